"""``harness baseline record``: answers of single engines become baselines."""

from __future__ import annotations

import sys
from pathlib import Path

from harness.baselines.build import Recorded, record_from
from harness.engines.environment import inspect_environment
from harness.engines.flags import NO_FLAGS, EngineFlags
from harness.runner.repetitions import record_repetitions
from harness.runner.run import new_folder, point_latest
from harness.util.progress import Reporter
from harness.workload.prepare import Prepared


def record_references(
    prepared: Prepared,
    out: Path,
    engine_python: str | None,
    reporter: Reporter,
    repeat: int,
    folder: Path,
    flags: EngineFlags = NO_FLAGS,
) -> list[Recorded]:
    """Send every prompt to single engines ``repeat`` times and write the answers as baselines.

    The second repetition measures by how much equal runs differ. Raises UsageError, before anything is written, when
    something is missing or wrong.
    """
    environment = inspect_environment(engine_python or sys.executable).model_copy(update={"flags": flags})
    runs = new_folder(out, prepared.profile, "baseline")
    done = record_repetitions(prepared, environment, runs, repeat, reporter)
    point_latest(runs / "repetition-01", "latest")
    return record_from(done.histories[0], done.histories[1] if repeat > 1 else None, prepared.sets, folder)
