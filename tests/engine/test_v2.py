"""Model runner V2, whose Triton kernels are interpreted here, hands off and drafts as V1 did.

The last of the files: its engines import what the others do not, and so take another fork server.
"""

from __future__ import annotations

import pytest

from harness.history.verdict import Verdict
from harness.reports.judge_run import assess
from tests.support.builders import changed_profile
from tests.support.real_engines import Done, harness, require_the_plain_engines_kv

pytestmark = pytest.mark.engine
CELLS = ("pd-eagle3", "single-eagle3", "single-none")


@pytest.fixture(scope="module")
def v2(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """The engines of ``eagle3`` without a router, with few cold prompts and the sampled ones."""

    def few(raw: dict) -> None:
        raw["workload"].update(per_stratum=1, text_prompts=1)
        raw["engine"]["model_runner"] = "V2"
        raw["judging"]["baseline_across"] = ["model_runner"]

    folder = tmp_path_factory.mktemp("v2")
    asked = [option for cell in CELLS for option in ("--cell", cell)]
    asked += ["--scenario", "cold", "--scenario", "sampled"]
    return harness("run", "--witness", "--profile", changed_profile(folder, few), *asked, out=folder / "out")


def test_it_answers_and_drafts_as_v1_recorded(v2: Done):
    assert v2.code == 0, v2.output
    assert {e.model_runner for e in v2.history.run.engines} == {"V2"}
    assert assess(v2.history).judgement.by_cell() == dict.fromkeys(CELLS, Verdict.PASS)
    assert "this run has V2, the baseline V1" in v2.output


def test_its_kv_is_the_plain_engines_bit_for_bit(v2: Done):
    require_the_plain_engines_kv(v2)
