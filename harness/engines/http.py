"""HTTP with limits for a whole exchange: the time from the first byte out to the last byte in, and the size.

httpx limits only the time of each read: it waits forever for a server that keeps sending a byte now and then, and one
that never stops sending fills the memory.
"""

from __future__ import annotations

import functools
import logging
import ssl
import time
from collections.abc import Iterable, Mapping
from typing import Any

import httpcore
import httpx

LARGEST = 64 * 2**20
"""Largest answer in bytes, far above what engines send."""


class _Budget(float):
    """The seconds of one exchange, counted from creation, and the bytes that may still be received.

    It is passed to httpcore as the timeout of the request, and httpcore passes it, unchanged, to every operation on the
    connection. So a connection need not remember whose exchange it serves.
    """

    def __init__(self, limit_s: float) -> None:
        self.until = time.monotonic() + limit_s
        self.room = LARGEST

    def left(self, kind: type[httpcore.TimeoutException]) -> float:
        """Return the seconds that are left for an operation. Raises ``kind`` when the time is over."""
        left = self.until - time.monotonic()
        if left <= 0:
            raise kind(f"more than {float(self):g} s for the whole exchange")
        return left


class _Stream(httpcore.NetworkStream):
    """A connection that enforces the budget of the exchange that uses it."""

    def __init__(self, inner: httpcore.NetworkStream) -> None:
        self._inner = inner

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        if not isinstance(timeout, _Budget):
            return self._inner.read(max_bytes, timeout)
        data = self._inner.read(max_bytes, timeout.left(httpcore.ReadTimeout))
        timeout.room -= len(data)
        if timeout.room < 0:
            raise httpcore.ReadError(f"an answer of more than {LARGEST // 2**20} MiB")
        return data

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._inner.write(buffer, timeout.left(httpcore.WriteTimeout) if isinstance(timeout, _Budget) else timeout)

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        allowed = timeout.left(httpcore.ConnectTimeout) if isinstance(timeout, _Budget) else timeout
        return _Stream(self._inner.start_tls(ssl_context, server_hostname, allowed))

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
        allowed = timeout.left(httpcore.ConnectTimeout) if isinstance(timeout, _Budget) else timeout
        return _Stream(super().connect_tcp(host, port, allowed, local_address, socket_options))


@functools.cache
def trusted() -> ssl.SSLContext:
    """Return the authorities whose certificates are accepted: the system's, or those of SSL_CERT_FILE."""
    return ssl.create_default_context()


_IDLE_S = 2.0
"""Seconds after which an idle connection is not used again. vLLM's servers close one after five (uvicorn's default,
``VLLM_HTTP_TIMEOUT_KEEP_ALIVE``), late when busy; a request that meets the close is lost: "Server disconnected"."""

LEAVE_AFTER = "leave_after"
"""Extension of a request: after so many events of a streamed answer, the connection is closed."""
_END_OF_EVENT = b"\n\n"


def _events(answer: httpcore.Response, count: int) -> bytes:
    """Return the beginning of an answer: the first ``count`` events, or all of it if it has no more."""
    read = b""
    for part in answer.iter_stream():
        read += part
        if read.count(_END_OF_EVENT) >= count:
            break
    return read


_LOG = logging.getLogger(__name__)


class _Transport(httpx.BaseTransport):
    """HTTP over such connections; an answer is read completely before it is returned, unless the request says
    ``LEAVE_AFTER``."""

    def __init__(self) -> None:
        self._pool = httpcore.ConnectionPool(
            ssl_context=trusted(),
            max_connections=100,
            max_keepalive_connections=20,
            keepalive_expiry=_IDLE_S,
            network_backend=_Backend(),
        )

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        begun = time.monotonic()
        try:
            answer = self._exchange(request)
        except httpx.HTTPError as error:
            _LOG.debug(
                "%s %s: %s after %.3f s", request.method, request.url, type(error).__name__, time.monotonic() - begun
            )
            raise
        _LOG.debug("%s %s: %d after %.3f s", request.method, request.url, answer.status_code, time.monotonic() - begun)
        return answer

    def _exchange(self, request: httpx.Request) -> httpx.Response:
        limits = [v for v in request.extensions.get("timeout", {}).values() if v is not None]
        budget = _Budget(max(limits)) if limits else None
        url = request.url
        try:
            with self._pool.stream(
                request.method,
                httpcore.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path),
                headers=request.headers.raw,
                content=request.read() or None,
                extensions={"timeout": dict.fromkeys(("connect", "read", "write", "pool"), budget)},
            ) as answer:
                events = request.extensions.get(LEAVE_AFTER)
                content = answer.read() if events is None else _events(answer, events)
        except (httpcore.TimeoutException, httpcore.NetworkError, httpcore.ProtocolError) as error:
            # httpx has an exception of the same name for each of these.
            raise getattr(httpx, type(error).__name__)(str(error)) from error
        except httpcore.UnsupportedProtocol as error:
            raise httpx.UnsupportedProtocol(str(error)) from error
        return httpx.Response(
            answer.status, headers=answer.headers, stream=httpx.ByteStream(content), extensions=answer.extensions
        )

    def close(self) -> None:
        self._pool.close()


class LimitedClient(httpx.Client):
    """An ``httpx.Client`` whose ``timeout``, of the client or of a call, limits the whole exchange.

    Raises httpx.TimeoutException when the time is over and httpx.ReadError when an answer is too large. Proxies and
    credentials from the environment are not used.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(transport=_Transport(), trust_env=False, **options)
        # A small compressed answer may unpack to a huge one.
        self.headers["Accept-Encoding"] = "identity"


def get(url: str, headers: Mapping[str, str], limit_s: float) -> httpx.Response:
    """Send one GET with a time limit for the whole exchange. Raises httpx.HTTPError."""
    with LimitedClient(timeout=limit_s, headers=dict(headers)) as client:
        return client.get(url)
