"""Time that overlapping intervals cover, and that they leave."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.util import clock
from harness.util.intervals import Intervals, covered


@pytest.mark.parametrize(
    ("intervals", "seconds"),
    [
        ([], 0),
        ([(0, 2), (5, 6)], 3),
        ([(0, 4), (1, 2), (3, 6)], 6),
        ([(3, 6), (0, 4)], 6),
        # Clipped away.
        ([(0, 2), (9, 7)], 2),
    ],
)
def test_what_overlaps_counts_once(intervals, seconds):
    assert covered(intervals) == seconds


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=12))
def test_it_is_the_number_of_seconds_in_any_of_them(intervals):
    assert covered(intervals) == len({s for begin, end in intervals for s in range(begin, end)})


def test_what_lies_outside_is_clipped_to_the_time_in_question():
    found = Intervals()
    for begin, end in ((0, 10), (5, 12), (20, 99)):
        found.add(begin, end)
    assert found.outside(8, 25) == 8 and found.outside(100, 101) == 1 and found.outside(0, 10) == 0
    now = clock.now()
    found.took(4.0)
    assert found.outside(now - 4, now) < 1
