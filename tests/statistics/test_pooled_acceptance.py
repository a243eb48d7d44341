"""Nights of fifteen P/D cells that lose less than a point at the last draft position, which no cell shows by itself."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from harness.history.acceptance import RequestCounts, counts_of_steps
from harness.judging.checks import pooled_acceptance
from harness.judging.checks.model import RegisteredTest
from harness.judging.checks.pooled_acceptance import NAME, _Drafts, _tested
from harness.profiles.model import Judging
from tests.statistics.nights import Share

JUDGING = Judging(tier="normal", permutations=2_000)
ALPHA = JUDGING.drafts_alpha
CELLS, TEXTS, COPIES, TOKENS = 15, 40, 4, 256
RECORDED, LOST = (0.728, 0.524, 0.363), (0.730, 0.521, 0.354)
TEST = RegisteredTest("pd-*", "cold", NAME)


def counts(rates: tuple[float, ...], rng: random.Random) -> RequestCounts:
    """The steps of an answer, each of which accepts drafts up to the first one that fails."""
    accepted, made = [], 1
    while made < TOKENS:
        u = rng.random()
        accepted.append(sum(u < rate for rate in rates))
        made += accepted[-1] + 1
    return counts_of_steps(accepted, None, len(rates))


def cell(rates: tuple[float, ...], parted: float, rng: random.Random) -> _Drafts:
    """A P/D cell beside its single engine; a share of its answers takes a path of its own. Texts differ in how well
    they are drafted."""
    texts, theirs, ours = [], [], []
    for text in range(TEXTS):
        ease = rng.gauss(0, 0.03)
        for _ in range(COPIES):
            texts.append(f"t{text}")
            theirs.append(counts(tuple(r + ease for r in RECORDED), rng))
            other = rates != RECORDED or rng.random() < parted
            ours.append(counts(tuple(r + ease for r in rates), rng) if other else theirs[-1])
    view = SimpleNamespace(id="pd-eagle3", record=SimpleNamespace(draft_tokens=3))
    return _Drafts(view, texts, theirs, ours)


def seen(rates: tuple[float, ...], cells: int, nights: int, monkeypatch, parted: float = 1.0) -> Share:
    """Of these nights, how many trip the test at the last position."""
    monkeypatch.setattr(pooled_acceptance, "_slack", lambda found: 0.0)
    count = 0
    for seed in range(nights):
        rng = random.Random(f"{seed} {rates}")
        found = _tested(TEST, [cell(rates, parted, rng) for _ in range(cells)], JUDGING, ALPHA)
        count += any(
            c.adjusted <= ALPHA and abs(c.difference.effect) >= JUDGING.floor_points / 100 and c.difference.excludes(0)
            for c in found.columns
        )
    return Share(count, nights)


@pytest.mark.parametrize("nights", [6, pytest.param(40, marks=pytest.mark.exhaustive)])
def test_fifteen_cells_see_what_one_does_not(nights, monkeypatch):
    together, alone = (seen(LOST, cells, nights, monkeypatch) for cells in (CELLS, 1))
    print(f"0.363 → 0.354 at position 2: seen by {CELLS} cells in {together}, by one in {alone}")
    assert together.count >= 0.9 * nights and alone.count <= 0.5 * nights


@pytest.mark.parametrize("nights", [6, pytest.param(200, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("parted", [0.3, 1.0])
def test_right_engines_do_not_trip_it(nights, parted, monkeypatch):
    found = seen(RECORDED, CELLS, nights, monkeypatch, parted)
    print(f"right engines, {parted:g} parted: {found}")
    assert found.low <= ALPHA
