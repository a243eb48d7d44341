"""What rounding alone can change in an output: near ties, and the tokens that the plain engine may dislike."""

from __future__ import annotations

import numpy as np

from harness.baselines.model import NOISE_QUANTILE, Again, BaselineRow, noise_floor
from harness.history.records import Leg, Observation
from harness.history.token_ids import Divergence, compare
from harness.judging.evidence import CellView
from harness.judging.rounding import bounds, near_tie_in_crowds

_RESOLUTION_NATS = 5e-4
"""Half of the last digit of ``BaselineRow.min_top_gap``."""


def _plain_again(cell: CellView) -> list[Again]:
    """Return what equal runs of the plain engine differed by, a prompt each; empty without a baseline or an A/A."""
    return [r.again for r in cell.rows(cell.name.plain).values() if r.again is not None]


def near_tie_nats(cell: CellView, o: Observation | None = None, recorded: bool = False) -> float:
    """Return the top-2 gap, in nats, up to which another token than the plain engine's is a near tie.

    In the bitwise tier it is the configured one, or what rounding was measured to move: in the engines' own answers, in
    those to the request ``o`` if it had others beside it, or against the baseline (``recorded``). In the normal tier it
    is at least the noise floor of the plain engine's A/A, and the same for every method: two outputs that are held
    against each other must be judged alike.
    """
    if cell.judging.tier != "bitwise":
        floor = cell.shared("noise floor", lambda: noise_floor(_plain_again(cell)))
        return max(cell.judging.near_tie_assumed(cell.settings.dtype), floor)
    given = cell.judging.near_tie_nats
    if given is not None:
        return given
    known = bounds(cell)
    if o is not None and o.concurrent > 1:
        return max(known.recorded if recorded else known.beside, near_tie_in_crowds(cell))
    return known.recorded if recorded else known.alone


def rounding_nats(cell: CellView) -> float:
    """Return by how many nats the plain engine may dislike a token that only rounding has chosen.

    It is ``judging.rounding_nats``, or the ``NOISE_QUANTILE`` of the gaps at which equal runs of the plain engine
    parted, without the limit of near ties, if that is larger.
    """
    return max(cell.judging.rounding_nats, cell.shared("partings", lambda: _parting_gap(cell)))


def _parting_gap(cell: CellView) -> float:
    gaps = [a.gap for a in _plain_again(cell) if a.divergence is not None and a.gap is not None]
    return float(np.quantile(gaps, NOISE_QUANTILE)) if gaps else 0.0


def parting(
    cell: CellView,
    o: Observation,
    wanted: tuple[int, ...],
    plain: Leg | None,
    row: BaselineRow | None,
    recorded: bool = False,
) -> Divergence | None:
    """Return where an answer parts from the plain engine's tokens ``wanted``; None if it does not.

    ``plain`` is the plain engine's answer in this run, whose gaps and runner-ups can show a near tie if it has these
    tokens. ``row`` is the prompt's baseline: no gap can be smaller than the smallest that was recorded with them.
    ``recorded`` says that ``wanted`` are the baseline's tokens.
    """
    ours = o.final.output_ids if o.final is not None else None
    if ours == wanted:
        return None
    gaps = plain.top_gaps if plain is not None and plain.output_ids == wanted else None
    if gaps is not None and row is not None and row.min_top_gap is not None and row.output_ids[: len(wanted)] == wanted:
        least = row.min_top_gap - _RESOLUTION_NATS
        gaps = tuple(None if g is None else max(g, least) for g in gaps)
    seconds = plain.runner_ups if plain is not None else None
    return compare(ours or (), wanted, gaps, near_tie_nats(cell, o, recorded), seconds)
