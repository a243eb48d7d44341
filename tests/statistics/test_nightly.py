"""The shipped nightly plan, recorded with nothing wrong, can pass, and says beforehand what it can see."""

from __future__ import annotations

import pytest

from harness.history.verdict import Verdict
from harness.judging.checks.registry import TEST_NAMES, judge
from harness.judging.power import sensitivity
from harness.workload.prepare import Prepared, prepare
from tests.support.nightly import Defect, Nights


@pytest.fixture(scope="module")
def shipped() -> Prepared:
    return prepare("nightly", (), planned=True)


def test_shipped_nightly_passes_when_nothing_is_wrong(shipped: Prepared):
    # Fewer draws where nothing is close: the p-values near the level are computed from as many as ever.
    simulated = Nights(shipped, permutations=1000).night(1)
    judgement = judge(simulated.night, simulated.baselines)
    wrong = [f"{f.id}: {f.message}" for f in judgement.findings][:3]
    assert judgement.verdict is Verdict.PASS, wrong
    assert len(judgement.by_cell()) == 136
    promised = sensitivity(shipped)
    cells = {(c.cell, c.scenario): {r.check: r for r in c.results} for c in judgement.cells}
    rows = {(r.cell, r.scenario): r for r in promised.rows}
    for cell, results in cells.items():
        figures, answers = results["survival"].figures, promised.in_answers(rows[cell])
        assert (figures.prompts, figures.texts) == rows[cell].sample
        assert figures.detectable_prompts == answers.prompts
    assert list(promised.pooled) == ["cold", "prefix-hit", "prefix-hit-on-p", "concurrent", "pressure"]
    for scenario, (names, sample) in promised.pooled.items():
        together, pooled = promised.in_all(scenario), cells[names[0], scenario]["pooled"].figures
        assert together is not None
        assert (pooled.prompts, pooled.texts) == sample
        # With nothing wrong on either side, the run sees what the plan promised.
        assert pooled.detectable_points == pytest.approx(100 * together.share, abs=1e-6)
        assert pooled.detectable_prompts == together.prompts


PAIR = ("*-none+qwen35-08b", "*-mtp+qwen35-08b")


def test_plan_and_judge_say_alike_that_a_cell_is_blind(shipped: Prepared):
    """One model with one drafter cannot show damage to 5 % of the answers in a test of them all; where the plain engine
    reads none, nothing else does."""
    few = prepare("nightly", PAIR, planned=True)
    workload = few.profile.workload.model_copy(update={"rescore": False})
    unread = few._replace(profile=few.profile.model_copy(update={"workload": workload}))
    blind = sensitivity(unread).blind()
    assert [c for cells in blind.values() for c in cells] == ["pd-mtp+qwen35-08b", "pd-none+qwen35-08b"]
    simulated = Nights(unread, permutations=1000).night(1)
    judgement = judge(simulated.night, simulated.baselines)
    assert {(f.cell, f.check, f.verdict) for f in judgement.findings} == {
        ("pd-mtp+qwen35-08b", "pooled", Verdict.UNKNOWN),
        ("pd-none+qwen35-08b", "pooled", Verdict.UNKNOWN),
    }
    assert sensitivity(shipped).blind() == {}


def test_one_model_with_one_drafter_can_pass_since_each_wrong_answer_shows():
    """Of 116 prompts, each in two P/D cells. What the test of all answers is too small to see, single answers show."""
    few = prepare("nightly", PAIR, planned=True)
    assert sensitivity(few).blind() == {}
    nights = Nights(few, permutations=1000, stages=1)
    simulated = nights.night(1)
    judgement = judge(simulated.night, simulated.baselines)
    assert judgement.verdict is Verdict.PASS
    notes = [r.note for c in judgement.cells for r in c.results if r.check == "pooled"]
    assert notes and all("for which logprob-trace looks" in note for note in notes)
    damaged = [nights.night(seed, Defect(share=0.05, moved=0.2)) for seed in range(2, 6)]
    assert {judge(night, known).verdict for night, known in damaged} == {Verdict.SUSPECT}


@pytest.mark.parametrize(
    ("defect", "found"),
    [(Defect(), Verdict.PASS), (Defect(nats=0.1), Verdict.REGRESSION), (Defect(nats=0.002), Verdict.PASS)],
)
def test_tokens_that_are_right_and_less_likely_after_the_hand_off_fail(defect: Defect, found: Verdict):
    """Rounding of P/D that is twice as coarse passes, and so does less than the practical floor."""
    few = prepare("nightly", PAIR, planned=True)
    simulated = Nights(few, permutations=1000, stages=1).night(1, defect)
    judgement = judge(simulated.night, simulated.baselines)
    tested = {(c.cell, r.check): r.verdict for c in judgement.cells for r in c.results if r.check in TEST_NAMES}
    logprobs = {cell: v for (cell, check), v in tested.items() if check == "logprobs-single"}
    assert logprobs == {"pd-mtp+qwen35-08b": found, "pd-none+qwen35-08b": found}
    # Nothing else looks at them.
    assert {v for (_, check), v in tested.items() if check not in ("logprobs-single", "pooled")} == {Verdict.PASS}
