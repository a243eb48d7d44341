"""Write docs/evidence/error-rates.md: python -m benchmarks.error_rates [RUNS], or some of its sections alone: states of
real models by python -m benchmarks.error_rates states, damaged answers and drafts by python -m benchmarks.error_rates
damage [NIGHTS]

Simulates runs of 36 cells without any change, and with one cell that is a point worse, and judges them with our gate,
with our gate with a fault injected into it, and with the common ±5 % gate.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import numpy as np

from harness.judging.power import sensitivity
from harness.profiles.model import Judging
from harness.stats.multiplicity import stage_alpha
from harness.util.paths import REPOSITORY
from harness.workload.prepare import prepare
from tests.statistics.attack import alarms_of_prompts, pooled_alarms
from tests.statistics.damaged import (
    CELLS as KINDS,
)
from tests.statistics.damaged import (
    DAMAGES,
    LEVEL,
    PROMPTS,
    RIGHT,
    TEXTS,
    TOKENS,
    Damage,
    RoundedBy,
    notice,
)
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
from tests.statistics.spread import TwinRequests, far
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


_PAGE = REPOSITORY / "docs" / "evidence" / "error-rates.md"
_STATES = "## States of real models"
ROUNDINGS = tuple(RoundedBy(sd, heavy) for heavy in (False, True) for sd in (0.03, 0.06, 0.12))
NIGHTS = 50
FALSE_ALARMS = 10_000
LOST = ((0.02, 1.0), (0.05, 1.0), (0.05, 0.5), (0.1, 0.5), (0.2, 0.25))
"""Shares of the requests that lose drafts, and of the drafts that these lose."""
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
    _write_section(lines)


def _write_section(lines: Sequence[str]) -> None:
    """Write a section, which begins with its heading, in place of the one that was there, or at the end."""
    before, _, rest = _PAGE.read_text(encoding="utf-8").partition(f"{lines[0]}\n")
    _, heading, after = rest.partition("\n## ")
    text = "\n".join(lines)
    _PAGE.write_text(f"{before.rstrip()}\n\n{text}\n" + (f"\n## {after}" if heading else ""), encoding="utf-8")


def damage(nights: int) -> None:
    """Write the sections on single damaged answers, on the noise of drafts and on what the same prompts hide."""
    _damaged_answers(nights)
    _noise_of_drafts()
    _same_prompts()


def _damaged_answers(nights: int) -> None:
    lines = [
        "## Damage, before and after",
        "",
        f"Nights of one model and one drafter, {PROMPTS} prompts of {TEXTS} texts in each of {len(KINDS)} cells,",
        f"{TOKENS} tokens an answer (`tests/statistics/damaged.py`). The damage is that with which the gate of",
        "three nats was attacked: margins moved by so many nats (normal), so that a share of the tokens is wrong.",
        "*Before*: that gate, and the registered tests `rescored` and `pooled`, for drafts `acceptance-single`.",
        "*Now*: `logprob-trace`, `request-acceptance` and the noise of drafts, and the same tests. *Comes again*:",
        "a damaged answer that was named is named again when it is sent three times more (the damage is the",
        "code's, and drawn anew): then the night is a REGRESSION, else SUSPECT, unless a registered test says so:",
        "all P/D answers are one's matter. One stage; what parts from the baseline (`survival`) is not simulated.",
        "Of the requests that lose drafts, a third part from their twins. Written by",
        "`python -m benchmarks.error_rates damage`.",
        "",
        "| damage | rounding | nights | noticed before | noticed now | comes again |",
        "|---|---|---|---|---|---|",
    ]
    for what in DAMAGES:
        for rounding in (None,) if what.drafts else ROUNDINGS:
            rng = np.random.default_rng(1)
            found = [notice(rounding or ROUNDINGS[0], what, rng) for _ in range(nights)]
            shares = " | ".join(
                str(Share(sum(side), nights)) for side in zip(*((n.old, n.now, n.again) for n in found), strict=True)
            )
            lines.append(f"| {what.name} | {rounding or '–'} | {nights} | {shares} |")
            print(lines[-1], flush=True)
    lines += [
        "",
        "Nights with nothing wrong, in which each of the figures above is a false alarm. `logprob-trace` by itself may",
        f"name an answer in {100 * LEVEL:g} % of them; its limits are those of each night's own answers:",
        "",
        "| rounding | nights | noticed before | noticed now |",
        "|---|---|---|---|",
    ]
    count = -(-FALSE_ALARMS // len(ROUNDINGS))
    total = 0
    for rounding in ROUNDINGS:
        rng = np.random.default_rng(2)
        found = [notice(rounding, RIGHT, rng) for _ in range(count)]
        old, now = (Share(sum(side), count) for side in zip(*((n.old, n.now) for n in found), strict=True))
        total += now.count
        lines.append(f"| {rounding} | {count} | {old} | {now} |")
        print(lines[-1], flush=True)
    drafts, rng = Damage("nothing", drafts=True), np.random.default_rng(2)
    found = [notice(ROUNDINGS[0], drafts, rng) for _ in range(FALSE_ALARMS)]
    old, now = (Share(sum(side), FALSE_ALARMS) for side in zip(*((n.old, n.now) for n in found), strict=True))
    lines += [
        f"| all together | {count * len(ROUNDINGS)} | | {Share(total, count * len(ROUNDINGS))} |",
        f"| drafts alone | {FALSE_ALARMS} | {old} | {now} |",
    ]
    _write_section(lines)


def _noise_of_drafts() -> None:
    level = Judging(tier="normal", stages=2).stage_alpha / 20
    lines = [
        "## Noise of accepted drafts",
        "",
        "Requests beside their twins in one cell, 160 of 40 texts, 107 steps of three drafts",
        "(`tests/statistics/spread.py`): behind the token at which they part, they are other texts. Nights in",
        "which they differ by more than four times the variance that partings and equal runs explain, at the",
        f"level of the first stage of a test among 20 ({level:.2g}).",
        "",
        "| parted from their twins | of equal runs | texts | requests that lost drafts | nights | far beyond noise |",
        "|---|---|---|---|---|---|",
    ]
    rows = [(p, e, heavy, 0.0, 1.0, 2500) for p in (0.02, 0.3, 1.0) for e in (0.0, 0.3) for heavy in (False, True)]
    rows += [(p, 0.3, False, lost, of, 200) for p in (0.02, 0.3, 1.0) for lost, of in LOST]
    for parted, equal, heavy, lost, of, nights in rows:
        cell = TwinRequests(parted=parted, equal_parted=equal, heavy=heavy, jitter=0.05, lost=lost, of_drafts=of)
        found = Share(far(cell, level, nights), nights)
        which = f"{100 * lost:g} %, {100 * of:g} % of their drafts" if lost else "none"
        lines.append(
            f"| {100 * parted:g} % | {100 * equal:g} % | {'heavy tails (t3)' if heavy else 'normal'} | {which} | "
            f"{nights} | {found} |"
        )
        print(lines[-1], flush=True)
    _write_section(lines)


def _same_prompts() -> None:
    lines = [
        "## What some prompts have in all cells",
        "",
        "The pooled test of a night of 40 texts with four prompts each, on both sides of which rounding makes 0.5",
        "% of the answers count as wrong. Some prompts, each of another text, are answered wrongly in every cell,",
        "as with a defect of a length; beside it, as many answers, each wrong by chance. 200 nights each.",
        "",
        "| P/D cells | prompts | wrong answers | failed: the same prompts | failed: by chance |",
        "|---|---|---|---|---|",
    ]
    for cells in (2, 10, 68):
        for hit in (4, 8, 12, 16, 24):
            same, scattered = (alarms_of_prompts(200, cells, hit, by_chance) for by_chance in (False, True))
            lines.append(f"| {cells} | {hit} of 160 | {hit * cells} of {160 * cells} | {same} | {scattered} |")
            print(lines[-1], flush=True)
    _write_section(lines)


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
    _PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    states()
    damage(NIGHTS)
    print(f"{time.time() - begun:.0f} s")


if __name__ == "__main__":
    if sys.argv[1:] == ["states"]:
        states()
    elif sys.argv[1:2] == ["damage"]:
        damage(int(sys.argv[2]) if len(sys.argv) > 2 else NIGHTS)
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 400)
