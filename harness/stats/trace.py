"""How far the log-probs of an answer lie from those of another engine that reads the same tokens.

Both sides score the same tokens, so partings of texts do not matter and every token counts, whether or not it changed.
Wrong KV moves all tokens behind it a little; rounding moves each by itself. A mean over a window tells them apart where
no single token does. The idea of a margin per token is that of Token-DiFR; the null here is local: answers of the same
run that are known to be right.

Differences are counted in units of what rounding moves a token of the same text by, up to ``CAP`` of them: a near tie
behind a rare word must not look like a window of damage.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from harness.stats.paired import Matrix

WINDOWS = (16, 32, 64)
"""Tokens over which a mean is taken."""
CAP = 8.0
FLOOR_NATS = 0.005
"""Rounding below it counts as this much: smaller differences are no damage that anybody looks for."""
_APART = 3.0
"""How many times as much or as little as usual rounding may move the tokens of one text."""
_PRIOR = 32
"""Tokens of the usual size with which the mean of a text is taken together."""
LEAST_TOKENS = 500
"""Tokens of right answers below which they say nothing about rare windows."""
LEAST_TAIL = 20
"""Figures below which no tail is fitted."""
_TAIL = 0.1
_STEEPEST = 200.0
_BINS = 512
_LEAST = 1.0
"""Smallest limit of a window, in units: what is usual, or ``FLOOR_NATS``, is never too much."""


def usual_size(moved: Sequence[float] | Matrix, usual: float) -> float:
    """Return by how many nats rounding moves a token of a text, from the differences ``moved`` of its tokens, taken
    together with ``_PRIOR`` tokens of the ``usual`` size."""
    sizes = np.abs(np.asarray(moved, dtype=float))
    return max(FLOOR_NATS, float(sizes.sum() + _PRIOR * usual) / (len(sizes) + _PRIOR))


def in_units(moved: Sequence[float] | Matrix, size: float) -> Matrix:
    """Return how many times ``size`` each difference is, at most ``CAP``."""
    units: Matrix = np.minimum(np.abs(np.asarray(moved, dtype=float)) / size, CAP)
    return units


def window_means(units: Matrix, size: int) -> Matrix:
    """Return the means over windows of ``size`` tokens, a quarter of their size apart, and over the last ``size``, of
    answers [..., tokens] as [..., windows].

    The smallest window takes a shorter answer, too, as if nothing had moved behind its end; the others have no window
    of it.
    """
    tokens = units.shape[-1]
    if tokens < size:
        takes = tokens > 0 and size == WINDOWS[0]
        return units.sum(axis=-1, keepdims=True) / size if takes else np.zeros((*units.shape[:-1], 0))
    sums = np.concatenate((np.zeros((*units.shape[:-1], 1)), np.cumsum(units, axis=-1)), axis=-1)
    starts = np.array(sorted({*range(0, tokens - size + 1, size // 4), tokens - size}))
    means: Matrix = (sums[..., starts + size] - sums[..., starts]) / size
    return means


class Null(NamedTuple):
    """What right answers show: every token in units of what the other half of its text moves by."""

    answers: tuple[Matrix, ...]

    @classmethod
    def of(cls, right: Sequence[Sequence[float] | Matrix]) -> Null:
        """Return it from the differences of each right answer."""
        usual = overall(right)
        out = []
        for moved in right:
            half = len(moved) // 2
            first, last = moved[:half], moved[half:]
            sides = (in_units(first, usual_size(last, usual)), in_units(last, usual_size(first, usual)))
            out.append(np.concatenate(sides))
        return cls(tuple(out))

    def limit(self, size: int, rate: float) -> float | None:
        """Return the mean over ``size`` tokens that a window of a right answer exceeds with a probability of at most
        ``rate``; None with fewer tokens than ``LEAST_TOKENS``.

        It is Chernoff's bound for independent tokens with the distribution seen here, for a window shortened by as much
        as the variance of means over windows is larger than that of independent tokens: neighbours move alike.
        """
        tokens = np.concatenate([np.zeros(0), *self.answers])
        if len(tokens) < LEAST_TOKENS:
            return None
        means = np.concatenate([np.zeros(0), *(window_means(a, size) for a in self.answers if len(a) >= size)])
        alone = float(tokens.var()) / size
        alike = max(1.0, float(means.var()) / alone) if len(means) > 1 and alone > 0 else 1.0
        return _chernoff(tokens, -math.log(rate) * alike / size)


class RoundingLimits(NamedTuple):
    """What rounding makes of log-probs, by the answers of an engine that are known to be right."""

    usual_nats: float
    """By how much it moves a token, over all texts."""
    sizes: tuple[float, ...]
    """The same in each of these answers, in nats."""
    windows: Mapping[int, float]
    """By window: the mean that no right answer has, in units of the size for its text. Empty with too few tokens."""
    flipped_nats: float | None
    """By how much a reader may dislike a token that rounding alone has chosen; None with too few differences. Such a
    token was ahead by less than rounding moves the distance of two tokens, each of which moves like any other."""

    @classmethod
    def of(cls, right: Sequence[Matrix], level: float, tokens: int) -> RoundingLimits:
        """Return the limits that right answers of so many ``tokens`` in all exceed with a chance of at most ``level``,
        which windows and single tokens share, from the differences of answers that are right."""
        usual = overall(right)
        share = level / (len(WINDOWS) + 1)
        null = Null.of(right)
        found = {size: null.limit(size, share / max(1, 4 * tokens // size)) for size in WINDOWS}
        single = tail_limit(np.abs(np.concatenate([np.zeros(0), *right])), share / max(1, tokens))
        return cls(
            usual_nats=usual,
            # A wrong answer among them must not pass for a text that is rounded coarsely, nor one that happens to be
            # read as it was said for a text that is not rounded.
            sizes=tuple(min(max(usual_size(m, usual), usual / _APART), usual * _APART) for m in right),
            windows={size: limit for size, limit in found.items() if limit is not None},
            flipped_nats=None if single is None else 2 * single,
        )


def overall(right: Sequence[Sequence[float] | Matrix]) -> float:
    """Return by how many nats rounding moves a token, over all right answers."""
    sizes = np.abs(np.concatenate([np.zeros(0), *(np.asarray(m, dtype=float) for m in right)]))
    return max(FLOOR_NATS, float(sizes.mean()) if len(sizes) else 0.0)


def _chernoff(tokens: Matrix, needed: float) -> float:
    """Return the mean whose rate function, of the distribution of ``tokens``, is ``needed``: at least ``_LEAST``, and
    ``CAP`` if means as large as the largest token are as likely as that."""
    counts, edges = np.histogram(tokens, bins=_BINS, range=(0.0, CAP))
    # The upper edge of each bin, so that rounding to bins makes no limit smaller.
    at, weights = edges[1:][counts > 0], counts[counts > 0] / len(tokens)
    if at[-1] <= _LEAST:
        return _LEAST

    def tilted(steepness: float) -> tuple[float, float]:
        """Return the mean of the distribution tilted by a steepness, and the rate function there."""
        grown = weights * np.exp(steepness * (at - at[-1]))
        total = float(grown.sum())
        mean = float((grown * at).sum()) / total
        return mean, steepness * (mean - float(at[-1])) - math.log(total)

    low, high = 0.0, _STEEPEST
    if tilted(high)[1] < needed:
        return CAP
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if tilted(middle)[1] < needed else (low, middle)
    return max(_LEAST, tilted(high)[0])


def tail_limit(right: Sequence[float] | Matrix, rate: float) -> float | None:
    """Return the figure that a right one exceeds with probability ``rate``, from figures known to be right.

    Within the sample it is a quantile. Beyond, a generalised Pareto tail is fitted to the largest tenth of them, of
    those above 0, by probability-weighted moments (Hosking and Wallis, Technometrics 29, 1987). Tails lighter than
    exponential are taken as exponential: with few figures, a bounded tail is more often luck than a bound. None if
    there are too few figures for a tail. Raises ValueError unless 0 < ``rate`` < 1.
    """
    if not 0 < rate < 1:
        raise ValueError(f"expected a rate between 0 and 1, found {rate}")
    ordered = np.sort(np.asarray(right, dtype=float))
    count = min(math.floor(len(ordered) * _TAIL), int((ordered > 0).sum()))
    if count < LEAST_TAIL:
        return None
    if rate * len(ordered) >= count:
        return float(np.quantile(ordered, 1 - rate))
    threshold = float(ordered[-count - 1])
    shape, scale = _pareto(ordered[-count:] - threshold)
    share = rate * len(ordered) / count
    return threshold + scale * (-math.log(share) if shape == 0 else (share**-shape - 1) / shape)


def _pareto(excess: Matrix) -> tuple[float, float]:
    """Return shape (above 0: heavier than exponential) and scale of a generalised Pareto distribution."""
    places = (np.arange(1, len(excess) + 1) - 0.35) / len(excess)
    first, second = float(excess.mean()), float(((1 - places) * excess).mean())
    spread = first - 2 * second
    if first <= 0 or spread <= 0:
        return 0.0, max(first, 0.0)
    shape = 2 - first / spread
    return (shape, 2 * first * second / spread) if shape > 0 else (0.0, first)
