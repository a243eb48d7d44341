"""The KV-cache groups of a cell's engines, as the blocks that P publishes show them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from harness.history.records import Observation
from harness.observed.cell import ObservedCell
from harness.observed.hand_off import HandOff
from harness.prompts.lengths import blocks, published_blocks


def published_groups(o: Observation) -> list[list[Any]]:
    """Return the block ids that P published for a hand-off, by KV-cache group; empty if there are none."""
    prefill = o.leg("prefill")
    groups = (prefill.kv_transfer_params or {}).get("remote_block_ids") if prefill is not None else None
    return groups if isinstance(groups, list) and all(isinstance(group, list) for group in groups) else []


@dataclass(frozen=True)
class KVGroups:
    """The KV-cache groups of one cell."""

    _cell: ObservedCell
    _hand_off: HandOff

    @cached_property
    def clipped(self) -> frozenset[int]:
        """The KV-cache groups with a sliding window or recurrent state: those of which P mostly publishes fewer blocks
        than the prompts fill that are longer than a window (of several, than one of them), or than a block."""
        clipped: Counter[tuple[int, int]] = Counter()
        if not any(self._cell.record.windows) and not self._cell.record.recurrent:
            return frozenset()
        for o in self._cell.history.in_order(self._cell.id):
            whole = blocks(self._hand_off.handed_tokens(o), self._cell.block_size("prefill"))
            for limit in self.limits(o):
                for index, group in enumerate(published_groups(o)):
                    clipped[limit, index] += 1 if len(group) < whole else -1
        return frozenset(index for (_, index), votes in clipped.items() if votes > 0)

    def limits(self, o: Observation) -> list[int]:
        """Return the tokens of the windows, and of a block of state, that are fewer than those that P hands over: of
        some group it then publishes fewer blocks than the prompt fills."""
        size = self._cell.block_size("prefill")
        whole = blocks(self._hand_off.handed_tokens(o), size)
        windows = [w for w in self._cell.record.windows if w and published_blocks(len(o.sent_ids), size, w) < whole]
        return [*windows, *([size] if self._cell.record.recurrent and whole > 1 else [])]
