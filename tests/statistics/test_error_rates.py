"""The statistics as statistics: how often unchanged nights fail, what is seen, and that a fault in them is noticed.

Everything is seeded: a failure repeats. Each rate is measured with few repetitions in every run, and with as many as
the stated bound needs before a release.
"""

from __future__ import annotations

import numpy as np
import pytest

from harness.stats.multiplicity import stage_alpha
from harness.stats.paired import by_unit, correlation_within, differences, label_swap, make_arms
from harness.stats.power import least_units, share_hit
from tests.statistics.nights import (
    CELLS,
    FAMILY_ALPHA,
    FAULTY,
    OURS,
    Share,
    false_alarms,
    five_percent,
    night,
    planned,
    power,
)
from tests.support.simulate import Scene, simulate, to_arms

ALL = pytest.mark.exhaustive
STAGE = stage_alpha(FAMILY_ALPHA, 2)
REGIMES = [
    Scene(60, design_effect=deff, diverging=share, unequal=0.4, strata=("aligned", "middle"))
    for deff in (2.0, 5.0, 10.0)
    for share in (0.1, 0.5, 1.0)
]
EDGES = [
    Scene(60, diverging=0.0),
    Scene(60, conditional=(0.0, 0.5)),
    Scene(60, conditional=(1.0, 1.0)),
    Scene(1),
    Scene(60, steps=1),
    Scene(2, steps=1),
]


def mixed_night() -> list[Scene]:
    """36 cells of all regimes and edge cases together."""
    cells = [*REGIMES * 3, *EDGES]
    return [*cells, *REGIMES][:CELLS]


@pytest.mark.parametrize(
    ("nights", "widest"), [(200, 12 * FAMILY_ALPHA), pytest.param(1500, 4 * FAMILY_ALPHA, marks=ALL)]
)
def test_unchanged_night_of_36_tests_fails_at_most_once_in_a_thousand(nights, widest):
    first, both = false_alarms(mixed_night(), nights, seed=11)
    print(f"first stage {first}, both {both}")
    assert first.low <= STAGE
    assert both.low <= FAMILY_ALPHA
    # The stages are independent, so the first alone bounds both far more narrowly than their count does.
    assert first.high**2 < widest


@pytest.mark.parametrize("scene", EDGES)
def test_edge_cases_never_raise_an_alarm_by_themselves(scene):
    first, _ = false_alarms([scene] * 4, 100, seed=3)
    assert first.count == 0


PLANNED = [
    Scene(0, diverging=0.1),
    Scene(0, diverging=0.5),
    Scene(0, diverging=1.0),
    Scene(0, diverging=1.0, strata=("aligned", "middle")),
]


@pytest.mark.parametrize("times", [40, pytest.param(150, marks=ALL)])
@pytest.mark.parametrize("scene", PLANNED, ids=str)
def test_drop_of_a_point_is_seen_nine_times_in_ten_at_the_numbers_that_plan_gives(scene, times):
    prompts = planned(scene)
    seen = power(scene._replace(prompts=prompts, drop=0.01), CELLS, times, seed=5)
    print(f"{prompts} prompts: {seen}")
    assert seen.high >= 0.9
    # Few repetitions bound the power from one side alone.
    assert seen.value >= (0.9 if times == 150 else 0.85)


@pytest.mark.parametrize("times", [8, pytest.param(30, marks=ALL)])
def test_independent_runs_need_many_more_prompts(times):
    scene = Scene(0, shared_prompts=False)
    prompts = planned(scene)
    seen = power(scene._replace(prompts=prompts, drop=0.01), CELLS, times, seed=5)
    print(f"{prompts} prompts: {seen}")
    assert prompts > 5 * planned(Scene(0))
    assert seen.high >= 0.9


def test_one_differing_prompt_is_not_enough_and_a_drop_in_one_stratum_is_seen():
    scene = Scene(120, diverging=0.1, strata=("aligned", "first", "middle", "lookahead"))
    generator = np.random.default_rng(4)
    seen = 0
    for i in range(60):
        outcomes = simulate(scene, generator)
        second = outcomes.second.copy()
        aligned = np.arange(scene.prompts) % 4 == 0
        lost = second[aligned, 1:] // 10
        second[aligned, 1:] -= lost
        second[aligned, 0] += lost.sum(axis=1)
        p = label_swap(to_arms(outcomes._replace(second=second), scene.strata), 20_000, i, STAGE / CELLS).p
        seen += p <= STAGE / CELLS
    assert Share(seen, 60).value > 0.9


@pytest.mark.parametrize("confidence", [0.95, 0.99])
@pytest.mark.parametrize(
    "scene",
    [
        Scene(40, design_effect=10.0, unequal=0.6),
        Scene(300, design_effect=2.0),
        Scene(80, shared_prompts=False, unequal=0.4),
    ],
)
def test_intervals_cover_at_their_rate(scene, confidence):
    generator = np.random.default_rng(9)
    inside = 0
    times = 1500
    for _ in range(times):
        d = differences(to_arms(simulate(scene, generator)), confidence)[0]
        inside += d.low <= 0.0 <= d.high
    share = Share(inside, times)
    print(f"{scene}: {share}")
    # Linearisation of a ratio costs a little with few prompts.
    assert share.high >= confidence - 0.005
    assert share.low <= confidence + 0.005


# --- padded copies of one text ---------------------------------------------------------------------------------------


def copied_rejections(by_text: bool, times: int = 400) -> Share:
    """Share of unchanged comparisons that reject at 1 %, where all copies of a text have the same luck."""
    scene = Scene(60, diverging=1.0, copies=3, shared_luck=1.0)
    units = [str(i // scene.copies) for i in range(scene.prompts)]
    generator = np.random.default_rng(21)
    rejected = 0
    for i in range(times):
        arms = to_arms(simulate(scene, generator))
        rejected += label_swap(by_unit(arms, units) if by_text else arms, 999, i).p <= 0.01
    return Share(rejected, times)


def test_copies_of_one_text_are_one_unit():
    assert copied_rejections(by_text=True).low <= 0.01
    assert copied_rejections(by_text=False).low > 0.01


def test_correlation_of_copies_is_measured():
    for luck in (0.0, 0.5, 1.0):
        scene = Scene(3000, diverging=1.0, copies=3, shared_luck=luck)
        units = [str(i // 3) for i in range(scene.prompts)]
        found = correlation_within(to_arms(simulate(scene, np.random.default_rng(2))), units)
        assert found == pytest.approx(luck, abs=0.06)


# --- damage to a few prompts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("texts", "copies"), [(103, 1), (40, 3)])
def test_share_of_damaged_answers_is_seen_as_often_as_promised(texts, copies):
    """Each answer is damaged with the chance that a plan says it sees, and the control never is."""
    alpha, generator = STAGE / CELLS, np.random.default_rng(3)
    share = share_hit(least_units(alpha), texts, copies, 0.9)
    seen = 0
    for i in range(300):
        damaged = (generator.random((texts, copies)) < share).sum(axis=1, keepdims=True).astype(float)
        trials = np.full_like(damaged, copies)
        seen += label_swap(make_arms(["wrong"], (damaged * 0, trials), (damaged, trials)), 20_000, i, alpha).p <= alpha
    assert Share(seen, 300).value == pytest.approx(0.9, abs=0.05)


# --- faults in the statistics -----------------------------------------------------------------------------------------


HALF = Scene(0, diverging=0.5)


def size_holds(judge) -> bool:
    """The first stage of a night of noisy cells stays at its level."""
    noisy = [Scene(60, diverging=1.0, design_effect=10.0, shared_prompts=False, unequal=0.4)] * CELLS
    first, _ = false_alarms(noisy, 60, seed=8, judge=judge)
    return first.low <= STAGE


def power_holds(judge) -> bool:
    return power(Scene(planned(HALF), diverging=0.5, drop=0.01), CELLS, 30, seed=8, judge=judge).high >= 0.9


def test_our_gate_holds_both():
    assert size_holds(OURS)
    assert power_holds(OURS)


@pytest.mark.parametrize("fault", sorted(FAULTY))
def test_fault_in_the_statistics_is_noticed(fault):
    assert not (size_holds(FAULTY[fault]) and power_holds(FAULTY[fault]))


def test_five_percent_gate_lets_a_point_through():
    generator = np.random.default_rng(1)
    worse = Share(sum(five_percent(Scene(80, drop=0.01), generator) for _ in range(200)), 200)
    print(f"±5 % sees a point: {worse}")
    assert worse.high < 0.6


def test_nights_are_repeatable():
    scenes = REGIMES[:4]
    first = night(scenes, np.random.default_rng(1))
    assert first == night(scenes, np.random.default_rng(1))
