"""What rounding alone can change in an output: near ties, and the tokens that the plain engine may dislike."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from harness.baselines.model import NOISE_QUANTILE, Baseline, Row
from harness.history.records import Leg, Observation
from harness.history.token_ids import Divergence, compare
from harness.judging.evidence import CellView

_RESOLUTION_NATS = 5e-4
"""Half of the last digit of ``Row.min_top_gap``."""


def plain_baseline(cell: CellView) -> Baseline | None:
    """Return the baseline of plain decoding; None without one."""
    lookup = cell.baselines.get(cell.name.plain)
    return lookup.baseline if lookup is not None else None


def plain_rows(cell: CellView) -> Mapping[str, Row]:
    """Return the rows of that baseline by prompt; empty without one."""
    baseline = plain_baseline(cell)
    return baseline.by_prompt() if baseline is not None else {}


def near_tie_nats(cell: CellView) -> float:
    """Return the top-2 gap, in nats, up to which another token than the plain engine's is a near tie.

    It is the configured one, and in the normal tier at least the noise floor of the plain engine's A/A. It is the same
    for every method: two outputs that are held against each other must be judged alike.
    """
    bound = cell.judging.near_tie_nats
    if cell.judging.tier == "bitwise":
        return bound
    baseline = plain_baseline(cell)
    return max(bound, (baseline.noise_floor_nats if baseline is not None else None) or 0.0)


def rounding_nats(cell: CellView) -> float:
    """Return by how many nats the plain engine may dislike a token that only rounding has chosen.

    It is ``judging.rounding_nats``, or the ``NOISE_QUANTILE`` of the gaps at which equal runs of the plain engine
    parted, without the limit of near ties, if that is larger.
    """
    baseline = plain_baseline(cell)
    again = [r.again for r in baseline.rows if r.again is not None] if baseline is not None else []
    gaps = [a.gap for a in again if a.divergence is not None and a.gap is not None]
    floor = cell.judging.rounding_nats
    return max(floor, float(np.quantile(gaps, NOISE_QUANTILE))) if gaps else floor


def parting(
    cell: CellView, o: Observation, wanted: tuple[int, ...], plain: Leg | None, row: Row | None
) -> Divergence | None:
    """Return where an answer parts from the plain engine's tokens ``wanted``; None if it does not.

    ``plain`` is the plain engine's answer in this run, whose gaps and runner-ups can show a near tie if it has these
    tokens. ``row`` is the prompt's baseline: no gap can be smaller than the smallest that was recorded with them.
    """
    gaps = plain.top_gaps if plain is not None and plain.output_ids == wanted else None
    if gaps is not None and row is not None and row.min_top_gap is not None and row.output_ids[: len(wanted)] == wanted:
        least = row.min_top_gap - _RESOLUTION_NATS
        gaps = tuple(None if g is None else max(g, least) for g in gaps)
    ours = o.final.output_ids if o.final is not None else None
    seconds = plain.runner_ups if plain is not None else None
    return compare(ours or (), wanted, gaps, cell.judging.near_tie_nats, seconds)


def told_runner_ups(plain: Leg | None) -> bool:
    """Return whether an answer names its second-best tokens, as records of earlier versions do not."""
    return plain is not None and plain.runner_ups is not None
