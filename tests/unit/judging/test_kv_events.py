"""What engines tell of their prefix caches, held against itself and against prefix hits."""

from __future__ import annotations

import json

import pytest

from harness.errors import DataError
from harness.history.kv_events import KVEvent, KVMessage, read_events
from harness.history.verdict import Verdict
from harness.judging.checks import kv_events
from harness.judging.checks.kv_events import ToldCache
from tests.support.builders import change_final, engine, history, observation, view

SIZE = 32
TOKENS = tuple(range(100, 100 + 3 * SIZE))


def stored(*hashes: str, parent: str | None = None, tokens=None, **changes) -> KVEvent:
    first = 0 if parent is None else (int(parent[1:]) + 1) * SIZE
    tokens = TOKENS[first : first + len(hashes) * SIZE] if tokens is None else tokens
    return KVEvent(kind="stored", hashes=hashes, parent=parent, tokens=tokens, block_size=SIZE, **changes)


def removed(*hashes: str) -> KVEvent:
    return KVEvent(kind="removed", hashes=hashes)


CLEARED = KVEvent(kind="cleared")
WHOLE = [stored("h0", "h1"), stored("h2", parent="h1")]


def wrong(*events: KVEvent, pool: int | None = 8) -> list[str]:
    cache = ToldCache(pool)
    return [words for event in events for words in cache.take(event)]


def test_a_version_that_tells_of_the_last_copy_alone_is_right_too():
    assert wrong(*(event for _ in range(9) for event in (stored("h0"), stored("h0"), removed("h0"))), pool=1) == []


def test_what_is_right_is_not_found_fault_with():
    twice = [*WHOLE, *WHOLE, removed("h2"), removed("h2"), removed("h0", "h1"), CLEARED, *WHOLE]
    assert wrong(*twice) == []


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([removed("h0")], "the removal of block h0, which by its events it does not hold"),
        ([*WHOLE, CLEARED, removed("h0")], "the removal of block h0"),
        ([stored("h2", parent="h1")], "behind block h1, which it did not report"),
        ([stored("h0", "h1", tokens=TOKENS[:SIZE])], "2 blocks of 32 tokens with 32 tokens"),
        ([*WHOLE, stored("h0", tokens=TOKENS[1 : SIZE + 1])], "reports block h0 with other tokens than before"),
        ([*WHOLE, stored("h0", adapter="a")], "reports block h0 with other tokens than before"),
        (
            [*WHOLE, *(stored(f"h{n}", tokens=TOKENS[:SIZE]) for n in range(10, 16))],
            "holds 9 blocks, and its pool has 8",
        ),
    ],
)
def test_what_cannot_be_so_is_found(events, words):
    assert [w for w in wrong(*events) if words in w]


def test_a_cache_holds_what_was_told_and_not_taken_out():
    cache = ToldCache(8)
    list(cache.take(WHOLE[0]))
    assert cache.holds(TOKENS[: 2 * SIZE], adapter=False) and not cache.holds(TOKENS, adapter=False)
    # Of the target itself, not of an adapter.
    assert not cache.holds(TOKENS[:SIZE], adapter=True)
    list(cache.take(removed("h0")))
    assert not cache.holds(TOKENS[: 2 * SIZE], adapter=False)


def judged(messages: list[KVMessage], hits: float, tmp_path, **changes):
    o = observation("single-none", 70, started_at=10.0)
    o = change_final(o, counters={"prefix_hits": hits}).model_copy(update={"sent_ids": TOKENS[:70], **changes})
    made = history([o], engines=(engine("single-none", "single").model_copy(update={"kv_blocks": 9}),))
    profile = {**made.run.profile, "engine": {**made.run.profile.get("engine", {}), "kv_events": True}}
    made = made.model_copy(update={"run": made.run.model_copy(update={"profile": profile}), "folder": tmp_path})
    group = made.run.cells[0].group
    (tmp_path / "witness").mkdir()
    lines = [json.dumps({"kv_events": 1}), *(m.model_dump_json() for m in messages)]
    (tmp_path / "witness" / f"{group}.single-events.1.jsonl").write_text("\n".join(lines) + "\n")
    cell = view(made, "single-none")
    assert kv_events.applies(cell)
    return kv_events.kv_events(cell)


def message(number: int, at: float, *events: KVEvent) -> KVMessage:
    return KVMessage(number=number, at=at, events=events)


@pytest.mark.parametrize(
    ("messages", "hits", "verdict", "words"),
    [
        ([message(0, 1.0, *WHOLE)], 64.0, Verdict.PASS, ""),
        ([message(0, 1.0, *WHOLE)], 0.0, Verdict.PASS, ""),
        # Told when the request was under way, or taken out before.
        ([message(0, 10.5, *WHOLE)], 64.0, Verdict.REGRESSION, "had not told of blocks with them"),
        ([message(0, 1.0, *WHOLE), message(1, 2.0, removed("h1"))], 64.0, Verdict.REGRESSION, "had not told"),
        ([message(0, 1.0, *WHOLE), message(2, 10.1, removed("h2"))], 64.0, Verdict.REGRESSION, "messages 1 to 1"),
        # A restarted engine counts from 0, and has nothing.
        ([message(0, 1.0, *WHOLE), message(0, 2.0, *WHOLE)], 64.0, Verdict.PASS, ""),
        ([message(0, 1.0, *WHOLE), message(0, 2.0, stored("h0"))], 64.0, Verdict.REGRESSION, "had not told"),
        ([], 64.0, Verdict.UNKNOWN, "found nothing"),
    ],
)
def test_a_hit_must_have_been_told_of(messages, hits, verdict, words, tmp_path):
    result = judged(messages, hits, tmp_path)
    assert result.verdict is verdict, result.findings
    assert (not words and not result.findings) or any(words in f.message for f in result.findings)


def test_what_was_told_wrongly_at_other_times_is_another_cells(tmp_path):
    result = judged([message(0, 1.0, *WHOLE), message(1, 99.0, removed("h7"))], 64.0, tmp_path)
    assert result.verdict is Verdict.PASS


def test_what_the_subscriber_cannot_read_is_unknown(tmp_path):
    (tmp_path / "witness").mkdir()
    file = tmp_path / "witness" / "g.decode-events.1.jsonl"
    file.write_text('{"kv_events":1}\n{"error":"an event Strange"}\n{"number":0,"at":1.0,"events":[]}\n{"torn')
    (events,) = read_events(tmp_path, "g").values()
    assert events.errors == ("an event Strange",) and len(events.messages) == 1
    file.write_text('{"kv_events":1}\n{"number":"x"}\n')
    with pytest.raises(DataError, match="damaged data"):
        read_events(tmp_path, "g")
