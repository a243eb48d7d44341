"""The same cells again and again on the same engines; every repetition is a run folder of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from harness.engine.environment import EngineEnvironment
from harness.engine.topology import EngineGroupSession
from harness.errors import InfrastructureError
from harness.history import History
from harness.matrix import EngineGroup, start_expected_s
from harness.operations import Prepared, prepared_recorder
from harness.progress import Reporter
from harness.recorder import Recorder
from harness.runner import rescore, run_cell


class Repetitions(NamedTuple):
    histories: tuple[History, ...]
    interrupted: bool


def record_repetitions(
    prepared: Prepared, environment: EngineEnvironment, folder: Path, repetitions: int, reporter: Reporter
) -> Repetitions:
    """Start each group of engines once and repeat its cells.

    KeyboardInterrupt ends the engines; the cells that are not complete are UNKNOWN then.
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
                recorder.engines(session.records())
                reporter.line(f"{group.id}: repetition {number} of {len(recorders)}")
                for work in works:
                    run_cell(session, work, recorder, reporter)
                if recorder.record.rescore and group.rescores:
                    rescore(session, recorder, reporter)
    except InfrastructureError as error:
        reporter.line(f"{group.id}: UNKNOWN: {error}")
        for recorder in recorders:
            recorder.fail_pending([c.id for c in group.cells], "failed", str(error))
