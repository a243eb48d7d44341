"""Write docs/error-rates.md: python -m benchmarks.error_rates [RUNS]

Simulates runs of 36 cells without any change, and with one cell that is a point worse, and judges them with our gate,
with our gate with a fault injected into it, and with the common ±5 % gate.
"""

from __future__ import annotations

import sys
import time

import numpy as np

from harness.stats.multiplicity import stage_alpha
from harness.util.paths import REPOSITORY
from tests.statistics.nights import (
    CELLS,
    FAMILY_ALPHA,
    FAULTY,
    OURS,
    Share,
    false_alarms,
    five_percent,
    planned,
    power,
)
from tests.support.simulate import Scene

REGIMES = {
    "greedy, 10 % of requests diverge": Scene(0, diverging=0.1),
    "greedy, 50 %": Scene(0, diverging=0.5),
    "greedy, all": Scene(0, diverging=1.0),
    "greedy, all, two strata": Scene(0, diverging=1.0, strata=("aligned", "middle")),
    "independent, design effect 5": Scene(0, shared_prompts=False),
}
HALF = REGIMES["greedy, 50 %"]


def common_gate(scene: Scene, times: int, seed: int) -> Share:
    generator = np.random.default_rng(seed)
    return Share(sum(five_percent(scene, generator) for _ in range(times)), times)


def main(runs: int) -> None:
    begun = time.time()
    lines = [
        "# Measured error rates",
        "",
        "Simulated runs of 36 cells (`tests/support/simulate.py`: each prompt has its own acceptance; a request ends",
        "with its tokens, after 107 steps on average, so the sides take different numbers of steps; the second run",
        "equals the first up to where a request diverges). Shares with their 99 % Clopper-Pearson intervals. The ±5 %",
        "gate is the one in common use: a cell fails when any pooled rate moves by more than 5 % of itself. Written by",
        f"`python -m benchmarks.error_rates {runs}`; `tests/statistics` holds the bounds on every change. What a whole",
        "night notices, from answers to verdicts: [detection.md](detection.md).",
        "",
        "## Runs without any change",
        "",
        f"Target: at most {100 * stage_alpha(FAMILY_ALPHA, 2):.2g} % of runs with a failure after the first stage, "
        f"at most {100 * FAMILY_ALPHA:g} % after both: these tests have half of `judging.family_alpha`.",
        "",
        "| cells | runs | failed after the first stage | failed after both | ±5 % gate, 80 prompts, run of 36 |",
        "|---|---|---|---|---|",
    ]
    for deff in (2.0, 5.0, 10.0):
        for share in (0.0, 0.1, 0.5, 1.0):
            scene = Scene(60, design_effect=deff, diverging=share, unequal=0.4, strata=("aligned", "middle"))
            first, both = false_alarms([scene] * CELLS, runs, seed=1)
            one = common_gate(scene._replace(prompts=80), 400, 2)
            failing = 1 - (1 - one.value) ** CELLS
            name = f"design effect {deff:g}, {100 * share:.0f} % diverging"
            lines.append(f"| {name} | {runs} | {first} | {both} | {100 * failing:.3g} % |")
            print(lines[-1], flush=True)
    lines += [
        "",
        "## One cell worse by one point at position 0",
        "",
        "With as many prompts as `harness plan` gives for one point with a power of 0.9 over both stages.",
        "",
        "| regime | prompts | detected by our gate | by ±5 % with as many prompts | by ±5 % with 80 |",
        "|---|---|---|---|---|",
    ]
    for name, scene in REGIMES.items():
        worse = scene._replace(prompts=planned(scene), drop=0.01)
        times = 100 if worse.prompts > 2000 else max(300, runs)
        ours = power(worse, CELLS, times, 3)
        lines.append(
            f"| {name} | {worse.prompts} | {ours} | {common_gate(worse, times, 4)} | "
            f"{common_gate(worse._replace(prompts=80), 300, 5)} |"
        )
        print(lines[-1], flush=True)
    lines += [
        "",
        "## Faults injected into the statistics",
        "",
        "Runs of 36 noisy cells (60 prompts, design effect 10, independent samples), and one cell worse by a point",
        f"among {planned(HALF)} prompts, half of which diverge.",
        "",
        "| gate | runs that fail without a change (first stage) | change of a point detected |",
        "|---|---|---|",
    ]
    noisy = [Scene(60, design_effect=10.0, shared_prompts=False, unequal=0.4)] * CELLS
    for name, judge in {"ours": OURS, **FAULTY}.items():
        first, _ = false_alarms(noisy, max(60, runs // 4), 8, judge)
        seen = power(HALF._replace(prompts=planned(HALF), drop=0.01), CELLS, 100, 8, judge)
        lines.append(f"| {name} | {first} | {seen} |")
        print(lines[-1], flush=True)
    (REPOSITORY / "docs" / "error-rates.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{time.time() - begun:.0f} s")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 400)
