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


def asked(tmp_path, *more: str) -> Done:
    few = {"per_stratum": 3, "text_prompts": 2, "at_once": 4}
    profile = changed_profile(tmp_path, lambda raw: raw["workload"].update(few))
    cell = ("--profile", profile, "--cell", "pd-eagle3", "--scenario", COLD)
    return harness("run", *cell, *more, out=tmp_path / "out")


def sizes(done: Done, scenario: str) -> set[int]:
    return {o.concurrent for o in done.history.in_order("pd-eagle3") if o.scenario == scenario}


def test_healthy_engines_answer_together_as_alone(tmp_path):
    done = asked(tmp_path)
    assert done.code == 0, done.output
    assert {v.scenario: v.verdict for v in assess(done.history).judgement.cells} == dict.fromkeys(
        (COLD, AT_ONCE), Verdict.PASS
    )
    assert sizes(done, AT_ONCE) == {4} and 4 in sizes(done, COLD)
    assert "cold prompts were asked together in pd-eagle3" in done.output


def test_an_engine_that_exchanges_answers_in_a_crowd_is_found_and_asked_one_by_one(tmp_path):
    done = asked(tmp_path, "--mutant", "N50")
    assert done.code == 1, done.output
    found = {v.scenario: v for v in assess(done.history).judgement.cells}
    assert found[AT_ONCE].verdict is Verdict.REGRESSION and found[COLD].verdict is Verdict.PASS
    assert "tokens-baseline" in {r.check for r in found[AT_ONCE].results if r.verdict is Verdict.REGRESSION}
    assert sizes(done, COLD) == {1}
    assert "cold prompts are asked one by one" in done.output
