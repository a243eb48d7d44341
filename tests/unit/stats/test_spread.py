"""How much requests differ from their twins, by hand."""

from __future__ import annotations

import pytest

from harness.stats.spread import FAR, TwinDrafts, spread_of


def beside(text: int, theirs: int, ours: int, behind: float = 0.0) -> TwinDrafts:
    return TwinDrafts(f"t{text}", (theirs, 100), (ours, 100), behind)


RATES = [60 + (7 * n) % 20 for n in range(40)]
RIGHT = [beside(n, rate, rate) for n, rate in enumerate(RATES)]


def test_equal_requests_do_not_differ():
    found = spread_of(RIGHT, [], 1e-4)
    assert found is not None and found.found == 0 and not found.far and found.widest == ()


def test_no_request_with_drafts_says_nothing():
    assert spread_of([TwinDrafts("t", (0, 0), (0, 0), 0.0)], [], 1e-4) is None
    assert spread_of([], [], 1e-4) is None


def test_requests_that_lost_their_drafts_are_named():
    lost = [*RIGHT[:-2], beside(38, 70, 0), beside(39, 60, 0)]
    found = spread_of(lost, [], 1e-4)
    assert found is not None and found.far and found.times > 5 * FAR
    assert found.widest == (38, 39)


def test_parted_requests_may_differ_as_unrelated_texts_do():
    """Every request accepts what another text does: far beyond noise if both say the same tokens, not if they part."""
    for behind, far in ((0.0, True), (1.0, False)):
        found = spread_of([beside(n, RATES[n], RATES[n - 5], behind) for n in range(40)], [], 1e-4)
        assert found is not None and found.far is far


def test_equal_runs_that_differ_without_parting_excuse_as_much():
    other = [beside(n, RATES[n], RATES[n - 5]) for n in range(40)]
    found = spread_of(other, other, 1e-4)
    assert found is not None and not found.far and found.times == pytest.approx(1)


def test_equal_runs_behind_their_partings_count_where_they_show_more_than_unrelated_texts():
    mine = [beside(n, 70, 70 + (15 if n % 2 else -15), 1.0) for n in range(40)]
    alone, with_runs = (spread_of(mine, equal, 1e-4) for equal in ([], mine))
    assert alone is None or alone.far
    assert with_runs is not None and not with_runs.far


def test_noise_of_few_texts_has_a_wider_limit():
    few = spread_of([beside(n, rate, rate, 1.0) for n, rate in enumerate(RATES[:3])], [], 1e-4)
    assert few is not None and few.limit > 1.5 * FAR
