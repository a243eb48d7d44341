"""The statistics against closed forms, brute force and scipy; their error rates are measured in tests/statistics."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as sp

from harness.stats.multiplicity import holm, stage_alpha
from harness.stats.paired import by_unit, correlation_within, differences, label_swap, make_arms, ratio
from harness.stats.power import detectable, least_units, share_hit, units_needed
from tests.support.simulate import Scene, simulate, to_arms


def arms_of(first, second, trials=None):
    a, b = np.array(first, float)[:, None], np.array(second, float)[:, None]
    t = np.full_like(a, 10) if trials is None else np.array(trials, float)[:, None]
    return make_arms(["all@0"], (a, t), (b, t))


def test_equal_arms_give_p_one_and_no_effect():
    arms = arms_of([3, 4, 5], [3, 4, 5])
    swap = label_swap(arms, 100, 1)
    assert (swap.p, swap.adjusted, swap.exact) == (1.0, (1.0,), True)
    (d,) = differences(arms)
    assert (d.effect, d.error, d.excludes_zero) == (0.0, 0.0, False)


def test_enumeration_is_the_sign_flip_test():
    first, second = [5, 6, 7, 4, 9, 6], [3, 5, 7, 2, 6, 5]
    deltas = np.array(second) - np.array(first)
    observed = abs(deltas.sum())
    brute = [abs((np.array(s) * deltas).sum()) >= observed for s in itertools.product((1, -1), repeat=6)]
    swap = label_swap(arms_of(first, second), 1000, 1)
    assert swap.exact and swap.p == pytest.approx(np.mean(brute))


def test_random_swaps_agree_with_enumeration():
    rng = np.random.default_rng(3)
    first = rng.integers(2, 8, 18)
    second = first - rng.choice([-1, 1, 2], 18)
    arms = arms_of(first, second)
    exact, random = label_swap(arms, 10**6, 1), label_swap(arms, 5000, 1)
    assert exact.exact and not random.exact
    assert random.p == pytest.approx(exact.p, abs=4 * np.sqrt(exact.p / 5000) + 1e-3)


def test_same_seed_same_answer_and_swapping_the_arms_changes_nothing():
    arms = to_arms(simulate(Scene(80, drop=0.02, strata=("a", "b")), np.random.default_rng(1)), ("a", "b"))
    swapped = arms._replace(hits=arms.hits[::-1], trials=arms.trials[::-1])
    assert label_swap(arms, 3000, 7) == label_swap(arms, 3000, 7)
    assert label_swap(arms, 3000, 7).p == pytest.approx(label_swap(swapped, 3000, 7).p, abs=1e-9)
    for a, b in zip(differences(arms), differences(swapped), strict=True):
        assert a.effect == pytest.approx(-b.effect)
        assert (a.low, a.high) == pytest.approx((-b.high, -b.low))


def test_difference_of_equal_lengths_is_the_paired_t_interval():
    first, second = [5, 6, 7, 4, 9], [3, 5, 7, 2, 6]
    (d,) = differences(arms_of(first, second), 0.95)
    test = sp.ttest_rel(np.array(second) / 10, np.array(first) / 10).confidence_interval(0.95)
    assert d.effect == pytest.approx(-0.16)
    assert (d.low, d.high) == pytest.approx((test.low, test.high))


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 5)), min_size=0, max_size=12))
@settings(max_examples=80)
def test_any_counts_give_finite_answers(rows):
    """All-zero and all-one positions, prompts without trials, one prompt and none."""
    n = len(rows)
    a = np.array([[min(x, t)] for x, _, t in rows], float).reshape(n, 1)
    b = np.array([[min(y, t)] for _, y, t in rows], float).reshape(n, 1)
    t = np.array([[t] for *_, t in rows], float).reshape(n, 1)
    arms = make_arms(["c"], (a, t), (b, t))
    swap = label_swap(arms, 200, 1)
    assert 0 < swap.p <= 1
    assert swap.p >= swap.least - 1e-12
    (d,) = differences(arms)
    if d.units > 1:
        assert np.isfinite([d.effect, d.error, d.low, d.high]).all()
        assert -1 <= d.low <= d.effect <= d.high <= 1


def test_shapes_are_checked():
    one = np.ones((3, 1))
    with pytest.raises(ValueError, match="four matrices"):
        make_arms(["a"], (one, one), (one, np.ones((2, 1))))
    with pytest.raises(ValueError, match="at least one permutation"):
        label_swap(make_arms(["a"], (one, one), (one, one)), 0, 1)


def test_one_yes_or_no_per_prompt_is_mcnemars_test():
    """Eight prompts lost and two won: the binomial test of the discordant pairs."""
    first = [1] * 9 + [0] * 3
    second = [0] * 8 + [1] + [1] * 2 + [0]
    swap = label_swap(arms_of(first, second, [1] * 12), 20_000, 1)
    assert swap.exact and swap.p == pytest.approx(sp.binomtest(8, 10).pvalue)


def test_where_it_is_close_the_outcome_does_not_depend_on_the_seed():
    rng = np.random.default_rng(5)
    first = rng.integers(2, 8, 20)
    arms = arms_of(first, first - rng.choice([-1, 1, 1, 2], 20))
    level = 1.5 * label_swap(arms, 2**20, 1).p
    assert {label_swap(arms, 300, seed).p <= level for seed in range(30)} == {True, False}
    more = [label_swap(arms, 300, seed, level) for seed in range(30)]
    assert {s.p <= level for s in more} == {True}
    assert {s.permutations for s in more} == {int(np.ceil(20 / level))}
    # Nowhere near a rejection, the first draws are enough.
    assert label_swap(arms_of([5, 5] * 10, [6, 4] * 10), 300, 1, level).permutations == 300


def test_copies_of_a_text_are_added_up():
    arms = arms_of([1, 2, 3, 4], [4, 3, 2, 1])
    added = by_unit(arms, ["b", "a", "b", "c"])
    assert added.hits[0][:, 0].tolist() == [2, 4, 4] and added.hits[1][:, 0].tolist() == [3, 6, 1]
    assert added.trials[0][:, 0].tolist() == [10, 20, 10]
    assert by_unit(arms, ["a", "b", "c", "d"]) is arms
    with pytest.raises(ValueError, match="units of 4 rows"):
        by_unit(arms, ["a"])


def test_correlation_within_texts_is_one_when_copies_agree_and_none_without_copies():
    arms = arms_of([5, 5, 5, 5, 5, 5], [6, 6, 4, 4, 7, 7])
    assert correlation_within(arms, ["a", "a", "b", "b", "c", "c"]) == pytest.approx(1.0)
    assert correlation_within(arms, ["a", "b", "a", "c", "c", "b"]) < 0
    assert correlation_within(arms, list("abcdef")) is None
    assert correlation_within(arms_of([5, 5, 5, 5], [5, 5, 5, 5]), list("aabb")) is None


def test_ratio_of_independent_steps_has_no_design_effect():
    rng = np.random.default_rng(1)
    hits = rng.binomial(50, 0.7, 4000).astype(float)
    found = ratio(hits, np.full(4000, 50.0))
    assert found.design_effect == pytest.approx(1.0, abs=0.1) and found.low < 0.7 < found.high
    assert np.isnan(ratio(np.array([3.0]), np.array([5.0])).low)
    assert np.isnan(ratio(np.zeros(0), np.zeros(0)).rate)


@given(st.dictionaries(st.text(min_size=1, max_size=4), st.floats(0, 1), max_size=8), st.integers(0, 5))
def test_holm_is_monotone_and_never_below_the_p_value(p_values, more):
    adjusted = holm(p_values, len(p_values) + more)
    assert all(adjusted[k] >= p - 1e-12 and adjusted[k] <= 1 for k, p in p_values.items())
    assert [adjusted[k] for k in sorted(p_values, key=lambda k: (p_values[k], k))] == sorted(adjusted.values())


def test_holm_counts_tests_without_a_result():
    assert holm({"a": 0.01}, 1)["a"] == pytest.approx(0.01)
    assert holm({"a": 0.01}, 36)["a"] == pytest.approx(0.36)
    assert holm({"a": 0.01, "b": 0.02}, 2) == {"a": pytest.approx(0.02), "b": pytest.approx(0.02)}
    with pytest.raises(ValueError, match="registered"):
        holm({"a": 0.1, "b": 0.1}, 1)


def test_two_stages_multiply():
    assert stage_alpha(9e-4, 2) == pytest.approx(0.03)
    assert stage_alpha(1e-3, 1) == 1e-3


def test_power_is_consistent():
    n = units_needed(0.02, 0.01, 1e-3)
    assert detectable(0.02, n, 1e-3) <= 0.01 < detectable(0.02, n - 1, 1e-3)
    assert detectable(0.02, 1, 1e-3) == float("inf")
    assert units_needed(0.0, 0.01, 1e-3) == 2
    assert 2.0 ** (1 - least_units(1e-3)) <= 1e-3 < 2.0 ** (2 - least_units(1e-3))
    with pytest.raises(ValueError, match="positive effect"):
        units_needed(0.1, 0.0, 1e-3)


def test_detectable_effect_has_the_power_of_the_noncentral_t_test():
    effect, n = detectable(0.05, 25, 1e-3, 0.9), 25
    assert sp.nct.sf(sp.t.isf(0.5e-3, n - 1), n - 1, effect / 0.05 * n**0.5) == pytest.approx(0.9)


def test_effect_has_noise_of_its_own():
    """Without other noise, n prompts of s steps each lose a share e of them with variance e / s."""
    alone = detectable(0.0, 200, 1e-3, 0.9, own=100)
    assert alone == pytest.approx((detectable(1.0, 200, 1e-3, 0.9)) ** 2 / 100)
    assert detectable(0.02, 200, 1e-3, 0.9, own=100) > max(alone, detectable(0.02, 200, 1e-3, 0.9))


def test_damage_of_the_least_units_reaches_the_level_beside_noisy_columns():
    rng = np.random.default_rng(1)
    alpha, columns = 1e-3, 4
    d = least_units(alpha, columns)
    assert d > least_units(alpha)
    first = rng.integers(0, 10, (60, columns)).astype(float)
    second = rng.integers(0, 10, (60, columns)).astype(float)
    first[:, 0], second[:, 0] = 0, [1] * d + [0] * (60 - d)
    trials = np.full((60, columns), 10.0)
    assert label_swap(make_arms(list("abcd"), (first, trials), (second, trials)), 40_000, 1).adjusted[0] <= alpha


def test_share_that_hits_enough_units():
    share = share_hit(7, 40, power=0.95)
    assert sp.binom.sf(6, 40, share) == pytest.approx(0.95)
    assert 1 - (1 - share_hit(7, 40, 3, 0.95)) ** 3 == pytest.approx(share)
    assert share_hit(41, 40) == float("inf")


def test_simulation_has_the_design_effect_that_was_asked_for():
    scene = Scene(20_000, design_effect=5.0, conditional=(0.7,))
    arms = to_arms(simulate(scene, np.random.default_rng(1)))
    assert ratio(arms.hits[0][:, 0], arms.trials[0][:, 0]).design_effect == pytest.approx(5.0, rel=0.1)
    dropped = to_arms(simulate(scene._replace(drop=0.05, diverging=0.0), np.random.default_rng(1)))
    assert differences(dropped)[0].effect == pytest.approx(-0.05, abs=0.003)
    risen = to_arms(simulate(scene._replace(drop=-0.05, diverging=0.0), np.random.default_rng(1)))
    assert differences(risen)[0].effect == pytest.approx(0.05, abs=0.003)
