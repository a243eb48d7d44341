"""Evidence that a rate is exceeded, looked at after every try."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.stats.sequential import e_value


@given(st.integers(1, 60), st.floats(0.001, 0.9))
def test_right_engines_expect_no_evidence(tries, rate):
    """At the rate itself, the mean over all that can be seen is one."""
    mean = sum(
        math.comb(tries, k) * rate**k * (1 - rate) ** (tries - k) * e_value(k, tries, rate) for k in range(tries + 1)
    )
    assert mean == pytest.approx(1, rel=1e-6)


@given(st.integers(1, 60), st.floats(0.01, 0.9), st.floats(0.1, 0.99))
def test_rarer_faults_expect_less(tries, rate, times):
    rarer = rate * times
    mean = sum(
        math.comb(tries, k) * rarer**k * (1 - rarer) ** (tries - k) * e_value(k, tries, rate) for k in range(tries + 1)
    )
    assert mean <= 1 + 1e-9


def test_looking_every_night_seldom_accuses_right_engines():
    """1 in 20 nights has a false alarm; evidence of 20 is ever reached with a chance of at most 1 in 20."""
    accused = 0
    for seed in range(400):
        draw, shown = random.Random(seed), 0
        for night in range(1, 201):
            shown += draw.random() < 0.05
            if e_value(shown, night, 0.05) >= 20:
                accused += 1
                break
    assert accused <= 400 / 20


def test_a_fault_of_some_nights_adds_up():
    assert e_value(1, 1, 1e-3) < 1000 < e_value(2, 9, 1e-3)
    assert e_value(3, 30, 1e-3) > 1000
    assert math.isfinite(e_value(5000, 5000, 1e-3))


@pytest.mark.parametrize(("shown", "tries", "rate"), [(2, 1, 0.1), (-1, 1, 0.1), (0, 1, 0.0), (0, 1, 1.0)])
def test_impossible_counts_are_refused(shown, tries, rate):
    with pytest.raises(ValueError, match="expected"):
        e_value(shown, tries, rate)
