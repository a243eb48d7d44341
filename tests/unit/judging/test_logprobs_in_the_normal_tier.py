"""The registered test of log-probs: how probable P/D finds its tokens, against the plain engine that reads them."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from harness.history.folder import History
from harness.history.records import RESCORE, Observation
from harness.history.verdict import Verdict
from harness.judging.checks.registry import judge
from harness.judging.findings import CheckResult
from tests.support.builders import change_final, with_answers
from tests.support.normal_tier import FOUR, baselines, night, scored

NAME = "logprobs-single"


def results(change: Callable[[Observation], Observation]) -> dict[str, dict[str, CheckResult]]:
    judgement = judge(read_afresh(night(stages=1, cells=FOUR, change=change)), baselines())
    return {c.cell: {r.check: r for r in c.results} for c in judgement.cells}


def read_afresh(made: History) -> History:
    """The run with every output re-scored, by an engine that finds its tokens as probable as they usually are."""

    def read(o: Observation) -> Observation:
        if o.scenario != RESCORE:
            return o
        usual = random.Random(o.prompt_id)
        likely = (-usual.expovariate(3) - 0.2 for _ in o.final.rescored)
        return change_final(o, rescored_logprobs=tuple(likely))

    made = scored(made)
    return with_answers(made, tuple(read(o) for o in made.observations))


def likely(o: Observation, sd: float = 0.0, less: float = 0.0) -> tuple[float, ...]:
    """Log-probs of the prompt's output tokens, moved by rounding and lowered by ``less`` nats."""
    usual, rounding = random.Random(o.prompt_id), random.Random(f"{o.cell} {o.prompt_id}")
    return tuple(-usual.expovariate(3) - 0.2 + rounding.gauss(0, sd) - less for _ in o.final.output_ids)


def pd(o: Observation) -> bool:
    return o.cell.startswith("pd")


def test_lost_layer_that_leaves_all_tokens_right_fails():
    """Every P/D answer has its tokens, which are 0.1 nat less likely."""
    found = results(lambda o: change_final(o, chosen_logprobs=likely(o, 0.03, 0.1 * pd(o))))
    for cell in ("pd-none", "pd-eagle3"):
        # Most of the answers moved, which shows in no single one beside the others.
        assert {n for n, r in found[cell].items() if r.verdict is not Verdict.PASS} == {NAME}
        (finding,) = found[cell][NAME].findings
        assert (finding.verdict, finding.damage) == (Verdict.REGRESSION, "target-kv")
        assert "in 1 of 1 columns: all@probability" in finding.message
        assert -10 < finding.evidence.columns[0].effect_points < -3
    assert not any(NAME in found[cell] for cell in ("single-none", "single-eagle3"))


def test_tokens_that_became_likelier_fail_too():
    found = results(lambda o: change_final(o, chosen_logprobs=likely(o, 0.03, -0.1 * pd(o))))
    assert found["pd-none"][NAME].verdict is Verdict.REGRESSION


@pytest.mark.parametrize("sd", [0.0, 0.05, 0.1])
def test_rounding_passes_also_where_only_one_side_rounds(sd: float):
    found = results(lambda o: change_final(o, chosen_logprobs=likely(o, sd if pd(o) else 0.0)))
    assert found["pd-none"][NAME].verdict is Verdict.PASS
    assert found["pd-eagle3"][NAME].verdict is Verdict.PASS
    assert "could have seen" in found["pd-none"][NAME].note


def test_change_below_the_practical_floor_passes():
    found = results(lambda o: change_final(o, chosen_logprobs=likely(o, 0.0, 0.002 * pd(o))))
    assert found["pd-none"][NAME].figures.p_adjusted < 0.001
    assert found["pd-none"][NAME].verdict is Verdict.PASS


def test_tokens_after_a_parting_are_compared_too():
    """The plain engine reads what P/D said, whatever it said itself."""

    def parted(o: Observation) -> Observation:
        if not pd(o):
            return change_final(o, chosen_logprobs=likely(o))
        first, second, *rest = o.final.output_ids
        unlikely = tuple(p - 0.2 * (i > 1) for i, p in enumerate(likely(o)))
        return change_final(o, output_ids=(first, second + 1, *rest), chosen_logprobs=unlikely)

    result = results(parted)["pd-none"][NAME]
    assert result.verdict is Verdict.REGRESSION
    assert result.note.endswith("output tokens") or "output tokens" in result.findings[0].message


def test_answers_without_log_probs_are_missing_evidence():
    found = results(lambda o: change_final(o, chosen_logprobs=None) if pd(o) and o.prompt_id == "p40" else o)
    assert found["pd-none"][NAME].verdict is Verdict.UNKNOWN
    assert "found 1 prompts without" in found["pd-none"][NAME].findings[0].message
