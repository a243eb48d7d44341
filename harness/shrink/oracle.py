"""What is wrong with an answer, told by another engine's answer to the same prompt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from harness.acceptance import real_steps, same_steps
from harness.checks.tokens import compare
from harness.engine.exchange import Ask
from harness.engine.topology import EngineGroupSession
from harness.errors import HandoffError
from harness.history import Leg, Observation
from harness.matrix import Cell
from harness.scenarios.play import Player
from harness.scrub import Scrubber
from harness.shrink.variant import Variant

Symptom = Literal["input", "tokens", "acceptance"]


class Seen(NamedTuple):
    """One try of a variant."""

    symptom: Symptom | None
    position: int | None
    """Output token at which the symptom begins."""
    leg: Leg
    right: Leg


class Reference:
    """Right answers: of an engine that is asked alone, greedily, with a cache of its own. Each prompt is asked once."""

    def __init__(self, session: EngineGroupSession) -> None:
        self._session = session
        self._known: dict[tuple[tuple[int, ...], int], Leg] = {}
        self.requests = 0

    def answer(self, ids: tuple[int, ...], max_tokens: int) -> Leg:
        """Raises HandoffError when there is no answer."""
        key = (ids, max_tokens)
        if key not in self._known:
            legs: list[Leg] = []
            self.requests += 1
            error = self._session.ask(Ask(False, list(ids), max_tokens=max_tokens), legs)
            if error is not None or not legs:
                raise HandoffError(error or "expected an answer of the reference, found none")
            self._known[key] = legs[0]
        return self._known[key]


class Oracle:
    """Tries variants on running engines and counts what that costs."""

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
        """Sent so far, with those that overwrite blocks, without the reference's."""
        return self._played + self._scrubber.requests

    def see(self, variant: Variant, scrub: bool = True) -> Seen:
        """Raises HandoffError when the judged request or its reference broke, EngineDiedError when an engine did.

        Variants of one prompt begin alike, and what one left behind must not help the next; ``scrub=False`` is for
        prompts that no recent one begins like.
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
    """The first thing that is wrong, in the order in which one explains the next, and where in the output it begins."""
    if leg.echoed_ids is not None and leg.echoed_ids != subject.sent_ids:
        return "input", 0
    at = compare(leg.output_ids or (), right.output_ids or (), right.top_gaps, near_tie_nats)
    if at is not None:
        return (None, None) if at.near_tie else ("tokens", at.position)
    ours, theirs = real_steps(leg), real_steps(right)
    if ours is None or theirs is None or same_steps(leg, ours, theirs.accepted):
        return None, None
    return "acceptance", _first_other_step(ours.accepted, theirs.accepted)


def _first_other_step(ours: tuple[int, ...], theirs: tuple[int, ...]) -> int:
    """Output tokens that exist when the first differing step begins."""
    produced = 1
    for a, b in zip(ours, theirs, strict=False):
        if a != b:
            break
        produced += a + 1
    return produced
