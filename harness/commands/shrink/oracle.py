"""Find out what is wrong with an answer by comparing it with another engine's answer to the same prompt."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

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
from harness.scenarios.parameters import LONG_ENOUGH

Symptom = Literal["input", "tokens", "end", "text", "acceptance"]


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
        self._known: dict[tuple[tuple[int, ...], int, str], Leg] = {}
        self.requests = 0

    def answer(
        self,
        ids: tuple[int, ...],
        max_tokens: int,
        fields: Mapping[str, Any] = MappingProxyType({}),
        temperature: float = 0.0,
    ) -> Leg:
        """Return the right answer to a request with these fields. Raises HandoffError when there is none."""
        key = (ids, max_tokens, json.dumps([dict(fields), temperature], sort_keys=True))
        if key not in self._known:
            legs: list[Leg] = []
            self.requests += 1
            ask = Ask(False, list(ids), max_tokens=max_tokens, fields=fields, temperature=temperature)
            error = self._session.ask(ask, legs)
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
        variant = self._with_known_answer(variant)
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
        most = variant.subject.max_tokens or self._default
        right = self.reference.answer(subject.sent_ids, most, subject.fields, subject.temperature)
        symptom, position = symptom_of(subject, leg, right, self._near)
        return Seen(symptom, position, leg, right)

    def _with_known_answer(self, variant: Variant) -> Variant:
        """Return the variant with the right answers of those of its prompts that were cut, which the parameters of
        requests are made of. Raises HandoffError where one is too short for them."""
        cut = {
            s.prompt.id: s.prompt for s in variant.script.sends if s.feature is not None and s.prompt.expected is None
        }
        for prompt in cut.values():
            answer = self.reference.answer(prompt.ids, self._default).output_ids or ()
            if len(answer) < LONG_ENOUGH:
                raise HandoffError(
                    f"the answer has {len(answer)} tokens, and a parameter that acts in the middle of it needs at "
                    f"least {LONG_ENOUGH}"
                )
            variant = variant.with_answer(prompt.id, answer)
        return variant


def symptom_of(subject: Observation, leg: Leg, right: Leg, near_tie_nats: float) -> tuple[Symptom | None, int | None]:
    """Return the first symptom, in the order in which one explains the next, and where in the output it begins."""
    if leg.echoed_ids is not None and leg.echoed_ids != subject.sent_ids:
        return "input", 0
    at = compare(leg.output_ids or (), right.output_ids or (), right.top_gaps, near_tie_nats, right.runner_ups)
    if at is not None:
        return (None, None) if at.near_tie else ("tokens", at.position)
    if (leg.finish_reason, leg.stop_reason) != (right.finish_reason, right.stop_reason):
        return "end", max(0, len(leg.output_ids or ()) - 1)
    if leg.text != right.text and leg.reasoning is None:
        return "text", 0
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
