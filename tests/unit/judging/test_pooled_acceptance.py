"""Drafts of all P/D cells together: what no cell shows by itself, and nothing where nothing was lost."""

from __future__ import annotations

import random

import pytest

from harness.history.verdict import Verdict
from harness.judging.checks.pooled_acceptance import pooled_acceptance
from harness.judging.checks.registry import judge
from harness.judging.checks.statistical import judge_pooled_drafts
from harness.judging.evidence import Evidence, FoundOfCells
from harness.profiles.model import Judging
from tests.support.builders import change_final, history, lookups, observation, speculation

METHODS = ("eagle3", "mtp", "dflash")
PROMPTS = range(40, 90)
JUDGING = Judging(tier="normal", permutations=2_000, must_detect_points=60, must_detect_stratum_points=None)
STEPS = 40
RATES = (0.728, 0.524, 0.363)


def drafted(rng: random.Random, lost: float) -> tuple[int, ...]:
    """Accepted drafts of a request: of those that would be accepted at the last position, this share is lost."""
    accepted = []
    for _ in range(STEPS):
        u = rng.random()
        count = sum(u < rate for rate in RATES)
        accepted.append(2 if count == 3 and rng.random() < lost else count)
    return tuple(accepted)


def night(lost: dict[str, float], seed: int = 1, methods=METHODS):
    """P/D repeats what its single engine accepted for three quarters of the prompts, as without partings."""
    rng, made = random.Random(seed), []
    for method in methods:
        for prompt in PROMPTS:
            alone = drafted(rng, 0.0)
            parts = rng.random() < 0.25 or lost.get(method, 0.0)
            after = tuple(2 if a == 3 and rng.random() < lost.get(method, 0.0) else a for a in alone)
            after = drafted(rng, lost.get(method, 0.0)) if parts and not lost.get(method) else after
            for cell, accepted in ((f"single-{method}", alone), (f"pd-{method}", after)):
                template = observation(cell, prompt)
                output = (*template.final.output_ids[:1], *range(100, 100 + sum(accepted) + STEPS))
                made.append(change_final(template, output_ids=output, speculation=speculation(accepted)))
    return history(made)


def judged_drafts(made):
    views = list(Evidence(made, lookups([40]), JUDGING, FoundOfCells()).views())
    drafts = pooled_acceptance(views, JUDGING)
    return drafts, {v.id: judge_pooled_drafts(v, drafts) for v in views if drafts and v.id in drafts.cells}


def test_a_loss_that_all_cells_share_is_seen_in_all_of_them():
    drafts, results = judged_drafts(night(dict.fromkeys(METHODS, 0.06)))
    assert {c: r.verdict for c, r in results.items()} == {f"pd-{m}": Verdict.REGRESSION for m in METHODS}
    (finding,) = results["pd-eagle3"].findings
    assert finding.damage == "drafter-kv" and "all@2" in finding.message
    assert drafts.tested.columns[2].difference.effect < -0.01 and drafts.tested.columns[0].difference.effect == 0


def test_cells_that_did_not_move_pass_beside_those_that_did():
    _, results = judged_drafts(night({"eagle3": 0.3, "mtp": 0.3}))
    assert results["pd-eagle3"].verdict is results["pd-mtp"].verdict is Verdict.REGRESSION
    assert results["pd-dflash"].verdict is Verdict.PASS or "of this cell" in results["pd-dflash"].findings[0].message


@pytest.mark.parametrize("seed", range(12))
def test_right_engines_pass(seed):
    _, results = judged_drafts(night({}, seed))
    assert {r.verdict for r in results.values()} == {Verdict.PASS}
    assert "could have seen" in results["pd-mtp"].note


def test_one_cell_says_no_more_than_its_own_test():
    assert judged_drafts(night({}, methods=("eagle3",))) == (None, {})


def test_methods_with_other_numbers_of_drafts_are_tested_as_far_as_they_go():
    made = night({})
    cells = tuple(c.model_copy(update={"draft_tokens": 2 if "mtp" in c.cell else 3}) for c in made.run.cells)
    made = made.model_copy(update={"run": made.run.model_copy(update={"cells": cells})})
    drafts, results = judged_drafts(made)
    assert [c.difference.column for c in drafts.tested.columns] == ["all@0", "all@1", "all@2"]
    assert set(drafts.cells["pd-mtp"]) == {"all@0", "all@1"} and results["pd-mtp"].verdict is Verdict.PASS


def test_the_bitwise_tier_needs_no_such_test():
    names = {r.check for c in judge(night({}), lookups([40])).cells for r in c.results}
    assert "acceptance-pooled" not in names
