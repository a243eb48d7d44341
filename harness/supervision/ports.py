"""Ports for engines, claimed so that no two harnesses of a user take the same ones.

A claim is a lock on a file. It is held by this process until it releases it, and by the supervisor of the process tree
that uses the port until that tree is gone, so that a claim outlives a killed harness for as long as its engines do.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import random
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from harness.errors import EngineStartError
from harness.supervision import procfs
from harness.supervision.server import LOOPBACK
from harness.util import file_lock


def _bind(port: int, host: str) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError:
        sock.close()
        raise
    return sock


# Below the range from which the kernel takes ports for outgoing connections (from 32768 on by default): a connection
# can take a port of that range in the seconds before the engine that claimed it binds it.
_LOWEST, _HIGHEST = 20000, 32000
_TRIES = 400
_LOCK_S = 30.0

_LOCK = threading.Lock()
_HELD: dict[int, int] = {}
"""Lock file descriptors by port. A claim holds for the port number on every address."""
_GIVEN: set[int] = set()
"""Ports that this process has given out: what a peer still sends to an ended engine must not reach another one."""


class _Taken(Exception):
    """A port of a range is in use or claimed."""


def _claim_one(folder: Path, port: int, host: str) -> int:
    """Lock the file of a free port and return its descriptor. Raises _Taken with the reason."""
    handle = file_lock.claim(folder / f"port-{port}")
    if handle is None:
        raise _Taken("claimed by another harness")
    try:
        _bind(port, host).close()
    except OSError as error:
        procfs.drop_claim(handle)
        raise _Taken(_bind_failure(error)) from None
    return handle


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock a file that others hold for milliseconds. Raises EngineStartError when it stays locked."""
    handle = file_lock.open_lock(path)
    try:
        deadline = time.monotonic() + _LOCK_S
        while not file_lock.take(handle):
            if time.monotonic() > deadline:
                raise EngineStartError(
                    f"expected to get the lock on {path} within {_LOCK_S:.0f} s, but another harness holds it; "
                    "if that harness is suspended, resume or end it"
                )
            time.sleep(0.01)
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def locked() -> Iterator[Path]:
    """Lock the folder of claims and return it, so that several ports are claimed together or not at all, and so that
    testing a lock is not mistaken for a claim. Raises EngineStartError when the files cannot be created."""
    try:
        folder = procfs.state_folder()
        with _LOCK, _locked(folder / "ports.lock"):
            yield folder
    except OSError as error:
        raise EngineStartError(f"cannot claim ports for engines: {error}") from error


def _claim_range(folder: Path, ports: Sequence[int], host: str) -> None:
    """Claim all of these ports. Raises _Taken naming the first that cannot be claimed."""
    held: dict[int, int] = {}
    try:
        for port in ports:
            if port in _HELD:
                raise _Taken(f"port {port}: given to another engine of this run")
            try:
                held[port] = _claim_one(folder, port, host)
            except _Taken as taken:
                raise _Taken(f"port {port}: {taken}") from None
    except _Taken:
        for handle in held.values():
            procfs.drop_claim(handle)
        raise
    _HELD.update(held)
    _GIVEN.update(held)


def free_ports(count: int, host: str = LOOPBACK) -> list[int]:
    """Claim consecutive free ports until ``release``, none of which this process has given out before. Raises
    EngineStartError when too few are found."""
    with locked() as folder:
        if len(_GIVEN) > (_HIGHEST - _LOWEST) // 2:
            # The earliest of them were given out thousands of engines ago.
            _GIVEN.intersection_update(_HELD)
        for first in random.SystemRandom().sample(range(_LOWEST, _HIGHEST - count), _TRIES):
            ports = list(range(first, first + count))
            if not _GIVEN.isdisjoint(ports):
                continue
            with contextlib.suppress(_Taken):
                _claim_range(folder, ports, host)
                return ports
    raise EngineStartError(
        f"expected {count} consecutive free ports between {_LOWEST} and {_HIGHEST} on {host}, found none in {_TRIES} "
        "tries; end the programs that listen there (see `harness ps`), or give --base-port"
    )


def claim(ports: Sequence[int], host: str = LOOPBACK) -> None:
    """Claim these ports until ``release``, all or none. Raises EngineStartError naming the first that is in use or
    claimed by another harness."""
    with locked() as folder:
        try:
            _claim_range(folder, ports, host)
        except _Taken as taken:
            raise EngineStartError(
                f"expected ports on {host} to be free for engines, found {taken}; end the program that listens there "
                "(`harness ps` shows other harnesses), give another --base-port, or omit it to use free ports"
            ) from None


def _bind_failure(error: OSError) -> str:
    """Describe why a port cannot be bound; only EADDRINUSE shows that something listens there."""
    return "in use" if error.errno == errno.EADDRINUSE else f"not known to be free ({error.strerror})"


def trouble(port: int, host: str = LOOPBACK) -> str:
    """Describe why the port cannot be bound now; return an empty string when it can."""
    try:
        _bind(port, host).close()
    except OSError as error:
        return _bind_failure(error)
    return ""


def in_use(port: int, host: str = LOOPBACK) -> bool:
    """Return whether something listens on the port, as far as that can be determined."""
    return trouble(port, host) == "in use"


def handles(ports: Iterable[int]) -> tuple[int, ...]:
    """Return the descriptors of this process's claims on these ports, for the supervisor, which holds them too."""
    with _LOCK:
        return tuple(_HELD[p] for p in ports if p in _HELD)


def held(ports: Iterable[int]) -> tuple[int, ...]:
    """Return those of ``ports`` that this process has claimed."""
    with _LOCK:
        return tuple(p for p in ports if p in _HELD)


def release(ports: Iterable[int]) -> None:
    """Release this process's claims on these ports; a supervisor that holds one too keeps it.

    Claims that cannot be released now end with this process.
    """
    with contextlib.suppress(EngineStartError), locked() as folder:
        for port in ports:
            handle = _HELD.pop(port, None)
            if handle is not None:
                os.close(handle)
                sweep(folder / f"port-{port}")


@atexit.register
def _release_all() -> None:
    """Release what is still claimed at exit: locks end with the process, but their files would stay."""
    if claimed := tuple(_HELD):
        release(claimed)


def sweep(path: Path) -> bool:
    """Remove a claim file unless somebody holds it; return whether it is gone. The folder must be locked."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    taken = False
    with contextlib.suppress(OSError):
        taken = file_lock.take(handle)
    if not taken:
        os.close(handle)
        return False
    procfs.drop_claim(handle)
    return True
