"""Numbers of a plan promise no more than the tests can see, and what no prompt shows is named."""

from __future__ import annotations

import pytest

from harness.commands.plan import _missed_edges, _one_in, _percent
from harness.workload.prepare import prepare


@pytest.mark.parametrize(
    ("share", "one_in", "percent"), [(0.05, 20, "5"), (0.0504, 19, "5.1"), (0.046, 21, "5"), (0.2, 5, "20")]
)
def test_no_smaller_damage_is_promised(share, one_in, percent):
    assert (_one_in(share), _percent(share)) == (one_in, percent)
    assert 1 / one_in >= share or one_in == 1


def test_lengths_that_matter_and_that_no_prompt_has_are_named():
    (line,) = _missed_edges(prepare("smollm2-quick", []))
    assert line == (
        "no prompt of N tokens is handed over with N mod 32 in {29}, where 4 slots for drafts take another block: "
        "pd-dflash"
    )
    assert _missed_edges(prepare("cpu", [])) == []
