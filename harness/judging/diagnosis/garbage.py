"""Answers that are wrong by themselves, in a cell whose registered tests could not tell.

A test that lacks the power to tell says how many prompts it would need. A few spoilt answers are often why: they widen
every interval. So they are named.
"""

from __future__ import annotations

from harness.history.acceptance import real_steps
from harness.history.records import RESCORE, Observation
from harness.history.token_ids import output_key
from harness.judging.evidence import CellView

_GROSS_NATS = 3.0
"""A token that the plain engine dislikes by more than this is no matter of rounding, not even in bfloat16."""
_STEPS = 8
"""An answer of fewer steps may accept no draft by chance."""
_SHARE = 0.1
"""When more answers than this accept no draft, the drafts are at fault and not single answers."""
_NAMED = 4


def garbage(cell: CellView) -> str:
    """Return a sentence that names the answers that are wrong by themselves; empty when there are none."""
    answered = cell.answered()
    worst = sorted(
        ((n, o.prompt_id) for o in answered.values() if (n := _disliked(cell, o)) > _GROSS_NATS), reverse=True
    )
    named = [f"{name} (a token that {cell.name.reference} dislikes by {nats:.1f} nats)" for nats, name in worst]
    already = {name for _, name in worst}
    drafted = [steps for o in answered.values() if o.final and (steps := real_steps(o.final)) is not None]
    lost = [o.prompt_id for o in answered.values() if o.prompt_id not in already and _lost_drafts(o)]
    if len(lost) + len(already) <= _SHARE * len(drafted):
        named += [f"{name} (none of its drafts accepted)" for name in lost]
    if not named:
        return ""
    more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
    return f"{len(named)} of {len(answered)} answers are wrong by themselves: {', '.join(named[:_NAMED])}{more}"


def _disliked(cell: CellView, o: Observation) -> float:
    """Return by how many nats the plain engine prefers another token, at the worst token of an answer; 0 if unknown."""
    if o.final is None or not o.final.output_ids:
        return 0.0
    scores = cell.history.of(cell.name.reference, scenario=RESCORE)
    score = scores.get(f"{o.prompt_id}#0.{output_key(o.final.output_ids)}")
    found = score.final.rescored if score is not None and score.error is None and score.final else None
    return max(found, default=0.0) if found else 0.0


def _lost_drafts(o: Observation) -> bool:
    steps = real_steps(o.final) if o.final is not None else None
    return steps is not None and len(steps.accepted) >= _STEPS and not any(steps.accepted)
