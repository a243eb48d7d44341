"""A real HTTP proxy on loopback between the harness and one engine.

It forwards everything, headers included, and breaks chosen exchanges the way broken servers and networks do. It uses
the standard library's server because that leaves the socket to the fault: a framework cannot send half an answer or
bytes that are not HTTP.
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
from typing import Any, NamedTuple

import httpx

from harness.supervision.server import LOOPBACK

COMPLETIONS = "/v1/completions"
_UPSTREAM_S = 900.0
"""Longer than the harness's own timeouts, which must expire first."""
_CANCEL_S = 2.0
_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "host", "content-length"}


class Request(NamedTuple):
    """A request from the harness."""

    method: str
    path: str
    headers: tuple[tuple[str, str], ...]
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        """Return the body as JSON; empty if it is not JSON."""
        with contextlib.suppress(ValueError):
            value = json.loads(self.body)
            if isinstance(value, dict):
                return value
        return {}

    def with_json(self, value: object) -> Request:
        return self._replace(body=json.dumps(value).encode())


class Answer(NamedTuple):
    """An answer, real or altered."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes

    def with_json(self, value: object) -> Answer:
        return self._replace(body=json.dumps(value).encode())

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class FaultError(Exception):
    """A fault could not take place; the message says why."""


class Call:
    """One exchange, for a fault to act on."""

    def __init__(self, request: Request, proxy: Proxy, connection: socket.socket, armed: Armed | None = None) -> None:
        self.request = request
        self.proxy = proxy
        self.armed = armed
        self.struck = False
        """Whether the fault has acted."""
        self._connection = connection

    def acted(self) -> None:
        """Note that the fault has acted; only then does it count."""
        if not self.struck and self.armed is not None:
            self.armed.acted()
        self.struck = True

    def forward(self, request: Request | None = None, to: str | None = None) -> Answer:
        """Send the request to the engine, or to the URL ``to``. Raises httpx.HTTPError when there is no answer."""
        return self.proxy.forward(request or self.request, to)

    def send(self, data: bytes) -> bool:
        """Send raw bytes; return False when the connection is closed."""
        try:
            self._connection.sendall(data)
        except OSError:
            return False
        return True

    def wait(self, seconds: float) -> bool:
        """Wait; return True as soon as the fault is cancelled or the proxy closed."""
        over = self.proxy.closing if self.armed is None else self.armed.over
        return over.wait(seconds)

    @property
    def abandoned(self) -> bool:
        """Return whether the harness has closed the connection, so that no answer can reach it."""
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
"""Answers an exchange in place of the engine; None if it handled the connection itself, which is then closed.

A fault has acted when its answer is sent, or when it calls ``Call.acted``; one that raises before that has not.
"""
Wanted = Callable[[Request], bool]


def completions(prompt: tuple[int, ...] | None = None) -> Wanted:
    """Match completion requests, of one prompt or all."""

    def wanted(request: Request) -> bool:
        ours = request.method == "POST" and request.path == COMPLETIONS
        return ours and (prompt is None or request.json.get("prompt") == list(prompt))

    return wanted


def path(name: str) -> Wanted:
    """Match requests for a path."""
    return lambda request: request.path == name


def anything(_: Request) -> bool:
    return True


class Armed:
    """A fault that is enabled for the wanted exchanges, and what happened."""

    def __init__(self, fault: Fault, wanted: Wanted, fatal: bool = False) -> None:
        """``fatal`` is whether the engine may die of the fault, so that later requests may go unanswered."""
        self.fault = fault
        self.wanted = wanted
        self.fatal = fatal
        self.struck = 0
        """Number of exchanges in which the fault has acted."""
        self.struck_at: float | None = None
        """``time.monotonic()`` at the first of them."""
        self.troubles: list[str] = []
        """What went wrong in the fault or the proxy, in words; it makes the drill inconclusive."""
        self.over = threading.Event()
        """Set on cancellation."""
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

    def cancel(self) -> None:
        """Cancel the fault and wait up to ``_CANCEL_S`` seconds for its exchanges to end."""
        self.over.set()
        with self._idle:
            self._idle.wait_for(lambda: not self._under_way, _CANCEL_S)

    def trouble(self, words: str) -> None:
        with self._lock:
            self.troubles.append(" ".join(words.split()))

    @property
    def failed(self) -> str:
        """Why the fault is inconclusive; empty if it acted and nothing went wrong."""
        with self._lock:
            if self.troubles:
                return "; ".join(dict.fromkeys(self.troubles))
            return "" if self.struck else "no exchange was struck"


def _struck(call: Call, armed: Armed) -> Answer | None:
    """Let a fault answer an exchange, and note what it did."""
    try:
        answer = armed.fault(call)
    except Exception as error:
        # If the fault ended the engine, there is no answer.
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
        """``target`` is the engine's URL, which may be set later."""
        self._target = target
        self._answered = False
        """Whether the engine has answered anything; until then it is starting and need not answer."""
        self.closing = threading.Event()
        self._armed: list[Armed] = []
        self._lock = threading.Lock()
        # Engines close idle connections after 5 s, and one that is about to be closed must not be used.
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

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)
        self._http.close()

    @contextlib.contextmanager
    def armed(self, fault: Fault, wanted: Wanted, fatal: bool = False) -> Iterator[Armed]:
        """Enable a fault for the wanted exchanges within the context; the last of several wins."""
        entry = Armed(fault, wanted, fatal)
        with self._lock:
            self._armed.append(entry)
        try:
            yield entry
        finally:
            with self._lock:
                self._armed.remove(entry)
            entry.cancel()

    def armed_for(self, request: Request) -> Armed | None:
        with self._lock:
            return next((a for a in reversed(self._armed) if a.wanted(request)), None)

    def trouble(self, words: str) -> None:
        """Note something that went wrong by itself, unless an enabled fault may have caused it by ending the engine."""
        with self._lock:
            for armed in self._armed:
                if not (armed.fatal and armed.struck):
                    armed.trouble(words)

    def answer(self, call: Call) -> Answer | None:
        """Return the answer for the harness; None to close the connection."""
        armed = call.armed
        if armed is None:
            try:
                return call.forward()
            except Exception as error:
                # If the engine does not answer, neither does the proxy.
                if self._answered:
                    self.trouble(f"{call.request.path} was not forwarded ({type(error).__name__}: {error})")
                return None
        with armed.at_work():
            return _struck(call, armed)

    def forward(self, request: Request, to: str | None = None) -> Answer:
        """Forward a request. Raises httpx.HTTPError."""
        headers = [(k, v) for k, v in request.headers if k.lower() not in {*_HOP_BY_HOP, "accept-encoding"}]
        url = (to or self.target) + request.path
        found = self._http.request(request.method, url, headers=headers, content=request.body)
        self._answered = True
        kept = tuple((k, v) for k, v in found.headers.multi_items() if k.lower() not in _HOP_BY_HOP)
        return Answer(found.status_code, kept, found.content)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # Closing must not wait for the threads of hung exchanges, which end with the process.
    block_on_close = False
    proxy: Proxy

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore broken connections, which are intended; anything else is a failure of the proxy."""
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
