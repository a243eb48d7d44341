"""The subscriber of an engine's KV events, with a publisher that encodes what vLLM's would."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from harness.engines.command import build_command
from harness.engines.event_log import EventLog
from harness.errors import EnvironmentFault
from harness.history.kv_events import EngineEvents, KVEvent, read_events
from harness.history.witness import KVWitness
from harness.profiles.load import load_profile
from tests.support.engines import ENVIRONMENT, option

zmq = pytest.importorskip("zmq")
msgspec = pytest.importorskip("msgspec")
STORED = {
    "type": "BlockStored",
    "block_hashes": [2**63 + 7, b"\x01\xff"],
    "parent_block_hash": None,
    "token_ids": list(range(64)),
    "block_size": 32,
    "lora_id": 1,
    "medium": "GPU",
    "lora_name": "odd-words",
    "group_idx": 1,
}


def told(folder: Path, *messages: list[object]) -> EngineEvents:
    """Return what the subscriber wrote down of messages."""
    log = EventLog(folder / "witness", "pd-eagle3.decode")
    publisher = zmq.Context.instance().socket(zmq.PUB)
    try:
        publisher.connect(log.endpoint)
        # As an engine, which takes seconds from its socket to its first event.
        time.sleep(0.5)
        for number, message in enumerate(messages):
            publisher.send_multipart((b"", number.to_bytes(8, "big"), msgspec.msgpack.encode(message)))
    finally:
        # What was sent before arrives.
        time.sleep(0.2)
        log.close()
        publisher.close()
    return read_events(folder, "pd-eagle3")["decode"]


def test_what_an_engine_tells_is_written_down(tmp_path):
    removed = {"type": "BlockRemoved", "block_hashes": [5], "medium": "GPU"}
    found = told(tmp_path, [1.5, [STORED, removed], 0], [2.5, [{"type": "AllBlocksCleared"}]])
    assert not found.errors and [(m.number, m.at) for m in found.messages] == [(0, 1.5), (1, 2.5)]
    stored, taken, cleared = (event for message in found.messages for event in message.events)
    assert stored == KVEvent(
        kind="stored",
        hashes=(str(2**63 + 7), "01ff"),
        tokens=tuple(range(64)),
        block_size=32,
        adapter="odd-words",
        group=1,
    )
    assert (taken.kind, taken.hashes, cleared.kind) == ("removed", ("5",), "cleared")
    # The notes of KV caches beside it are read without it.
    assert KVWitness(tmp_path).noted("a", "decode", "end") == []


def test_what_cannot_be_read_is_an_error_and_ends_nothing(tmp_path):
    found = told(tmp_path, [1.0, [{"type": "BlockMoved"}]], [2.0, [STORED]])
    assert [e for e in found.errors if "an event BlockMoved" in e] and len(found.messages) == 1


def test_an_engine_is_told_where_to_publish(tmp_path):
    log = EventLog(tmp_path, "single-none.single")
    log.close()
    profile = load_profile("cpu-events")
    command = build_command(profile, profile.methods[0], "single", ENVIRONMENT, 1, None, events=log.endpoint)
    assert f'"endpoint": "{log.endpoint}"' in option(command, "--kv-events-config")
    assert log.endpoint.startswith("tcp://127.0.0.1:")


def test_without_the_packages_it_says_which(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "msgspec", None)
    with pytest.raises(EnvironmentFault, match="expected pyzmq and msgspec"):
        EventLog(tmp_path, "single-none.single")
