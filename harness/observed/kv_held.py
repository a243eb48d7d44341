"""What the KV caches of a cell's engines held, if the run's profile asked for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from harness.history.records import RESCORE, Observation
from harness.history.token_ids import common_prefix
from harness.history.witness import KVWitness, Moment, Noted, NotedDrafts, joined
from harness.observed.cell import ObservedCell


class KVReference(NamedTuple):
    """What another engine computed of the same prompt."""

    cell: str
    noted: Noted
    answer: Noted | None
    """What it held behind the cells that the prompt fills; None if its answer has no KV there."""
    output_ids: tuple[int, ...]
    drafted: int
    """Tokens of prompt and answer that its drafter had seen when it drafted last; 0 if it did not, or noted nothing."""


def _place(o: Observation) -> tuple[str, ...]:
    return o.cell, o.scenario, o.form, o.key


class KVHeld:
    """What the engines of one cell noted of its requests."""

    def __init__(self, cell: ObservedCell, witness: KVWitness) -> None:
        self._cell = cell
        self._witness = witness

    @property
    def errors(self) -> list[str]:
        """What went wrong in the engines' plugin."""
        return self._witness.errors.get(self._cell.record.group, [])

    @property
    def unseen(self) -> dict[str, str]:
        """Layers whose caches could not be read, with the reason."""
        return self._witness.unseen.get(self._cell.record.group, {})

    def layers_of(self, cell: str) -> Mapping[str, Mapping[str, bool]]:
        """Return, by role of a cell's engines, the layers that they note, and whether each is a drafter's."""
        record = self._cell.history.cell(cell)
        return {} if record is None else self._witness.layers.get(record.group, {})

    @property
    def drafting(self) -> bool:
        """Whether the engines note what drafts are sampled from."""
        return self._cell.record.group in self._witness.drafting

    def drafts(self, o: Observation) -> list[NotedDrafts]:
        """Return what the drafts of an answer were sampled from, step by step."""
        role = o.final.role if o.final is not None else ""
        return [step for noted in self._noted(o, role, "drafts") for step in noted.drafts]

    def drafted(self, o: Observation) -> int:
        """Return how many tokens of a prompt and its answer its drafter had seen when it drafted last: of those it has
        made KV. 0 if it did not draft, or noted nothing."""
        return max((step.position + 1 for step in self.drafts(o)), default=0)

    def had(self, o: Observation, role: str) -> Noted | None:
        """Return what the engine of a role held of a prompt when the request had ended; None if it was not noted, or
        the note says nothing."""
        return next((noted for noted in self._noted(o, role, "end") if noted.groups or noted.states), None)

    def answer(self, o: Observation, role: str) -> Noted | None:
        """Return what the engine of a role held behind the cells that a prompt fills; None if it was not noted."""
        return next(iter(self._noted(o, role, "answer")), None)

    def found(self, o: Observation, role: str) -> list[Noted]:
        """Return what an engine held of a prompt before its first step, and before those after a preemption."""
        return self._noted(o, role, "begin")

    def _noted(self, o: Observation, role: str, moment: Moment) -> list[Noted]:
        request = self._request(o, role)
        return self._witness.noted(request, role, moment) if request is not None else []

    def had_with_answer(self, o: Observation, role: str) -> Noted | None:
        """Return what the engine of a role held of a prompt and its answer; None if it was not noted."""
        prompt, answer = self.had(o, role), self.answer(o, role)
        return prompt if prompt is None or answer is None else joined(prompt, answer)

    def received(self, o: Observation, role: str) -> Noted | None:
        """Return what an engine held of a prompt of which another one had sent a part; None if none was noted."""
        return next((n for n in self.found(o, role) if any(g.received for g in n.groups)), None)

    def read_afresh(self, plain: str) -> Iterator[tuple[Noted, Noted, int]]:
        """Yield what the plain engine held of an answer that it read afresh, what it held when it gave an answer to the
        same prompt, and how many tokens both begin with."""
        first = self._cell.history.first_answers(plain).values()
        answers = {o.prompt_id: o for o in first if not o.adapter}
        for o in self._cell.history.of(plain, scenario=RESCORE).values():
            said, read = answers.get(o.prompt_id), o.final
            if said is None or said.final is None or read is None:
                continue
            whole = (*said.sent_ids, *(said.final.output_ids or ()))
            ours, theirs = self.had(o, read.role), self.had_with_answer(said, said.final.role)
            if ours is not None and theirs is not None:
                yield ours, theirs, common_prefix(o.sent_ids, whole)

    def before(self, o: Observation) -> Observation | None:
        """Return the turn that a request goes on with."""
        place = (o.scenario, o.instance, o.form)
        answers = self._cell.history.in_order(self._cell.id)
        return next((a for a in answers if a.part == "donor" and (a.scenario, a.instance, a.form) == place), None)

    def reference(self, o: Observation, cell: str) -> KVReference | None:
        """Return what the engine of a cell held of the same prompt, in another request; None if it noted nothing."""
        other = self.other_answer(o, cell)
        leg = other.final if other is not None else None
        if other is None or leg is None or (noted := self.had(other, leg.role)) is None:
            return None
        return KVReference(cell, noted, self.answer(other, leg.role), leg.output_ids or (), self.drafted(other))

    def other_answer(self, o: Observation, cell: str) -> Observation | None:
        """Return the answer of a cell to the same prompt, the cold one if there is one; None where that is ``o``."""
        other = self._cell.history.first_answers(cell).get((o.sent_ids, o.adapter))
        same = other is not None and _place(other) == _place(o)
        return None if same else other

    def _request(self, o: Observation, role: str) -> str | None:
        """Return the name that an engine knows a request by."""
        if not self._cell.routed or o.cell != self._cell.id or o.route != "cell":
            leg = o.leg(role)
            return None if leg is None else leg.request_id
        # A router names requests by itself. Its own are told by their prompts, which it may be asked several times.
        answers = self._cell.history.in_order(self._cell.id)
        asked = [a for a in answers if a.sent_ids == o.sent_ids and a.route == "cell" and not a.refused]
        named = self._witness.routed(self._cell.record.group, o.sent_ids)
        at = next((i for i, a in enumerate(asked) if _place(a) == _place(o)), len(named))
        return named[at] if len(named) == len(asked) and at < len(named) else None
