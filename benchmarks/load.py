"""Peak memory and time of judging, reporting and merging a large recorded run:

    python benchmarks/load.py [CELLS] [OBSERVATIONS_PER_CELL] [FOLDER]

Writes a made-up run of so many cells (variants of four: single and P/D, with and without EAGLE3; in one variant of
fifty every tenth answer of P/D is wrong), whole and as two halves, and runs ``harness check`` on the whole and
``harness merge`` on the halves as child processes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from harness.config import load_profile
from harness.history import LINES, Observation, RunRecord, write_run
from tests.unit.builders import change_final, history, observation

CELLS = ("pd-eagle3", "single-eagle3", "pd-none", "single-none")
LENGTHS = range(40, 140)
_MIB = 1 << 20


def templates() -> dict[str, list[tuple[Observation, Observation]]]:
    """Right and wrong observations by cell, one pair per prompt length."""
    out: dict[str, list[tuple[Observation, Observation]]] = {}
    for cell in CELLS:
        for tokens in LENGTHS:
            o = observation(cell, tokens)
            assert o.final is not None and o.final.output_ids is not None
            wrong = change_final(o, output_ids=(9, *o.final.output_ids[1:]))
            out.setdefault(cell, []).append((o, wrong))
    return out


def records(cells: int) -> RunRecord:
    """Provenance of a run of so many cells, as variants of ``CELLS``."""
    base = history([observation(c) for c in CELLS]).run
    made = tuple(
        record.model_copy(update={"cell": f"{record.cell}+v{v:04d}", "group": f"{record.group}+v{v:04d}"})
        for v in range(-(-cells // len(CELLS)))
        for record in base.cells
    )[:cells]
    profile: dict[str, Any] = {**load_profile("cpu").model_dump(mode="json"), "source": "cpu"}
    profile["scenarios"] = []
    return base.model_copy(update={"cells": made, "profile": profile})


def lines(run: RunRecord, each: int) -> Iterator[str]:
    """Observations as JSON lines, cell after cell."""
    patterns = {
        cell: [tuple(json.dumps(o.model_dump(mode="json")) for o in pair) for pair in pairs]
        for cell, pairs in templates().items()
    }
    for record in run.cells:
        name, _, variant = record.cell.partition("+")
        damaged = name.startswith("pd") and int(variant[1:]) % 50 == 0
        for i in range(each):
            right, wrong = patterns[name][i % len(LENGTHS)]
            text = wrong if damaged and i % 10 == 0 else right
            text = text.replace(f'"cell": "{name}"', f'"cell": "{record.cell}"', 1)
            prompt = f"p{LENGTHS[i % len(LENGTHS)]}"
            text = text.replace(f'"prompt_id": "{prompt}"', f'"prompt_id": "{prompt}-{i:05d}"', 1)
            yield text.replace('"sequence": 0', f'"sequence": {i}', 1)


def write(folder: Path, run: RunRecord, each: int) -> None:
    """A run folder, written as it is made."""
    folder.mkdir(parents=True)
    run = run.model_copy(
        update={
            "run_id": folder.name,
            "cells": tuple(c.model_copy(update={"planned": each}) for c in run.cells),
        }
    )
    with (folder / LINES).open("w", encoding="utf-8") as stream:
        for line in lines(run, each):
            stream.write(line + "\n")
    write_run(folder, run)


def measured(name: str, arguments: Sequence[str], folder: Path) -> None:
    """Run ``harness`` and print its time, its own peak memory and how it ended."""
    begun = time.monotonic()
    with (folder / f"{name}.log").open("w") as log:
        child = subprocess.Popen([sys.executable, "-m", "harness", *arguments], stdout=log, stderr=log)
        _, status, used = os.wait4(child.pid, 0)
    seconds, peak = time.monotonic() - begun, used.ru_maxrss * 1024
    print(
        f"| {name} | {peak / _MIB:.0f} MiB | {seconds:.0f} s | {used.ru_utime + used.ru_stime:.0f} s | "
        f"{os.waitstatus_to_exitcode(status)} |",
        flush=True,
    )


def main() -> None:
    cells, each = (int(a) for a in (sys.argv[1:3] or ("1000", "1000")))
    folder = Path(sys.argv[3] if len(sys.argv) > 3 else tempfile.mkdtemp(prefix="harness-load-"))
    run = records(cells)
    half = len(run.cells) // 2 // len(CELLS) * len(CELLS)
    write(folder / "whole", run, each)
    for name, part in (("first", run.cells[:half]), ("second", run.cells[half:])):
        write(folder / name, run.model_copy(update={"cells": part}), each)
    size = (folder / "whole" / LINES).stat().st_size
    print(f"{len(run.cells)} cells × {each} observations, {size / _MIB:.0f} MiB of lines, in {folder}\n")
    print("| command | peak | time | CPU | exit |\n|---|---:|---:|---:|---:|")
    measured("check", ["check", str(folder / "whole")], folder)
    halves = [str(folder / "first"), str(folder / "second")]
    measured("merge", ["merge", *halves, "--out", str(folder / "merged")], folder)
    for path in sorted((folder / "whole").iterdir()):
        print(f"{path.name}: {path.stat().st_size / _MIB:.1f} MiB")


if __name__ == "__main__":
    main()
