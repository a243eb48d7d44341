"""Loopback ports for engines."""

from __future__ import annotations

import socket
from collections.abc import Iterator

from harness.engine.command import LOOPBACK
from harness.errors import EngineStartError


def _bind(port: int) -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((LOOPBACK, port))
    except OSError:
        sock.close()
        raise
    return sock


def free_ports(count: int) -> list[int]:
    """Distinct free ports, held together while being picked."""
    held = [_bind(0) for _ in range(count)]
    ports = [s.getsockname()[1] for s in held]
    for sock in held:
        sock.close()
    return ports


def require_free(ports: list[int]) -> None:
    """Raise EngineStartError naming the first port of ``ports`` that something else listens on."""
    for port in ports:
        try:
            _bind(port).close()
        except OSError as error:
            raise EngineStartError(
                f"expected port {port} on {LOOPBACK} to be free for an engine, found it in use ({error.strerror}); "
                "end what listens there, name another --base-port, or leave it out to take free ports"
            ) from error


def allot(count: int, base_port: int | None) -> Iterator[int]:
    """``count`` ports: consecutive from ``base_port`` when given (each must be free), otherwise any free ones."""
    if base_port is None:
        return iter(free_ports(count))
    ports = list(range(base_port, base_port + count))
    require_free(ports)
    return iter(ports)
