"""How far rounding may move KV in the normal tier, by simulated right engines: how often one is called wrong, and what
damage shows."""

from __future__ import annotations

import numpy as np
import pytest

from harness.history.witness import KVLayer
from harness.judging.checks.kv_rounding import bounds_of
from harness.observed.kv_notes import CellDistance, KVBounds

LAYERS, CELLS = 6, 8
CONSTANT = KVBounds(5e-2)


def _answer(rng: np.random.Generator, damage: float = 0.0) -> list[CellDistance]:
    """Distances of one answer: layers round more the deeper they are, cells alike, and eight projections see it."""
    found = []
    for cell in range(CELLS):
        common = rng.lognormal(sigma=0.3)
        for layer in range(LAYERS):
            for values in (False, True):
                seen = float(np.sqrt(rng.chisquare(8) / 8))
                true = 0.002 * (1 + layer) * common * rng.lognormal(sigma=0.2)
                hit = damage if (cell, layer, values) == (3, 2, False) else 0.0
                found.append(CellDistance(KVLayer(f"l{layer}", False), values, cell, seen * float(np.hypot(true, hit))))
    return found


def _wrong(bounds: KVBounds, answer: list[CellDistance]) -> bool:
    return any(d.distance > bounds.of(d.layer, d.values) for d in answer)


@pytest.mark.parametrize("seed", range(5))
def test_right_nights_are_right_and_a_lost_token_shows(seed: int) -> None:
    rng = np.random.default_rng(seed)
    requests = 200
    bounds = bounds_of([_answer(rng) for _ in range(80)], 1e-3 / (requests * CELLS), CONSTANT)
    assert bounds != CONSTANT
    # 20 nights of right engines.
    assert sum(_wrong(bounds, _answer(rng)) for _ in range(20 * requests)) == 0
    # One token's keys of one of eight heads of a layer, in a cell of 16: 1 / sqrt(8 * 16) of its size.
    assert sum(_wrong(bounds, _answer(rng, damage=0.088)) for _ in range(50)) >= 40


def test_too_few_answers_leave_the_constant() -> None:
    rng = np.random.default_rng(1)
    assert bounds_of([_answer(rng) for _ in range(3)], 1e-6, CONSTANT) == CONSTANT


def test_engines_that_round_nothing_leave_the_constant() -> None:
    still = [[d._replace(distance=0.0) for d in _answer(np.random.default_rng(i))] for i in range(80)]
    assert bounds_of(still, 1e-6, CONSTANT) == CONSTANT
