"""A TCP relay in front of P's side channel, and faults that lead D to it, to disturb the link between the engines."""

from __future__ import annotations

import contextlib
import socket
import threading
import uuid
from typing import Any

from faults.proxy import Answer, Call, Fault, FaultError
from harness.supervision.server import LOOPBACK

REFUSED_PORT = 1
"""The port of tcpmux: nothing listens there, and no unprivileged server can."""
_CHUNK = 4096


class Relay:
    """Forwards TCP connections with a delay; without a target, accepts them and stays silent.

    Use it as a context manager.
    """

    def __init__(self, target: int | None, delay_s: float = 0.0) -> None:
        """``target`` is a port on loopback."""
        self._target = target
        self._delay = delay_s
        self._closing = threading.Event()
        self._open: list[socket.socket] = []
        self.connections = 0
        self.trouble = ""
        """Why the target could not be reached."""
        self._listener = socket.create_server((LOOPBACK, 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        for sock in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    @property
    def failed(self) -> str:
        """Why the drill is inconclusive; empty if D connected to the relay."""
        return self.trouble or ("" if self.connections else "D never connected to the relay of P's side channel")

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self._open.append(near)
            self.connections += 1
            if self._target is not None:
                threading.Thread(target=self._connect, args=(near, self._target), daemon=True).start()

    def _connect(self, near: socket.socket, target: int) -> None:
        try:
            far = socket.create_connection((LOOPBACK, target), timeout=10)
        except OSError as error:
            self.trouble = f"the relay did not reach P's side channel: {error}"
            near.close()
            return
        far.settimeout(None)
        self._open.append(far)
        threading.Thread(target=self._pump, args=(far, near), daemon=True).start()
        self._pump(near, far)

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK):
                if self._closing.wait(self._delay):
                    return
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)


def led_to(port: int) -> Fault:
    """Name another side channel in P's parameters; a new engine id makes D repeat its handshake."""

    def fault(call: Call) -> Answer:
        answer = call.forward()
        body = answer.json
        lead(body, port)
        return answer.with_json(body)

    return fault


def lead(body: dict[str, Any], port: int) -> None:
    """Change P's parameters in an answer or a request, in place. Raises FaultError when there are none."""
    params = body.get("kv_transfer_params")
    if not params:
        raise FaultError("expected kv_transfer_params to change, found none")
    params["remote_port"] = port
    params["remote_engine_id"] = str(uuid.uuid4())
