"""Power analysis: which effects a comparison of N prompts can detect.

Normal theory with t quantiles for the linearised difference (``harness.stats.paired``): an effect e is detected with
probability ``power`` at two-sided level alpha when e ≥ (t(1 - alpha/2) + t(power)) · sd / √N with N - 1 degrees of
freedom, where sd is the standard deviation of one prompt's linearised difference. Bonferroni stands in for the maximum
over columns, which makes the figures conservative. ``tests/statistics`` checks them by simulation.
"""

from __future__ import annotations

import math

from scipy.special import stdtrit

_MOST = 10_000_000


def detectable(sd: float, prompts: int, alpha: float, power: float = 0.9) -> float:
    """Return the smallest effect that N prompts detect with the given power; infinite with fewer than two prompts."""
    if prompts < 2:
        return math.inf
    return _reach(prompts, alpha, power) * sd / math.sqrt(prompts)


def prompts_needed(sd: float, effect: float, alpha: float, power: float = 0.9) -> int:
    """Return the number of prompts that detect ``effect`` with the given power, capped at ten million.

    Raises ValueError when the effect is not positive.
    """
    if effect <= 0:
        raise ValueError(f"expected a positive effect, found {effect}")
    if sd == 0:
        return 2
    low, high = 1, 2
    while detectable(sd, high, alpha, power) > effect:
        low, high = high, high * 2
        if high > _MOST:
            return _MOST
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if detectable(sd, middle, alpha, power) > effect else (low, middle)
    return high


def least_prompts(alpha: float) -> int:
    """Return the fewest prompts with which a label swap can reach ``alpha``: 2^(1 - N) is the smallest p-value."""
    return max(2, 1 + math.ceil(-math.log2(alpha)))


def _reach(prompts: int, alpha: float, power: float) -> float:
    return float(stdtrit(prompts - 1, 1 - alpha / 2) + stdtrit(prompts - 1, power))
