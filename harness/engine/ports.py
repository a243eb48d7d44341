"""Ports for engines, on loopback unless said otherwise."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Iterator

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


# Ports that were given out. A server binds its port seconds after it was told, and listens minutes later: until then it
# looks free, and a second group of engines that starts meanwhile could be given the same one.
_GIVEN: set[tuple[str, int]] = set()
_LOCK = threading.Lock()


def free_ports(count: int, host: str = LOOPBACK) -> list[int]:
    """Distinct free ports, none of which this process has given out before. Raises EngineStartError when too few are
    found."""
    held: list[socket.socket] = []
    try:
        with _LOCK:
            wanted = set(range(_LOWEST, _HIGHEST)) - {p for h, p in _GIVEN if h == host}
            for port in random.SystemRandom().sample(sorted(wanted), min(_TRIES, len(wanted))):
                if len(held) == count:
                    break
                with contextlib.suppress(OSError):
                    held.append(_bind(port, host))
                    _GIVEN.add((host, port))
        if len(held) < count:
            raise EngineStartError(
                f"expected {count} free ports between {_LOWEST} and {_HIGHEST} on {host}, found {len(held)} in "
                f"{_TRIES} tries; end what listens there or name --base-port"
            )
        return [s.getsockname()[1] for s in held]
    finally:
        for sock in held:
            sock.close()


def require_free(ports: list[int], host: str = LOOPBACK) -> None:
    """Raise EngineStartError naming the first port of ``ports`` that something else listens on."""
    for port in ports:
        try:
            _bind(port, host).close()
        except OSError as error:
            raise EngineStartError(
                f"expected port {port} on {host} to be free for an engine, found it in use ({error.strerror}); "
                "end what listens there, name another --base-port, or leave it out to take free ports"
            ) from error


def allot(count: int, base_port: int | None, host: str = LOOPBACK) -> Iterator[int]:
    """``count`` ports: consecutive from ``base_port`` when given (each must be free), otherwise any free ones."""
    if base_port is None:
        return iter(free_ports(count, host))
    ports = list(range(base_port, base_port + count))
    require_free(ports, host)
    return iter(ports)
