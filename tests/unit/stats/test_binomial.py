"""The exact interval is the one of scipy.stats, which the program does not import."""

from __future__ import annotations

import pytest
from scipy.stats import binomtest

from harness.stats.binomial import exact_interval


@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.99])
@pytest.mark.parametrize(("count", "of"), [(0, 1), (1, 1), (0, 7), (7, 7), (1, 7), (3, 11), (50, 100), (2, 11_760)])
def test_it_is_that_of_scipy(count, of, confidence):
    found = binomtest(count, of).proportion_ci(confidence, method="exact")
    assert exact_interval(count, of, confidence) == pytest.approx((found.low, found.high), abs=1e-9)
