"""Write docs/evidence/error-rates.md: python -m benchmarks.error_rates [RUNS], or its last section alone, on states of
real models: python -m benchmarks.error_rates states

Simulates runs of 36 cells without any change, and with one cell that is a point worse, and judges them with our gate,
with our gate with a fault injected into it, and with the common ±5 % gate.
"""

from __future__ import annotations

import sys
import time

import numpy as np

from harness.judging.power import sensitivity
from harness.stats.multiplicity import stage_alpha
from harness.util.paths import REPOSITORY
from harness.workload.prepare import prepare
from tests.statistics.attack import pooled_alarms
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


_STATES = "## States of real models"
_RIGHT, _DAMAGED = 10_000, 300


def states() -> None:
    """Write the section on scenarios in the normal tier: the tests of wrong answers, from counts alone."""
    promised = sensitivity(prepare("nightly", (), planned=True))
    cells, sample = promised.pooled["pressure"]
    copies, level = round(sample.copies), promised.pooled_alpha
    row = next(r for r in promised.rows if r.scenario == "pressure")
    lines = [
        _STATES,
        "",
        f"A scenario of `nightly`: {sample.prompts} requests of {len(cells)} cells, made of {sample.units} texts,",
        "against the same prompts cold, from the counts of wrong answers. On both sides rounding makes a share of",
        "answers count as wrong, in some texts more often than in others. Whole nights of these cells are in",
        "`tests/statistics/test_states.py`. Written by `python -m benchmarks.error_rates states`.",
        "",
        "| all cells together: wrong on either side | damaged in the state | nights | failed |",
        "|---|---|---|---|",
    ]
    nights = [(share, 0, _RIGHT) for share in (0.0, 0.005, 0.05)]
    nights += [(share, one_in, _DAMAGED) for one_in in (20, 30, 41, 80) for share in (0.0, 0.005)]
    for share, one_in, count in nights:
        damage = 1 / one_in if one_in else 0.0
        found = pooled_alarms(count, share, sample.units, copies, 1, damage, level)
        lines.append(f"| {100 * share:g} % | {f'1 in {one_in}' if one_in else 'none'} | {count} | {found} |")
        print(lines[-1], flush=True)
    lines += [
        "",
        f"At most {100 * level:g} % of nights without damage may fail. One cell alone, {row.sample.prompts} requests,",
        f"first stage at {promised.alpha:.2g}:",
        "",
        "| damaged in the state | nights | failed |",
        "|---|---|---|",
    ]
    for share in (0.0, 0.1, promised.in_answers(row).share, 0.5):
        count = _DAMAGED if share else _RIGHT
        each = round(row.sample.copies)
        found = pooled_alarms(count, 0.005, row.sample.units, each, 2, share, promised.alpha)
        lines.append(f"| {100 * share:.0f} % | {count} | {found} |")
        print(lines[-1], flush=True)
    path = REPOSITORY / "docs" / "evidence" / "error-rates.md"
    kept = path.read_text(encoding="utf-8").partition(_STATES)[0]
    path.write_text(kept.rstrip() + "\n\n" + "\n".join(lines) + "\n", encoding="utf-8")


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
    (REPOSITORY / "docs" / "evidence" / "error-rates.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    states()
    print(f"{time.time() - begun:.0f} s")


if __name__ == "__main__":
    if sys.argv[1:] == ["states"]:
        states()
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 400)
