"""Nights of the normal tier and their baselines, made by hand."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence

from harness.baselines.lookup import Lookup
from harness.baselines.model import Again, BaselineRow
from harness.history.acceptance import counts_of_steps
from harness.history.folder import History
from harness.history.records import Observation
from harness.history.token_ids import output_key
from tests.support.builders import (
    baseline_row,
    changed_rows,
    history,
    lookup_of,
    observation,
    rescoring,
    with_answers,
    with_profile,
    with_run,
)

LENGTHS = list(range(32, 32 + 96))
CELLS = ("single-none", "pd-eagle3", "single-eagle3")
FOUR = ("single-none", "pd-none", "pd-eagle3", "single-eagle3")
JUDGING = {"tier": "normal", "permutations": 20_000, "must_detect_points": 60, "must_detect_stratum_points": None}


@functools.cache
def steps(outputs: int, seed: str, worse: float = 0.0) -> tuple[int, ...]:
    """Accepted counts that account for the output; with probability ``worse`` a step accepts nothing."""
    rng = random.Random(seed)
    left, out = outputs - 1, []
    while left > 0:
        accepted = min(rng.choice((0, 1, 2, 3)), left - 1)
        accepted = 0 if rng.random() < worse else accepted
        out.append(accepted)
        left -= accepted + 1
    return tuple(out)


def night(
    pd: Callable[[int], tuple[int, ...]] | None = None,
    single: Callable[[int], tuple[int, ...]] | None = None,
    change: Callable[[Observation], Observation] = lambda o: o,
    lengths: list[int] = LENGTHS,
    cells: Sequence[str] = CELLS,
    **judging: object,
) -> History:
    """A night whose requests accept what the functions say; by default what the baseline says."""
    observations = []
    for cell in cells:
        chosen = {"pd-eagle3": pd, "single-eagle3": single}.get(cell) or recorded
        for n in lengths:
            observations.append(change(_answered(cell, n, chosen(n))))
    return with_profile(history(observations), judging={**JUDGING, **judging})


@functools.cache
def _answered(cell: str, n: int, accepted: tuple[int, ...]) -> Observation:
    return observation(cell, n, accepted=accepted)


@functools.cache
def outputs(n: int) -> int:
    return len(observation("single-none", n).final.output_ids)


def recorded(n: int) -> tuple[int, ...]:
    return steps(outputs(n), f"baseline {n}")


def again(n: int) -> tuple[int, ...]:
    return steps(outputs(n), f"again {n}")


def worse(n: int) -> tuple[int, ...]:
    return steps(outputs(n), f"tonight {n}", 0.5)


def better(n: int) -> tuple[int, ...]:
    return (3,) * (outputs(n) // 4)


def baselines(
    lengths: list[int] = LENGTHS, quiet: bool = True, close: tuple[tuple[int, float], ...] = ()
) -> dict[str, Lookup]:
    return dict(_baselines(tuple(lengths), quiet, close))


@functools.cache
def _baselines(lengths: tuple[int, ...], quiet: bool, close: tuple[tuple[int, float], ...]) -> dict[str, Lookup]:
    out = {}
    for method in ("none", "eagle3"):
        rows = []
        for n in lengths:
            o = observation("single-none", n)
            accepted = recorded(n) if method == "eagle3" else ()
            repeated = (again(n) if quiet else worse(n)) if method == "eagle3" else ()
            counted = counts_of_steps(repeated, None, 3 if method == "eagle3" else 0)
            twice = Again(divergence=None, gap=None, steps=counted.steps, accepted_at=counted.accepted_at)
            rows.append(baseline_row(o.prompt_id, o.final.output_ids, accepted, close=close, again=twice))
        out[method] = lookup_of(method, rows)
    return out


def scored(made: History, gap: Callable[[Observation], float] = lambda o: 0.0) -> History:
    """The same run with every output re-scored: the plain engine dislikes its token 2 by ``gap``, and no other."""
    scores = {}
    for o in made.observations:
        output = o.final.output_ids
        gaps = [gap(o) if i == 2 else 0.0 for i in range(len(output))]
        scores[o.prompt_id, output_key(output)] = rescoring(o.prompt_id, o.sent_ids, output, gaps)
    return with_run(with_answers(made, (*made.observations, *scores.values())), rescore=True)


def noisy(lookups: dict[str, Lookup], method: str, gaps: Sequence[float | None]) -> dict[str, Lookup]:
    """The same baselines, in which equal runs of ``method`` parted at these gaps, a prompt each; None: they did not."""
    left = iter(gaps)

    def parted(row: BaselineRow) -> dict[str, object]:
        gap = next(left, None)
        return {} if gap is None else {"again": row.again.model_copy(update={"divergence": 5, "gap": gap})}

    return {**lookups, method: changed_rows(lookups[method], parted)}
