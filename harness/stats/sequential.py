"""A rate that is looked at after every try: Robbins' mixture interval, and evidence that it exceeds another.

Under any rate p, the mixture likelihood ratio B(k + 1/2, n - k + 1/2) / (B(1/2, 1/2) p^k (1 - p)^(n - k)) is a
nonnegative martingale with mean 1, so the chance that it ever exceeds 1 / alpha is at most alpha (Ville's inequality).
The interval contains the rates at which it does not. Robbins, "Statistical methods related to the law of the iterated
logarithm", Ann. Math. Statist. 41 (1970).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from scipy.optimize import brentq
from scipy.special import betainc, betaln

_EDGE = 1e-12


class Interval(NamedTuple):
    low: float
    high: float


def interval_of(shown: int, tries: int, confidence: float = 0.95) -> Interval:
    """Return the rates that ``shown`` out of ``tries`` do not exclude: all of them when nothing was tried.

    Raises ValueError unless 0 ≤ ``shown`` ≤ ``tries``.
    """
    if not 0 <= shown <= tries:
        raise ValueError(f"expected between 0 and {tries} of {tries} tries, found {shown}")
    if tries == 0:
        return Interval(0.0, 1.0)
    limit = math.log(1 / (1 - confidence))
    mixture = float(betaln(shown + 0.5, tries - shown + 0.5) - betaln(0.5, 0.5))

    def excess(p: float) -> float:
        return mixture - shown * math.log(p) - (tries - shown) * math.log1p(-p) - limit

    best = min(max(shown / tries, _EDGE), 1 - _EDGE)
    low = 0.0 if shown == 0 or excess(_EDGE) <= 0 else float(brentq(excess, _EDGE, best))
    high = 1.0 if shown == tries or excess(1 - _EDGE) <= 0 else float(brentq(excess, best, 1 - _EDGE))
    return Interval(low, high)


def e_value(shown: int, tries: int, rate: float) -> float:
    """Return the evidence that tries show something more often than at ``rate``: the likelihood ratio of all higher
    rates, weighed equally, to this one.

    At this rate or a lower one, the chance that it ever reaches 1 / alpha is at most alpha (Ville's inequality),
    however often one looks. Raises ValueError unless 0 ≤ ``shown`` ≤ ``tries`` and 0 < ``rate`` < 1.
    """
    if not (0 <= shown <= tries and 0 < rate < 1):
        raise ValueError(f"expected between 0 and {tries} of {tries} tries and a rate, found {shown} and {rate}")
    missed = tries - shown
    above = float(betainc(missed + 1, shown + 1, 1 - rate)) / (1 - rate)
    log_ratio = float(betaln(shown + 1, missed + 1)) - shown * math.log(rate) - missed * math.log1p(-rate)
    # No float is larger.
    return above * math.exp(min(log_ratio, 700.0))
