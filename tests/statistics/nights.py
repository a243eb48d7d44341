"""Simulated nights of many cells, judged by our gate, by ours with a fault in it, and by the gate in common use."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy import stats as sp

from harness.stats.multiplicity import holm, stage_alpha
from harness.stats.paired import Arms, differences, label_swap
from harness.stats.power import units_needed
from tests.support.simulate import Scene, simulate, to_arms

FAMILY_ALPHA = 5e-4
"""What the tests of single cells share: half of ``judging.family_alpha``."""
FLOOR = 0.005
CELLS = 36
_FIRST_LOOK = 511
_PERMUTATIONS = 20_000
_LEVEL = stage_alpha(FAMILY_ALPHA, 2) / CELLS


class Judge(NamedTuple):
    """How a p-value comes about, how p-values of a night are adjusted, and which direction counts."""

    p_value: Callable[[Arms, int], float]
    adjust: Callable[[dict[str, float], int], dict[str, float]]
    counts: Callable[[Arms], bool]
    """Whether the change is one that fails: beyond the floor, with an interval that excludes zero."""


def paired_p(arms: Arms, seed: int) -> float:
    """The label-swap test. A first look with few swaps settles what is nowhere near a rejection: a p-value below 1e-3
    shows more than ten of 511 swaps beyond with a chance below 1e-9."""
    first = label_swap(arms, _FIRST_LOOK, seed)
    return first.p if first.exact or first.p > 0.02 else label_swap(arms, _PERMUTATIONS, seed, _LEVEL).p


def unpaired_p(arms: Arms, seed: int) -> float:
    """Pairing dropped: two independent samples of prompts."""
    rates = []
    for hits, trials in zip(arms.hits, arms.trials, strict=True):
        rate = hits.sum(axis=0) / trials.sum(axis=0)
        spread = ((hits - rate * trials) / trials.mean(axis=0)).var(axis=0, ddof=1) / len(hits)
        rates.append((rate, spread))
    z = np.abs(rates[1][0] - rates[0][0]) / np.sqrt(np.maximum(rates[0][1] + rates[1][1], 1e-30))
    return float(min(1.0, len(arms.columns) * 2 * sp.norm.sf(z.max())))


def unclustered_p(arms: Arms, seed: int) -> float:
    """Clustering ignored: two proportions of pooled steps."""
    hits, trials = (np.array([m.sum(axis=0) for m in side]) for side in (arms.hits, arms.trials))
    pooled = hits.sum(axis=0) / trials.sum(axis=0)
    error = np.sqrt(np.maximum(pooled * (1 - pooled), 1e-30) * (1 / trials[0] + 1 / trials[1]))
    z = np.abs(hits[1] / trials[1] - hits[0] / trials[0]) / error
    return float(min(1.0, len(arms.columns) * 2 * sp.norm.sf(z.max())))


def both_ways(arms: Arms) -> bool:
    return any(abs(d.effect) >= FLOOR and d.excludes_zero for d in differences(arms))


def rises_only(arms: Arms) -> bool:
    """One-sided, the wrong way round."""
    return any(d.effect >= FLOOR and d.excludes_zero for d in differences(arms))


def no_adjustment(p_values: dict[str, float], registered: int) -> dict[str, float]:
    return dict(p_values)


OURS = Judge(paired_p, holm, both_ways)
FAULTY = {
    "pairing dropped": OURS._replace(p_value=unpaired_p),
    "clustering ignored": OURS._replace(p_value=unclustered_p),
    "Holm dropped": OURS._replace(adjust=no_adjustment),
    "one-sided flipped": OURS._replace(counts=rises_only),
}


def planned(scene: Scene, points: float = 1.0) -> int:
    """Return the number of prompts that ``harness plan`` gives for a change of so many points in one of the cells."""
    arms = to_arms(simulate(scene._replace(prompts=4000, drop=0.0), np.random.default_rng(7)), scene.strata)
    d = differences(arms)[0]
    each, power_of_stage = _LEVEL / len(arms.columns), 0.9**0.5
    return units_needed(d.error * 4000**0.5, points / 100, each, power_of_stage, d.trials)


class Night(NamedTuple):
    """Which cells failed after the first stage, and after both."""

    first: frozenset[int]
    failed: frozenset[int]


def night(scenes: list[Scene], generator: np.random.Generator, judge: Judge = OURS, stages: int = 2) -> Night:
    """Simulate and judge one night with a cell per scene."""
    alpha = stage_alpha(FAMILY_ALPHA, stages)
    left = list(range(len(scenes)))
    first: frozenset[int] = frozenset()
    for stage in range(stages):
        arms = {i: to_arms(simulate(scenes[i], generator), scenes[i].strata) for i in left}
        seeds = generator.integers(0, 2**31, len(scenes))
        p_values = {str(i): judge.p_value(a, int(seeds[i])) for i, a in arms.items()}
        adjusted = judge.adjust(p_values, len(left))
        left = [i for i in left if adjusted[str(i)] <= alpha and judge.counts(arms[i])]
        if stage == 0:
            first = frozenset(left)
        if not left:
            break
    return Night(first, frozenset(left))


def five_percent(scene: Scene, generator: np.random.Generator) -> bool:
    """The gate in common use: any position's pooled rate moved by more than 5 % of itself."""
    arms = to_arms(simulate(scene, generator))
    rates = [h.sum(axis=0) / t.sum(axis=0) for h, t in zip(arms.hits, arms.trials, strict=True)]
    return bool((np.abs(rates[1] - rates[0]) > 0.05 * rates[0]).any())


class Share(NamedTuple):
    """A measured share with its 99 % Clopper-Pearson interval."""

    count: int
    of: int

    @property
    def value(self) -> float:
        return self.count / self.of

    @property
    def low(self) -> float:
        return self._interval()[0]

    @property
    def high(self) -> float:
        return self._interval()[1]

    def _interval(self) -> tuple[float, float]:
        found = sp.binomtest(self.count, self.of).proportion_ci(0.99, method="exact")
        return float(found.low), float(found.high)

    def __str__(self) -> str:
        digits = 1 if self.of < 1000 else 2
        return f"{100 * self.value:.{digits}f} % ({100 * self.low:.2f}–{100 * self.high:.{digits}f})"


def false_alarms(
    scenes: list[Scene], nights: int, seed: int, judge: Judge = OURS, stages: int = 2
) -> tuple[Share, Share]:
    """Share of nights without any change that fail after the first stage, and after all."""
    generator = np.random.default_rng(seed)
    done = [night(scenes, generator, judge, stages) for _ in range(nights)]
    return Share(sum(bool(n.first) for n in done), nights), Share(sum(bool(n.failed) for n in done), nights)


def power(scene: Scene, cells: int, times: int, seed: int, judge: Judge = OURS, stages: int = 2) -> Share:
    """Share of nights in which the one cell that is worse fails; the other cells are not simulated but counted."""
    generator = np.random.default_rng(seed)
    alpha = stage_alpha(FAMILY_ALPHA, stages)
    seen = 0
    for _ in range(times):
        for stage in range(stages):
            arms = to_arms(simulate(scene, generator), scene.strata)
            p = judge.p_value(arms, int(generator.integers(0, 2**31)))
            tests = cells if stage == 0 else 1
            if judge.adjust({"it": p}, tests)["it"] > alpha or not judge.counts(arms):
                break
        else:
            seen += 1
    return Share(seen, times)
