"""A real HTTP proxy between the harness and one engine, on loopback: forwards everything, headers included, and does
to a chosen exchange what broken servers and networks do.

The standard library's server is used because it leaves the socket to the fault: half an answer or no HTTP at all
cannot be sent through a framework.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, NamedTuple

import httpx

from harness.engine.command import LOOPBACK

COMPLETIONS = "/v1/completions"
_UPSTREAM_S = 900.0
"""The harness's own limits must strike first."""
_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "host", "content-length"}


class Request(NamedTuple):
    """What the harness sent."""

    method: str
    path: str
    headers: tuple[tuple[str, str], ...]
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        """The body as JSON; empty when it is none."""
        with contextlib.suppress(ValueError):
            value = json.loads(self.body)
            if isinstance(value, dict):
                return value
        return {}

    def with_json(self, value: object) -> Request:
        return self._replace(body=json.dumps(value).encode())


class Answer(NamedTuple):
    """What the engine answered, or what the harness is told that it did."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes

    def with_json(self, value: object) -> Answer:
        return self._replace(body=json.dumps(value).encode())

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Call:
    """One exchange in the hands of a fault."""

    def __init__(self, request: Request, proxy: Proxy, connection: socket.socket) -> None:
        self.request = request
        self.proxy = proxy
        self._connection = connection

    def forward(self, request: Request | None = None, to: str | None = None) -> Answer:
        """Ask the engine, or the server at the URL ``to``. Raises httpx.HTTPError when it does not answer."""
        return self.proxy.forward(request or self.request, to)

    def send(self, data: bytes) -> bool:
        """Put bytes on the wire as they are; False when nobody listens any more."""
        try:
            self._connection.sendall(data)
        except OSError:
            return False
        return True

    def wait(self, seconds: float) -> bool:
        """Wait; True when the proxy is being closed meanwhile."""
        return self.proxy.closing.wait(seconds)

    def reset(self) -> None:
        """End the connection with RST instead of FIN."""
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        self._connection.close()


Fault = Callable[[Call], Answer | None]
"""Answers an exchange in the engine's place; None when it dealt with the connection itself, which is closed then."""
Wanted = Callable[[Request], bool]


def completions(prompt: tuple[int, ...] | None = None) -> Wanted:
    """Completion requests: of one prompt, or all."""

    def wanted(request: Request) -> bool:
        ours = request.method == "POST" and request.path == COMPLETIONS
        return ours and (prompt is None or request.json.get("prompt") == list(prompt))

    return wanted


def path(name: str) -> Wanted:
    """Requests of a path."""
    return lambda request: request.path == name


def anything(_: Request) -> bool:
    return True


class Proxy:
    """A proxy in front of one engine, on a port of its own. Use as a context manager."""

    def __init__(self, target: str = "") -> None:
        """``target`` is the engine's URL; it may be set later."""
        self.target = target
        self.closing = threading.Event()
        self._armed: list[tuple[Wanted, Fault]] = []
        self._lock = threading.Lock()
        self.struck = 0
        """Exchanges that a fault was let loose on since it was armed."""
        self.struck_at: float | None = None
        """``time.monotonic()`` of the first of them."""
        self._http = httpx.Client(timeout=_UPSTREAM_S, limits=httpx.Limits(max_connections=64))
        self._server = _Server((LOOPBACK, 0), _Handler)
        self._server.proxy = self
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self._server.server_port}"

    def __enter__(self) -> Proxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)
        self._http.close()

    @contextlib.contextmanager
    def armed(self, fault: Fault, wanted: Wanted) -> Iterator[None]:
        """Let a fault loose on the wanted exchanges while the context lasts; of several the last one counts."""
        entry = (wanted, fault)
        with self._lock:
            self.struck, self.struck_at = 0, None
            self._armed.append(entry)
        try:
            yield
        finally:
            with self._lock:
                self._armed.remove(entry)

    def fault_for(self, request: Request) -> Fault | None:
        with self._lock:
            for wanted, fault in reversed(self._armed):
                if wanted(request):
                    self.struck += 1
                    self.struck_at = self.struck_at or time.monotonic()
                    return fault
        return None

    def forward(self, request: Request, to: str | None = None) -> Answer:
        """Raises httpx.HTTPError."""
        headers = [(k, v) for k, v in request.headers if k.lower() not in {*_HOP_BY_HOP, "accept-encoding"}]
        url = (to or self.target) + request.path
        found = self._http.request(request.method, url, headers=headers, content=request.body)
        kept = tuple((k, v) for k, v in found.headers.multi_items() if k.lower() not in _HOP_BY_HOP)
        return Answer(found.status_code, kept, found.content)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # Threads of hung exchanges end with the process; closing must not wait for them.
    block_on_close = False
    proxy: Proxy

    def handle_error(self, request: object, client_address: object) -> None:
        """Connections that break are what this is for."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def _exchange(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        request = Request(self.command, self.path, tuple(self.headers.items()), body)
        proxy = self.server.proxy
        fault = proxy.fault_for(request)
        try:
            call = Call(request, proxy, self.connection)
            answer = call.forward() if fault is None else fault(call)
        except httpx.HTTPError:
            # What the engine does not answer is not answered here either.
            answer = None
        if answer is None:
            self.close_connection = True
            return
        self.send_response_only(answer.status)
        for name, value in answer.headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        self.wfile.write(answer.body)

    do_GET = do_POST = _exchange  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass
