"""Write docs/evidence/detection.md: python -m benchmarks.attack [NIGHTS] [RIGHT_NIGHTS] [CELL_PATTERN...]

Simulates nights of the nightly profile whose P/D answers are garbage now and then, NIGHTS for each rate, and
RIGHT_NIGHTS of a part of it with nothing wrong, and judges them. A whole night takes half a minute to a minute.
"""

from __future__ import annotations

import sys
import time

from harness.history.records import COLD
from harness.judging.power import sensitivity
from harness.profiles.model import Judging
from harness.util.paths import REPOSITORY
from harness.workload.prepare import prepare
from tests.statistics.attack import DEFECTS, attack, pooled_alarms, unchanged
from tests.support.nightly import Defect, Nights, Noise

PAIR = ("*-none+qwen35-08b", "*-mtp+qwen35-08b")
"""A part of the profile that is small enough for many nights."""
COUNTED = 10_000
LEVEL = Judging().pooled_alpha


def main(nights: int, right: int, patterns: list[str]) -> None:
    begun = time.time()
    prepared = prepare("nightly", patterns, planned=True)
    simulated = Nights(prepared, permutations=1000)
    together = sensitivity(prepared)
    requests = together.pooled[COLD].sample.prompts if COLD in together.pooled else 0
    lines = [
        "# What a night notices",
        "",
        "Simulated nights of the `nightly` profile, from answers to verdicts (`tests/support/nightly.py`): some P/D",
        "requests are answered with tokens that the plain engine dislikes by 15 nats, each by chance and by itself.",
        f"{len(prepared.works)} cells, {requests} P/D requests a night. Shares of nights with 99 % Clopper-Pearson",
        f"intervals; first stage only. Written by `python -m benchmarks.attack {nights} {right}`.",
        "",
        "| damaged P/D requests | nights | noticed by tests of single cells | by the pooled test | by checks of single "
        "answers | PASS |",
        "|---|---|---|---|---|---|",
    ]
    for rate in DEFECTS:
        found = attack(simulated, Defect(1 / rate), range(nights))
        by = " | ".join(str(found.share(what)) for what in ("cell", "pooled", "request"))
        lines.append(f"| 1 in {rate} | {nights} | {by} | {found.green} |")
        print(lines[-1], flush=True)
    lines += [
        "",
        "## Nights with nothing wrong",
        "",
        f"The cells `{'`, `'.join(PAIR)}` alone, with one stage (`judging.stages: 1`), so that a night fails at",
        "once. At most 0.1 % may fail. Such a part of the profile has too few P/D requests for the pooled test; where",
        "it passes, single answers were looked at one by one.",
        "",
        "| nights of right engines | nights | failed |",
        "|---|---|---|",
    ]
    part = prepare("nightly", PAIR, planned=True)
    noises = {"P/D rounds alike": Noise(), "P/D rounds differently": Noise(parting=0.0, pd_parting=0.5)}
    for name, noise in noises.items():
        found = unchanged(Nights(part, noise, stages=1, permutations=1000), range(right))
        lines.append(f"| {name} | {right} | {found.red} |")
        print(lines[-1], flush=True)
    lines += [
        "",
        "The pooled test by itself, from the counts of wrong answers in a whole night of 40 texts. On both sides",
        "rounding makes a share of answers count as wrong, in some texts more often than in others. At most",
        f"{100 * LEVEL:g} % may fail.",
        "",
        "| answers that count as wrong on either side | nights | failed |",
        "|---|---|---|",
    ]
    for share in (0.0, 0.0005, 0.005, 0.05):
        lines.append(f"| {100 * share:g} % | {COUNTED} | {pooled_alarms(COUNTED, share)} |")
        print(lines[-1], flush=True)
    (REPOSITORY / "docs" / "evidence" / "detection.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{time.time() - begun:.0f} s")


if __name__ == "__main__":
    given = sys.argv[1:]
    main(int(given[0]) if given else 20, int(given[1]) if len(given) > 1 else 10_000, given[2:])
