"""HTTP with limits for a whole exchange: its time from the first byte out to the last byte in, and its size.

httpx limits the time of each read: a server that sends one byte now and then, in the headers or in the body, is waited
for without end, and one that does not stop fills the memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

import httpcore
import httpx

LARGEST = 64 * 2**20
"""Bytes of one answer. Completions have under 1 MB, /metrics about 0.1 MB."""


class _Exchange(threading.local):
    """What the exchange of this thread may still use."""

    limit_s: float | None = None
    until: float = 0.0
    room: int = LARGEST

    def begin(self, limit_s: float | None) -> None:
        self.limit_s = limit_s
        self.until = time.monotonic() + (limit_s or 0.0)
        self.room = LARGEST

    def left(self, timeout: float | None, kind: type[httpcore.TimeoutException]) -> float | None:
        """Time for one operation. Raises ``kind`` when there is none left."""
        if self.limit_s is None:
            return timeout
        left = self.until - time.monotonic()
        if left <= 0:
            raise kind(f"more than {self.limit_s:g} s for the whole exchange")
        return left if timeout is None else min(timeout, left)


_current = _Exchange()


class _Stream(httpcore.NetworkStream):
    """A connection that keeps to the limits of the exchange that uses it."""

    def __init__(self, inner: httpcore.NetworkStream) -> None:
        self._inner = inner

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        data = self._inner.read(max_bytes, _current.left(timeout, httpcore.ReadTimeout))
        _current.room -= len(data)
        if _current.room < 0:
            raise httpcore.ReadError(f"an answer of more than {LARGEST // 2**20} MiB")
        return data

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._inner.write(buffer, _current.left(timeout, httpcore.WriteTimeout))

    def close(self) -> None:
        self._inner.close()

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)


class _Backend(httpcore.SyncBackend):
    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.NetworkStream:
        allowed = _current.left(timeout, httpcore.ConnectTimeout)
        return _Stream(super().connect_tcp(host, port, allowed, local_address, socket_options))


class _Transport(httpx.HTTPTransport):
    """httpx's own, over such connections; plain HTTP only."""

    def __init__(self) -> None:
        super().__init__(trust_env=False)
        self._pool.close()
        self._pool = httpcore.ConnectionPool(
            max_connections=100, max_keepalive_connections=20, keepalive_expiry=5.0, network_backend=_Backend()
        )


class LimitedClient(httpx.Client):
    """``timeout``, of the client or of a call, limits the whole exchange: httpx.TimeoutException when it is over. An
    answer that is too large is an httpx.ReadError. Proxies and passwords of the environment are not used."""

    def __init__(self, **options: Any) -> None:
        super().__init__(transport=_Transport(), trust_env=False, **options)
        # A small compressed answer may be a large one.
        self.headers["Accept-Encoding"] = "identity"

    def send(self, request: httpx.Request, **options: Any) -> httpx.Response:
        limits = [v for v in request.extensions.get("timeout", {}).values() if v is not None]
        _current.begin(max(limits) if limits else None)
        try:
            return super().send(request, **options)
        finally:
            _current.begin(None)


def get(url: str, headers: Mapping[str, str], limit_s: float) -> httpx.Response:
    """One GET with a limit for the whole exchange. Raises httpx.HTTPError."""
    with LimitedClient(timeout=limit_s, headers=dict(headers)) as client:
        return client.get(url)
