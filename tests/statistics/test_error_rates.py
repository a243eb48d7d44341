"""The statistics as statistics: how often unchanged nights fail, what is seen, and that a fault in them is noticed.

The expected numbers of prompts are those of docs/error-rates.md. Everything is seeded: a failure repeats. Each rate is
measured with few repetitions in every run, and with as many as the stated bound needs before a release.
"""

from __future__ import annotations

import numpy as np
import pytest

from harness.stats.multiplicity import stage_alpha
from harness.stats.paired import differences, label_swap
from harness.stats.power import detectable
from tests.statistics.nights import CELLS, FAMILY_ALPHA, FAULTY, OURS, Share, false_alarms, five_percent, night, power
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


@pytest.mark.parametrize(("nights", "widest"), [(200, 0.1), pytest.param(1500, 2 * FAMILY_ALPHA**0.5, marks=ALL)])
def test_unchanged_night_of_36_tests_fails_at_most_once_in_a_thousand(nights, widest):
    first, both = false_alarms(mixed_night(), nights, seed=11)
    print(f"first stage {first}, both {both}")
    assert first.low <= STAGE
    assert both.low <= FAMILY_ALPHA
    # The first stage alone decides how wide the second bound is: the stages are independent.
    assert first.high < widest


@pytest.mark.parametrize("scene", EDGES)
def test_edge_cases_never_raise_an_alarm_by_themselves(scene):
    first, _ = false_alarms([scene] * 4, 100, seed=3)
    assert first.count == 0


@pytest.mark.parametrize("times", [40, pytest.param(150, marks=ALL)])
@pytest.mark.parametrize(
    ("diverging", "prompts"),
    [(0.1, 68), (0.5, 362), (1.0, 732)],
)
def test_drop_of_a_point_is_seen_at_the_stated_numbers_of_prompts(diverging, prompts, times):
    seen = power(Scene(prompts, diverging=diverging, drop=0.01), CELLS, times, seed=5)
    print(f"{diverging}: {seen}")
    assert seen.high >= 0.9
    assert seen.value >= 0.85


@pytest.mark.parametrize("times", [8, pytest.param(30, marks=ALL)])
def test_independent_runs_need_the_stated_numbers(times):
    seen = power(Scene(4004, shared_prompts=False, drop=0.01), CELLS, times, seed=5)
    print(seen)
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
        p = label_swap(to_arms(outcomes._replace(second=second), scene.strata), 20_000, i).p
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


def test_planned_effect_is_the_one_that_is_seen():
    """``plan`` promises this effect with power 0.9 at its level; the bound over columns makes it cautious."""
    scene = Scene(200, diverging=0.5)
    generator = np.random.default_rng(2)
    sd = float(np.mean([differences(to_arms(simulate(scene, generator)))[0].error * 200**0.5 for _ in range(40)]))
    effect = detectable(sd, 200, STAGE / CELLS / 3, 0.9**0.5)
    seen = power(scene._replace(drop=effect), CELLS, 100, seed=6)
    assert seen.value >= 0.85


# --- faults in the statistics -----------------------------------------------------------------------------------------


def size_holds(judge) -> bool:
    """The first stage of a night of noisy cells stays at its level."""
    noisy = [Scene(60, diverging=1.0, design_effect=10.0, shared_prompts=False, unequal=0.4)] * CELLS
    first, _ = false_alarms(noisy, 60, seed=8, judge=judge)
    return first.low <= STAGE


def power_holds(judge) -> bool:
    return power(Scene(362, diverging=0.5, drop=0.01), CELLS, 30, seed=8, judge=judge).high >= 0.9


def test_our_gate_holds_both():
    assert size_holds(OURS)
    assert power_holds(OURS)


@pytest.mark.parametrize("fault", sorted(FAULTY))
def test_fault_in_the_statistics_is_noticed(fault):
    held = {"size": size_holds(FAULTY[fault]), "power": power_holds(FAULTY[fault])}
    print(fault, held)
    assert not all(held.values())


def test_five_percent_gate_lets_a_point_through():
    generator = np.random.default_rng(1)
    worse = Share(sum(five_percent(Scene(80, drop=0.01), generator) for _ in range(200)), 200)
    print(f"±5 % sees a point: {worse}")
    assert worse.high < 0.6


def test_nights_are_repeatable():
    scenes = REGIMES[:4]
    first = night(scenes, np.random.default_rng(1))
    assert first == night(scenes, np.random.default_rng(1))
