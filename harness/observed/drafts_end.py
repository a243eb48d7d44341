"""Acceptance that ends at a length: no step beyond it accepts a draft, in any request."""

from __future__ import annotations

import math
from typing import NamedTuple

from harness.history.acceptance import by_position
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
    steps = [
        (key, len(answers[key].o.sent_ids) + produced, accepted)
        for key, found in cell.steps().items()
        if not answers[key].o.drafts_filtered and not found.unaccounted
        for produced, accepted in by_position(found.accepted).items()
    ]
    tokens = 1 + max((length for _, length, accepted in steps if accepted), default=0)
    beyond = [key for key, length, _ in steps if length >= tokens]
    before = [accepted for _, length, accepted in steps if length < tokens]
    hits = sum(a > 0 for a in before)
    if not hits or len(set(beyond)) < _LEAST_REQUESTS:
        return None
    # A step more that accepted nothing, so that a drafter that was always right may be wrong once.
    missed = (len(before) - hits + 1) / (len(before) + 1)
    if len(beyond) * math.log(missed) > math.log(_CHANCE):
        return None
    return DraftsEnd(tokens, len(set(beyond)), len(beyond), len(before), hits)
