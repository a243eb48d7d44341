"""Exact tests of small counts, against scipy."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest, fisher_exact

from harness.stats.exact import fisher_fewer, sign_more

counts = st.integers(0, 60).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))


@given(counts, counts)
def test_it_is_fishers(ours, theirs):
    table = [[ours[0], ours[1] - ours[0]], [theirs[0], theirs[1] - theirs[0]]]
    assert fisher_fewer(*ours, *theirs) == pytest.approx(fisher_exact(table, "less").pvalue, rel=1e-6)


@given(st.integers(0, 80), st.integers(0, 80))
def test_signs(more, less):
    expected = binomtest(more, more + less, 0.5, "greater").pvalue if more + less else 1.0
    assert sign_more(more, less) == pytest.approx(expected, rel=1e-6)


def test_bad_counts_are_refused():
    with pytest.raises(ValueError, match="at most as many hits as trials"):
        fisher_fewer(3, 2, 0, 0)
