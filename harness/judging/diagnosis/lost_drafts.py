"""Answers that lost all their drafts, in a cell whose registered tests could not tell.

A test that lacks the power to tell says how many prompts it would need. A few such answers are often why: they widen
every interval. So they are named.
"""

from __future__ import annotations

from harness.judging.evidence import CellView

_STEPS = 8
"""An answer of fewer steps may accept no draft by chance."""
_SHARE = 0.1
"""When more answers than this accept no draft, the drafts are at fault and not single answers."""
_NAMED = 4


def without_drafts(cell: CellView) -> str:
    """Return a sentence that names the answers none of whose drafts was accepted; empty when there are none."""
    answered = cell.answered()
    drafted = cell.steps()
    lost = [
        answered[key].prompt_id
        for key, steps in drafted.items()
        if len(steps.accepted) >= _STEPS and not any(steps.accepted)
    ]
    if not lost or len(lost) > _SHARE * len(drafted):
        return ""
    more = f" and {len(lost) - _NAMED} more" if len(lost) > _NAMED else ""
    return (
        f"none of the drafts was accepted in {len(lost)} of {len(answered)} answers: {', '.join(lost[:_NAMED])}{more}"
    )
