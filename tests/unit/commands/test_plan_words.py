"""Numbers of a plan are rounded so that they promise no more than the tests can see."""

from __future__ import annotations

import pytest

from harness.commands.plan import _one_in, _percent


@pytest.mark.parametrize(
    ("share", "one_in", "percent"), [(0.05, 20, "5"), (0.0504, 19, "5.1"), (0.046, 21, "5"), (0.2, 5, "20")]
)
def test_no_smaller_damage_is_promised(share, one_in, percent):
    assert (_one_in(share), _percent(share)) == (one_in, percent)
    assert 1 / one_in >= share or one_in == 1
