"""Power analysis: what a comparison of two arms can see, before it is made and after.

A change of every unit by an effect e is detected when a paired t test rejects, whose statistic then has a noncentral t
distribution with N - 1 degrees of freedom and noncentrality e / standard error. Damage to a few units, with everything
else equal, is detected when enough of them are hit: d units that all differ one way have the label-swap p-value
2^(1 - d). Bonferroni stands in for the maximum over columns. ``tests/statistics`` checks both by simulation.
"""

from __future__ import annotations

import math
from functools import lru_cache

from scipy.special import betaincinv, nctdtrinc, ndtr, ndtri, stdtrit

_MOST = 10_000_000
_HOPELESS = 1000
"""Critical t from which no effect is worth naming; the noncentral t distribution cannot be computed there."""
_NORMAL_FROM = 20_000
"""Units from which the t distributions are normal to four digits, and much faster to compute as such."""


def detectable(sd: float, units: int, alpha: float, power: float = 0.9, own: float = 0.0) -> float:
    """Return the smallest effect that N units detect with the given power; infinite with fewer than two units.

    ``sd`` is the standard deviation of one unit's linearised difference without an effect. An effect adds noise of its
    own: with ``own`` steps in a unit, each lost or not, the variance e / ``own``; 0 leaves that out.
    """
    if units < 2:
        return math.inf
    if sd == 0 and not own:
        return 0.0
    reach = _reach(units, alpha, power)
    # The positive root of e² = reach² (sd² + e / own) / units.
    scale = reach * reach / units
    linear = scale / own if own else 0.0
    return (linear + math.sqrt(linear * linear + 4 * scale * sd * sd)) / 2


def units_needed(sd: float, effect: float, alpha: float, power: float = 0.9, own: float = 0.0) -> int:
    """Return the number of units that detect ``effect`` with the given power, capped at ten million.

    Raises ValueError when the effect is not positive.
    """
    if effect <= 0:
        raise ValueError(f"expected a positive effect, found {effect}")
    low, high = 1, 2
    while detectable(sd, high, alpha, power, own) > effect:
        low, high = high, high * 2
        if high > _MOST:
            return _MOST
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if detectable(sd, middle, alpha, power, own) > effect else (low, middle)
    return high


def least_units(alpha: float, columns: int = 1) -> int:
    """Return the fewest units that have to differ, all one way, for a label swap to reach ``alpha``.

    Its p-value is 2^(1 - d); with other columns, which are noise, also the chance that one of them reaches the
    standardised difference √d of such damage.
    """
    units = max(2, 1 + math.ceil(-math.log2(alpha)))
    while 2.0 ** (1 - units) + (columns - 1) * 2 * float(ndtr(-math.sqrt(units))) > alpha:
        units += 1
    return units


def share_hit(least: int, units: int, copies: float = 1.0, power: float = 0.9) -> float:
    """Return the smallest share of prompts, each damaged by itself, that hits ``least`` of the units with that power.

    A unit of ``copies`` prompts is hit if any of them is. Infinite when there are fewer units than that.
    """
    if least > units:
        return math.inf
    # P(Binomial(units, u) >= least) = power, solved for u.
    hit = float(betaincinv(least, units - least + 1, power))
    return 1.0 - float((1 - hit) ** (1 / copies))


@lru_cache(maxsize=4096)
def _reach(units: int, alpha: float, power: float) -> float:
    """Return the noncentrality at which a two-sided t test rejects with the given power."""
    if units > _NORMAL_FROM:
        return float(ndtri(power) - ndtri(alpha / 2))
    degrees = units - 1
    critical = -float(stdtrit(degrees, alpha / 2))
    if critical > _HOPELESS:
        return math.inf
    return float(nctdtrinc(degrees, 1 - power, critical))
