"""Whole nights of the normal tier, from observations to verdicts of the first stage: tokens that part at near ties, and
acceptance that follows them. Nothing was changed, so every test that trips is a false alarm."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest

from harness.baselines.lookup import Lookup
from harness.baselines.model import Again
from harness.history.acceptance import counts_of_steps
from harness.history.token_ids import common_prefix
from harness.judging.checks.hypothesis_tests import run_tests
from harness.judging.checks.model import TestName
from harness.judging.checks.pooled import pooled
from harness.judging.evidence import Evidence, FoundOfCells
from harness.profiles.model import Judging
from harness.stats.multiplicity import stage_alpha
from tests.statistics.nights import FAMILY_ALPHA, Share
from tests.support.builders import baseline_row, change_final, history, lookup_of, observation, speculation

PROMPTS = list(range(40, 40 + 48))
CELLS = ("single-none", "pd-eagle3", "single-eagle3")
OUTPUTS = 36
JUDGING = Judging(
    tier="normal", permutations=2_000, near_tie_nats=0.36, must_detect_points=60, must_detect_stratum_points=None
)
LOGPROBS = [-random.Random(t).expovariate(3) for t in range(OUTPUTS)]
TEMPLATES = {(cell, n): observation(cell, n) for cell in CELLS for n in PROMPTS}


class Run(NamedTuple):
    """What one run says to one prompt."""

    tokens: tuple[int, ...]
    accepted: tuple[int, ...]


def near_ties(prompt: int, share: float) -> dict[int, float]:
    """Output tokens at which a prompt's two best are close, with the distance in nats."""
    rng = random.Random(f"ties {prompt}")
    return {t: round(rng.uniform(0.01, 0.3), 3) for t in range(OUTPUTS) if rng.random() < share}


def run_once(prompt: int, ties: dict[int, float], rng: random.Random, hard: float = 0.0, rounding: float = 0.3) -> Run:
    """At each near tie one of two tokens is said, the other one with the chance ``rounding``; what follows depends on
    it. With the chance ``hard`` a token without a near tie is replaced."""
    path = 0
    tokens = []
    for t in range(OUTPUTS):
        if t in ties:
            path = 2 * path + (rng.random() < rounding)
        elif rng.random() < hard:
            path = 2 * path + 1
        tokens.append(random.Random(f"{prompt} {t} {path}").randrange(100, 500))
    steps = random.Random(f"{prompt} {path}")
    left, accepted = OUTPUTS - 1, []
    while left > 0:
        accepted.append(min(steps.choice((0, 1, 3)), left - 1))
        left -= accepted[-1] + 1
    return Run(tuple(tokens), tuple(accepted))


def recorded(method: str, ties: dict[int, dict[int, float]], rng: random.Random, rounding: float) -> Lookup:
    rows = []
    for n in PROMPTS:
        one, two = (run_once(n, ties[n], rng, rounding=rounding) for _ in range(2))
        at = common_prefix(one.tokens, two.tokens)
        counted = counts_of_steps(two.accepted, None, 3)
        again = Again(
            divergence=at if at < OUTPUTS else None,
            gap=ties[n].get(at),
            steps=counted.steps if method != "none" else 0,
            accepted_at=counted.accepted_at if method != "none" else (),
        )
        tied = {"close": tuple(ties[n].items()), "min_top_gap": min(ties[n].values(), default=9.0)}
        accepted = one.accepted if method != "none" else ()
        rows.append(baseline_row(f"p{n}", one.tokens, accepted, again=again, **tied))
    return lookup_of(method, rows)


def tripped(share: float, seed: int, hard: float = 0.0, rounding: float = 0.3) -> set[TestName]:
    """Names of the tests that fail the first stage of one night; ``hard`` is the damage of P/D, ``rounding`` how often
    a single engine takes the other token at a near tie."""
    rng = random.Random(seed)
    ties = {n: near_ties(n + 1000 * seed, share) for n in PROMPTS}
    baselines = {m: recorded(m, ties, rng, rounding) for m in ("none", "eagle3")}
    # A stream of its own, so that tokens do not depend on log-probs.
    rounded = random.Random(f"log-probs {seed}")
    made = []
    for (cell, n), template in TEMPLATES.items():
        pd = cell.startswith("pd")
        said = run_once(n, ties[n], rng, hard if pd else 0.0, 0.3 if pd else rounding)
        metrics = None if cell == "single-none" else speculation(said.accepted)
        likely = tuple(min(-2e-4, nats + rounded.gauss(0, 0.06 if pd else 0.03)) for nats in LOGPROBS)
        made.append(change_final(template, output_ids=said.tokens, speculation=metrics, chosen_logprobs=likely))
    views = list(Evidence(history(made), baselines, JUDGING, FoundOfCells()).views())
    tests, together = run_tests(views, JUDGING), pooled(views, JUDGING)["cold"]
    assert tests
    assert not [t.problem for t in (*tests.values(), together.tested) if t.problem]
    failed = {i.name for i, t in tests.items() if t.adjusted is not None and t.adjusted <= JUDGING.stage_alpha}
    return failed | ({"pooled"} if together.tested.p <= JUDGING.pooled_alpha else set())


@pytest.mark.parametrize(
    ("share", "nights"),
    [(0.0, 5), (0.01, 20), (0.1, 20), *(pytest.param(s, 100, marks=pytest.mark.exhaustive) for s in (0.01, 0.1))],
)
def test_unchanged_nights_trip_no_more_often_than_stated(share, nights):
    failed = Share(sum(bool(tripped(share, seed)) for seed in range(nights)), nights)
    print(f"near ties at {100 * share:g} % of tokens: {failed}")
    assert failed.low <= stage_alpha(FAMILY_ALPHA, 2) + JUDGING.pooled_alpha


def test_pd_that_rounds_otherwise_than_bit_equal_single_engines_does_not_trip_the_token_tests():
    """Single engines always take the same token; P/D takes the other one at every third near tie."""
    seen = [tripped(0.1, seed, rounding=0.0) for seed in range(40)]
    assert not any("survival" in names for names in seen)


def test_damage_that_is_no_near_tie_is_seen_by_the_token_tests():
    """One token in fifty is wrong on P/D, which ends half of the outputs."""
    seen = [tripped(0.01, seed, hard=0.02) for seed in range(20)]
    assert sum({"survival", "pooled"} <= names for names in seen) >= 18
