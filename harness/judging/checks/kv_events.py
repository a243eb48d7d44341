"""Check what engines tell of their prefix caches, which routers go by, against what prefix hits find."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from harness.history.kv_events import EngineEvents, KVEvent
from harness.history.records import Leg, Observation
from harness.history.verdict import Verdict
from harness.judging.evidence import CellView
from harness.judging.findings import CheckResult, Finding, conclude
from harness.scenarios.proving import hits_of

NAME = "kv-events"
_SLACK_S = 1.0
"""Seconds after an answer within which the events of its last step are told."""
_NO_EVENTS = EngineEvents((), ())


class _Told(NamedTuple):
    """What is wrong with a message, and when it was sent."""

    at: float
    words: str


class ToldCache:
    """The prefix cache of an engine, by what it has told."""

    def __init__(self, pool: int | None) -> None:
        self._pool = pool
        """Blocks that it can hold; None where that is not known, or a block may have several hashes."""
        self._held: Counter[tuple[int, str]] = Counter()
        """By group and hash: several blocks may have one. Versions that tell of the removal of the last alone (vllm
        #55092) leave some here, so that a hit is not held against it."""
        self._told: set[tuple[int, str]] = set()
        """Those of which no removal was told since, of any copy."""
        self._known: dict[tuple[int, str], tuple[str | None, tuple[int, ...], str | None]] = {}
        """Parent, tokens and adapter of each hash that was told."""

    def take(self, event: KVEvent) -> Iterator[str]:
        """Take in an event; yield what is wrong with it."""
        if event.kind == "cleared":
            self._held.clear()
            self._told.clear()
        elif event.kind == "removed":
            for one in event.hashes:
                self._told.discard((event.group, one))
                if not self._held[event.group, one]:
                    yield f"it reports the removal of block {one}, which by its events it does not hold"
                else:
                    self._held[event.group, one] -= 1
        else:
            yield from self._stored(event)

    def _stored(self, event: KVEvent) -> Iterator[str]:
        size, parent = event.block_size, event.parent
        if len(event.tokens) != len(event.hashes) * size:
            yield (
                f"it reports {len(event.hashes)} blocks of {size} tokens with {len(event.tokens)} tokens: which block "
                "has which is not known"
            )
            return
        if parent is not None and (event.group, parent) not in self._known:
            yield f"it reports blocks behind block {parent}, which it did not report"
        for at, one in enumerate(event.hashes):
            tokens = event.tokens[at * size : (at + 1) * size]
            known = self._known.setdefault((event.group, one), (parent, tokens, event.adapter))
            if known != (parent, tokens, event.adapter):
                yield f"it reports block {one} with other tokens than before"
            self._held[event.group, one] += 1
            self._told.add((event.group, one))
            parent = one
        if self._pool is not None and (held := len(self._told)) > self._pool:
            yield f"by what it tells it holds {held} blocks, and its pool has {self._pool}: removals were not told"

    def holds(self, tokens: tuple[int, ...], adapter: bool) -> bool:
        """Return whether it has told of blocks with the beginning of a prompt, all of which it still holds."""
        return any(self._begins(key, tokens, adapter) for key, count in self._held.items() if count)

    def _begins(self, key: tuple[int, str], tokens: tuple[int, ...], adapter: bool) -> bool:
        """Return whether a block is held and the last one of exactly these tokens."""
        group, one = key
        while True:
            if (group, one) not in self._known or not self._held[group, one]:
                return False
            parent, own, name = self._known[group, one]
            if not own or tokens[-len(own) :] != own or (name is not None) != adapter:
                return False
            tokens = tokens[: -len(own)]
            if parent is None:
                return not tokens
            one = parent


def applies(cell: CellView) -> bool:
    """Return whether the engines were to tell of their prefix caches."""
    return bool(cell.profile.section("engine").get("kv_events"))


def kv_events(cell: CellView) -> CheckResult:
    """Check that no message was lost, that what was told is consistent, and that every prefix hit found blocks of its
    prompt that were told of and not taken out."""
    findings: list[Finding] = []
    judged = 0
    told = cell.shared("kv-events", lambda: cell.history.kv_events(cell.record.group))
    asked = [o for o in cell.all_observations() if o.legs]
    for role in sorted({o.process_of(leg) for o in asked for leg in o.legs}):
        events = told.get(role, _NO_EVENTS)
        if not events.messages:
            findings.append(
                cell.untested(NAME, f"expected the {role} engine to tell of its prefix cache, found nothing")
            )
            continue
        findings += [cell.untested(NAME, f"{role} engine: {words}") for words in events.errors]
        own = sorted((o for o in asked if _leg_of(o, role)), key=lambda o: o.started_at)
        wrong, missed = _replayed(cell, role, events, own)
        judged += len(own)
        findings += [_finding(cell, f"the {role} engine tells wrongly of its prefix cache: {w}") for w in wrong]
        findings += [_finding(cell, words, o) for o, words in missed]
    return conclude(NAME, cell.id, judged, findings)


def _finding(cell: CellView, words: str, o: Observation | None = None) -> Finding:
    return cell.finding(NAME, Verdict.REGRESSION, "kv-events", words, o)


def _leg_of(o: Observation, role: str) -> Leg | None:
    return next((leg for leg in o.legs if o.process_of(leg) == role), None)


def _replayed(
    cell: CellView, role: str, events: EngineEvents, asked: list[Observation]
) -> tuple[list[str], list[tuple[Observation, str]]]:
    """Follow an engine's prefix cache by what it told. Return what is wrong with what it told in the time of these
    requests, each kind once, and the requests whose hits it has not told of."""
    engine = cell.engine(role)
    several = cell.record.recurrent
    pool = engine.kv_blocks - 1 if engine is not None and engine.kv_blocks is not None and not several else None
    cache = ToldCache(pool)
    waiting = list(asked)
    missed: list[tuple[Observation, str]] = []
    wrong: list[_Told] = []
    expected = 0
    for message in events.messages:
        while waiting and waiting[0].started_at < message.at:
            missed += _unannounced(cell, role, cache, waiting.pop(0))
        if message.number != expected:
            if message.number == 0:
                cache = ToldCache(pool)
            else:
                wrong.append(_Told(message.at, f"messages {expected} to {message.number - 1} did not come"))
        expected = message.number + 1
        wrong += [_Told(message.at, words) for event in message.events for words in cache.take(event)]
    for o in waiting:
        missed += _unannounced(cell, role, cache, o)
    spans = [(o.started_at, o.ended_at + _SLACK_S) for o in asked]
    mine = [t.words for t in wrong if any(start <= t.at <= end for start, end in spans)]
    return list(_first_of_each_kind(mine).values()), missed


def _first_of_each_kind(sentences: list[str]) -> Mapping[str, str]:
    """Return the first of the sentences that are alike but for numbers."""
    found: dict[str, str] = {}
    for words in sentences:
        found.setdefault("".join(c for c in words if not c.isdigit()), words)
    return found


def _unannounced(cell: CellView, role: str, cache: ToldCache, o: Observation) -> Iterator[tuple[Observation, str]]:
    """Yield a request whose prefix hit is of blocks that the engine has not told of, if its hit is known."""
    leg = _leg_of(o, role)
    if leg is None or o.concurrent > 1 or o.answers > 1 or len(cell.record.windows) > 1 or cell.record.recurrent:
        return
    size = cell.block_size(role)
    whole = hits_of(leg) // size * size
    if whole and not cache.holds(o.sent_ids[:whole], bool(o.adapter)):
        yield (
            o,
            f"the {role} engine took {whole} tokens of this prompt from its prefix cache, and had not told of blocks "
            "with them, or told that it has taken them out: a router that goes by its events would not have found them",
        )
