"""How often the trend over many nights gives notice, of drifts and of nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from harness.history.acceptance import RequestCounts
from harness.history.verdict import Verdict
from harness.reports.trend import trend_of
from harness.reports.trend_model import TrendRun


def night(index: int, rng: np.random.Generator, rate: float, prompts: int = 60) -> TrendRun:
    """A night in which every prompt has steps of its own, accepted at ``rate``."""
    steps = rng.integers(20, 60, prompts)
    counts = {
        f"p{i}": RequestCounts(int(n), tuple(int(v) for v in rng.binomial(n, [rate, rate / 2])), "per-request")
        for i, n in enumerate(steps)
    }
    cells = {"pd-eagle3": Verdict.PASS}
    return TrendRun(
        f"n{index:03d}", f"{index:03d}", Path("n"), Verdict.PASS, cells, {"pd-eagle3": counts}, {"pd-eagle3": 2}, "0"
    )


def nights(count: int, seed: int, drift: float = 0.0):
    rng = np.random.default_rng(seed)
    return [night(i, rng, 0.7 - drift * i) for i in range(count)]


def test_unchanged_nights_give_as_few_notices_as_promised():
    """30 nights at one false notice in 365: at most 8 % of such months have one, and 60 months are looked at."""
    noticed = sum(bool(trend_of(nights(30, seed), 365).drifts) for seed in range(60))
    assert noticed <= 10


def test_drift_of_a_tenth_of_a_point_a_night_is_noticed_with_its_beginning():
    found = [trend_of(nights(40, seed, 0.001), 365) for seed in range(10)]
    seen = [t for t in found if any(d.falls and d.position == 0 for d in t.drifts)]
    assert len(seen) >= 9
    assert all(d.since < d.run for t in seen for d in t.drifts)


def test_nights_equal_bit_for_bit_never_give_a_notice():
    same = night(0, np.random.default_rng(1), 0.7)
    assert not trend_of([same._replace(run_id=f"n{i}", started=str(i)) for i in range(200)], 365).drifts


def test_a_notice_does_not_hide_what_follows():
    """Acceptance falls by two points, is noticed, and falls by eight more from night 50 on, which is noticed, too."""
    rng = np.random.default_rng(3)
    rates = [0.70] * 10 + [0.68] * 40 + [0.60] * 30
    found = trend_of([night(i, rng, rate) for i, rate in enumerate(rates)], 365).drifts
    falls = [d for d in found if d.position == 0 and d.falls]
    assert falls[0].run < 50
    later = [d for d in falls if d.run >= 50]
    assert later and later[0].run < 55
    assert later[0].first > falls[0].run


@pytest.mark.parametrize("level", ["another vLLM", "a new baseline"])
def test_sums_start_again_where_a_change_is_expected(level):
    rng = np.random.default_rng(3)
    rates = [0.70] * 20 + [0.60] * 20
    changed = [night(i, rng, r)._replace(levels={"pd-eagle3": level if i >= 20 else ""}) for i, r in enumerate(rates)]
    assert trend_of([n._replace(levels={}) for n in changed], 365).drifts
    found = trend_of(changed, 365)
    assert not found.drifts
    (first,) = [p for p in found.points if p.run == 20 and p.position == 0]
    assert (first.effect, first.upper, first.lower) == (0.0, 0.0, 0.0)
