"""Exact tests of small counts."""

from __future__ import annotations

import math
from functools import lru_cache


def fisher_fewer(hits: int, trials: int, other_hits: int, other_trials: int) -> float:
    """Return the probability that of the hits of two equal sides so few are the first one's (Fisher's exact test).

    Given all hits of both, those of the first are hypergeometric. Raises ValueError for more hits than trials.
    """
    if not (0 <= hits <= trials and 0 <= other_hits <= other_trials):
        raise ValueError(f"expected at most as many hits as trials, found {hits}/{trials}, {other_hits}/{other_trials}")
    both, every = hits + other_hits, trials + other_trials
    least = max(0, both - other_trials)
    whole = _log_choose(every, both)
    ways = (_log_choose(trials, n) + _log_choose(other_trials, both - n) - whole for n in range(least, hits + 1))
    return min(1.0, math.fsum(map(math.exp, ways)))


def sign_more(more: int, less: int) -> float:
    """Return the probability that of so many changes ``more`` or more go one way, if each goes either way (sign
    test)."""
    count = more + less
    ways = (_log_choose(count, n) - count * math.log(2) for n in range(more, count + 1))
    return min(1.0, math.fsum(map(math.exp, ways)))


@lru_cache(maxsize=1 << 16)
def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
