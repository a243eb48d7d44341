"""A subscriber of an engine's KV events, which writes down what the engine tells of its prefix cache.

``harness.history.kv_events`` reads it.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from harness.errors import EnvironmentFault
from harness.history.kv_events import MARK, SUFFIX
from harness.supervision.server import LOOPBACK

_POLL_MS = 100
_DRAIN_MS = 300
"""What an engine said before it ended is here by then."""
_NUMBERS = itertools.count()
_KINDS = {"BlockStored": "stored", "BlockRemoved": "removed", "AllBlocksCleared": "cleared"}


class EventLog:
    """Binds a socket, to which an engine connects when it starts, and writes each of its messages to a file."""

    def __init__(self, folder: Path, engine: str) -> None:
        """``engine`` is what the name of the file begins with. Raises EnvironmentFault without pyzmq and msgspec."""
        try:
            import msgspec
            import zmq
        except ImportError as error:
            raise EnvironmentFault(
                f"expected pyzmq and msgspec, with which KV events are read (engine.kv_events), found none ({error}); "
                "install them beside the harness, or leave engine.kv_events out"
            ) from error
        self._decode = msgspec.msgpack.decode
        self._socket: Any = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        port: int = self._socket.bind_to_random_port(f"tcp://{LOOPBACK}")
        self.endpoint = f"tcp://{LOOPBACK}:{port}"
        """Where the engine has to publish."""
        folder.mkdir(parents=True, exist_ok=True)
        # Several in a process: P's successor has the same role.
        number = f"{os.getpid()}{next(_NUMBERS):03d}"
        self._file = (folder / f"{engine}{SUFFIX}.{number}.jsonl").open("ab", buffering=0)
        self._write({MARK: 1})
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read, name=f"kv-events-{engine}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write down what has come by now, and listen no more."""
        self._ended.set()
        self._thread.join()
        self._socket.close(linger=0)
        self._file.close()

    def _read(self) -> None:
        while True:
            last = self._ended.is_set()
            while self._socket.poll(_DRAIN_MS if last else _POLL_MS):
                self._take(self._socket.recv_multipart())
            if last:
                return

    def _take(self, frames: list[bytes]) -> None:
        try:
            _, number, payload = frames
            at, events, *_ = self._decode(payload)
            row: dict[str, Any] = {"number": int.from_bytes(number, "big"), "at": at, "events": list(_events(events))}
        except (ValueError, TypeError, KeyError) as error:
            row = {"error": f"expected a message of KV events, found {type(error).__name__}: {error}"}
        self._write(row)

    def _write(self, row: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(row, separators=(",", ":")).encode() + b"\n")


def _events(told: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield events in the harness's own format. Raises ValueError for one that vLLM 0.32.0 does not have."""
    for event in told:
        kind = _KINDS.get(event["type"])
        if kind is None:
            raise ValueError(f"an event {event['type']}")
        row: dict[str, Any] = {"kind": kind}
        if kind != "cleared":
            row |= {"hashes": [_hash(h) for h in event["block_hashes"]], "group": event.get("group_idx") or 0}
        if kind == "stored":
            parent = event.get("parent_block_hash")
            row |= {
                "parent": None if parent is None else _hash(parent),
                "tokens": event["token_ids"],
                "block_size": event["block_size"],
                "adapter": event.get("lora_name"),
            }
        yield row


def _hash(value: int | bytes) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)


def subscription(endpoint: str) -> dict[str, Any]:
    """Return vLLM's ``--kv-events-config`` for an engine that publishes to a subscriber."""
    return {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint, "topic": ""}
