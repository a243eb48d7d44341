"""What quiet tries exclude: a rate p stays quiet in n independent tries with probability (1 - p)^n, by the binomial
distribution, so that n quiet tries exclude every rate above the exact upper bound 1 - (1 - confidence)^(1 / n)
(Clopper and Pearson, Biometrika 26, 1934, one-sided).
"""

from __future__ import annotations

import math

CONFIDENCE = 0.95


def quiet_tries(rate: float) -> int:
    """Return how many quiet tries exclude a rate: the smallest n with (1 - rate)^n ≤ 1 - ``CONFIDENCE``.

    Raises ValueError unless 0 < ``rate`` ≤ 1.
    """
    if not 0 < rate <= 1:
        raise ValueError(f"expected a rate above 0 and up to 1, found {rate}")
    return 1 if rate == 1 else math.ceil(math.log(1 - CONFIDENCE) / math.log1p(-rate))


def excluded_above(tries: int) -> float:
    """Return the smallest rate that so many quiet tries exclude; 1 for none."""
    return 1.0 if tries == 0 else 1 - (1 - CONFIDENCE) ** (1 / tries)


def least_rate(all_of: int) -> float:
    """Return the smallest rate that still explains tries all of which showed: the exact lower bound for n of n."""
    return float((1 - CONFIDENCE) ** (1 / all_of))
