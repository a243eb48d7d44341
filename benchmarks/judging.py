"""Measure the time of judging 36 cells × 1,000 prompts × 100 steps with 20,000 permutations, on one core:

python -m benchmarks.judging [CELLS] [PROMPTS]
"""

from __future__ import annotations

import os
import sys
import time

import numpy as np
from rich.console import Console
from rich.table import Table

from harness.stats.multiplicity import holm, stage_alpha
from harness.stats.paired import differences, label_swap
from tests.support.simulate import Scene, simulate, to_arms

STRATA = ("aligned", "lookahead", "first", "middle", "sub-block")


def main(cells: int, prompts: int) -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    generator = np.random.default_rng(1)
    scene = Scene(prompts, steps=100, strata=STRATA)
    arms = [to_arms(simulate(scene, generator), STRATA) for _ in range(cells)]
    alpha = stage_alpha(0.5e-3, 2)
    begun = time.perf_counter()
    p_values = {}
    for number, each in enumerate(arms):
        p_values[str(number)] = label_swap(each, 20_000, number, alpha / cells).p
        differences(each)
    rejected = sum(p <= alpha for p in holm(p_values, cells).values())
    seconds = time.perf_counter() - begun
    table = Table(title="judging")
    for column in ("cells", "prompts", "columns", "permutations", "rejected", "seconds"):
        table.add_column(column, justify="right")
    columns = str(len(arms[0].columns))
    table.add_row(str(cells), str(prompts), columns, "20,000", str(rejected), f"{seconds:.1f}")
    Console().print(table)


if __name__ == "__main__":
    numbers = [int(a) for a in sys.argv[1:3]]
    main(*(numbers + [36, 1000][len(numbers) :]))
