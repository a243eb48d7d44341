"""The gate of the normal tier for the drafts of single requests."""

from __future__ import annotations

import pytest

from harness.history.verdict import Verdict
from harness.judging.checks.registry import GATES, judge
from harness.judging.findings import CheckResult
from harness.profiles.load import load_profile
from harness.pytest_items import _possible
from tests.support.builders import change_final, speculation, with_answers
from tests.support.normal_tier import LENGTHS, baselines, night, recorded, steps

NAME = "request-acceptance"
ONE = 100


def found(cell: str = "pd-eagle3", **accepted) -> CheckResult:
    judgement = judge(night(stages=1, **accepted), baselines())
    result = judgement.result(cell, NAME)
    assert result is not None
    return result


def lost(n: int) -> tuple[int, ...]:
    """What one request accepts that lost all its drafts."""
    return (0,) * (sum(recorded(n)) + len(recorded(n))) if n == ONE else recorded(n)


def test_one_request_without_drafts_is_suspect_with_its_prompt_named():
    result = found(pd=lost)
    assert [(f.prompt_id, f.verdict, f.damage) for f in result.findings] == [(f"p{ONE}", Verdict.SUSPECT, "drafter-kv")]
    (finding,) = result.findings
    assert finding.evidence.accepted == 0 and finding.evidence.p < 1e-6
    assert "32 of 39 in single-eagle3 of this run" in finding.message
    assert judge(night(stages=1, pd=lost), baselines()).verdict is Verdict.SUSPECT


def test_half_of_the_drafts_of_one_request():
    """Of the steps that begin at the same token, half accept nothing in this request alone."""

    def halved(n: int) -> tuple[int, ...]:
        mine, out = recorded(n), []
        for i, accepted in enumerate(mine):
            out += [0] * (accepted + 1) if i % 2 and n == ONE else [accepted]
        return tuple(out)

    assert [f.prompt_id for f in found(pd=halved).findings] == [f"p{ONE}"]


def test_single_engines_are_held_against_their_baseline():
    result = found("single-eagle3", single=lost, pd=lost)
    assert [(f.prompt_id, f.damage) for f in result.findings] == [(f"p{ONE}", "sampler")]
    assert "the baseline" in result.findings[0].message


def test_rounding_passes():
    """Every request accepts otherwise, as often."""
    result = found(pd=lambda n: steps(sum(recorded(n)) + len(recorded(n)) + 1, f"tonight {n}"))
    assert result.verdict is Verdict.PASS and result.judged == len(LENGTHS)
    assert result.note == f"{len(LENGTHS)} requests beside single-eagle3 of this run"


def test_nothing_in_the_whole_answer_counts_where_texts_part_at_once():
    def parted(o):
        if o.cell != "pd-eagle3" or o.prompt_id != f"p{ONE}":
            return o
        count = 60
        first, *_ = o.final.output_ids
        ids = (first, *range(500, 500 + count))
        return change_final(o, output_ids=ids, speculation=speculation((0,) * count), chosen_logprobs=(0.0,) * len(ids))

    made = night(stages=1, pd=lambda n: (2,) * 30, single=lambda n: (2,) * 30)
    made = with_answers(made, tuple(parted(o) for o in made.observations))
    result = judge(made, baselines()).result("pd-eagle3", NAME)
    assert [f.prompt_id for f in result.findings] == [f"p{ONE}"]
    assert "in the whole answer" in result.findings[0].message


@pytest.mark.parametrize("cell", ["single-none"])
def test_engines_that_do_not_draft_have_no_such_gate(cell: str):
    assert judge(night(stages=1), baselines()).result(cell, NAME) is None


def test_pytest_has_items_of_the_gates_where_they_apply():
    profile = load_profile("nightly")
    normal = profile.model_copy(update={"judging": profile.judging.model_copy(update={"tier": "normal"})})
    gates = set(GATES)
    assert gates <= _possible("pd-mtp", "cold", normal)
    assert gates & _possible("pd-none", "cold", normal) == {"logprob-trace"}
    without = normal.model_copy(update={"workload": normal.workload.model_copy(update={"rescore": False})})
    assert gates & _possible("pd-mtp", "cold", without) == {"request-acceptance"}
