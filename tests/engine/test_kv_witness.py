"""The KV witness on real engines: what it says of right hand-offs, and of a drafter whose KV never arrives."""

from __future__ import annotations

import pytest

from harness.history.verdict import Verdict
from harness.judging.checks.kv import COMPUTED, HANDED_OVER
from harness.judging.checks.registry import judge
from harness.judging.references import baselines_for
from tests.support.builders import changed_profile
from tests.support.real_engines import harness, left_over

pytestmark = pytest.mark.engine
CELLS = ("pd-eagle3", "single-eagle3", "single-none")


def _few(raw: dict) -> None:
    raw["workload"].update(per_stratum=1, text_prompts=1)


@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_the_kv_of_right_engines_is_the_plain_engines_bit_for_bit(tmp_path, runner):
    def few(raw: dict) -> None:
        _few(raw)
        raw["engine"]["model_runner"] = runner
        raw["judging"]["baseline_across"] = ["model_runner"]

    asked = [option for cell in CELLS for option in ("--cell", cell)]
    profile = changed_profile(tmp_path, few)
    done = harness("run", "--witness", "--profile", profile, *asked, "--scenario", "cold", out=tmp_path / "out")
    assert done.code == 0, done.output
    judgement = judge(done.history, baselines_for(done.history))
    over, computed = judgement.result("pd-eagle3", HANDED_OVER), judgement.result("pd-eagle3", COMPUTED)
    assert over.verdict is computed.verdict is Verdict.PASS
    assert over.judged == computed.judged == 6
    assert judgement.result("single-eagle3", COMPUTED).verdict is Verdict.PASS
    assert done.folder is not None and left_over(done.folder) == []


def test_a_drafters_kv_that_never_arrives_is_located_by_layer(tmp_path):
    profile = changed_profile(tmp_path, _few)
    asked = ("--cell", "pd-eagle3", "--scenario", "cold", "--mutant", "M4")
    done = harness("run", "--witness", "--profile", profile, *asked, out=tmp_path / "out")
    assert done.code == 1, done.output
    result = judge(done.history, baselines_for(done.history)).result("pd-eagle3", HANDED_OVER)
    assert (result.verdict, result.judged, result.found) == (Verdict.REGRESSION, 6, 6)
    assert {f.damage for f in result.findings} == {"drafter-kv"}
    assert all("keys and values in layer model.layers.3" in f.message and "zeros" in f.message for f in result.findings)
    assert "drafter" in done.output and "model.layers.3" in done.output
