"""Simulated pairs of runs, to measure what the statistics get wrong and what they see.

A prompt has acceptance probabilities of its own, so that its steps are correlated; an arm's step accepts 0 … k drafts.
The second arm repeats the first up to the step at which the request diverges, and draws anew from there on. A drop
turns accepted steps into steps that accept nothing.
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
    """Share of the requests that part from the other arm, at a step that is uniform over the request."""
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
    lengths = np.full(n, scene.steps)
    if scene.unequal:
        shape = 1 / scene.unequal**2
        lengths = np.maximum(1, np.round(generator.gamma(shape, scene.steps / shape, n))).astype(int)
    mine = _outcome_probabilities(scene, generator)
    other = mine if scene.shared_prompts else _outcome_probabilities(scene, generator)
    diverges = generator.random(n) < scene.diverging
    common = np.where(diverges, np.floor(generator.random(n) * lengths), lengths).astype(int)
    if not scene.shared_prompts:
        common = np.zeros(n, int)
    shared = generator.multinomial(common, mine)
    first = shared + generator.multinomial(lengths - common, mine)
    second = shared + generator.multinomial(lengths - common, other)
    if scene.drop:
        second = _changed(second, scene, generator)
    assert first.shape == (n, k + 1)
    return Outcomes(first, second)


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
