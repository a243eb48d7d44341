"""Paired comparison of two arms on the same prompts, with the source of a prompt as the unit.

The steps of one prompt are correlated (design effects of 4 to 10 follow from public figures), padded copies of one text
may be, and both arms decode the same prompts, so neither pooled counts nor unpaired tests are right. Instead the counts
of all copies of a text are added up (``by_unit``), and:

* ``differences``: the linearised ratio difference, its standard error over units, and a t interval with N - 1 degrees
  of freedom (Cochran, Sampling Techniques, 3rd ed., ch. 6: the combined ratio estimator).
* ``label_swap``: a permutation test that exchanges the two arms within units. It is exact when the arms are
  exchangeable within a unit, whatever the correlation of steps and copies. Its statistic is the maximum over columns of
  the standardised difference, so one p-value covers all positions and strata (Westfall and Young 1993: maxT). For one
  yes or no per unit it is McNemar's exact test (1947).
* ``correlation_within``: how much the differences of the copies of one text have in common.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import stdtrit  # scipy.stats takes longer to import than most commands to run.

Matrix = npt.NDArray[np.float64]

_CHUNK = 2048
"""Permutations at a time: 2048 × 1,000 prompts of float32 are 8 MB, which fits in the CPU cache."""


class Arms(NamedTuple):
    """Counts of the same N units in two arms, in C columns (for example a draft position within a stratum)."""

    columns: tuple[str, ...]
    hits: tuple[Matrix, Matrix]
    """Per arm [N, C]: numerators, e.g. steps that accepted the draft at the column's position."""
    trials: tuple[Matrix, Matrix]
    """Per arm [N, C]: denominators, e.g. verify steps; 0 where a unit does not belong to the column."""

    @property
    def units(self) -> int:
        return int(self.hits[0].shape[0])


class Difference(NamedTuple):
    """Second arm minus first arm of one column."""

    column: str
    rates: tuple[float, float]
    effect: float
    """Difference of the rates, as a fraction (0.01 is one point); nan when an arm has no trials."""
    error: float
    """Standard error of the effect; 0 when the arms are equal unit by unit, nan with fewer than two units."""
    low: float
    """The interval is cut where no difference of two shares can lie, -1 to 1."""
    high: float
    units: int
    """Number of units with trials in both arms, from which the interval is computed."""
    trials: float
    """Mean trials of these units in the first arm."""

    @property
    def excludes_zero(self) -> bool:
        return self.effect != 0.0 and self.excludes(0.0)

    def excludes(self, margin: float) -> bool:
        """Return whether the interval lies outside of ``margin`` on either side of zero."""
        return self.low > margin or self.high < -margin


class Swap(NamedTuple):
    p: float
    """Two-sided p-value of the maximum over all columns."""
    adjusted: tuple[float, ...]
    """Per column: p-value adjusted for the search over columns (single-step maxT)."""
    least: float
    """The smallest p-value possible with this number of units."""
    permutations: int
    exact: bool
    """Whether all label swaps were enumerated."""


def make_arms(columns: Sequence[str], first: tuple[Matrix, Matrix], second: tuple[Matrix, Matrix]) -> Arms:
    """Build arms from (hits, trials) of each. Raises ValueError unless all four shapes are [N, len(columns)]."""
    shapes = {np.shape(m) for m in (*first, *second)}
    if len(shapes) != 1 or next(iter(shapes))[1:] != (len(columns),):
        raise ValueError(f"expected four matrices of shape [prompts, {len(columns)}], found {sorted(shapes)}")
    a, b = ((np.asarray(h, float), np.asarray(t, float)) for h, t in (first, second))
    return Arms(tuple(columns), (a[0], b[0]), (a[1], b[1]))


def count_arms(
    counted: Sequence[Sequence[tuple[Sequence[int], int | Sequence[int]]]], k: int, prefix: str = "all@"
) -> Arms:
    """Build arms with one column per draft position.

    ``counted`` has, for the first and the second arm, one entry per prompt in the same order: (steps that accepted the
    draft at each of ``k`` positions, number of steps or, where not every step drafts, of drafts at each position).
    """
    sides = []
    for side in counted:
        hits = np.array([at for at, _ in side], float).reshape(len(side), k)
        trials = np.array([np.broadcast_to(tried, k) for _, tried in side], float).reshape(len(side), k)
        sides.append((hits, trials))
    return make_arms([f"{prefix}{p}" for p in range(k)], sides[0], sides[1])


def by_unit(arms: Arms, units: Sequence[str]) -> Arms:
    """Add up the rows that belong to the same unit, for example the padded copies of one text.

    ``units`` names the unit of each row; the result has them in alphabetical order. Raises ValueError unless there is
    a name for every row.
    """
    if len(units) != arms.units:
        raise ValueError(f"expected the units of {arms.units} rows, found {len(units)}")
    if len(set(units)) == len(units):
        return arms
    index = np.unique(np.asarray(units), return_inverse=True)[1]

    def added(rows: Matrix) -> Matrix:
        out = np.zeros((index.max() + 1, rows.shape[1]))
        np.add.at(out, index, rows)
        return out

    return Arms(
        arms.columns,
        (added(arms.hits[0]), added(arms.hits[1])),
        (added(arms.trials[0]), added(arms.trials[1])),
    )


def correlation_within(arms: Arms, units: Sequence[str]) -> float | None:
    """Return the correlation of the first column's differences between rows of the same unit, -1 to 1.

    This is the intraclass correlation of the linearised differences by one-way analysis of variance (Donner 1986). None
    if no unit has two rows, or if nothing differs.
    """
    hits, trials = ([m[:, 0] for m in side] for side in (arms.hits, arms.trials))
    used = (trials[0] > 0) & (trials[1] > 0)
    names, index, sizes = np.unique(np.asarray(units)[used], return_inverse=True, return_counts=True)
    n, groups = int(used.sum()), len(names)
    if groups < 2 or n == groups:
        return None
    residual = _residuals([h[used] for h in hits], [t[used] for t in trials])
    means = np.bincount(index, residual) / sizes
    between = float((sizes * (means - residual.mean()) ** 2).sum()) / (groups - 1)
    within = float(((residual - means[index]) ** 2).sum()) / (n - groups)
    typical = (n - float((sizes**2).sum()) / n) / (groups - 1)
    whole = between + (typical - 1) * within
    return (between - within) / whole if whole > 0 else None


def _residuals(
    hits: Sequence[npt.NDArray[np.float64]], trials: Sequence[npt.NDArray[np.float64]]
) -> npt.NDArray[np.float64]:
    """Return the linearised contribution of each unit to the difference of the two rates [N]."""
    first, second = (h - h.sum() / t.sum() * t for h, t in zip(hits, trials, strict=True))
    return np.asarray(second / trials[1].mean() - first / trials[0].mean())


def differences(arms: Arms, confidence: float = 0.99) -> tuple[Difference, ...]:
    """Return the rates, their difference and its interval for each column."""
    out = []
    for c, column in enumerate(arms.columns):
        hits = [m[:, c] for m in arms.hits]
        trials = [m[:, c] for m in arms.trials]
        both = (trials[0] > 0) & (trials[1] > 0)
        out.append(_difference(column, [h[both] for h in hits], [t[both] for t in trials], confidence))
    return tuple(out)


def _difference(
    column: str, hits: Sequence[npt.NDArray[np.float64]], trials: Sequence[npt.NDArray[np.float64]], confidence: float
) -> Difference:
    n = len(hits[0])
    nan = float("nan")
    if n == 0:
        return Difference(column, (nan, nan), nan, nan, nan, nan, 0, 0.0)
    rates = [float(h.sum() / t.sum()) for h, t in zip(hits, trials, strict=True)]
    effect, mean = rates[1] - rates[0], float(trials[0].mean())
    if n == 1:
        return Difference(column, (rates[0], rates[1]), effect, nan, nan, nan, 1, mean)
    error = float(np.std(_residuals(hits, trials), ddof=1) / np.sqrt(n))
    reach = float(stdtrit(n - 1, 0.5 + confidence / 2)) * error
    # Log-probs above zero, which a defect can make, are no shares: their difference stays within its own interval.
    most = max(1.0, abs(effect))
    low, high = max(-most, effect - reach), min(most, effect + reach)
    return Difference(column, (rates[0], rates[1]), effect, error, low, high, n, mean)


DRAWS_BEYOND = 20
"""Random swaps that a p-value at the level is expected to find beyond, where the outcome is close: enough that another
seed rarely gives another outcome."""
_CLOSE = 10
"""A p-value up to this many times the level, or down to this fraction of it, is close to it."""


def label_swap(arms: Arms, permutations: int, seed: int, level: float = 1.0) -> Swap:
    """Test the largest difference by exchanging the arms within random subsets of units; p-values are two-sided.

    Units that are equal in both arms cannot change the statistic and are left out; if all swaps of the others are at
    most ``permutations``, they are enumerated. Of a p-value that is nowhere near ``level`` few random swaps are drawn;
    where ``permutations`` of them give a p-value within ten times ``level``, it is computed from as
    many as it takes to expect ``DRAWS_BEYOND`` beyond at the level. Raises ValueError when ``permutations`` < 1.
    """
    if permutations < 1:
        raise ValueError(f"expected at least one permutation, found {permutations}")
    n = arms.units
    least = 2.0 ** (1 - n) if n else 1.0
    test = _SwapTest(arms, seed)
    if test.differing == 0:
        return Swap(1.0, (1.0,) * len(arms.columns), least, 0, True)
    if test.differing < 40 and 2**test.differing <= permutations:
        return test.run(2**test.differing, True, least)
    if permutations > _CHUNK and level <= _SETTLED / 5:
        glance = test.run(_CHUNK, False, least)
        if glance.p > _SETTLED:
            return glance
    found = test.run(permutations, False, least)
    enough = math.ceil(DRAWS_BEYOND / level)
    # With few swaps no p-value can be far below the level; one that is would hardly ever come back above it.
    close = level / _CLOSE < found.p <= _CLOSE * max(level, 1 / (1 + permutations))
    return test.run(enough, False, least) if close and permutations < enough else found


_SETTLED = 0.05
"""A p-value of ``_CHUNK`` random swaps above it belongs to no test that could reject: one of 0.022, the most that any
step of Holm takes with two stages, shows as many beyond with a chance below 1e-11."""


class _SwapTest:
    def __init__(self, arms: Arms, seed: int) -> None:
        self._seed = seed
        half_h = (arms.hits[1] - arms.hits[0]) / 2
        half_t = (arms.trials[1] - arms.trials[0]) / 2
        differing = np.flatnonzero((half_h != 0).any(axis=1) | (half_t != 0).any(axis=1))
        self.differing = len(differing)
        self._total_h = (arms.hits[0] + arms.hits[1]).sum(axis=0) / 2
        self._total_t = (arms.trials[0] + arms.trials[1]).sum(axis=0) / 2
        self._scale = _scale(half_h, half_t, self._total_h, self._total_t)
        self._half = np.concatenate([half_h[differing], half_t[differing]], axis=1).astype(np.float32)

    def run(self, count: int, exact: bool, least: float) -> Swap:
        """Return the p-values by ``count`` swaps, which are all there are if ``exact``."""
        observed = self._of(self._half.sum(axis=0, keepdims=True, dtype=np.float64))[0]
        # Slightly below the observed value, so that swaps with an equal statistic count despite rounding.
        bar = observed * (1 - 1e-6) - 1e-12
        highest = float(bar.max())
        beyond = 0
        beyond_by_column = np.zeros(len(observed))
        for signs in _signs(self.differing, count, exact, self._seed):
            largest = self._of((signs @ self._half).astype(np.float64)).max(axis=1)
            beyond += int((largest >= highest).sum())
            beyond_by_column += (largest[:, None] >= bar[None, :]).sum(axis=0)
        # The observed labels are one of the swaps; among random ones they have to be added.
        more = 0 if exact else 1
        adjusted = tuple((more + float(b)) / (more + count) for b in beyond_by_column)
        return Swap((more + beyond) / (more + count), adjusted, least, count, exact)

    def _of(self, shift: Matrix) -> Matrix:
        return _statistic(shift, self._total_h, self._total_t, self._scale)


def _scale(half_h: Matrix, half_t: Matrix, total_h: Matrix, total_t: Matrix) -> Matrix:
    """Return the standard deviation of each column's difference under label swaps, by linearisation [C].

    It is the same for every swap, so dividing by it only puts the columns on one scale.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        rate = np.where(total_t > 0, total_h / total_t, 0.0)
        spread = np.sqrt((((half_h - rate * half_t) * 2) ** 2).sum(axis=0))
        return np.where(total_t > 0, spread / total_t, 0.0)


def _statistic(shift: Matrix, total_h: Matrix, total_t: Matrix, scale: Matrix) -> Matrix:
    """Return absolute standardised differences [P, C]: the second arm has ``total + shift``, the first the rest."""
    width = len(total_h)
    h, t = shift[:, :width], shift[:, width:]
    with np.errstate(divide="ignore", invalid="ignore"):
        effect = (total_h + h) / (total_t + t) - (total_h - h) / (total_t - t)
        out = np.abs(effect) / scale
    return np.where(np.isfinite(out), out, 0.0)


_SIGNS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).astype(np.float32) * 2 - 1
"""Signs by byte, one for each bit [256, 8]."""


def _signs(n: int, count: int, exact: bool, seed: int) -> Iterator[npt.NDArray[np.float32]]:
    """Yield chunks of ``count`` signs [chunk, n]: all that there are if ``exact``, else random ones of that seed."""
    if exact:
        yield ((np.arange(count)[:, None] >> np.arange(n)[None, :] & 1) * 2 - 1).astype(np.float32)
        return
    generator = np.random.default_rng(seed)
    for begun in range(0, count, _CHUNK):
        packed = generator.integers(0, 256, size=(min(_CHUNK, count - begun), -(-n // 8)), dtype=np.uint8)
        yield np.take(_SIGNS, packed, axis=0).reshape(len(packed), -1)[:, :n]


class Ratio(NamedTuple):
    """A pooled rate of one arm, with the prompt as the unit."""

    rate: float
    low: float
    high: float
    design_effect: float
    """Variance of the rate relative to that of independent steps; nan where that is undefined."""


def ratio(hits: npt.NDArray[np.float64], trials: npt.NDArray[np.float64], confidence: float = 0.99) -> Ratio:
    """Return Σ hits / Σ trials over prompts [N] with a linearised t interval; nan bounds below two prompts."""
    used = trials > 0
    h, t = hits[used], trials[used]
    nan = float("nan")
    if len(h) == 0:
        return Ratio(nan, nan, nan, nan)
    rate = float(h.sum() / t.sum())
    if len(h) == 1:
        return Ratio(rate, nan, nan, nan)
    variance = float(np.var((h - rate * t) / t.mean(), ddof=1) / len(h))
    independent = rate * (1 - rate) / float(t.sum())
    reach = float(stdtrit(len(h) - 1, 0.5 + confidence / 2)) * variance**0.5
    return Ratio(rate, rate - reach, rate + reach, variance / independent if independent else nan)
