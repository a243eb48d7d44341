"""Ports for engines, on loopback unless said otherwise, claimed so that no two harnesses of a user take the same ones.

A claim is a lock on a file. It is held by this process until it lets go, and by the warden of the tree that uses the
port until that tree is gone, so that it outlives a harness that is killed for as long as its engines do.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import os
import random
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO

from harness.engine import traces
from harness.engine.command import LOOPBACK
from harness.errors import EngineStartError


def _bind(port: int, host: str) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError:
        sock.close()
        raise
    return sock


# Below the range from which the kernel takes ports for outgoing connections (32768 on Linux by default): a port from
# that range was taken by a connection of the other engine before its owner bound it, seconds later.
_LOWEST, _HIGHEST = 20000, 32000
_TRIES = 400
_LOCK_S = 30.0

_LOCK = threading.Lock()
_HELD: dict[int, int] = {}
"""Descriptors of claims by port. They belong to ports of any address: an engine elsewhere is claimed for there."""
_GIVEN: set[int] = set()
"""Ports that this process has given out: what a peer still says to an engine that is gone must not reach another."""


class _Taken(Exception):
    """A port of a range is in use or claimed."""


def _claim_one(folder: Path, port: int, host: str) -> int:
    """Lock the file of a port that is free; returns its descriptor. Raises _Taken with the reason."""
    path = folder / f"port-{port}"
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Whoever let go of it may have removed the file between the two calls.
        if path.stat().st_ino != os.fstat(handle).st_ino:
            raise _Taken("claimed by another harness")
    except (BlockingIOError, FileNotFoundError, _Taken):
        os.close(handle)
        raise _Taken("claimed by another harness") from None
    try:
        _bind(port, host).close()
    except OSError as error:
        traces.drop_claim(handle)
        raise _Taken(_words(error)) from None
    return handle


def _lock(file: IO[bytes]) -> None:
    """Lock a file that others hold for milliseconds. Raises EngineStartError when one does not let go of it."""
    deadline = time.monotonic() + _LOCK_S
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise EngineStartError(
                    f"expected the lock on {file.name} within {_LOCK_S:.0f} s, found that another harness holds it; "
                    "see whether one is stopped, and continue or end it"
                ) from None
        time.sleep(0.01)


@contextlib.contextmanager
def locked() -> Iterator[Path]:
    """The folder of claims, locked: several ports are claimed together or not at all, and who only looks does not seem
    to hold one. Raises EngineStartError when its files cannot be made."""
    try:
        folder = traces.state_folder()
        with _LOCK, (folder / "ports.lock").open("wb") as lock:
            _lock(lock)
            yield folder
    except OSError as error:
        raise EngineStartError(f"expected to claim ports for engines, found that it cannot be done: {error}") from error


def _claim_range(folder: Path, ports: Sequence[int], host: str) -> None:
    """Claim all of them. Raises _Taken naming the first that cannot be."""
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
            traces.drop_claim(handle)
        raise
    _HELD.update(held)
    _GIVEN.update(held)


def free_ports(count: int, host: str = LOOPBACK) -> list[int]:
    """Consecutive free ports, claimed together until ``release``, none of which this process has given out before.
    Raises EngineStartError when too few are found."""
    with locked() as folder:
        if len(_GIVEN) > (_HIGHEST - _LOWEST) // 2:
            # What was given out first was so thousands of engines ago.
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
        "tries; end what listens there, see `harness ps`, or name --base-port"
    )


def claim(ports: Sequence[int], host: str = LOOPBACK) -> None:
    """Claim these ports together until ``release``. Raises EngineStartError naming the first that is in use or claimed
    by another harness; then none is claimed."""
    with locked() as folder:
        try:
            _claim_range(folder, ports, host)
        except _Taken as taken:
            raise EngineStartError(
                f"expected ports on {host} to be free for engines, found {taken}; end what listens there (`harness ps` "
                "shows other harnesses), name another --base-port, or leave it out to take free ports"
            ) from None


def require_free(ports: Iterable[int], host: str = LOOPBACK) -> None:
    """Raise EngineStartError naming the first port of ``ports`` that something else listens on."""
    for port in ports:
        if why := trouble(port, host):
            raise EngineStartError(
                f"expected port {port} on {host} to be free for an engine, found it {why}; end what listens there, "
                "name another --base-port, or leave it out to take free ports"
            )


def _words(error: OSError) -> str:
    """Why a port cannot be bound: only one reason says that something listens there."""
    return "in use" if error.errno == errno.EADDRINUSE else f"not known to be free ({error.strerror})"


def trouble(port: int, host: str = LOOPBACK) -> str:
    """Why nobody could listen there now, in words; empty when somebody could."""
    try:
        _bind(port, host).close()
    except OSError as error:
        return _words(error)
    return ""


def in_use(port: int, host: str = LOOPBACK) -> bool:
    """Whether something listens there, as far as that can be known."""
    return trouble(port, host) == "in use"


def handles(ports: Iterable[int]) -> tuple[int, ...]:
    """Descriptors of the claims of these ports, for the warden that holds them too."""
    with _LOCK:
        return tuple(_HELD[p] for p in ports if p in _HELD)


def held(ports: Iterable[int]) -> tuple[int, ...]:
    """Those of ``ports`` that this process has claimed."""
    with _LOCK:
        return tuple(p for p in ports if p in _HELD)


def release(ports: Iterable[int]) -> None:
    """Let go of claims of this process. A warden that still holds one keeps it; where it cannot be done now, they end
    with this process."""
    with contextlib.suppress(EngineStartError), locked() as folder:
        for port in ports:
            handle = _HELD.pop(port, None)
            if handle is not None:
                os.close(handle)
                sweep(folder / f"port-{port}")


@atexit.register
def _release_all() -> None:
    """What is still claimed when this process ends as it should: its locks end by themselves, their files do not."""
    if claimed := tuple(_HELD):
        release(claimed)


def sweep(path: Path) -> bool:
    """Remove the file of a claim that nobody holds, in the locked folder; returns whether it is gone."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return False
    traces.drop_claim(handle)
    return True
