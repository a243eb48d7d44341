"""Run the same cells repeatedly on the same engines; every repetition has its own run folder."""

from __future__ import annotations

from pathlib import Path

from harness.engines.environment import EngineEnvironment
from harness.history.folder import History
from harness.history.layout import repetition
from harness.runner.groups import Runner
from harness.runner.options import DEFAULTS, RunOptions
from harness.runner.run import prepared_recorder
from harness.util.progress import Reporter
from harness.workload.cells import in_other_crowds
from harness.workload.prepare import Prepared


def record_repetitions(
    prepared: Prepared,
    environment: EngineEnvironment,
    folder: Path,
    repetitions: int,
    reporter: Reporter,
    rounding: bool | None = None,
    options: RunOptions = DEFAULTS,
) -> tuple[History, ...]:
    """Start each group of engines once, repeat its cells, and return the recorded repetitions; ``Runner`` says what an
    interruption leaves of them. ``rounding`` says whether the plain engine shows in the first one how it rounds; by
    default, all do where the tier follows from that."""
    first, *again = (
        prepared_recorder(
            _repeated(prepared, i),
            environment,
            folder / repetition(i),
            options.mutants,
            run_id=f"{folder.name}-{i:02d}",
            rounding=rounding if i == 1 or rounding is False else None,
        )
        for i in range(1, repetitions + 1)
    )
    return Runner(prepared, environment, first, reporter, options, again).run_all()


def _repeated(prepared: Prepared, number: int) -> Prepared:
    """Return what a repetition asks: the same, the first one as planned and others in other crowds."""
    if number == 1:
        return prepared
    works = (in_other_crowds(w, prepared.profile.part(w.cell.variant), number) for w in prepared.works)
    return prepared._replace(works=tuple(works))
