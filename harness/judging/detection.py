"""What a registered test can see: one account, for ``harness plan`` before a run and for judging after it.

Two kinds of damage are told apart. A change of every prompt, as when drafts are a little worse everywhere, shows in a
rate: the smallest one that is detected is ``share``. Damage to a few prompts, as when some lengths or some moments are
handed off wrongly, must hit as many units as a label swap needs to reach its level: ``prompts``.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from harness.profiles.model import Judging
from harness.stats.power import detectable, least_units, share_hit


class Level(NamedTuple):
    """How strict a test is."""

    alpha: float
    """p-value below which it rejects at the first step of Holm."""
    columns: int
    """Number of columns over which its maximum is taken."""
    power: float
    """Probability with which it has to detect."""

    @property
    def each(self) -> float:
        """Level of one column by Bonferroni, which stands in for the maximum."""
        return self.alpha / max(1, self.columns)

    @property
    def least(self) -> int:
        """The fewest units that have to differ, all one way."""
        return least_units(self.alpha, max(1, self.columns))


class Sample(NamedTuple):
    """The prompts of one column."""

    prompts: int
    units: int
    """Number of texts that they were made of, which are independent; padded copies of one text need not be."""

    @property
    def copies(self) -> float:
        return self.prompts / self.units if self.units else 1.0


class Detectable(NamedTuple):
    """What a test sees with the power that was asked for."""

    share: float
    """Smallest change, as a fraction: of the rate if it is spread over all prompts, or of the prompts that are damaged
    if each is right or wrong. Infinite if there are too few prompts to see anything."""
    prompts: float
    """Fewest prompts, of different texts, whose damage it sees with everything else equal; infinite likewise."""

    def enough(self, points: float | None) -> bool:
        """Return whether a change of so many percentage points is seen; always if none is required."""
        return points is None or self.share <= points / 100


def describe(seen: Detectable) -> str:
    """Describe what is seen."""
    if not math.isfinite(seen.share):
        return "nothing (too few texts)"
    return f"{100 * seen.share:.2f} points, or the loss of {seen.prompts:.0f} prompts"


BLIND = Detectable(math.inf, math.inf)


def stage_power(judging: Judging) -> float:
    """Return the power that each stage needs for all of them together to have the configured one."""
    return float(judging.power ** (1 / judging.stages))


class Floor(NamedTuple):
    """What a change must exceed to count."""

    least: float
    """The smallest change that counts, however certain."""
    slack: float = 0.0
    """What may change without a defect, as a fraction of the rate: the interval has to lie beyond it."""
    confidence: float = 0.99
    """Level of that interval."""


def seen_in_rate(sd: float, rate: float, steps: float, sample: Sample, level: Level, floor: Floor) -> Detectable:
    """Return what a test of a rate sees, such as the acceptance at a position.

    ``sd`` is the standard deviation of one unit's linearised difference between equal runs, ``steps`` the mean number
    of trials of a unit (0 leaves the noise of the effect itself out).
    """
    if sample.units < level.least:
        return BLIND
    share = max(floor.least, detectable(sd, sample.units, level.each, level.power, steps))
    if floor.slack:
        beyond = detectable(sd, sample.units, 1 - floor.confidence, level.power, steps)
        share = max(share, floor.slack * rate + beyond)
    # Prompts whose rate falls to zero lower the mean by their share of it.
    lost = math.ceil(share * sample.prompts / rate) if rate > 0 else sample.prompts
    return Detectable(share, min(max(level.least, lost), sample.prompts))


def seen_in_answers(sd: float, sample: Sample, level: Level, shows: float = 1.0) -> Detectable:
    """Return what a test sees in which each prompt is right or wrong.

    ``sd`` as in ``seen_in_rate``: 0 if equal runs agree. ``shows`` is the share of damaged prompts in which it shows.
    """
    if sample.units < level.least:
        return BLIND
    noise = detectable(sd, sample.units, level.each, level.power)
    hit = share_hit(level.least, sample.units, sample.copies, level.power) / shows if shows > 0 else math.inf
    share = max(noise, hit)
    if not share <= 1:
        return BLIND
    return Detectable(share, max(level.least, math.ceil(noise * sample.prompts)))
