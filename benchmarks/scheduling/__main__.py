"""Compare the scheduler's makespan with a lower bound, on synthetic matrices:

python -m benchmarks.scheduling [MIXES]

Exit 1 when any makespan is more than 20 % above its lower bound.
"""

from __future__ import annotations

import sys
import time
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.scheduling.bounds import lower_bound
from benchmarks.scheduling.first_fit import first_fit
from benchmarks.scheduling.mixes import inventory, mix
from harness.scheduling.planning import one_by_one, simulate

GPUS = (1, 2, 4, 8, 16, 32, 64)
CELLS = (8, 24, 80, 200, 500)
ALLOWED = 1.20
"""Largest accepted ratio of a makespan to its lower bound."""


class Case(NamedTuple):
    gpus: int
    cells: int
    jobs: int
    bound_s: float
    ours_s: float
    greedy_s: float
    one_by_one_s: float
    planning_s: float
    rule: str

    @property
    def ratio(self) -> float:
        return self.ours_s / self.bound_s


def measure(gpus: int, cells: int, seed: int) -> Case:
    devices = inventory(gpus)
    jobs = mix(cells, devices, seed)
    begun = time.process_time()
    ours = simulate(jobs, devices)
    planning = time.process_time() - begun
    greedy = simulate(jobs, devices, first_fit).makespan_s
    single = simulate(jobs, devices, one_by_one).makespan_s
    bound = lower_bound(jobs, devices)
    return Case(gpus, cells, len(jobs), bound, ours.makespan_s, greedy, single, planning, ours.rule)


def main(mixes: int) -> int:
    table = Table(title=f"worst of {mixes} per line; ratios to the lower bound")
    for column in (
        "GPUs",
        "cells",
        "jobs",
        "bound h",
        "ours h",
        "ours",
        "first fit",
        "one by one",
        "planning CPU s",
        "rule",
    ):
        table.add_column(column, justify="left" if column == "rule" else "right")
    worst = 0.0
    missed = total = 0
    for gpus in GPUS:
        for cells in CELLS:
            cases = [measure(gpus, cells, seed) for seed in range(mixes)]
            case = max(cases, key=lambda c: c.ratio)
            worst = max(worst, case.ratio)
            total += len(cases)
            missed += sum(c.ratio > ALLOWED for c in cases)
            slowest = max(c.planning_s for c in cases)
            print(f"{gpus} GPUs, {cells} cells: {case.ratio:.3f}", file=sys.stderr, flush=True)
            row = (case.gpus, case.cells, case.jobs, f"{case.bound_s / 3600:.2f}", f"{case.ours_s / 3600:.2f}")
            ratios = (s / case.bound_s for s in (case.ours_s, case.greedy_s, case.one_by_one_s))
            table.add_row(*map(str, row), *(f"{r:.3f}" for r in ratios), f"{slowest:.2f}", case.rule)
        table.add_section()
    console = Console()
    console.print(table)
    console.print(
        f"worst ratio {worst:.3f}; {missed} of {total} cases above {ALLOWED:.2f}, the limit for sorted orders alone "
        "(1.10 with the random search that is gone)"
    )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if sys.argv[1:] else 1))
