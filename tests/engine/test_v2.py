"""Model runner V2, whose Triton kernels are interpreted here, hands off and drafts as V1 did."""

from __future__ import annotations

import pytest

from harness.history.verdict import Verdict
from harness.reports.judge_run import assess
from tests.support.builders import changed_profile
from tests.support.real_engines import harness, left_over

pytestmark = pytest.mark.engine


def test_v2_answers_and_drafts_as_v1_recorded(tmp_path):
    def second(raw: dict) -> None:
        raw["engine"]["model_runner"] = "V2"
        raw["judging"]["baseline_across"] = ["model_runner"]
        raw["workload"].update(per_stratum=1, text_prompts=0)

    profile = changed_profile(tmp_path, second)
    asked = ("--cell", "pd-eagle3", "--scenario", "cold", "--scenario", "sampled")
    done = harness("run", "--profile", profile, *asked, out=tmp_path / "out")
    assert done.code == 0, done.output
    assert {e.model_runner for e in done.history.run.engines} == {"V2"}
    assert assess(done.history).judgement.by_cell() == {"pd-eagle3": Verdict.PASS}
    assert "this run has V2, the baseline V1" in done.output
    assert done.folder is not None and left_over(done.folder) == []
