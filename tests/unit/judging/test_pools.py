"""KV blocks that are never given back: seen once per cell, whatever its answers were."""

from __future__ import annotations

import pytest

from harness.history.engine_interfaces import RESET_PREFIX_CACHE
from harness.history.verdict import Verdict
from harness.judging.checks import pools
from harness.judging.checks.registry import judge
from tests.support.builders import history, lookups, observation, view, with_cells, with_run


def emptied(after, lacking=()):
    made = history([observation("pd-none", 40)])
    return with_run(with_cells(made, emptied_s=after), lacking=dict.fromkeys(lacking, "…"))


@pytest.mark.parametrize(
    ("after", "verdict", "words"),
    [
        ({"prefill": 0.0, "decode": 31.5}, Verdict.PASS, None),
        (
            {"prefill": None, "decode": 0.0},
            Verdict.REGRESSION,
            "the prefill engine still has KV blocks in use",
        ),
        ({"prefill": 0.0}, Verdict.UNKNOWN, "the record does not say when the KV pool of the decode engine"),
        (None, Verdict.UNKNOWN, "the record does not say when the KV pool of the decode engine"),
    ],
)
def test_every_engine_must_give_its_blocks_back(after, verdict, words):
    result = pools.pool_returned(view(emptied(after), "pd-none"))
    assert result.verdict is verdict
    if words is not None:
        assert words in result.findings[0].message


def test_a_stranded_block_is_a_finding_of_its_own_beside_right_answers():
    (cell,) = judge(emptied({"prefill": 0.0, "decode": None}), lookups([40])).cells
    assert (cell.verdict, cell.diagnosis.damage) == (Verdict.REGRESSION, "blocks-kept")
    assert [r.check for r in cell.results if r.verdict is not Verdict.PASS] == ["pool-returned"]


@pytest.mark.parametrize("made", [emptied({}), emptied(None, lacking=[RESET_PREFIX_CACHE])])
def test_pools_that_could_not_be_asked_about_are_not_judged(made):
    assert not pools.applies(view(made, "pd-none"))
