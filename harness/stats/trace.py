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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import groupby
from typing import NamedTuple

import numpy as np

from harness.stats.paired import Matrix

WINDOWS = (16, 32, 64)
"""Tokens over which a mean is taken, besides that over a whole answer."""
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


def usual_sizes(moved: Matrix, usual: float) -> Matrix:
    """Return by how many nats rounding moves a token of each text, from the differences ``moved`` of their tokens
    [texts, tokens], taken together with ``_PRIOR`` tokens of the ``usual`` size."""
    sizes: Matrix = np.maximum(FLOOR_NATS, (np.abs(moved).sum(axis=1) + _PRIOR * usual) / (moved.shape[1] + _PRIOR))
    return sizes


def _by_length(answers: Iterable[Sequence[float] | Matrix]) -> Iterator[Matrix]:
    """Yield the answers in their order, those of one length that follow each other as rows."""
    return (np.stack([np.asarray(a, dtype=float) for a in of]) for _, of in groupby(answers, len))


def in_units(moved: Sequence[float] | Matrix, size: float | Matrix) -> Matrix:
    """Return how many times ``size`` each difference is, at most ``CAP``."""
    units: Matrix = np.minimum(np.abs(np.asarray(moved, dtype=float)) / size, CAP)
    return units


def window_means(units: Matrix, size: int) -> Matrix:
    """Return the means over windows of ``size`` tokens, a quarter of their size apart, and over the last ``size``, of
    answers [..., tokens] as [..., windows]; none of shorter answers."""
    tokens = units.shape[-1]
    if tokens < size:
        return np.zeros((*units.shape[:-1], 0))
    sums = np.concatenate((np.zeros((*units.shape[:-1], 1)), np.cumsum(units, axis=-1)), axis=-1)
    starts = _starts(tokens, size)
    means: Matrix = (sums[..., starts + size] - sums[..., starts]) / size
    return means


@lru_cache(maxsize=4096)
def _starts(tokens: int, size: int) -> np.ndarray:
    return np.array(sorted({*range(0, tokens - size + 1, size // 4), tokens - size}))


class Distribution(NamedTuple):
    """How far single tokens move, in units: the upper edges of bins, and their shares."""

    at: Matrix
    weights: Matrix

    @classmethod
    def of(cls, tokens: Matrix) -> Distribution:
        counts, edges = np.histogram(tokens, bins=_BINS, range=(0.0, CAP))
        # The upper edge of each bin, so that rounding to bins makes no limit smaller.
        return cls(edges[1:][counts > 0], counts[counts > 0] / len(tokens))


@dataclass(frozen=True, eq=False)
class Null:
    """What right answers show: every token in units of what the other half of its text moves by."""

    answers: tuple[Matrix, ...]
    _alikes: dict[int, float] = field(init=False, default_factory=dict)

    @classmethod
    def of(cls, right: Sequence[Sequence[float] | Matrix]) -> Null:
        """Return it from the differences of each right answer."""
        usual = overall(right)
        out: list[Matrix] = []
        for moved in _by_length(right):
            half = moved.shape[1] // 2
            first, last = moved[:, :half], moved[:, half:]
            sides = (usual_sizes(last, usual)[:, None], usual_sizes(first, usual)[:, None])
            out += [*np.concatenate((in_units(first, sides[0]), in_units(last, sides[1])), axis=1)]
        return cls(tuple(out))

    @cached_property
    def tokens(self) -> Matrix:
        return np.concatenate([np.zeros(0), *self.answers])

    @cached_property
    def _each(self) -> Distribution:
        return Distribution.of(self.tokens)

    def limit(self, size: int, rate: float) -> float | None:
        """Return the mean over ``size`` tokens that a window of a right answer exceeds with a probability of at most
        ``rate``; None with fewer tokens than ``LEAST_TOKENS``.

        It is Chernoff's bound for independent tokens with the distribution seen here, for a window shortened by as much
        as the variance of means over windows is larger than that of independent tokens: neighbours move alike.
        """
        tokens = self.tokens
        if len(tokens) < LEAST_TOKENS:
            return None
        return _chernoff(self._each, -math.log(rate) * self._alike(size) / size)

    def _alike(self, size: int) -> float:
        """Return how many times as much means over so many tokens vary as those of independent tokens."""
        if size not in self._alikes:
            long = (a for a in self.answers if len(a) >= size)
            means = np.concatenate([np.zeros(0), *(window_means(of, size).ravel() for of in _by_length(long))])
            alone = float(self.tokens.var()) / size
            self._alikes[size] = max(1.0, float(means.var()) / alone) if len(means) > 1 and alone > 0 else 1.0
        return self._alikes[size]

    def whole(self, rate: float) -> WholeAnswers | None:
        """Return the limits of means over whole answers, for a ``rate`` per token; None with fewer tokens than
        ``LEAST_TOKENS``."""
        tokens = self.tokens
        if len(tokens) < LEAST_TOKENS:
            return None
        alike = max(map(self._alike, WINDOWS))
        weights, means = _halves(self.answers)
        variance = float(tokens.var())
        if variance <= 0:
            return WholeAnswers(self._each, rate, alike, 0.0)
        # By the square of the distance from the mean that tokens of so long a text have by themselves.
        more = float(((means - tokens.mean()) ** 2 * weights).sum() - alike * variance * len(means)) / weights.sum()
        return WholeAnswers(self._each, rate, alike, max(0.0, more) / variance)


def _halves(answers: Iterable[Matrix]) -> tuple[Matrix, Matrix]:
    """Return of each half of each answer how many tokens it has, and their mean."""
    lengths: list[Matrix] = [np.zeros(0)]
    means: list[Matrix] = [np.zeros(0)]
    for of in _by_length(answers):
        at = of.shape[1] // 2
        halves = [half for half in (of[:, :at], of[:, at:]) if half.shape[1]]
        if halves:
            means.append(np.stack([half.mean(axis=1) for half in halves], axis=1).ravel())
            lengths.append(np.tile([float(half.shape[1]) for half in halves], len(of)))
    return np.concatenate(lengths), np.concatenate(means)


@dataclass(frozen=True, eq=False)
class WholeAnswers:
    """Limits of the mean over all tokens of an answer, whatever their number.

    A whole answer is a text of its own, so what the halves of right answers differ by, each in units of the other,
    counts besides what neighbours move alike.
    """

    tokens: Distribution
    rate: float
    """How often a right answer may be beyond, for each of its tokens."""
    alike: float
    """How many times as much means over a window vary as those of independent tokens."""
    texts: float
    """Variance of the means of texts, as a multiple of that of a token."""

    def limit(self, size: int) -> float:
        """Return the mean that a right answer of ``size`` tokens exceeds with a probability of at most ``rate`` times
        ``size``."""
        return _whole_limit(self, size)


@lru_cache(maxsize=4096)
def _whole_limit(whole: WholeAnswers, size: int) -> float:
    rare = -math.log(min(1.0, whole.rate * size))
    return _chernoff(whole.tokens, rare * (whole.alike / size + whole.texts))


class Window(NamedTuple):
    """Tokens of an answer that moved, and how far right ones may, in units."""

    start: int
    tokens: int
    mean: float
    limit: float


class RoundingLimits(NamedTuple):
    """What rounding makes of log-probs, by the answers of an engine that are known to be right."""

    usual_nats: float
    """By how much it moves a token, over all texts."""
    sizes: tuple[float, ...]
    """The same in each of these answers, in nats."""
    windows: Mapping[int, float]
    """By window: the mean that no right answer has, in units of the size for its text. Empty with too few tokens."""
    whole: WholeAnswers | None
    """The same for all tokens of an answer; None with too few."""
    flipped_nats: float | None
    """By how much a reader may dislike a token that rounding alone has chosen; None with too few differences. Such a
    token was ahead by less than rounding moves the distance of two tokens, each of which moves like any other."""

    @classmethod
    def of(cls, right: Sequence[Matrix], level: float, tokens: int) -> RoundingLimits:
        """Return the limits that right answers of so many ``tokens`` in all exceed with a chance of at most ``level``,
        which windows, whole answers and single tokens share, from the differences of answers that are right."""
        usual = overall(right)
        share = level / (len(WINDOWS) + 2)
        null = Null.of(right)
        found = {size: null.limit(size, share / max(1, 4 * tokens // size)) for size in WINDOWS}
        single = tail_limit(np.abs(np.concatenate([np.zeros(0), *right])), share / max(1, tokens))
        return cls(
            usual_nats=usual,
            # A wrong answer among them must not pass for a text that is rounded coarsely, nor one that happens to be
            # read as it was said for a text that is not rounded.
            sizes=tuple(
                min(max(size, usual / _APART), usual * _APART)
                for of in _by_length(right)
                for size in usual_sizes(of, usual).tolist()
            ),
            windows={size: limit for size, limit in found.items() if limit is not None},
            whole=null.whole(share / max(1, tokens)),
            flipped_nats=None if single is None else 2 * single,
        )


def worst_window(units: Matrix, windows: Mapping[int, float], whole: WholeAnswers | None) -> Window | None:
    """Return the window of an answer, or the whole of it, that is the furthest beyond its limit or the closest to it;
    None without limits, or tokens."""
    tokens = len(units)
    found = []
    for size, limit in windows.items():
        means = window_means(units, size)
        if len(means):
            worst = int(means.argmax())
            found.append(Window(min(worst * (size // 4), tokens - size), size, float(means[worst]), limit))
    if whole is not None and tokens:
        found.append(Window(0, tokens, float(units.mean()), whole.limit(tokens)))
    return max(found, key=lambda w: w.mean / w.limit, default=None)


def are_beyond(units: Matrix, limits: RoundingLimits) -> np.ndarray:
    """Return which answers [N, tokens] have a window, or are as a whole, beyond their limit."""
    out = np.zeros(len(units), bool)
    for size, limit in limits.windows.items():
        out |= window_means(units, size).max(axis=1, initial=0.0) > limit
    if limits.whole is not None and units.shape[1]:
        out |= units.mean(axis=1) > limits.whole.limit(units.shape[1])
    return out


def overall(right: Sequence[Sequence[float] | Matrix]) -> float:
    """Return by how many nats rounding moves a token, over all right answers."""
    sizes = np.abs(np.concatenate([np.zeros(0), *(np.asarray(m, dtype=float) for m in right)]))
    return max(FLOOR_NATS, float(sizes.mean()) if len(sizes) else 0.0)


def _chernoff(tokens: Distribution, needed: float) -> float:
    """Return the mean whose rate function, of the distribution of tokens, is ``needed``: at least ``_LEAST``, and
    ``CAP`` if means as large as the largest token are as likely as that."""
    at, weights = tokens
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
