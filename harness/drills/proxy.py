"""A real HTTP proxy between the harness and one engine, on loopback: forwards everything, headers included, and does
to a chosen exchange what broken servers and networks do.

The standard library's server is used because it leaves the socket to the fault: half an answer or no HTTP at all
cannot be sent through a framework.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
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
_CALL_OFF_S = 2.0
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


class FaultError(Exception):
    """A fault could not be brought about; the text says why."""


class Call:
    """One exchange in the hands of a fault."""

    def __init__(self, request: Request, proxy: Proxy, connection: socket.socket, armed: Armed | None = None) -> None:
        self.request = request
        self.proxy = proxy
        self.armed = armed
        self.struck = False
        """Whether the fault has acted."""
        self._connection = connection

    def acted(self) -> None:
        """The fault has done what it is there for: only now it counts."""
        if not self.struck and self.armed is not None:
            self.armed.acted()
        self.struck = True

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
        """Wait; True when the fault is called off, or the proxy closed, meanwhile."""
        over = self.proxy.closing if self.armed is None else self.armed.over
        return over.wait(seconds)

    @property
    def abandoned(self) -> bool:
        """Whether the harness has closed the connection, so that no answer reaches it."""
        try:
            return self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def reset(self) -> None:
        """End the connection with RST instead of FIN."""
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        self._connection.close()


Fault = Callable[[Call], Answer | None]
"""Answers an exchange in the engine's place; None when it dealt with the connection itself, which is closed then.

A fault has acted when its answer goes out, or when it says so by ``Call.acted``; one that raises before has not.
"""
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


class Armed:
    """A fault that is let loose on the wanted exchanges, and what came of it."""

    def __init__(self, fault: Fault, wanted: Wanted, fatal: bool = False) -> None:
        """``fatal`` is whether the engine may be gone when it has acted, so that nothing is forwarded any more."""
        self.fault = fault
        self.wanted = wanted
        self.fatal = fatal
        self.struck = 0
        """Exchanges in which the fault has acted."""
        self.struck_at: float | None = None
        """``time.monotonic()`` of the first of them."""
        self.troubles: list[str] = []
        """What went wrong in the fault or in the proxy, in words: the drill says nothing then."""
        self.over = threading.Event()
        """Set when it is called off."""
        self._lock = threading.Lock()
        self._under_way = 0
        self._idle = threading.Condition(self._lock)

    def acted(self) -> None:
        with self._lock:
            self.struck += 1
            self.struck_at = self.struck_at or time.monotonic()

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        with self._lock:
            self._under_way += 1
        try:
            yield
        finally:
            with self._idle:
                self._under_way -= 1
                self._idle.notify_all()

    def call_off(self, patience_s: float = _CALL_OFF_S) -> None:
        """End what waits in it; one that waits for the engine itself is not waited for longer."""
        self.over.set()
        with self._idle:
            self._idle.wait_for(lambda: not self._under_way, patience_s)

    def trouble(self, words: str) -> None:
        with self._lock:
            self.troubles.append(" ".join(words.split()))

    @property
    def failed(self) -> str:
        """Why nothing is known; empty when the fault acted and nothing went wrong."""
        with self._lock:
            if self.troubles:
                return "; ".join(dict.fromkeys(self.troubles))
            return "" if self.struck else "no exchange was struck"


def _struck(call: Call, armed: Armed) -> Answer | None:
    """What a fault makes of an exchange, and a note of what it did."""
    try:
        answer = armed.fault(call)
    except Exception as error:
        # An engine that the fault has ended does not answer it.
        ended = call.struck and (armed.fatal or armed.over.is_set())
        if not (ended and isinstance(error, httpx.HTTPError)):
            armed.trouble(f"the fault failed ({type(error).__name__}: {error})")
        return None
    if call.struck:
        return answer
    if answer is None:
        armed.trouble("the fault ended without having acted")
    elif call.abandoned:
        armed.trouble("the harness had given up before the fault's answer was there")
    else:
        call.acted()
    return answer


class Proxy:
    """A proxy in front of one engine, on a port of its own. Use as a context manager."""

    def __init__(self, target: str = "") -> None:
        """``target`` is the engine's URL; it may be set later."""
        self._target = target
        self._answered = False
        """Whether the engine has answered anything: before, it is starting, and need not."""
        self.closing = threading.Event()
        self._armed: list[Armed] = []
        self._lock = threading.Lock()
        # Engines close idle connections after 5 s: one that is about to be closed must not be used.
        self._http = httpx.Client(timeout=_UPSTREAM_S, limits=httpx.Limits(max_connections=64, keepalive_expiry=2.0))
        self._server = _Server((LOOPBACK, 0), _Handler)
        self._server.proxy = self
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
        self._thread.start()

    @property
    def target(self) -> str:
        """The engine's URL."""
        return self._target

    @target.setter
    def target(self, url: str) -> None:
        self._target, self._answered = url, False

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
    def armed(self, fault: Fault, wanted: Wanted, fatal: bool = False) -> Iterator[Armed]:
        """Let a fault loose on the wanted exchanges while the context lasts; of several the last one counts."""
        entry = Armed(fault, wanted, fatal)
        with self._lock:
            self._armed.append(entry)
        try:
            yield entry
        finally:
            with self._lock:
                self._armed.remove(entry)
            entry.call_off()

    def armed_for(self, request: Request) -> Armed | None:
        with self._lock:
            return next((a for a in reversed(self._armed) if a.wanted(request)), None)

    def trouble(self, words: str) -> None:
        """Something went wrong that no fault did; after one that may end the engine, it is what came of it."""
        with self._lock:
            for armed in self._armed:
                if not (armed.fatal and armed.struck):
                    armed.trouble(words)

    def answer(self, call: Call) -> Answer | None:
        """What the harness is told; None when the connection is to be closed."""
        armed = call.armed
        if armed is None:
            try:
                return call.forward()
            except Exception as error:
                # What the engine does not answer is not answered here either.
                if self._answered:
                    self.trouble(f"{call.request.path} was not forwarded ({type(error).__name__}: {error})")
                return None
        with armed.at_work():
            return _struck(call, armed)

    def forward(self, request: Request, to: str | None = None) -> Answer:
        """Raises httpx.HTTPError."""
        headers = [(k, v) for k, v in request.headers if k.lower() not in {*_HOP_BY_HOP, "accept-encoding"}]
        url = (to or self.target) + request.path
        found = self._http.request(request.method, url, headers=headers, content=request.body)
        self._answered = True
        kept = tuple((k, v) for k, v in found.headers.multi_items() if k.lower() not in _HOP_BY_HOP)
        return Answer(found.status_code, kept, found.content)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # Threads of hung exchanges end with the process; closing must not wait for them.
    block_on_close = False
    proxy: Proxy

    def handle_error(self, request: object, client_address: object) -> None:
        """Connections that break are what this is for; anything else is a fault of the proxy."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            self.proxy.trouble(f"the proxy failed ({type(error).__name__}: {error})")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def _exchange(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        request = Request(self.command, self.path, tuple(self.headers.items()), body)
        proxy = self.server.proxy
        answer = proxy.answer(Call(request, proxy, self.connection, proxy.armed_for(request)))
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
