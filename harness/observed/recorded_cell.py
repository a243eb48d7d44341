"""A recorded cell with all that follows from its record, without baselines or thresholds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from harness.history.folder import History
from harness.observed import acceptance
from harness.observed.cell import ObservedCell
from harness.observed.hand_off import HandOff
from harness.observed.kv_groups import KVGroups
from harness.observed.kv_held import KVHeld
from harness.observed.prefix_cache import PrefixCache


@dataclass(frozen=True)
class RecordedCell(ObservedCell):
    """One cell of a recorded run, in one scenario, by subject."""

    @cached_property
    def hand_off(self) -> HandOff:
        return HandOff(self)

    @cached_property
    def prefix_cache(self) -> PrefixCache:
        return PrefixCache(self, self.hand_off)

    @cached_property
    def kv_groups(self) -> KVGroups:
        return KVGroups(self, self.hand_off)

    @cached_property
    def kv_held(self) -> KVHeld:
        """What the KV caches held, for a run whose profile asked to note it."""
        return KVHeld(self, self.history.kv_witness)

    @cached_property
    def counts(self) -> acceptance.CellCounts:
        """Acceptance counts of each answered request with at least two output tokens, by key."""
        return acceptance.counts_of(self)


def recorded_cells(history: History) -> list[RecordedCell]:
    """Return the cells that the run was asked to observe with cold prompts, or that have no scenario."""
    return [RecordedCell(history, r) for r in history.run.cells if r.planned or not r.scenarios]
