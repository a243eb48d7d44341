"""The acceptance of a cell, and by how much its state alone may change it."""

from __future__ import annotations

from typing import NamedTuple

from harness.history.acceptance import RequestCounts, request_counts, settle_padding
from harness.observed.cell import ObservedCell
from harness.profiles.scenarios import PRESSURE_SLACK


class CellCounts(NamedTuple):
    """Acceptance counts of the answered requests of a cell."""

    by_key: dict[str, RequestCounts]
    padded: bool
    """Whether a padded first step was recognised from the engine's counters."""


def counts_of(cell: ObservedCell) -> CellCounts:
    """Return the acceptance counts of each answered request with at least two output tokens, by key."""
    k = cell.record.draft_tokens
    counted = {
        key: found
        for key, a in cell.answers().items()
        if len(a.output) > 1 and (found := request_counts(a.leg, k)) is not None
    }
    return CellCounts(*settle_padding(counted, cell.may_pad))


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
