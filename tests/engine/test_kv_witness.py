"""The KV witness on real engines: what it says of right hand-offs, and of a drafter whose KV never arrives."""

from __future__ import annotations

import pytest

from harness.history.folder import load_history
from harness.history.verdict import Verdict
from harness.judging.checks.kv import HANDED_OVER
from harness.judging.checks.registry import judge
from harness.judging.references import baselines_for
from tests.support.real_engines import Done, harness, require_the_plain_engines_kv

pytestmark = pytest.mark.engine


def test_the_kv_of_right_engines_is_the_plain_engines_bit_for_bit(eagle3: Done):
    require_the_plain_engines_kv(eagle3)


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
