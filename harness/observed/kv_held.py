"""What the KV caches of a cell's engines held, if the run's profile asked for it."""

from __future__ import annotations

from typing import NamedTuple

from harness.history.records import COLD, Observation
from harness.history.witness import KVWitness, Noted
from harness.observed.cell import ObservedCell


class Reference(NamedTuple):
    """What another engine computed of the same prompt."""

    cell: str
    noted: Noted
    first_token: int | None
    """The first token of its answer."""


class KVHeld:
    """What the engines of one cell noted of its requests."""

    def __init__(self, cell: ObservedCell, witness: KVWitness) -> None:
        self._cell = cell
        self._witness = witness
        self._asked: dict[str, dict[tuple[int, ...], Observation]] = {}

    @property
    def errors(self) -> list[str]:
        """What went wrong in the engines' plugin."""
        return self._witness.errors.get(self._cell.record.group, [])

    @property
    def unseen(self) -> dict[str, str]:
        """Layers whose caches could not be told apart into keys and values, with the reason."""
        return self._witness.unseen.get(self._cell.record.group, {})

    def had(self, o: Observation, role: str) -> Noted | None:
        """Return what the engine of a role held of a prompt when the request had ended; None if it was not noted."""
        request = self._request(o, role)
        return self._ended(request, role) if request is not None else None

    def _ended(self, request: str, role: str) -> Noted | None:
        return next(iter(self._witness.noted(request, role, "end")), None)

    def found(self, o: Observation, role: str) -> list[Noted]:
        """Return what an engine held of a prompt before its first step, and before those after a preemption."""
        request = self._request(o, role)
        return self._witness.noted(request, role, "begin") if request is not None else []

    def received(self, o: Observation) -> Noted | None:
        """Return what D held of a prompt of which P had sent a part; None if none was noted."""
        return next((n for n in self.found(o, "decode") if any(g.received for g in n.groups)), None)

    def reference(self, o: Observation, cell: str) -> Reference | None:
        """Return what the engine of another cell held of the same prompt, cold if it was asked so; None if it was not
        asked, or if that is the very same request."""
        other = self._asked_of(cell).get(tuple(o.sent_ids))
        leg = other.final if other is not None else None
        if other is None or leg is None or any(leg.request_id == mine.request_id for mine in o.legs):
            return None
        noted = self._ended(leg.request_id, leg.role)
        return Reference(cell, noted, next(iter(leg.output_ids or ()), None)) if noted is not None else None

    def _request(self, o: Observation, role: str) -> str | None:
        """Return the name that an engine knows a request by."""
        if not self._cell.routed:
            leg = o.leg(role)
            return None if leg is None else leg.request_id
        # A router names requests by itself. Its own are told by their prompts, which it may be asked several times.
        asked = [a for a in self._cell.history.in_order(self._cell.id) if a.sent_ids == o.sent_ids]
        named = self._witness.routed(o.sent_ids)
        at = next((i for i, a in enumerate(asked) if a.sequence == o.sequence), len(named))
        return named[at] if len(named) == len(asked) and at < len(named) else None

    def _asked_of(self, cell: str) -> dict[tuple[int, ...], Observation]:
        if cell not in self._asked:
            found: dict[tuple[int, ...], Observation] = {}
            answers = [o for o in self._cell.history.in_order(cell) if o.error is None and o.route == "cell"]
            for o in sorted(answers, key=lambda o: o.scenario != COLD):
                if o.final is not None:
                    found.setdefault(tuple(o.sent_ids), o)
            self._asked[cell] = found
        return self._asked[cell]
