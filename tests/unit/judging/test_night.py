"""The normal tier on hand-made nights: every verdict, both stages, tokens, counters instead of per-request metrics."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import harness.judging.checks.hypothesis_tests as hypothesis_tests
from harness.baselines.lookup import Lookup
from harness.baselines.model import BaselineRow
from harness.history.records import Observation
from harness.history.verdict import Verdict
from harness.judging.checks import drafting
from harness.judging.checks.hypothesis_tests import run_tests
from harness.judging.checks.model import RegisteredTest
from harness.judging.checks.registry import judge, tripped_once
from harness.judging.evidence import Evidence, FoundOfCells, Stages
from harness.judging.findings import Judgement
from harness.profiles.model import Judging
from tests.support.builders import change_final, changed_rows, history, observation, view, with_profile
from tests.support.normal_tier import (
    FOUR,
    JUDGING,
    LENGTHS,
    again,
    baselines,
    better,
    night,
    noisy,
    outputs,
    recorded,
    scored,
    worse,
)


def verdict(judgement: Judgement, cell: str, check: str) -> Verdict:
    found = judgement.result(cell, check)
    assert found is not None
    return found.verdict


def test_equal_night_passes_and_says_what_it_could_have_seen():
    judgement = judge(night(stages=1), baselines())
    assert judgement.verdict is Verdict.PASS
    for check in ("acceptance-single", "first-step", "survival", "pooled"):
        assert verdict(judgement, "pd-eagle3", check) is Verdict.PASS
    result = judgement.result("pd-eagle3", "acceptance-baseline")
    assert result.figures.p == 1.0
    # Equal arms leave the noise of the effect itself, and damage to a few prompts has to reach the level, too.
    assert result.figures.detectable_points > 0.5 and result.figures.detectable_prompts > 10
    found = f"{result.figures.detectable_points:.2f} points, or the loss of {result.figures.detectable_prompts} prompts"
    assert f"could have seen {found}" in result.note


def test_noise_like_that_of_equal_runs_passes():
    judgement = judge(night(pd=again, single=again, stages=1), baselines())
    assert verdict(judgement, "pd-eagle3", "acceptance-baseline") is Verdict.PASS
    assert verdict(judgement, "pd-eagle3", "acceptance-single") is Verdict.PASS


def test_drop_of_pd_alone_is_a_regression_of_the_drafter():
    judgement = judge(night(pd=worse, stages=1), baselines())
    assert verdict(judgement, "pd-eagle3", "acceptance-baseline") is Verdict.REGRESSION
    assert verdict(judgement, "pd-eagle3", "acceptance-single") is Verdict.REGRESSION
    assert verdict(judgement, "single-eagle3", "acceptance-baseline") is Verdict.PASS
    found = [f for f in judgement.findings if f.check == "acceptance-single"]
    assert found[0].damage == "drafter-kv" and "adjusted p" in found[0].message
    assert found[0].evidence.columns[0].effect_points < -10
    assert "by conditional acceptance the change is at position 0" in found[0].message
    by_step = found[0].evidence.by_step
    assert by_step.found[0][0] == "0" and by_step.found[0][2] < by_step.reference[0][2]


def test_both_worse_is_drift_and_one_single_engine_worse_is_not():
    judgement = judge(night(pd=worse, single=worse, stages=1), baselines())
    assert verdict(judgement, "pd-eagle3", "acceptance-baseline") is Verdict.DRIFT
    assert verdict(judgement, "single-eagle3", "acceptance-baseline") is Verdict.DRIFT
    assert verdict(judgement, "pd-eagle3", "acceptance-single") is Verdict.PASS
    alone = judge(night(single=worse, stages=1), baselines())
    assert verdict(alone, "single-eagle3", "acceptance-baseline") is Verdict.REGRESSION


def test_better_than_recorded_is_improved_and_better_than_single_is_wrong():
    both = judge(night(pd=better, single=better, stages=1), baselines())
    assert verdict(both, "pd-eagle3", "acceptance-baseline") is Verdict.IMPROVED
    pd = judge(night(pd=better, stages=1), baselines())
    assert verdict(pd, "pd-eagle3", "acceptance-single") is Verdict.REGRESSION


def test_second_stage_decides_between_regression_and_suspect():
    first = night(pd=worse)
    assert RegisteredTest("pd-eagle3", "cold", "acceptance-single") in tripped_once(first, baselines()).tests
    assert verdict(judge(first, baselines()), "pd-eagle3", "acceptance-single") is Verdict.UNKNOWN
    confirmed = judge(first, baselines(), Stages(night(pd=worse)))
    assert verdict(confirmed, "pd-eagle3", "acceptance-single") is Verdict.REGRESSION
    passed = judge(first, baselines(), Stages(night()))
    assert verdict(passed, "pd-eagle3", "acceptance-single") is Verdict.SUSPECT
    assert passed.verdict.exit_code != 0
    lacking = judge(first, baselines(), Stages(night(lengths=LENGTHS[:2])))
    assert verdict(lacking, "pd-eagle3", "acceptance-single") is Verdict.UNKNOWN


def test_equal_runs_that_differ_make_it_unknown():
    judgement = judge(night(pd=worse, single=worse, stages=1), baselines(quiet=False))
    assert verdict(judgement, "pd-eagle3", "acceptance-baseline") is Verdict.UNKNOWN


def test_too_few_prompts_are_unknown_and_never_pass():
    few = LENGTHS[:6]
    judgement = judge(night(lengths=few, stages=1), baselines(few))
    assert judgement.verdict is Verdict.UNKNOWN
    messages = [f.message for f in judgement.findings]
    assert any("send more prompts" in m for m in messages)


def test_evidence_that_could_not_see_enough_is_unknown():
    judgement = judge(night(pd=again, stages=1, must_detect_points=0.5), baselines())
    assert verdict(judgement, "pd-eagle3", "acceptance-baseline") is Verdict.UNKNOWN
    finding = next(f for f in judgement.findings if f.check == "acceptance-baseline" and f.cell == "pd-eagle3")
    assert "a change of 0.5 points" in finding.message


def test_collapse_of_a_small_stratum_does_not_hide_behind_the_others():
    """Three aligned prompts of 96 whose drafts are never accepted: seen, or UNKNOWN, never PASS."""

    def aligned_collapse(n: int) -> tuple[int, ...]:
        return (0,) * (outputs(n) - 1) if n % 32 == 0 else again(n)

    judgement = judge(night(pd=aligned_collapse, stages=1, must_detect_stratum_points=30), baselines())
    assert verdict(judgement, "pd-eagle3", "acceptance-baseline") is not Verdict.PASS


def test_prompts_without_a_repetition_are_not_left_out_in_silence():
    def once(row):
        return {"again": None} if row.prompt_id == f"p{LENGTHS[0]}" else {}

    lacking = {method: changed_rows(lookup, once) for method, lookup in baselines().items()}
    judgement = judge(night(stages=1), lacking)
    assert verdict(judgement, "pd-eagle3", "survival") is Verdict.UNKNOWN
    assert any("found 1 without" in f.message for f in judgement.result("pd-eagle3", "survival").findings)


def test_near_ties_between_equal_runs_are_counted_by_the_same_rule():
    """Half of all requests part at ties, in both arms: no hard divergence anywhere."""
    half = [0.01 if i % 2 else None for i in range(len(LENGTHS))]
    ties = noisy(noisy(baselines(close=((5, 0.01),)), "none", half), "eagle3", half)
    assert verdict(judge(night(change=parted(5, 0.01), stages=1), ties), "pd-eagle3", "survival") is Verdict.PASS


def test_pd_that_rounds_otherwise_and_is_right_is_no_regression():
    """Every P/D output parts at a near tie, and equal runs of the single engine never do."""
    judgement = judge(night(change=parted(5, 0.01), stages=1), baselines(close=((5, 0.01),)))
    assert judgement.verdict is Verdict.PASS
    assert "96 at a near tie, 0 between equal runs" in judgement.result("pd-eagle3", "survival").note


def test_holm_is_what_keeps_a_lone_small_p_from_failing(monkeypatch):
    """A p-value between alpha and alpha / m fails only when the adjustment is taken out."""
    calls = []

    def spy(p_values, registered):
        calls.append((dict(p_values), registered))
        return hypothesis_tests_holm(p_values, registered)

    hypothesis_tests_holm = hypothesis_tests.holm
    monkeypatch.setattr(hypothesis_tests, "holm", spy)
    judge(scored(night(stages=1)), baselines())
    ((p_values, registered),) = calls
    assert registered == len(p_values) == 10
    adjusted = hypothesis_tests_holm({**p_values, next(iter(p_values)): 0.5e-3}, registered)
    assert min(adjusted.values()) == pytest.approx(5e-3)


def test_second_stage_that_could_not_see_it_confirms_nothing():
    first = night(pd=worse, must_detect_points=60)
    blind = judge(night(pd=worse, must_detect_points=0.5), baselines(), Stages(night(pd=again)))
    assert verdict(blind, "pd-eagle3", "acceptance-single") is Verdict.UNKNOWN
    assert verdict(judge(first, baselines(), Stages(night())), "pd-eagle3", "acceptance-single") is Verdict.SUSPECT


def test_change_below_the_floor_is_no_failure():
    judgement = judge(night(pd=worse, stages=1, floor_points=100, must_detect_points=100), baselines())
    assert verdict(judgement, "pd-eagle3", "acceptance-baseline") is Verdict.PASS
    notes = [r.note for c in judgement.cells for r in c.results if c.cell == "pd-eagle3"]
    assert any("below the practical floor" in n for n in notes)


def test_missing_baseline_and_missing_repetition_are_unknown():
    assert verdict(judge(night(stages=1), {}), "pd-eagle3", "acceptance-baseline") is Verdict.UNKNOWN
    once = baselines()
    once["none"] = changed_rows(once["none"], lambda _: {"again": None})
    judgement = judge(night(stages=1), once)
    assert verdict(judgement, "single-none", "survival") is Verdict.UNKNOWN
    assert any("--repeat 2" in f.message for f in judgement.findings)


def parted(at: int, gap: float) -> Callable[[Observation], Observation]:
    """P/D answers another token from ``at`` on; the plain engine's margin there is ``gap``."""

    def change(o: Observation) -> Observation:
        final = o.final
        if o.cell == "single-none":
            return change_final(o, top_gaps=tuple(gap if i == at else g for i, g in enumerate(final.top_gaps)))
        if o.cell != "pd-eagle3" or len(final.output_ids) <= at:
            return o
        return change_final(o, output_ids=(*final.output_ids[:at], 9, *final.output_ids[at + 1 :]))

    return change


def test_tokens_that_part_at_once_are_a_cliff_and_hard():
    judgement = judge(night(change=parted(0, 9.0), stages=1), baselines())
    assert verdict(judgement, "pd-eagle3", "survival") is Verdict.REGRESSION
    assert {f.damage for f in judgement.findings if f.check == "survival"} == {"target-kv"}


def test_near_ties_are_not_hard():
    made = night(change=parted(20, 0.01), stages=1)
    assert verdict(judge(made, baselines(close=((20, 0.01),))), "pd-eagle3", "survival") is Verdict.PASS
    assert verdict(judge(made, baselines()), "pd-eagle3", "survival") is Verdict.REGRESSION
    assert verdict(judge(made, baselines(close=((20, 0.5),))), "pd-eagle3", "survival") is Verdict.REGRESSION


# --- all P/D cells together ------------------------------------------------------------------------------------------


def damaged(cells: tuple[str, ...], every: int) -> Callable[[Observation], Observation]:
    """Every so many prompts, P/D says something else from the start; no two cells share a prompt."""

    def change(o: Observation) -> Observation:
        if o.cell not in cells or (len(o.sent_ids) + cells.index(o.cell)) % every:
            return o
        return change_final(o, output_ids=(9, *o.final.output_ids[1:]))

    return change


def test_damage_that_no_cell_shows_alone_shows_in_all_of_them():
    judgement = judge(night(change=damaged(("pd-none", "pd-eagle3"), 12), stages=1, cells=FOUR), baselines())
    for cell in ("pd-none", "pd-eagle3"):
        assert verdict(judgement, cell, "survival") is Verdict.PASS
        assert verdict(judgement, cell, "pooled") is Verdict.REGRESSION
    finding = next(f for f in judgement.findings if f.check == "pooled" and f.cell == "pd-none")
    assert finding.damage == "target-kv" and finding.changed == ("all@parted",)
    assert "8 of this cell, 0 of its single engine (parted: p" in finding.message


def test_cell_without_damage_has_no_finding_of_the_others():
    judgement = judge(night(change=damaged(("pd-none",), 4), stages=1, cells=FOUR), baselines())
    assert verdict(judgement, "pd-none", "pooled") is Verdict.REGRESSION
    assert verdict(judgement, "pd-eagle3", "pooled") is Verdict.PASS
    assert "other cells have more wrong answers" in judgement.result("pd-eagle3", "pooled").note


def test_too_few_pd_requests_to_show_what_they_share_are_unknown():
    judgement = judge(night(stages=1, must_detect_points=5), baselines())
    assert verdict(judgement, "pd-eagle3", "pooled") is Verdict.UNKNOWN
    finding = next(f for f in judgement.findings if f.check == "pooled")
    assert "more P/D cells with their single engines" in finding.message


def test_without_pairs_nothing_is_pooled():
    judgement = judge(night(stages=1, cells=("single-none", "single-eagle3")), baselines())
    assert not [r for c in judgement.cells for r in c.results if r.check == "pooled"]


def test_crash_of_the_pooled_test_is_unknown_and_hides_nothing(monkeypatch):
    monkeypatch.setattr("harness.judging.checks.pooled._tested", lambda *_: 1 / 0)
    judgement = judge(night(stages=1), baselines())
    assert verdict(judgement, "pd-eagle3", "pooled") is Verdict.UNKNOWN
    assert verdict(judgement, "pd-eagle3", "survival") is Verdict.PASS


# --- padded copies of one text ---------------------------------------------------------------------------------------


def copied(o: Observation) -> Observation:
    """Six prompts each are copies of one text."""
    return o.model_copy(update={"source": f"text {len(o.sent_ids) // 6}"})


def test_texts_are_the_unit_and_their_correlation_is_said():
    judgement = judge(night(pd=again, change=copied, stages=1), baselines())
    result = judgement.result("pd-eagle3", "acceptance-baseline")
    assert (result.figures.prompts, result.figures.texts) == (96, 17)
    assert "padded copies of a text correlate by" in result.note


def test_too_few_texts_are_unknown_however_many_prompts_they_make():
    made = night(change=lambda o: o.model_copy(update={"source": f"text {len(o.sent_ids) % 6}"}), stages=1)
    judgement = judge(made, baselines())
    assert verdict(judgement, "pd-eagle3", "acceptance-baseline") is Verdict.UNKNOWN
    assert any("96 prompts of 6 texts can give no p-value below" in f.message for f in judgement.findings)


def test_crashed_test_is_unknown_and_hides_nothing(monkeypatch):
    monkeypatch.setitem(hypothesis_tests._TESTS, "first-step", lambda *_: 1 / 0)
    judgement = judge(night(stages=1), baselines())
    assert verdict(judgement, "pd-eagle3", "first-step") is Verdict.UNKNOWN
    assert verdict(judgement, "pd-eagle3", "acceptance-single") is Verdict.PASS
    assert any("ZeroDivisionError" in f.message for f in judgement.findings)


def test_judging_twice_gives_the_same_bytes():
    made = night(pd=worse)
    first = judge(made, baselines(), Stages(night(pd=again)))
    assert first.model_dump_json() == judge(made, baselines(), Stages(night(pd=again))).model_dump_json()


def without_metrics(o: Observation) -> Observation:
    """As an engine without per-request metrics answers: only its counters grew."""
    final = o.final
    if final.speculation is None:
        return o
    accepted = final.speculation.per_step_accepted
    grown = {f"accepted_at_{p}": float(sum(a > p for a in accepted)) for p in range(3)}
    return change_final(o, speculation=None, counters={**final.counters, "drafts": float(len(accepted)), **grown})


def test_counters_stand_in_for_per_request_metrics():
    judgement = judge(night(change=without_metrics, stages=1), baselines())
    assert verdict(judgement, "pd-eagle3", "acceptance-baseline") is Verdict.PASS
    assert verdict(judgement, "pd-eagle3", "first-step") is Verdict.UNKNOWN
    assert "padded first step was recognised" in judgement.result("pd-eagle3", "acceptance-baseline").note
    dropped = judge(night(pd=worse, change=without_metrics, stages=1), baselines())
    assert verdict(dropped, "pd-eagle3", "acceptance-baseline") is Verdict.REGRESSION


@pytest.mark.parametrize("wrong", [False, True])
def test_counters_in_the_bitwise_tier(wrong):
    def chosen(n: int) -> tuple[int, ...]:
        return worse(n) if wrong else recorded(n)

    made = night(pd=chosen, change=without_metrics, tier="bitwise", lengths=LENGTHS[:8])
    found = verdict(judge(made, baselines(LENGTHS[:8])), "pd-eagle3", "acceptance-baseline")
    assert found is (Verdict.REGRESSION if wrong else Verdict.PASS)


@pytest.mark.parametrize("room", [0, 1])
def test_padding_is_known_without_a_surplus_only_where_the_answer_fills_the_context(room):
    # There the last step has no room for drafts and is not counted: the padded one takes its place.
    *short, last = recorded(40)
    assert last == 0
    made = history([without_metrics(observation("pd-eagle3", 40, accepted=tuple(short)))])
    made = with_profile(made, engine={"max_model_len": 40 + outputs(40) + room})
    lookups = baselines([40])
    lookups["eagle3"] = changed_rows(lookups["eagle3"], lambda _: {"accepted": tuple(short)})
    found = drafting.acceptance_baseline(view(made, "pd-eagle3", lookups))
    assert found.verdict is (Verdict.REGRESSION if room else Verdict.PASS)


def test_registered_number_does_not_depend_on_results():
    evidence = Evidence(night(stages=1), baselines(), Judging.model_validate(JUDGING), FoundOfCells())
    some = run_tests(list(evidence.views()), evidence.judging)
    none = run_tests(list(evidence._replace(baselines={}).views()), evidence.judging)
    assert set(some) == set(none)
    single = RegisteredTest("pd-eagle3", "cold", "acceptance-single")
    assert some[single].adjusted == none[single].adjusted


def steady() -> dict[str, Lookup]:
    """Baselines whose equal runs accept the same."""

    def alike(row: BaselineRow) -> dict[str, object]:
        counted = row.counts(3 if row.accepted else 0)
        return {"again": row.again.model_copy(update={"steps": counted.steps, "accepted_at": counted.accepted_at})}

    return {method: changed_rows(known, alike) for method, known in baselines().items()}


def few_lost(n: int) -> tuple[int, ...]:
    return (0,) * (outputs(n) - 1) if n % 24 == 0 else recorded(n)


def test_few_requests_that_lost_their_drafts_are_a_finding_and_no_excuse():
    """They inflate the noise of the test of means, which alone would ask for more prompts."""
    result = judge(night(pd=few_lost, stages=1, must_detect_points=5), steady()).result(
        "pd-eagle3", "acceptance-single"
    )
    assert result is not None and result.verdict is Verdict.REGRESSION
    (finding,) = result.findings
    assert finding.damage == "drafter-kv" and "times the variance" in finding.message
    named = finding.message.split("most in ")[1].split(":")[0].split(", ")
    assert set(named) <= {f"p{n}" for n in LENGTHS if n % 24 == 0}


def test_equal_runs_that_differ_as_much_are_an_excuse():
    made = night(pd=again, single=recorded, stages=1)
    assert verdict(judge(made, baselines()), "pd-eagle3", "acceptance-single") is Verdict.PASS
    assert verdict(judge(made, steady()), "pd-eagle3", "acceptance-single") is Verdict.REGRESSION


def test_requests_that_differ_far_more_than_noise_are_asked_for_again():
    first = night(pd=few_lost)
    assert RegisteredTest("pd-eagle3", "cold", "acceptance-single") in tripped_once(first, steady()).tests
    assert verdict(judge(first, steady()), "pd-eagle3", "acceptance-single") is Verdict.UNKNOWN
    again_lost = judge(first, steady(), Stages(first))
    assert verdict(again_lost, "pd-eagle3", "acceptance-single") is Verdict.REGRESSION
    right = judge(first, steady(), Stages(night()))
    assert verdict(right, "pd-eagle3", "acceptance-single") is Verdict.SUSPECT
