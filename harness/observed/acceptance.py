"""The acceptance of a cell, and by how much its state alone may change it."""

from __future__ import annotations

from typing import NamedTuple

from harness.history.acceptance import Placed, RequestCounts, Steps, begun_before, counts_by, place, settle_padding
from harness.history.records import Observation
from harness.observed.cell import ObservedCell
from harness.profiles.scenarios import PRESSURE_SLACK


class CellCounts(NamedTuple):
    """Acceptance counts of the answered requests of a cell."""

    by_key: dict[str, RequestCounts]
    padded: bool
    """Whether a padded first step was recognised from the engine's counters."""


def counts_of(cell: ObservedCell) -> CellCounts:
    """Return the acceptance counts of each answered request with at least two output tokens, by key."""
    k, steps = cell.record.draft_tokens, cell.steps()
    counted = {
        key: found
        for key, a in cell.answers().items()
        if len(a.output) > 1 and (found := counts_by(steps.get(key), a.leg, k)) is not None
    }
    return CellCounts(*settle_padding(counted, cell.may_pad))


def drafts_by_crowd(cell: ObservedCell, o: Observation, reference: Steps) -> bool:
    """Return whether the requests beside others have steps with fewer drafts than the reference, or with none, and the
    reference tells where its own begin: all, or all but those at the end of the context, which have no drafts."""
    if not cell.traits.by_crowd or cell.cold:
        return False
    answered = 1 + sum(a + 1 for a in reference.accepted) + reference.unaccounted
    context = cell.settings.context_tokens
    return not reference.unaccounted or (context is not None and len(o.sent_ids) + answered >= context)


def placed_steps(cell: ObservedCell, o: Observation, steps: Steps, reference: Steps) -> Placed | None:
    """Place a request's steps at output positions; None where no placement makes its answer.

    The engine turns crowded when another request joins, when one that was preempted comes back, and drafts nothing at
    the end of the context; a request that was preempted itself has a token from its second prefill.
    """
    leg = o.final
    if leg is None or leg.speculation is None or leg.output_ids is None:
        return None
    gaps = o.concurrent - 1 + 2 * o.preemptions(leg) + leg.speculation.at_limit
    readings = [steps]
    if not steps.certain and steps.padded:
        told = leg.speculation
        readings.append(Steps(told.per_step_accepted, False, False, told.per_step_drafted))
    nested, tokens = cell.traits.nested, len(leg.output_ids)
    if cell.settings.context_tokens is not None:
        # Behind them there is no room for k drafts.
        room = cell.settings.context_tokens - len(o.sent_ids) - cell.record.draft_tokens
        reference = reference._replace(accepted=begun_before(reference.accepted, room))
    placed = [found for r in readings if (found := place(r, reference, tokens, gaps, nested)) is not None]
    return min(placed, key=lambda found: len(found.aligned.differing), default=None)


def acceptance_slack(cell: ObservedCell) -> float:
    """Return the relative tolerance on a request's accepted drafts: that of the scenario, and of the cold prompts of a
    soak, which are prefilled beside others."""
    config = cell.config
    if config is None:
        return PRESSURE_SLACK if cell.cold and cell.history.run.kind == "soak" else 0.0
    other_chunks = config.chunks_long_prompts and _longer_than_a_step(cell)
    return max(config.acceptance_slack, PRESSURE_SLACK if other_chunks else 0.0)


def mean_slack(cell: ObservedCell) -> float:
    """Return by how much of itself mean acceptance may be moved by the state alone."""
    return cell.config.mean_slack if cell.config is not None else 0.0


def _longer_than_a_step(cell: ObservedCell) -> bool:
    engine = cell.engine(cell.answering)
    step = engine.step_tokens if engine is not None else None
    return step is not None and any(len(o.sent_ids) > step for o in cell.observations().values())
