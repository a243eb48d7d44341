"""Run the same cells repeatedly on the same engines; every repetition has its own run folder."""

from __future__ import annotations

from pathlib import Path

from harness.engines.environment import EngineEnvironment
from harness.history.folder import History
from harness.runner.groups import Runner
from harness.runner.run import prepared_recorder
from harness.util.progress import Reporter
from harness.workload.prepare import Prepared


def record_repetitions(
    prepared: Prepared,
    environment: EngineEnvironment,
    folder: Path,
    repetitions: int,
    reporter: Reporter,
    rounding: bool = False,
) -> tuple[History, ...]:
    """Start each group of engines once, repeat its cells, and return the recorded repetitions; ``Runner`` says what an
    interruption leaves of them. With ``rounding``, the plain engine shows in the first one how it rounds."""
    first, *again = (
        prepared_recorder(
            prepared,
            environment,
            folder / f"repetition-{i:02d}",
            run_id=f"{folder.name}-{i:02d}",
            rounding=(rounding and i == 1) or None,
        )
        for i in range(1, repetitions + 1)
    )
    return Runner(prepared, environment, first, reporter, again=again).run_all()
