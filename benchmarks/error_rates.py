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
from tests.statistics.nights import CELLS, FAMILY_ALPHA, FAULTY, OURS, Share, false_alarms, five_percent, power
from tests.support.simulate import Scene

PROMPTS = {0.1: 68, 0.5: 362, 1.0: 732}
REGIMES = {
    "greedy, 10 % of requests diverge": Scene(68, diverging=0.1),
    "greedy, 50 %": Scene(362, diverging=0.5),
    "greedy, all": Scene(732, diverging=1.0),
    "independent, design effect 5": Scene(4004, shared_prompts=False),
}


def common_gate(scene: Scene, times: int, seed: int) -> Share:
    generator = np.random.default_rng(seed)
    return Share(sum(five_percent(scene, generator) for _ in range(times)), times)


def main(runs: int) -> None:
    begun = time.time()
    lines = [
        "# Measured error rates",
        "",
        "Simulated runs of 36 cells (`tests/support/simulate.py`: each prompt has its own acceptance, 107 steps on",
        "average, the second run equal to the first up to where a request diverges). Shares with their 99 %",
        "Clopper-Pearson intervals. The ±5 % gate is the one in common use: a cell fails when any pooled rate moves by",
        f"more than 5 % of itself. Written by `python -m benchmarks.error_rates {runs}`; `tests/statistics` holds",
        "the bounds on every change, and simulates whole runs from observations to verdicts (48 prompts, near ties",
        "at 0, 1 and 10 % of tokens): 0, 0 and 2 % of runs fail in the first stage.",
        "",
        "## Runs without any change",
        "",
        f"Target: at most {100 * stage_alpha(FAMILY_ALPHA, 2):.2g} % of runs with a failure after the first stage, "
        f"at most {100 * FAMILY_ALPHA:g} % after both.",
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
        "| regime | prompts | detected by our gate | by ±5 % with as many prompts | by ±5 % with 80 |",
        "|---|---|---|---|---|",
    ]
    for name, scene in REGIMES.items():
        worse = scene._replace(drop=0.01)
        times = 40 if scene.prompts > 2000 else 300
        ours = power(worse, CELLS, times, 3)
        lines.append(
            f"| {name} | {scene.prompts} | {ours} | {common_gate(worse, times, 4)} | "
            f"{common_gate(worse._replace(prompts=80), 300, 5)} |"
        )
        print(lines[-1], flush=True)
    lines += [
        "",
        "## Faults injected into the statistics",
        "",
        "Runs of 36 noisy cells (60 prompts, design effect 10, independent samples), and one cell worse by a point",
        "among 362 prompts.",
        "",
        "| gate | runs that fail without a change (first stage) | change of a point detected |",
        "|---|---|---|",
    ]
    noisy = [Scene(60, design_effect=10.0, shared_prompts=False, unequal=0.4)] * CELLS
    for name, judge in {"ours": OURS, **FAULTY}.items():
        first, _ = false_alarms(noisy, max(60, runs // 4), 8, judge)
        seen = power(Scene(362, diverging=0.5, drop=0.01), CELLS, 100, 8, judge)
        lines.append(f"| {name} | {first} | {seen} |")
        print(lines[-1], flush=True)
    (REPOSITORY / "docs" / "error-rates.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{time.time() - begun:.0f} s")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 400)
