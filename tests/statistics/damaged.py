"""Nights of one model and one drafter, alone and as P/D pairs, some answers of which are damaged: what the gate of
three nats noticed, and what the gates that replaced it do.

A greedy answer is 256 tokens, each ahead of the next best by a margin: 15 % by 1 nat on average, the others by 0.3 and
5 more. Each reading rounds log-probs, in some texts more coarsely than in others; damage moves them besides. A token
whose margin was turned round is disliked by it. 160 prompts are four copies of 40 texts in each of four cells.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from harness.profiles.model import Judging
from harness.stats.exact import fisher_fewer, sign_more
from harness.stats.paired import Matrix, by_unit, label_swap, make_arms
from harness.stats.spread import TwinDrafts, spread_of
from harness.stats.trace import RoundingLimits, are_beyond, in_units

TEXTS, COPIES, TOKENS = 40, 4, 256
PROMPTS = TEXTS * COPIES
CELLS = ("single-none", "single-eagle3", "pd-none", "pd-eagle3")
OLD_NATS = 3.0
NEAR_TIE = 0.36
GARBAGE_NATS = 15.0
JUDGING = Judging(tier="normal", stages=1)
LEVEL = JUDGING.single_alpha
TESTS = 13
"""Registered tests of single cells in such a profile."""
_TEXT_OF = np.repeat(np.arange(TEXTS), COPIES)
_STEPS, _LOST_STEPS = 107, 255
_RATE = 0.72


class RoundedBy(NamedTuple):
    """How engines round: the standard deviation of a log-prob in nats, and whether few are rounded much more."""

    sd: float
    heavy: bool = False

    def __str__(self) -> str:
        return f"{self.sd:g} nats, {'t3' if self.heavy else 'normal'}"

    def draw(self, rng: np.random.Generator, coarseness: Matrix) -> Matrix:
        """Return how far two readings of answers to texts of this coarseness [N, 1] lie apart [N, tokens]."""
        shape = (2, len(coarseness), TOKENS)
        drawn = rng.standard_normal(shape, np.float32)
        if self.heavy:
            # Student's t with three degrees of freedom, of variance 1.
            drawn /= np.sqrt(2 * rng.standard_gamma(1.5, shape, np.float32))
        return np.asarray((drawn[0] - drawn[1]) * (self.sd * coarseness), float)


class Damage(NamedTuple):
    """What is wrong with a night."""

    name: str
    nats: float = 0.0
    """By how much the log-probs of damaged answers are moved (normal); infinite for garbage."""
    where: str = "none"
    """``one`` answer of P/D; ``percent`` of those of both P/D cells, each by itself; ``prompts``, the same in both;
    ``all``."""
    share: float = 1.0
    """Which share of the prompts, or of P/D's answers."""
    drafts: bool = False
    """Whether, in place of tokens, all drafts of these requests are lost in ``pd-eagle3``."""

    def hit(self, rng: np.random.Generator) -> np.ndarray:
        """Return which answers [P/D cells, prompts] are damaged."""
        out = np.zeros((2, PROMPTS), bool)
        if self.where == "one":
            out[rng.integers(2), rng.integers(PROMPTS)] = True
        elif self.where == "percent":
            out.flat[rng.permutation(out.size)[: max(1, round(self.share * out.size))]] = True
        elif self.where == "prompts":
            out[:, rng.permutation(PROMPTS)[: max(1, round(self.share * PROMPTS))]] = True
        return out


class Noticed(NamedTuple):
    """What noticed a night."""

    old: bool
    """The bound of three nats on any token, or a registered test."""
    now: bool
    """The gates of single answers, the noise of drafts, or a registered test."""
    gates: int
    """Answers that the gates of single answers name."""
    right: int
    """Right ones among them."""
    again: bool
    """Whether one of those that were named, asked again three times, is named again: damage of the code comes again."""


def notice(rounding: RoundedBy, damage: Damage, rng: np.random.Generator) -> Noticed:
    """Judge one night."""
    return _of_drafts(damage, rng) if damage.drafts else _of_tokens(rounding, damage, rng)


def _margins(rng: np.random.Generator) -> Matrix:
    shape = (PROMPTS, TOKENS)
    close = rng.random(shape, np.float32) < 0.15
    return np.asarray(np.where(close, 1.0, 5.0) * rng.standard_exponential(shape, np.float32) + 0.3 * ~close, float)


def _read(
    rounding: RoundedBy, texts: Matrix, rng: np.random.Generator, damage: Damage, hit: np.ndarray
) -> tuple[Matrix, Matrix]:
    """Return how far log-probs moved, and by how much each token is disliked, of one cell's answers."""
    moved, margin = rounding.draw(rng, texts), _margins(rng)
    gaps = np.where(margin + moved < 0, margin, 0.0)
    for i in np.flatnonzero(hit):
        if np.isinf(damage.nats):
            moved[i] -= GARBAGE_NATS
            gaps[i] = GARBAGE_NATS
        else:
            moved[i] += rng.normal(0, damage.nats, TOKENS)
            gaps[i] = np.where(margin[i] + moved[i] < 0, margin[i], 0.0)
    return moved, gaps


class _Gate(NamedTuple):
    """``logprob-trace`` by a night's own answers of the plain engine."""

    sizes: Matrix
    limits: RoundingLimits
    gap: float

    @classmethod
    def of(cls, plain: Matrix, gaps: Matrix) -> _Gate:
        limits = RoundingLimits.of(list(plain), LEVEL, len(CELLS) * PROMPTS * TOKENS)
        gap = max(limits.flipped_nats or OLD_NATS, NEAR_TIE, float(np.sort(gaps.max(axis=1))[-2]))
        return cls(np.array(limits.sizes), limits, gap)

    def coarser(self, moved: Matrix) -> float:
        """Return how many times as coarsely as the plain engine's the answers of a cell are rounded."""
        return max(1.0, float(np.median(np.abs(moved).mean(axis=1) / self.sizes)))

    def names(self, moved: Matrix, gaps: Matrix, which: np.ndarray, times: float) -> np.ndarray:
        """Return which answers to these prompts are named."""
        units = in_units(moved, (self.sizes[which] * times)[:, None])
        return (gaps.max(axis=1) > self.gap * times) | are_beyond(units, self.limits)


def _of_tokens(rounding: RoundedBy, damage: Damage, rng: np.random.Generator) -> Noticed:
    texts = np.exp(rng.normal(0, 0.3, TEXTS))[_TEXT_OF][:, None]
    hits = [np.zeros(PROMPTS, bool)] * 2 + list(
        np.ones((2, PROMPTS), bool) if damage.where == "all" else damage.hit(rng)
    )
    read = [_read(rounding, texts, rng, damage, hit) for hit in hits]
    gate = _Gate.of(*read[0])
    every = np.arange(PROMPTS)
    times = [gate.coarser(moved) for moved, _ in read]
    named = [gate.names(moved, gaps, every, t) for (moved, gaps), t in zip(read, times, strict=True)]
    wrong = np.array([gaps.max(axis=1) > NEAR_TIE for _, gaps in read], float)
    tested = _tests(wrong)
    again = False
    for cell, hit in enumerate(hits):
        for i in np.flatnonzero(named[cell] & hit)[:8]:
            for _ in range(3):
                one = np.array([i])
                moved = rounding.draw(rng, texts[one])
                moved = moved + (GARBAGE_NATS if np.isinf(damage.nats) else rng.normal(0, damage.nats, (1, TOKENS)))
                again |= bool(gate.names(moved, np.zeros((1, TOKENS)), one, times[cell])[0])
    right = sum(int((n & ~h).sum()) for n, h in zip(named, hits, strict=True))
    total = sum(int(n.sum()) for n in named)
    old = any(float(gaps.max()) > OLD_NATS for _, gaps in read)
    return Noticed(old or tested, total > 0 or tested, total, right, again)


def _tests(wrong: Matrix) -> bool:
    """Return whether ``rescored`` of a cell or ``pooled`` finds more wrong answers [cells, prompts] in P/D."""
    if not wrong[2:].any():
        return False
    pairs = [(wrong[0], wrong[c], JUDGING.stage_alpha / TESTS) for c in (1, 2, 3)]
    pairs.append((wrong[:2].ravel(), wrong[2:].ravel(), JUDGING.pooled_alpha))
    for theirs, ours, level in pairs:
        names = [str(t) for t in np.tile(_TEXT_OF, len(ours) // PROMPTS)]
        ones = np.ones((len(ours), 1))
        arms = by_unit(make_arms(["wrong"], (theirs[:, None], ones), (ours[:, None], ones)), names)
        if ours.sum() > theirs.sum() and label_swap(arms, 2000, 1, level).p <= level:
            return True
    return False


def _of_drafts(damage: Damage, rng: np.random.Generator) -> Noticed:
    """Judge the first drafts of ``pd-eagle3`` beside the single engine's, a third of which follow another text from
    some token on."""
    rates = np.clip(rng.normal(_RATE, 0.06, TEXTS)[_TEXT_OF], 0, 1)
    behind = np.where(rng.random(PROMPTS) < 0.37, rng.random(PROMPTS), 0.0)
    after = np.round(_STEPS * behind).astype(int)
    other = np.clip(rng.normal(_RATE, 0.06, PROMPTS), 0, 1)
    alike = rng.binomial(_STEPS - after, rates)
    theirs, ours = alike + rng.binomial(after, rates), alike + rng.binomial(after, other)
    steps = np.full(PROMPTS, _STEPS)
    hit = damage.hit(rng)[0]
    ours, steps = np.where(hit, 0, ours), np.where(hit, _LOST_STEPS, steps)
    arms = make_arms(
        ["all@0"], (theirs[:, None], np.full((PROMPTS, 1), float(_STEPS))), (ours[:, None], steps[:, None])
    )
    level = JUDGING.stage_alpha / TESTS
    moved = label_swap(by_unit(arms, [str(t) for t in _TEXT_OF]), 2000, 1, level).p <= level
    each = LEVEL / (2 * PROMPTS) / 3
    # As long as both say the same, and where nothing was accepted the whole answers.
    before = np.where(hit, np.round(_LOST_STEPS * (1 - behind)).astype(int), _STEPS - after)
    same = zip(np.where(hit, 0, alike), before, alike, _STEPS - after, hit, theirs, strict=True)
    named = np.array(
        [
            min(
                fisher_fewer(int(a), int(n), int(b), int(m)),
                sign_more(int(b) if lost else 0, 0),
                fisher_fewer(0, _LOST_STEPS, int(whole), _STEPS) if lost else 1.0,
            )
            <= each
            for a, n, b, m, lost, whole in same
        ]
    )
    beside = [
        TwinDrafts(str(t), (int(b), _STEPS), (int(a), int(n)), float(s))
        for t, a, n, b, s in zip(_TEXT_OF, ours, steps, theirs, behind, strict=True)
    ]
    spread = spread_of(beside, [], level)
    far = spread is not None and spread.far
    right = int((named & ~hit).sum())
    return Noticed(moved, moved or bool(named.any()) or far, int(named.sum()), right, bool((named & hit).any()))


RIGHT = Damage("nothing")
DAMAGES = (
    Damage("one garbage answer of 640 (15 nats)", np.inf, "one"),
    Damage("one answer by 3 nats", 3.0, "one"),
    Damage("one answer by 1.5 nats", 1.5, "one"),
    Damage("one answer by 0.6 nats", 0.6, "one"),
    Damage("1 in 100 P/D answers by 1 nat", 1.0, "percent", 0.01),
    Damage("1 in 20 by 1 nat, the same 8 prompts in both cells", 1.0, "prompts", 0.05),
    Damage("1 in 20 by 0.6 nats, the same 8 prompts", 0.6, "prompts", 0.05),
    Damage("5 % of the aligned prompts garbage", np.inf, "prompts", 0.0125),
    Damage("5 % of the aligned prompts by 1.5 nats", 1.5, "prompts", 0.0125),
    Damage("all aligned prompts (40 of 160) by 1.5 nats", 1.5, "prompts", 0.25),
    Damage("all aligned prompts by 0.6 nats", 0.6, "prompts", 0.25),
    Damage("drafter lost for all aligned prompts", 0.0, "prompts", 0.25, True),
    Damage("drafter lost for half of them", 0.0, "prompts", 0.125, True),
    Damage("drafter lost for 5 % of them", 0.0, "prompts", 0.0125, True),
    Damage("all P/D answers by 0.2 nats", 0.2, "all"),
    Damage("all P/D answers by 0.3 nats", 0.3, "all"),
)
"""The lines of the table that attacked the gate of three nats, in its order."""
