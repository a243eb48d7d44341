"""Simulated pairs of runs, to measure what the statistics get wrong and what they see.

A prompt has acceptance probabilities of its own, so that its steps are correlated; an arm's step accepts 0 … k drafts.
A request ends with its tokens, so that an arm that accepts less takes more steps. The second arm repeats the first up
to the token at which the request diverges, and draws anew from there on. A drop turns accepted steps into steps that
accept nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from harness.stats.paired import Arms, make_arms

Counts = npt.NDArray[np.int64]


class Scene(NamedTuple):
    """What is simulated. The default resembles the figures published for an 8B target with an EAGLE3 drafter."""

    prompts: int
    steps: int = 107
    """Mean verify steps of a request: 256 tokens at an acceptance length of 2.4."""
    conditional: tuple[float, ...] = (0.73, 0.71, 0.68)
    """P(draft p accepted | draft p - 1 accepted), p = 0 … k - 1."""
    diverging: float = 1.0
    """Share of the requests that part from the other arm, at a token that is uniform over the request."""
    design_effect: float = 5.0
    """Variance of a pooled rate against independent steps; 1 is none."""
    shared_prompts: bool = True
    """Both arms decode the same prompts; without it the arms share nothing."""
    unequal: float = 0.0
    """Coefficient of variation of the request lengths."""
    drop: float = 0.0
    """Fall of the acceptance at position 0, as a share; negative values are rises."""
    strata: tuple[str, ...] = ()
    """Names of strata; prompts are dealt to them in turn."""
    copies: int = 1
    """How many prompts are padded copies of one text."""
    shared_luck: float = 0.0
    """Share of the texts of which all copies part together and draw the same; the others' copies are independent."""

    @property
    def correlation(self) -> float:
        """Intra-prompt correlation that gives the design effect: 1 + (steps - 1) ρ."""
        return min(0.9, max(0.0, self.design_effect - 1) / max(1, self.steps - 1))


class Outcomes(NamedTuple):
    """Per arm [N, k + 1]: number of steps that accepted 0, 1, … k drafts."""

    first: Counts
    second: Counts


def simulate(scene: Scene, generator: np.random.Generator) -> Outcomes:
    """Draw both arms."""
    n, k = scene.prompts, len(scene.conditional)
    lengths = np.full(n, float(scene.steps))
    if scene.unequal:
        shape = 1 / scene.unequal**2
        lengths = np.maximum(1, np.round(generator.gamma(shape, scene.steps / shape, n)))
    tokens = np.maximum(1, np.round(lengths * (1 + np.cumprod(scene.conditional).sum()))).astype(int)
    mine = _outcome_probabilities(scene, generator)
    other = mine if scene.shared_prompts else _outcome_probabilities(scene, generator)
    diverges = generator.random(n) < scene.diverging
    common = np.where(diverges, np.floor(generator.random(n) * tokens), tokens).astype(int)
    if not scene.shared_prompts:
        common = np.zeros(n, int)
    shared = _decoded(common, mine, generator)
    first = shared + _decoded(tokens - _tokens(shared), mine, generator)
    again = _changed(shared, scene, generator) if scene.drop else shared
    second = again + _decoded(tokens - _tokens(again), _worse(other, scene), generator)
    assert first.shape == (n, k + 1)
    return _with_copies(Outcomes(first, second), scene, generator)


def _tokens(counts: Counts) -> Counts:
    """Tokens that the steps make [N]: the drafts that they accept and one more each."""
    return np.asarray(counts @ (np.arange(counts.shape[1]) + 1))


def _decoded(tokens: Counts, probabilities: npt.NDArray[np.float64], generator: np.random.Generator) -> Counts:
    """Draw steps until each request has its tokens [N, k + 1]: most of them as sums, where they cannot be too many, and
    the others one by one."""
    n, width = probabilities.shape
    out = np.zeros((n, width), int)
    left = tokens.copy()
    for _ in range(_SUMS):
        active = np.flatnonzero(left > 0)
        drawn = generator.multinomial(np.maximum(1, left[active] // width), probabilities[active])
        out[active] += drawn
        left[active] -= _tokens(drawn)
    up_to = probabilities.cumsum(axis=1)
    mean = _tokens(probabilities)
    while len(active := np.flatnonzero(left > 0)):
        drawn = _one_by_one(left[active], up_to[active], mean[active], generator)
        out[active] += drawn
        left[active] -= _tokens(drawn)
    return out


_SUMS = 2
"""Draws of sums; with more of them, or fewer, it takes longer."""


def _one_by_one(left: Counts, up_to: npt.NDArray[np.float64], mean: Counts, generator: np.random.Generator) -> Counts:
    """Draw about as many steps as give each request the tokens that it lacks, and return those that it needs."""
    luck = generator.random((len(left), int((left / mean).max() * 1.1) + 8))
    made = np.ones(luck.shape, np.int32)
    for outcome in range(up_to.shape[1] - 1):
        made += luck > up_to[:, outcome : outcome + 1]
    needed = made.cumsum(axis=1) - made < left[:, None]
    return np.stack([(needed & (made == k)).sum(axis=1) for k in range(1, up_to.shape[1] + 1)], axis=1)


def _with_copies(outcomes: Outcomes, scene: Scene, generator: np.random.Generator) -> Outcomes:
    """Let the copies of some texts have the same outcomes."""
    if scene.copies == 1 or not scene.shared_luck:
        return outcomes
    texts = np.arange(scene.prompts) // scene.copies
    alike = (generator.random(texts.max() + 1) < scene.shared_luck)[texts]
    of = np.where(alike, texts * scene.copies, np.arange(scene.prompts))
    return Outcomes(outcomes.first[of], outcomes.second[of])


def _outcome_probabilities(scene: Scene, generator: np.random.Generator) -> npt.NDArray[np.float64]:
    """[N, k + 1]: each prompt's probabilities of accepting 0 … k drafts in a step."""
    rho = scene.correlation
    reach = np.ones(scene.prompts)
    columns = []
    for mean in scene.conditional:
        if rho and 0 < mean < 1:
            size = 1 / rho - 1
            p = generator.beta(mean * size, (1 - mean) * size, scene.prompts)
        else:
            p = np.full(scene.prompts, mean)
        columns.append(reach * (1 - p))
        reach = reach * p
    out = np.stack([*columns, reach], axis=1)
    return np.asarray(out / out.sum(axis=1, keepdims=True))


def _changed(counts: Counts, scene: Scene, generator: np.random.Generator) -> Counts:
    """Move steps between "accepted nothing" and the rest, so that position 0 moves by ``-drop`` on average."""
    out = counts.copy()
    mean = scene.conditional[0]
    if scene.drop > 0:
        lost = generator.binomial(out[:, 1:], min(1.0, scene.drop / mean))
        out[:, 1:] -= lost
        out[:, 0] += lost.sum(axis=1)
    else:
        won = generator.binomial(out[:, 0], min(1.0, -scene.drop / (1 - mean)))
        out[:, 0] -= won
        out[:, 1] += won
    return out


def _worse(probabilities: npt.NDArray[np.float64], scene: Scene) -> npt.NDArray[np.float64]:
    """Return the probabilities of steps that are yet to come, with the same change."""
    out = probabilities.copy()
    mean = scene.conditional[0]
    if scene.drop > 0:
        lost = out[:, 1:] * min(1.0, scene.drop / mean)
        out[:, 1:] -= lost
        out[:, 0] += lost.sum(axis=1)
    elif scene.drop < 0:
        won = out[:, 0] * min(1.0, -scene.drop / (1 - mean))
        out[:, 0] -= won
        out[:, 1] += won
    return out


def to_arms(outcomes: Outcomes, strata: tuple[str, ...] = ()) -> Arms:
    """Columns ``all@p`` and, where there are strata, ``stratum@p``."""
    k = outcomes.first.shape[1] - 1
    n = len(outcomes.first)
    masks = {"all": np.ones(n, bool)} | {s: np.arange(n) % len(strata) == i for i, s in enumerate(strata)}
    columns = [f"{name}@{p}" for name in masks for p in range(k)]
    sides = []
    for counts in outcomes:
        at = counts[:, ::-1].cumsum(axis=1)[:, ::-1][:, 1:]
        trials = counts.sum(axis=1, keepdims=True) * np.ones((1, k))
        hits = np.concatenate([at * m[:, None] for m in masks.values()], axis=1)
        sides.append((hits.astype(float), np.concatenate([trials * m[:, None] for m in masks.values()], axis=1)))
    return make_arms(columns, sides[0], sides[1])
