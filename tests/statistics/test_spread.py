"""The noise of accepted drafts, held against what right engines can show: right nights, and nights in which a few
requests lost their drafts."""

from __future__ import annotations

import pytest

from harness.profiles.model import Judging
from tests.statistics.nights import Share
from tests.statistics.spread import TwinRequests, far

LEVEL = Judging().stage_alpha / 20
"""That of a test of a profile with 20 of them."""


@pytest.mark.parametrize("nights", [100, pytest.param(10_000, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("heavy", [False, True])
@pytest.mark.parametrize("parted", [0.02, 0.3, 1.0])
def test_right_engines_do_not_differ_far_more_than_noise_explains(parted, heavy, nights):
    """Also where P/D parts from single engines that never part from each other."""
    found = sum(
        far(TwinRequests(parted=parted, equal_parted=equal, heavy=heavy, jitter=0.05), LEVEL, nights // 2)
        for equal in (0.0, 0.3)
    )
    print(f"{parted:g} parted: {Share(found, nights)}")
    assert Share(found, nights).low <= LEVEL


@pytest.mark.parametrize(("parted", "least"), [(0.02, 30), (0.3, 20)])
def test_one_request_in_twenty_that_lost_its_drafts_is_seen(parted, least):
    assert far(TwinRequests(parted=parted, lost=0.05), LEVEL, 40) >= least
