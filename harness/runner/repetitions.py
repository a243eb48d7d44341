"""Run the same cells repeatedly on the same engines; every repetition has its own run folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from harness.engines.environment import EngineEnvironment
from harness.engines.session import EngineGroupSession
from harness.errors import InfrastructureError
from harness.history.folder import History
from harness.profiles.cells import EngineGroup, start_expected_s
from harness.runner.record_cells import ask_cells
from harness.runner.recorder import Recorder
from harness.runner.run import prepared_recorder
from harness.util.progress import Reporter
from harness.workload.prepare import Prepared


class Repetitions(NamedTuple):
    """The recorded repetitions."""

    histories: tuple[History, ...]
    interrupted: bool


def record_repetitions(
    prepared: Prepared, environment: EngineEnvironment, folder: Path, repetitions: int, reporter: Reporter
) -> Repetitions:
    """Start each group of engines once and repeat its cells.

    KeyboardInterrupt ends the engines and leaves incomplete cells UNKNOWN.
    """
    recorders = [
        prepared_recorder(prepared, environment, folder / f"repetition-{i:02d}", run_id=f"{folder.name}-{i:02d}")
        for i in range(1, repetitions + 1)
    ]
    interrupted = False
    try:
        for group in prepared.plan.groups:
            _repeat(group, prepared, environment, folder, recorders, reporter)
    except KeyboardInterrupt:
        interrupted = True
        for recorder in recorders:
            recorder.interrupted()
    return Repetitions(tuple(r.finish() for r in recorders), interrupted)


def _repeat(
    group: EngineGroup,
    prepared: Prepared,
    environment: EngineEnvironment,
    folder: Path,
    recorders: Sequence[Recorder],
    reporter: Reporter,
) -> None:
    works = [w for w in prepared.works if w.cell in group.cells]
    try:
        with EngineGroupSession(
            group, prepared.profile.part(group.variant), environment, folder / "logs", progress=reporter.line
        ) as session:
            reporter.step(group.id, start_expected_s(group))
            for number, recorder in enumerate(recorders, 1):
                reporter.line(f"{group.id}: repetition {number} of {len(recorders)}")
                ask_cells(session, works, recorder, reporter)
    except InfrastructureError as error:
        reporter.line(f"{group.id}: UNKNOWN: {error}")
        for recorder in recorders:
            recorder.fail_pending(group.cell_ids, "failed", str(error))
