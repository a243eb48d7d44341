"""Write docs/evidence/wrong-answers.md: python -m benchmarks.wrong_answers [NIGHTS]

How often the gates for single answers see one that is wrong, and how often they name a right one. Log-probs of right
answers are rounded, once while they are said and once while they are read; those of a wrong one are moved by more. The
limits come from each night's own answers of the plain engine, as in ``harness.judging.checks.traces``.
"""

from __future__ import annotations

import sys
import time
from typing import NamedTuple

import numpy as np

from harness.judging.checks.request_acceptance import _NOTHING_IN, _WAYS
from harness.profiles.model import Judging
from harness.stats.exact import fisher_fewer, sign_more
from harness.stats.paired import Matrix
from harness.stats.trace import RoundingLimits, are_beyond, in_units
from harness.util.paths import REPOSITORY
from tests.statistics.nights import Share

TEXTS, CELLS, TOKENS = 160, 4, 256
OLD_NATS = 3.0
LEVEL = Judging().single_alpha
DAMAGE = (
    (0.2, TOKENS),
    (0.3, TOKENS),
    (0.6, TOKENS),
    (1.0, TOKENS),
    (1.5, TOKENS),
    (3.0, TOKENS),
    (0.6, 32),
    (1.5, 16),
)
"""By how many nats the log-probs of a wrong answer are moved, and for how many of its tokens."""


class Noise(NamedTuple):
    """How engines round: the standard deviation of a log-prob in nats, and whether few are rounded much more."""

    sd: float
    heavy: bool

    def __str__(self) -> str:
        return f"{self.sd:g} nats, {'heavy tails (t3)' if self.heavy else 'normal'}"

    def draw(self, rng: np.random.Generator, coarseness: Matrix) -> Matrix:
        """Return how far two readings lie apart, of answers [N, tokens] to texts of this coarseness [N, 1]."""
        shape = (2, len(coarseness), TOKENS)
        drawn = rng.standard_t(3, shape) / 3**0.5 if self.heavy else rng.normal(0, 1, shape)
        return np.asarray((drawn[0] - drawn[1]) * self.sd * coarseness)


NOISES = tuple(Noise(sd, heavy) for heavy in (False, True) for sd in (0.03, 0.06, 0.12))


class Night:
    """What a night's right answers allow."""

    def __init__(self, plain: Matrix, gaps: Matrix, pd: Matrix) -> None:
        limits = RoundingLimits.of(list(plain), LEVEL, CELLS * TEXTS * TOKENS)
        self.sizes, self.limits = np.array(limits.sizes), limits
        self.gap = max(limits.flipped_nats or OLD_NATS, float(np.sort(gaps.max(axis=1))[-2]))
        self.coarser = max(1.0, float(np.median(np.abs(pd).mean(axis=1) / self.sizes)))

    def beyond(self, moved: Matrix, gaps: Matrix, sizes: Matrix) -> Matrix:
        """Return which answers [N, tokens] are named."""
        units = in_units(moved, (sizes * self.coarser)[:, None])
        return (gaps.max(axis=1) > self.gap * self.coarser) | are_beyond(units, self.limits)


def margins(rng: np.random.Generator, answers: int) -> Matrix:
    """Return by how much each token is ahead of the next best: 15 % of a chat model's are close."""
    close = rng.random((answers, TOKENS)) < 0.15
    return np.where(close, rng.exponential(1, close.shape), 0.3 + rng.exponential(5, close.shape))


def disliked(margin: Matrix, moved: Matrix) -> Matrix:
    """Return by how much a reader dislikes each token: where its margin was turned round, by the margin."""
    return np.where(margin + moved < 0, margin, 0.0)


def night(rng: np.random.Generator, noise: Noise, times: float) -> tuple[Night, Matrix, bool]:
    """Return the limits of a night, how coarsely its texts are rounded, and whether a right answer was named.

    P/D rounds ``times`` as much as the plain engine.
    """
    texts = np.exp(rng.normal(0, 0.3, (TEXTS, 1)))
    plain = noise.draw(rng, texts)
    pd = [noise.draw(rng, texts) * times for _ in range(CELLS - 1)]
    gaps = disliked(margins(rng, TEXTS), plain)
    limits = Night(plain, gaps, pd[0])
    named = any(limits.beyond(m, disliked(margins(rng, TEXTS), m), limits.sizes).any() for m in pd)
    return limits, texts, named


def seen(noise: Noise, nats: float, tokens: int, times: int, seed: int = 1) -> tuple[float, Share, Share]:
    """Return the share of wrong tokens of answers that are wrong by ``nats`` on their first ``tokens``, and how many
    such answers the old bound and the new gate name."""
    rng = np.random.default_rng(seed)
    old = new = wrong = 0
    each = 40
    for _ in range(times // each):
        limits, texts, _ = night(rng, noise, 1.0)
        which = rng.integers(0, TEXTS, each)
        damage = rng.normal(0, nats, (each, TOKENS)) * (np.arange(TOKENS) < tokens)
        moved = noise.draw(rng, texts[which]) + damage
        gaps = disliked(margins(rng, each), moved)
        old += int((gaps.max(axis=1) > OLD_NATS).sum())
        new += int(limits.beyond(moved, gaps, limits.sizes[which]).sum())
        wrong += int((gaps > 0).sum())
    return wrong / (times * TOKENS), Share(old, times), Share(new, times)


def lost_drafts(share: float, steps: int, rate: float, times: int, seed: int = 1) -> Share:
    """Return how many requests are named that lose this share of their drafts, beside a twin that accepts ``rate``."""
    rng = np.random.default_rng(seed)
    twins = rng.binomial(steps, rate, times)
    lost = rng.binomial(twins, share)
    level = LEVEL / (CELLS * TEXTS) / _WAYS
    named = 0
    for theirs, gone in zip(twins.tolist(), lost.tolist(), strict=True):
        named += min(fisher_fewer(theirs - gone, steps, theirs, steps), sign_more(gone, 0)) <= level
    return Share(named, times)


def main(nights: int) -> None:
    begun = time.time()
    lines = [
        "# Single answers that are wrong",
        "",
        f"Simulated nights of {TEXTS} texts in {CELLS} cells, {TOKENS} tokens an answer. Each reading of an answer",
        "rounds its log-probs, in some texts more coarsely than in others (by a factor of 1.35, one standard",
        "deviation). 15 % of the tokens are close to the next best (1 nat on average), the others 5 nats ahead. A",
        "wrong answer has log-probs that are moved by so many nats besides (normal). Before: the bound of 3 nats on",
        "the largest dislike of a token (`disliked-tokens`, until `logprob-trace` replaced it). Limits are those of",
        f"each night's own answers. Written by `python -m benchmarks.wrong_answers {nights}`.",
        "",
        "## One wrong answer",
        "",
        "| wrong by | of its tokens wrong | rounding | seen before | seen |",
        "|---|---|---|---|---|",
    ]
    for nats, tokens in DAMAGE:
        for noise in NOISES:
            wrong, old, new = seen(noise, nats, tokens, 400)
            where = "" if tokens == TOKENS else f", first {tokens} tokens"
            lines.append(f"| {nats:g} nats{where} | {100 * wrong:.1f} % | {noise} | {old} | {new} |")
            print(lines[-1], flush=True)
    lines += [
        "",
        "## Right answers that are named",
        "",
        f"At most {100 * LEVEL:g} % of nights may name one.",
        "",
        "| rounding | P/D rounds | nights | named one |",
        "|---|---|---|---|",
    ]
    for noise in NOISES:
        for times in (1.0, 3.0):
            rng = np.random.default_rng(2)
            named = sum(night(rng, noise, times)[2] for _ in range(nights))
            words = "alike" if times == 1 else f"{times:g} times as much"
            lines.append(f"| {noise} | {words} | {nights} | {Share(named, nights)} |")
            print(lines[-1], flush=True)
    lines += [
        "",
        "## Requests that lose drafts",
        "",
        f"`request-acceptance`: one request of {CELLS * TEXTS} that loses a share of its first drafts, beside a twin.",
        "",
        "| verify steps | the twin accepts | drafts lost | requests | named |",
        "|---|---|---|---|---|",
    ]
    for steps, rate in ((_NOTHING_IN, 0.7), (60, 0.36), (60, 0.7), (107, 0.7)):
        for share in (0.0, 0.25, 0.5, 1.0):
            found = lost_drafts(share, steps, rate, 10_000 if not share else 400)
            lines.append(f"| {steps} | {100 * rate:g} % | {100 * share:g} % | {found.of} | {found} |")
            print(lines[-1], flush=True)
    (REPOSITORY / "docs" / "evidence" / "wrong-answers.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{time.time() - begun:.0f} s")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)
