"""How often a night of the normal tier notices that some P/D requests are answered with garbage, and how often it fails
without a reason. Whole nights go through the project's own ``judge``: whatever it says counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from harness.history.verdict import Verdict
from harness.judging.checks.pooled import COLUMNS
from harness.judging.checks.registry import TEST_NAMES, judge
from harness.profiles.model import Judging
from harness.stats.paired import label_swap, make_arms
from tests.statistics.nights import Share
from tests.support.nightly import RIGHT, Defect, Nights

DEFECTS = (10, 20, 100, 300)
"""One damaged P/D request in so many."""


class Outcome(NamedTuple):
    """What some nights came to."""

    nights: int
    verdicts: Counter[Verdict]
    noticed: Counter[str]
    """Nights with a finding, by what found it: ``cell`` for tests of single cells, ``pooled``, ``request`` for checks
    of single answers."""

    def share(self, by: str) -> Share:
        return Share(self.noticed[by], self.nights)

    @property
    def red(self) -> Share:
        """Share of nights that fail: a pass and missing evidence do not."""
        quiet = (Verdict.PASS, Verdict.KNOWN, Verdict.UNKNOWN)
        return Share(sum(n for v, n in self.verdicts.items() if v not in quiet), self.nights)

    @property
    def green(self) -> Share:
        return Share(self.verdicts[Verdict.PASS], self.nights)


def attack(nights: Nights, defect: Defect, seeds: Iterable[int]) -> Outcome:
    """Judge one night per seed."""
    verdicts: Counter[Verdict] = Counter()
    noticed: Counter[str] = Counter()
    for seed in seeds:
        simulated = nights.night(seed, defect)
        judgement = judge(simulated.night, simulated.baselines)
        verdicts[judgement.verdict] += 1
        noticed.update({_by(f.check) for f in judgement.findings if f.verdict is not Verdict.UNKNOWN or f.changed})
    return Outcome(verdicts.total(), verdicts, noticed)


def unchanged(nights: Nights, seeds: Iterable[int]) -> Outcome:
    """Judge nights in which nothing is wrong."""
    return attack(nights, RIGHT, seeds)


def pooled_alarms(
    nights: int,
    share: float,
    texts: int = 40,
    answers: int = 229,
    seed: int = 1,
    damage: float = 0.0,
    level: float = Judging().pooled_alpha,
) -> Share:
    """Share of nights in which the pooled test fails, from the counts of wrong answers alone: without a reason, unless
    ``damage`` is the share of the answers on the second side that a defect makes wrong.

    On both sides rounding makes ``share`` of the ``answers`` to each text count as wrong, in some texts much more often
    than in others. The defaults are those of a whole night of the nightly profile.
    """
    rng = np.random.default_rng(seed)
    failed = 0
    for night in range(nights):
        rates = share * rng.gamma(0.5, 2.0, texts)
        rescored = rng.poisson(answers * rates, (2, texts))
        hit = rng.binomial(answers, damage, texts)
        wrong = np.stack([rescored, rng.binomial(rescored, 0.6)], axis=2).astype(float)
        wrong[1] += hit[:, None]
        total = np.full((texts, 2), float(answers))
        arms = make_arms(COLUMNS, (wrong[0], total), (wrong[1], total))
        failed += label_swap(arms, 511, night, level).p <= level
    return Share(failed, nights)


def alarms_of_prompts(
    nights: int,
    cells: int,
    hit: int,
    scattered: bool,
    share: float = 0.005,
    texts: int = 40,
    copies: int = 4,
    level: float = Judging().pooled_alpha,
) -> Share:
    """Share of nights in which the pooled test fails because ``hit`` prompts, each made of another text, are answered
    wrongly in every one of so many cells; ``scattered``, because as many answers are, each by chance."""
    rng = np.random.default_rng(1)
    failed = 0
    for night in range(nights):
        answers = cells * copies
        rates = share * rng.gamma(0.5, 2.0, texts)
        rounded = rng.poisson(answers * rates, (2, texts)).astype(float)
        at = rng.integers(0, texts, hit * cells) if scattered else np.repeat(rng.permutation(texts)[:hit], cells)
        rounded[1] += np.bincount(at, minlength=texts)
        wrong = np.stack([rounded, rounded], axis=2)
        total = np.full((texts, 2), float(answers))
        failed += label_swap(make_arms(COLUMNS, (wrong[0], total), (wrong[1], total)), 511, night, level).p <= level
    return Share(failed, nights)


def _by(check: str) -> str:
    return check if check == "pooled" else "cell" if check in TEST_NAMES else "request"
