"""A defect of one P/D request in twenty, which no cell shows alone, fails a night; a right night passes."""

from __future__ import annotations

import pytest

from harness.history.verdict import Verdict
from harness.profiles.model import Judging
from harness.workload.prepare import prepare
from tests.statistics.attack import attack, pooled_alarms, unchanged
from tests.support.nightly import Defect, Nights, Noise

CELLS = ("*-none+llama31-8b*",)


@pytest.fixture(scope="module")
def nights() -> Nights:
    return Nights(prepare("nightly", CELLS, ("cold",), planned=True), permutations=1000)


def test_one_damaged_request_in_twenty_fails_the_night(nights: Nights):
    found = attack(nights, Defect(1 / 20), range(2))
    assert found.verdicts == {Verdict.REGRESSION: 2}
    assert found.share("pooled").count == 2


def test_right_night_passes_also_if_pd_rounds_otherwise(nights: Nights):
    assert unchanged(nights, range(2)).green.count == 2
    otherwise = Nights(
        prepare("nightly", CELLS, ("cold",), planned=True), Noise(parting=0.0, pd_parting=0.5), permutations=1000
    )
    assert unchanged(otherwise, range(2)).green.count == 2


@pytest.mark.parametrize("share", [0.0005, 0.01])
def test_pooled_test_fails_no_more_often_than_it_says(share: float):
    found = pooled_alarms(2000, share)
    print(f"{100 * share:g} % of answers count as wrong: {found}")
    assert found.low <= Judging().pooled_alpha
