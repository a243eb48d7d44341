"""Whether requests differ from their twins by more than noise can make them.

A few requests that lost most of their accepted drafts move no mean beyond chance: they inflate the noise that it is
held against. So the noise itself is held against what right engines can show. Up to the token at which two answers part
they are drafted alike, or as equal runs (A/A) are; behind it they are two texts, whose acceptance differs by no more
than that of texts that have nothing to do with each other, or that of equal runs behind their partings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import chdtri  # scipy.stats takes longer to import than most commands to run.

from harness.stats.paired import Matrix

FAR = 4.0
"""How many times as large as noise explains a variance is far above it: twice the standard deviation."""
ALIKE = 0.1
"""Share of a request that may be drafted otherwise although both answers say the same tokens: drafters round, too."""
_PARTED = 5.0
"""Whole requests behind their partings from which equal runs say how much those differ."""


class TwinDrafts(NamedTuple):
    """The accepted drafts of a request and of its twin, another answer to the same prompt."""

    text: str
    """What the prompt was made of."""
    theirs: tuple[int, int]
    """Accepted drafts of the twin, and its drafts."""
    ours: tuple[int, int]
    behind: float
    """Share of the answer behind the token at which both part; 0 if they do not."""


class Spread(NamedTuple):
    """How much the requests of a cell differ from their twins."""

    found: float
    """Root mean square of the differences of their rates, as a fraction."""
    explained: float
    """The same that noise explains."""
    limit: float
    """From how many times the variance that noise explains the requests differ by more."""
    widest: tuple[int, ...]
    """The requests that differ most, by their places."""

    @property
    def times(self) -> float:
        """How many times the variance that noise explains was found."""
        return (self.found / self.explained) ** 2

    @property
    def far(self) -> bool:
        return self.times > self.limit


def spread_of(requests: Sequence[TwinDrafts], equal: Sequence[TwinDrafts], level: float) -> Spread | None:
    """Return how much requests differ from their twins; None if no request and twin have drafts.

    ``equal`` are those of equal runs. Noise exceeds the limit with a chance of at most ``level`` where it is normal and
    as large as it can be; then the variance of n texts has n degrees of freedom, fewer if it lies in some of them
    (Satterthwaite 1946).
    """
    used = [i for i, r in enumerate(requests) if r.theirs[1] and r.ours[1]]
    if not used:
        return None
    mine = [requests[i] for i in used]
    sizes = np.array([(r.theirs[1] + r.ours[1]) / 2 for r in mine])
    weights = sizes / sizes.mean()
    squares = weights * _differences(mine) ** 2
    behind = np.array([max(ALIKE, r.behind) for r in mine])
    explained = np.maximum(1.0, weights) * np.maximum(behind * _of_two_texts(mine, weights, equal), _of_one_text(equal))
    total = float(explained.sum())
    if not total:
        return None
    by_text = np.bincount(np.unique([r.text for r in mine], return_inverse=True)[1], explained)
    freedom = total**2 / float((by_text**2).sum())
    order = np.argsort(-squares, kind="stable")
    return Spread(
        found=float(squares.sum() / len(mine)) ** 0.5,
        explained=(total / len(mine)) ** 0.5,
        limit=max(FAR, float(chdtri(freedom, level)) / freedom),
        widest=tuple(used[i] for i in order[:3] if squares[i]),
    )


def _differences(requests: Sequence[TwinDrafts]) -> Matrix:
    return np.array([r.ours[0] / r.ours[1] - r.theirs[0] / r.theirs[1] for r in requests])


def _of_two_texts(requests: Sequence[TwinDrafts], weights: Matrix, equal: Sequence[TwinDrafts]) -> float:
    """Return the variance of the difference of two answers that part at once: that of unrelated texts, or of equal
    runs where they show more."""
    rates = np.array([r.theirs[0] / r.theirs[1] for r in requests])
    mean = np.average(rates, weights=weights)
    unrelated = 2 * float(np.average((rates - mean) ** 2, weights=weights))
    parted = [r for r in equal if r.behind and r.theirs[1] and r.ours[1]]
    share = sum(r.behind for r in parted)
    if share < _PARTED:
        return unrelated
    return max(unrelated, float((_differences(parted) ** 2).sum()) / share)


def _of_one_text(equal: Sequence[TwinDrafts]) -> float:
    """Return the variance of the difference of equal runs that say the same tokens."""
    alike = [r for r in equal if not r.behind and r.theirs[1] and r.ours[1]]
    return float((_differences(alike) ** 2).mean()) if alike else 0.0
