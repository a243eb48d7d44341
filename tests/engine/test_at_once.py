"""Cold prompts go together where that changes no answer, and are judged as alone; where it does, that is found."""

from __future__ import annotations

import pytest

from harness.history.records import COLD
from harness.history.verdict import Verdict
from harness.profiles.scenarios import AT_ONCE
from harness.reports.judge_run import assess
from tests.support.builders import changed_profile
from tests.support.real_engines import Done, harness

pytestmark = pytest.mark.engine


CELLS = ("pd-eagle3", "pd-eagle3-router")


def asked(tmp_path, *more: str) -> Done:
    few = {"per_stratum": 3, "text_prompts": 2, "at_once": 4}
    profile = changed_profile(tmp_path, lambda raw: raw["workload"].update(few))
    cells = [option for cell in CELLS for option in ("--cell", cell)]
    return harness("run", "--profile", profile, *cells, "--scenario", COLD, *more, out=tmp_path / "out")


def sizes(done: Done, scenario: str) -> set[int]:
    return {o.concurrent for cell in CELLS for o in done.history.in_order(cell) if o.scenario == scenario}


def test_healthy_engines_answer_together_as_alone(tmp_path):
    done = asked(tmp_path)
    assert done.code == 0, done.output
    assert [v.verdict for v in assess(done.history).judgement.cells] == [Verdict.PASS] * 4
    assert sizes(done, AT_ONCE) == {3, 4} and 4 in sizes(done, COLD)
    assert "cold prompts were asked together in pd-eagle3 and pd-eagle3-router" in done.output


def test_an_engine_that_exchanges_answers_in_a_crowd_is_found_and_asked_one_by_one(tmp_path):
    done = asked(tmp_path, "--mutant", "N50")
    assert done.code == 1, done.output
    for v in assess(done.history).judgement.cells:
        assert v.verdict is (Verdict.REGRESSION if v.scenario == AT_ONCE else Verdict.PASS), v
        if v.scenario == AT_ONCE:
            assert "tokens-baseline" in {r.check for r in v.results if r.verdict is Verdict.REGRESSION}
    assert sizes(done, COLD) == {1}
    assert "cold prompts are asked one by one" in done.output
