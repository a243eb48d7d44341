"""Nights of requests beside their twins, as ``harness.stats.spread`` judges them in a cell: right ones, which part here
and there and are other texts from there on, and some of which lose their drafts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from harness.stats.spread import Spread, TwinDrafts, spread_of

TEXTS, COPIES, STEPS, POSITIONS = 40, 4, 107, 3


class TwinRequests(NamedTuple):
    """What is simulated of one cell."""

    parted: float = 0.3
    """Share of the requests that part from their twins."""
    equal_parted: float = 0.3
    """The same of equal runs of the single engine."""
    sd: float = 0.08
    """How much texts differ in acceptance."""
    heavy: bool = False
    """Whether few texts differ much more (t3)."""
    jitter: float = 0.0
    """Share of the drafts of a request that are drawn again though both say the same tokens."""
    lost: float = 0.0
    """Share of the requests that lose drafts."""
    of_drafts: float = 1.0
    """Share of their drafts that these lose."""


def beside(cell: TwinRequests, parted: float, rng: np.random.Generator, damaged: bool) -> list[TwinDrafts]:
    n = TEXTS * COPIES
    texts = np.repeat(np.arange(TEXTS), COPIES)

    def rates(size: int) -> np.ndarray:
        moved = rng.standard_t(3, size) / 3**0.5 if cell.heavy else rng.normal(0, 1, size)
        return np.clip(0.54 + cell.sd * moved, 0.02, 0.98)

    theirs, other = rates(TEXTS)[texts], rates(n)
    behind = np.where(rng.random(n) < parted, rng.random(n), 0.0)
    drafts = STEPS * POSITIONS
    after = np.round(drafts * behind).astype(int)
    again = rng.binomial(drafts - after, cell.jitter)
    alike = rng.binomial(drafts - after - again, theirs)
    mine = alike + rng.binomial(again, theirs) + rng.binomial(after, other)
    twin = alike + rng.binomial(again, theirs) + rng.binomial(after, theirs)
    if damaged:
        hit = rng.random(n) < cell.lost
        mine = np.where(hit, rng.binomial(mine, 1 - cell.of_drafts), mine)
    return [
        TwinDrafts(f"t{t}", (int(a), drafts), (int(b), drafts), float(s))
        for t, a, b, s in zip(texts, twin, mine, behind, strict=True)
    ]


def night(cell: TwinRequests, level: float, rng: np.random.Generator) -> Spread:
    equal = beside(cell, cell.equal_parted, rng, damaged=False)
    found = spread_of(beside(cell, cell.parted, rng, damaged=True), equal, level)
    assert found is not None
    return found


def far(cell: TwinRequests, level: float, nights: int, seed: int = 1) -> int:
    """Return in how many nights the requests differ far more than noise explains."""
    rng = np.random.default_rng(seed)
    return sum(night(cell, level, rng).far for _ in range(nights))
