"""Acceptance that ends at a length: no step beyond it accepts a draft, in any request."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

from harness.observed.cell import ObservedCell

_CHANCE = 1e-9
"""So improbable is the end by chance: each step accepts its first draft as often as those before the end."""
_LEAST_REQUESTS = 2


class DraftsEnd(NamedTuple):
    """The length from which on nothing is accepted."""

    tokens: int
    """Tokens of prompt and answer, from which on no step that begins there accepts a draft."""
    requests: int
    """Requests that have steps there."""
    steps: int
    """Their steps there, none of which accepted a draft."""
    before: int
    """Steps that began with fewer tokens."""
    accepted_before: int
    """Those of them that accepted their first draft."""

    @property
    def words(self) -> str:
        return (
            f"accepts nothing from token {self.tokens} on, in every request that gets there: in 0 of {self.steps} "
            f"steps of {self.requests} requests, in {self.accepted_before} of {self.before} before it"
        )


def drafts_end(cell: ObservedCell) -> DraftsEnd | None:
    """Return where the acceptance of a cell ends; None if it does not, or chance may explain it. Steps without drafts,
    whose places are not known, leave out their request."""
    answers = cell.answers()
    compared = [
        (len(answers[key].o.sent_ids), found.accepted)
        for key, found in cell.steps().items()
        if not answers[key].o.drafts_filtered and not found.unaccounted
    ]
    ends = [next((at for at, count in _last_first(*request) if count), 0) for request in compared]
    tokens = 1 + max(ends, default=0)
    beyond = [sum(1 for _ in takewhile(lambda step: step[0] >= tokens, _last_first(*r))) for r in compared]
    requests, steps = sum(n > 0 for n in beyond), sum(beyond)
    # Every step that accepted a draft is before the end.
    hits = sum(len(accepted) - accepted.count(0) for _, accepted in compared)
    before = sum(len(accepted) for _, accepted in compared) - steps
    if not hits or requests < _LEAST_REQUESTS:
        return None
    # A step more that accepted nothing, so that a drafter that was always right may be wrong once.
    missed = (before - hits + 1) / (before + 1)
    if steps * math.log(missed) > math.log(_CHANCE):
        return None
    return DraftsEnd(tokens, requests, steps, before, hits)


def _last_first(prompt: int, accepted: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the steps of a request from the last one on: tokens of prompt and answer when it began, accepted drafts."""
    at = prompt + 1 + sum(accepted) + len(accepted)
    for count in reversed(accepted):
        at -= count + 1
        yield at, count
