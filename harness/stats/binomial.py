"""The exact interval of a rate (Clopper and Pearson, Biometrika 26, 1934)."""

from __future__ import annotations

from scipy.special import betaincinv  # scipy.stats takes longer to import than most commands to run.


def exact_interval(count: int, of: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return the two-sided interval of the rate of which ``count`` out of ``of`` were seen, ``of`` above zero."""
    beyond = (1 - confidence) / 2
    low = float(betaincinv(count, of - count + 1, beyond)) if count else 0.0
    high = float(betaincinv(count + 1, of - count, 1 - beyond)) if count < of else 1.0
    return low, high
