"""The KV witness on real engines: what it says of right hand-offs, and of a drafter whose KV never arrives."""

from __future__ import annotations

import pytest

from harness.history.folder import load_history
from harness.history.records import COLD
from harness.history.verdict import Verdict
from harness.judging.checks.kv import COMPUTED, HANDED_OVER
from harness.judging.checks.registry import judge
from harness.judging.references import baselines_for
from tests.support.builders import changed_profile
from tests.support.real_engines import Done, harness, left_over

pytestmark = pytest.mark.engine
CELLS = ("pd-eagle3", "single-eagle3", "single-none")


@pytest.fixture
def v2(tmp_path) -> Done:
    """The engines of ``eagle3`` without a router, of model runner V2, with few cold prompts."""

    def few(raw: dict) -> None:
        raw["workload"].update(per_stratum=1, text_prompts=1)
        raw["engine"]["model_runner"] = "V2"
        raw["judging"]["baseline_across"] = ["model_runner"]

    asked = [option for cell in CELLS for option in ("--cell", cell)]
    profile = changed_profile(tmp_path, few)
    return harness("run", "--witness", "--profile", profile, *asked, "--scenario", "cold", out=tmp_path / "out")


@pytest.mark.parametrize("runner", ["eagle3", "v2"])
def test_the_kv_of_right_engines_is_the_plain_engines_bit_for_bit(runner, request):
    done: Done = request.getfixturevalue(runner)
    assert done.code == 0, done.output
    judgement = judge(done.history, baselines_for(done.history))
    over, computed = judgement.result("pd-eagle3", HANDED_OVER), judgement.result("pd-eagle3", COMPUTED)
    assert over.verdict is computed.verdict is Verdict.PASS
    cold = [o for o in done.history.in_order("pd-eagle3") if o.scenario == COLD]
    assert over.judged == computed.judged == len(cold) >= 6
    assert judgement.result("single-eagle3", COMPUTED).verdict is Verdict.PASS
    assert done.folder is not None and left_over(done.folder) == []


def test_a_drafters_kv_that_never_arrives_is_located_by_layer(quick_selftest):
    folder = quick_selftest[2] / "M4"
    recorded = load_history(folder)
    result = judge(recorded, baselines_for(recorded)).result("pd-eagle3", HANDED_OVER)
    assert result.verdict is Verdict.REGRESSION
    assert result.judged == result.found == len(recorded.of("pd-eagle3")) >= 5
    assert {f.damage for f in result.findings} == {"drafter-kv"}
    assert all("keys and values in layer model.layers.3" in f.message and "zeros" in f.message for f in result.findings)
    done = harness("check", str(folder))
    assert done.code == 1, done.output
    assert "drafter" in done.output and "model.layers.3" in done.output
