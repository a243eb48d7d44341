"""Limits in time: of a request, of a cell, of a run."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import httpx
import pytest

from harness.engine import limited
from harness.engine.client import Client, Sampling
from harness.errors import HandoffError, RequestTimeoutError


@contextlib.contextmanager
def server(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """A real server on loopback that answers each connection with raw bytes."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(20)

        def one(connection: socket.socket) -> None:
            with connection, contextlib.suppress(OSError):
                connection.recv(65536)
                answer(connection)

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=one, args=(listening.accept()[0],), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def dripping(text: bytes, at_once: int = 0) -> Callable[[socket.socket], None]:
    """Sends ``at_once`` bytes, and then one every 50 ms, which is far below the limit of a read."""

    def answer(connection: socket.socket) -> None:
        connection.sendall(text[:at_once])
        for byte in text[at_once:] * 1000:
            time.sleep(0.05)
            connection.sendall(bytes([byte]))

    return answer


HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n"
DRIPS = {
    "status line": dripping(HEAD),
    "headers": dripping(HEAD[:17] + b"X: " + b"y" * 500, 17),
    "body": dripping(HEAD + b"x" * 200, len(HEAD)),
    "nothing": lambda _connection: time.sleep(30),
}


@pytest.mark.parametrize("where", DRIPS)
@pytest.mark.parametrize("call", ["complete", "post", "get", "metrics"])
def test_whole_exchange_has_a_limit(where, call):
    limit = 0.6
    with server(DRIPS[where]) as url:
        client = Client("single", url, limit)
        begun = time.monotonic()
        if call == "get":
            with pytest.raises(httpx.TimeoutException):
                client.get("/health", timeout_s=limit)
        else:
            with pytest.raises(RequestTimeoutError):
                {
                    "complete": lambda: client.complete([1, 2], Sampling(2, 2), "r", "s"),
                    "post": lambda: client.post("/pause", timeout_s=limit),
                    "metrics": client.snapshot,
                }[call]()
        assert limit * 0.9 < time.monotonic() - begun < limit + 1.5
        client.close()


def test_limit_of_one_request_does_not_touch_those_beside_it():
    """Threads share a client: a slow answer in one must not cut the other's."""

    def slow_then_whole(connection: socket.socket) -> None:
        time.sleep(0.8)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")

    with server(slow_then_whole) as url, limited.LimitedClient(base_url=url, timeout=5.0) as client:
        outcomes: dict[float, str] = {}

        def ask(limit: float) -> None:
            try:
                outcomes[limit] = client.get("/", timeout=limit).text
            except httpx.TimeoutException:
                outcomes[limit] = "late"

        threads = [threading.Thread(target=ask, args=(limit,)) for limit in (0.3, 5.0, 0.4, 4.0)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert outcomes == {0.3: "late", 0.4: "late", 5.0: "ok", 4.0: "ok"}
        assert client.get("/").text == "ok"


def test_answer_without_end_is_cut(monkeypatch):
    monkeypatch.setattr(limited, "LARGEST", 2**20)

    def flood(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n")
        while True:
            connection.sendall(b"x" * 65536)

    with server(flood) as url:
        client = Client("single", url, 20.0)
        begun = time.monotonic()
        with pytest.raises(HandoffError, match="more than 1 MiB") as caught:
            client.complete([1, 2], Sampling(2, 2), "r", "s")
        assert not isinstance(caught.value, RequestTimeoutError)
        assert time.monotonic() - begun < 10


def test_refused_connection_is_no_timeout():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    with pytest.raises(HandoffError) as caught:
        Client("single", f"http://127.0.0.1:{port}", 1.0).complete([1], Sampling(2, 2), "r", "s")
    assert not isinstance(caught.value, RequestTimeoutError)
