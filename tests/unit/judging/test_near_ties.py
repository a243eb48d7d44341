"""Near ties: one bound for both arms, only for the runner-up, and with a gap that the baseline bears out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.baselines.model import Again, noise_floor
from harness.history.token_ids import compare
from harness.history.verdict import Verdict
from harness.judging.checks import tokens
from harness.judging.checks.registry import judge
from harness.judging.near_ties import near_tie_nats, rounding_nats
from tests.support.builders import (
    baseline_row,
    change_final,
    changed_rows,
    garbled,
    history,
    lookups,
    observation,
    view,
)
from tests.support.normal_tier import baselines, night, noisy, scored


def test_both_arms_of_a_test_are_held_to_the_bound_of_the_plain_engine():
    """All cells say the same tokens, one of which the plain engine dislikes by less than its own noise."""
    judgement = judge(scored(night(stages=1), lambda o: 0.5), noisy(baselines(), "none", [0.9] * 20))
    assert judgement.result("single-eagle3", "rescored").verdict is Verdict.PASS
    assert judgement.result("pd-eagle3", "rescored").verdict is Verdict.PASS


def test_noise_of_a_drafter_forgives_nothing():
    """The other way round: wrong tokens of P/D are not excused because equal EAGLE3 runs part."""
    made = scored(night(change=lambda o: garbled(o) if o.cell.startswith("pd") else o, stages=1), lambda o: 0.0)
    disliked = scored(made, lambda o: 0.5 if o.cell.startswith("pd") else 0.0)
    judgement = judge(disliked, noisy(baselines(), "eagle3", [0.9] * 20))
    assert judgement.result("pd-eagle3", "rescored").verdict is Verdict.REGRESSION


def test_noise_floor_does_not_grow_with_the_number_of_prompts():
    usual = [Again(divergence=3, gap=0.1, steps=0, accepted_at=())] * 99
    assert noise_floor([*usual, usual[0].model_copy(update={"gap": 0.95})]) == pytest.approx(0.1)
    assert noise_floor(usual[:0]) == 0.0


def test_bounds_are_the_plain_engines_and_at_least_the_settings():
    made = night(stages=1)
    cell = view(made, "pd-eagle3", noisy(baselines(), "none", [0.5] * 40))
    normal = cell.judging.model_copy(update={"tier": "normal"})
    assert near_tie_nats(replace(cell, judging=normal)) == pytest.approx(0.5)
    assert rounding_nats(cell) == 3.0
    assert rounding_nats(view(made, "pd-eagle3", noisy(baselines(), "none", [4.5] * 40))) == pytest.approx(4.5)


@pytest.mark.parametrize(("second", "tie"), [((7, 999), True), ((7, 8), False), ((7, None), True), (None, True)])
def test_only_the_runner_up_is_a_near_tie(second, tie):
    assert compare((5, 999), (5, 1), (9.0, 0.1), 0.36, second).near_tie is tie


def test_runner_up_of_the_baseline_counts_in_both_arms_or_in_neither():
    again = Again(divergence=1, gap=0.1, steps=0, accepted_at=(), token=9)
    row = baseline_row("p", (1, 2, 3), min_top_gap=0.1, close=((1, 0.1),), runner_ups=((1, 9),), again=again)
    assert row.near_tie(1, 9, 0.36) and not row.near_tie(1, 8, 0.36)
    assert not row.near_tie(1, None, 0.36) and not row.near_tie(1, 9, 0.05)
    assert row.model_copy(update={"again": row.again.model_copy(update={"token": None})}).near_tie(1, 8, 0.36)


def test_gap_below_the_recorded_minimum_excuses_nothing():
    """The reference reports a gap of zero where its baseline has never had less than nine nats."""
    plain = observation("single-none", 40)
    lying = change_final(plain, top_gaps=tuple(0.0 if i == 2 else 9.0 for i in range(len(plain.final.top_gaps))))
    pair = history([garbled(observation("pd-none", 40)), lying])
    for check in (tokens.tokens_reference, tokens.tokens_baseline):
        assert check(view(pair, "pd-none", lookups([40]))).verdict is Verdict.REGRESSION
    close = changed_rows(lookups([40])["none"], lambda _: {"min_top_gap": 0.0})
    result = tokens.tokens_reference(view(pair, "pd-none", {"none": close}))
    assert result.verdict is Verdict.PASS and "does not name the runner-up" in result.note


def test_garbage_at_a_tie_is_no_near_tie():
    plain = observation("single-none", 40)
    tied = change_final(
        plain,
        top_gaps=tuple(0.0 if i == 2 else 9.0 for i in range(len(plain.final.top_gaps))),
        runner_ups=tuple(4 for _ in plain.final.top_gaps),
    )
    result = tokens.tokens_reference(view(history([garbled(observation("pd-none", 40)), tied]), "pd-none"))
    assert result.verdict is Verdict.REGRESSION
