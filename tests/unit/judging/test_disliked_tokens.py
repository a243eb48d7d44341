"""The gate per request of the normal tier: garbage in a few answers never passes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.history.records import Observation
from harness.history.verdict import Verdict
from harness.judging.checks.registry import judge
from harness.judging.checks.rescored import disliked_tokens
from harness.judging.exposure import exposure_of
from harness.judging.findings import Judgement
from harness.reports.trend import answers_of
from harness.reports.trend_model import Answers
from tests.support.builders import change_final, view, with_answers
from tests.support.normal_tier import baselines, night, noisy, scored

PROMPTS = list(range(32, 332))


def garbage(prompts: int):
    """Every token but the first, which P knows, is wrong in the first answers of P/D."""

    def change(o: Observation) -> Observation:
        if o.cell != "pd-eagle3" or len(o.sent_ids) >= PROMPTS[0] + prompts:
            return o
        first, *others = o.final.output_ids
        return change_final(o, output_ids=(first, *(t + 100 for t in others)))

    return change


def judged(prompts: int, nats: float = 15.0) -> Judgement:
    made = night(change=garbage(prompts), lengths=PROMPTS, stages=1)
    plain = {o.prompt_id: o.final.output_ids for o in made.observations if o.cell == "single-none"}
    made = scored(made, lambda o: nats if o.final.output_ids != plain[o.prompt_id] else 0.0)
    return judge(made, baselines(PROMPTS))


@pytest.mark.parametrize("prompts", [9, 1])
def test_garbage_in_a_few_of_300_answers_is_suspect_with_the_prompts_named(prompts):
    judgement = judged(prompts)
    assert judgement.verdict is Verdict.SUSPECT
    found = [f for f in judgement.findings if f.verdict is Verdict.SUSPECT]
    assert {f.check for f in found} == {"disliked-tokens"}
    assert {f.prompt_id for f in found} == {f"p{n}" for n in PROMPTS[:prompts]}
    assert all(f.prompt_id in f.message for f in found)
    (cell,) = [c for c in judgement.cells if c.cell == "pd-eagle3"]
    assert cell.diagnosis.damage == "target-kv"
    assert exposure_of(judgement).handed_off == len(PROMPTS)
    assert answers_of(judgement)["pd-eagle3"] == Answers(prompts, len(PROMPTS))


def test_what_a_test_sees_beyond_chance_is_a_regression():
    assert judged(30).verdict is Verdict.REGRESSION


def test_what_rounding_can_make_passes():
    assert judged(1, nats=2.9).verdict is Verdict.PASS
    assert judged(1, nats=3.1).verdict is Verdict.SUSPECT


def test_bound_rises_with_the_gaps_at_which_equal_runs_part():
    made = scored(night(stages=1), lambda o: 4.0)
    assert disliked_tokens(view(made, "pd-eagle3", baselines())).verdict is Verdict.SUSPECT
    assert disliked_tokens(view(made, "pd-eagle3", noisy(baselines(), "none", [4.5] * 20))).verdict is Verdict.PASS
    cell = view(made, "pd-eagle3", baselines())
    wide = replace(cell, judging=cell.judging.model_copy(update={"rounding_nats": 5.0}))
    assert disliked_tokens(wide).verdict is Verdict.PASS


def test_output_without_a_score_is_unknown():
    made = scored(night(stages=1, lengths=PROMPTS[:3]))
    lost = with_answers(made, made.observations[:-1])
    result = disliked_tokens(view(lost, "single-none", baselines()))
    assert result.verdict is Verdict.UNKNOWN and "no score" in result.findings[0].message
