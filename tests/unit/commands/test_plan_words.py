"""Numbers of a plan promise no more than the tests can see, and what no prompt shows is named."""

from __future__ import annotations

import pytest

from harness.cli.options import make_console
from harness.commands.plan import _one_in, _percent, print_plan
from harness.commands.plan_data import missed_lengths, strata_of
from harness.workload.prepare import prepare


@pytest.mark.parametrize(
    ("share", "one_in", "percent"), [(0.05, 20, "5"), (0.0504, 19, "5.1"), (0.046, 21, "5"), (0.2, 5, "20")]
)
def test_no_smaller_damage_is_promised(share, one_in, percent):
    assert (_one_in(share), _percent(share)) == (one_in, percent)
    assert 1 / one_in >= share or one_in == 1


def test_lengths_that_matter_and_that_no_prompt_has_are_named():
    handed = "no prompt of N tokens is handed over with N mod 32 in {29}, where 4 slots for drafts take another block"
    found = {at: cells for at, cells in missed_lengths(prepare("smollm2-quick", [])).items() if "handed over" in at}
    assert found == {handed: ["pd-dflash"]}
    assert not any("handed over" in at for at in missed_lengths(prepare("cpu", [])))


def test_strata_are_those_of_the_chosen_methods_below_a_title_in_one_line(capsys):
    prepared = prepare("cpu-quick", ["pd-eagle3"])
    (strata,) = strata_of(prepared)
    assert list(strata.counts) == ["eagle3"] and sum(strata.counts["eagle3"].values()) == 15
    print_plan(prepared, 1.0, make_console())
    lines = capsys.readouterr().out.splitlines()
    assert "prompts (probe.jsonl, block size 32)" in lines
    assert "│ lookahead │      2 │" in lines
