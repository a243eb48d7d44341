"""Find out what is wrong with an answer by comparing it with another engine's answer to the same prompt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from harness.commands.shrink.variant import Variant
from harness.engines.request import Ask
from harness.engines.session import EngineGroupSession
from harness.errors import HandoffError
from harness.history.acceptance import real_steps, same_steps
from harness.history.records import Leg, Observation
from harness.history.token_ids import compare
from harness.profiles.cells import Cell
from harness.runner.kv_scrub import Scrubber
from harness.runner.play import Player

Symptom = Literal["input", "tokens", "acceptance"]


class Seen(NamedTuple):
    symptom: Symptom | None
    position: int | None
    """Index of the output token at which the symptom begins."""
    leg: Leg
    right: Leg


class Reference:
    """Right answers, from an engine that gets one greedy request at a time with its own cache salt. Cached."""

    def __init__(self, session: EngineGroupSession) -> None:
        self._session = session
        self._known: dict[tuple[tuple[int, ...], int], Leg] = {}
        self.requests = 0

    def answer(self, ids: tuple[int, ...], max_tokens: int) -> Leg:
        """Return the right answer. Raises HandoffError when there is none."""
        key = (ids, max_tokens)
        if key not in self._known:
            legs: list[Leg] = []
            self.requests += 1
            error = self._session.ask(Ask(False, list(ids), max_tokens=max_tokens), legs)
            if error is not None or not legs:
                raise HandoffError(error or "expected an answer from the reference, found none")
            self._known[key] = legs[0]
        return self._known[key]


class Oracle:
    """Tries variants on running engines and counts the requests."""

    def __init__(
        self,
        session: EngineGroupSession,
        cell: Cell,
        reference: Reference,
        near_tie_nats: float,
        scrubber: Scrubber,
        record: Callable[[Observation], None] = lambda _: None,
    ) -> None:
        self._player = Player(session, cell)
        self._default = session.profile.workload.max_tokens
        self.reference = reference
        self._near = near_tie_nats
        self._scrubber = scrubber
        self._record = record
        self._played = 0

    @property
    def requests(self) -> int:
        """Requests sent so far, including those that overwrite blocks, but not the reference's."""
        return self._played + self._scrubber.requests

    def see(self, variant: Variant, scrub: bool = True) -> Seen:
        """Try a variant once.

        Variants of a prompt share a prefix, so the KV blocks that one left are overwritten before the next;
        ``scrub=False`` is for prompts whose prefix no recent prompt shares. Raises HandoffError when the judged request
        or its reference failed, and EngineDiedError when an engine died.
        """
        observations = []
        if scrub:
            self._scrubber.scrub()
        for observation in self._player.play(variant.script, self._played):
            self._record(observation)
            observations.append(observation)
            self._played += 1
        subject = next(o for o in observations if o.part == variant.part)
        leg = subject.final
        if subject.error is not None or leg is None or leg.output_ids is None:
            raise HandoffError(subject.error or "expected an answer with token ids, found none")
        right = self.reference.answer(subject.sent_ids, variant.subject.max_tokens or self._default)
        symptom, position = symptom_of(subject, leg, right, self._near)
        return Seen(symptom, position, leg, right)


def symptom_of(subject: Observation, leg: Leg, right: Leg, near_tie_nats: float) -> tuple[Symptom | None, int | None]:
    """Return the first symptom, in the order in which one explains the next, and where in the output it begins."""
    if leg.echoed_ids is not None and leg.echoed_ids != subject.sent_ids:
        return "input", 0
    at = compare(leg.output_ids or (), right.output_ids or (), right.top_gaps, near_tie_nats, right.runner_ups)
    if at is not None:
        return (None, None) if at.near_tie else ("tokens", at.position)
    ours, theirs = real_steps(leg), real_steps(right)
    if ours is None or theirs is None or same_steps(leg, ours, theirs.accepted):
        return None, None
    return "acceptance", _first_differing_step(ours.accepted, theirs.accepted)


def _first_differing_step(ours: tuple[int, ...], theirs: tuple[int, ...]) -> int:
    """Return the number of output tokens that precede the first differing step."""
    produced = 1
    for a, b in zip(ours, theirs, strict=False):
        if a != b:
            break
        produced += a + 1
    return produced
