"""Measure the time of judging 36 cells × 1,000 prompts × 100 steps with 20,000 permutations, on one core:

python -m benchmarks.judging [CELLS] [PROMPTS]

Or of a whole simulated night of the profile ``nightly``, written into a folder and read from there:

python -m benchmarks.judging night [FOLDER]
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.memory import peak_mib
from harness.history.folder import HistoryWriter, load_history, write_run
from harness.history.records import RESCORE
from harness.judging.checks.registry import judge
from harness.stats.multiplicity import holm, stage_alpha
from harness.stats.paired import differences, label_swap
from harness.util.paths import REPOSITORY
from harness.workload.prepare import prepare
from tests.support.nightly import Nights
from tests.support.simulate import Scene, simulate, to_arms

_BASELINES = "baselines.pickle"
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


def write_night(folder: Path) -> None:
    """Write a night without any change, and what it is judged against."""
    simulated = Nights(prepare("nightly", (), planned=True)).night(1)
    with HistoryWriter(folder) as writer:
        for number, o in enumerate(simulated.night.observations):
            if o.scenario == RESCORE:
                # The simulated scores share their exchange, of which a record has each once.
                first = o.legs[0].model_copy(update={"request_id": f"score-{number}"})
                o = o.model_copy(update={"legs": (first,)})
            writer.append(o)
    write_run(folder, simulated.night.run)
    (folder / _BASELINES).write_bytes(pickle.dumps(simulated.baselines))


def judge_night(folder: Path) -> None:
    """Load and judge it, and print CPU time and peak memory."""
    baselines = pickle.loads((folder / _BASELINES).read_bytes())
    begun = time.process_time()
    history = load_history(folder, unread=True)
    loaded = time.process_time()
    judgement = judge(history, baselines)
    ended = time.process_time()
    places = {(c.cell, c.scenario) for c in judgement.cells}
    print(
        f"{len(history.observations)} answers and scores in {len(places)} scenarios of cells: {judgement.verdict}; "
        f"load {loaded - begun:.1f} s, judge {ended - loaded:.1f} s, {peak_mib():.0f} MiB"
    )


def night(folder: Path) -> None:
    """Write it, unless it is there, and judge it in a process of its own."""
    if not (folder / _BASELINES).exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_night(folder)
    subprocess.run(
        [sys.executable, "-m", "benchmarks.judging", "--judge", str(folder.resolve())], cwd=REPOSITORY, check=True
    )


if __name__ == "__main__":
    given = sys.argv[1:]
    if given[:1] == ["night"]:
        night(Path(given[1] if len(given) > 1 else tempfile.mkdtemp(prefix="harness-night-")))
        sys.exit()
    if given[:1] == ["--judge"]:
        judge_night(Path(given[1]))
        sys.exit()
    numbers = [int(a) for a in sys.argv[1:3]]
    main(*(numbers + [36, 1000][len(numbers) :]))
