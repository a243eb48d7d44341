"""How far rounding moves KV, by what the plain engine held of the same tokens twice in a run: when it computed a prompt
and its answer, and when it read both afresh, in steps of other sizes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from harness.history.witness import CELL
from harness.judging.evidence import CellView
from harness.observed.kv_notes import CellDistance, KVBounds, distances
from harness.stats.trace import tail_limit

_CONSTANT = {"float32": 2e-3}
_CONSTANT_16_BITS = 5e-2
"""What is taken for rounding where none was measured. Sketches are kept in half precision, which alone makes 5e-4; a
head's keys of one token, lost from a cell of four heads, make 0.12."""
_CONSTANT_OF_STATES = 0.2
"""The same for recurrent state in 16 bits, which carries the rounding of all tokens before: 0.05 was seen between two
engines, 0.08 between two model runners. A lost head makes 0.35 of eight, 0.5 of four."""
_FLOOR = 1e-3
"""Usual distance of a layer below which it counts as this much, for the same reason."""
_NOTES = 3
"""Notes that are compared of a request: those of P and D, and one more before a first step."""


def constant_bounds(cell: CellView) -> KVBounds:
    """Return the bounds of the bitwise tier, which follow from the data type."""
    dtype, kept = cell.settings.dtype, cell.settings.kv_cache_dtype
    states = _CONSTANT.get(dtype, _CONSTANT_OF_STATES)
    # A number that is rounded to the next one of 8 bits, where another engine rounds it down, is 6 % away.
    return KVBounds(_CONSTANT.get(dtype if kept == "auto" else kept, _CONSTANT_16_BITS), states)


def measured_bounds(cell: CellView) -> KVBounds:
    """Return bounds that the target's KV of right engines exceeds in at most ``judging.single_alpha`` of all nights,
    over all requests of one: the usual distance of each layer, times what the largest of these ratios in a cell of the
    plain engine's own tokens allows. The constants where too few were seen."""
    return cell.shared("kv-bounds", lambda: _measured(cell))


def _measured(cell: CellView) -> KVBounds:
    answers = [
        list(distances(read, said, tokens)) for read, said, tokens in cell.kv_held.read_afresh(cell.name.reference)
    ]
    asked = sum(len(o.sent_ids) // CELL + 1 for o in cell.history.observations)
    return bounds_of(answers, cell.judging.single_alpha / max(1, asked * _NOTES), constant_bounds(cell))


def bounds_of(answers: Sequence[list[CellDistance]], rate: float, otherwise: KVBounds) -> KVBounds:
    """Return the bounds that a cell of 16 right tokens exceeds with a chance of at most ``rate`` in any layer, from the
    distances in answers that are right; ``otherwise`` where they are too few or show no rounding."""
    usual = _usual([d for of_answer in answers for d in of_answer])
    largest = [ratio for of_answer in answers for ratio in _largest(of_answer, usual)]
    limit = tail_limit(largest, rate)
    if limit is None:
        return otherwise
    # A fitted tail may end too early: what was seen twice over is within the bounds.
    limit = max(limit, 2 * max(largest))
    return otherwise._replace(by_layer={of: limit * size for of, size in usual.items()})


def _usual(found: list[CellDistance]) -> dict[tuple[str, bool], float]:
    by_layer: dict[tuple[str, bool], list[float]] = defaultdict(list)
    for d in found:
        by_layer[d.layer.name, d.values].append(d.distance)
    return {of: max(_FLOOR, float(np.median(sizes))) for of, sizes in by_layer.items()}


def _largest(of_answer: list[CellDistance], usual: dict[tuple[str, bool], float]) -> list[float]:
    """Return, for each cell of an answer, the largest distance over the usual one of its layer."""
    ratios: dict[int, float] = defaultdict(float)
    for d in of_answer:
        ratios[d.cell] = max(ratios[d.cell], d.distance / usual[d.layer.name, d.values])
    return list(ratios.values())
