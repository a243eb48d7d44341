"""Command line of ``harness run --resume``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.errors import UsageError

if TYPE_CHECKING:
    from harness.engine.executor import ExecutorChoice
    from harness.operations import Outcome

ResumeOption = Annotated[
    Path | None,
    typer.Option(
        "--resume",
        metavar="RUN_DIR",
        help="Go on with a run that was killed or interrupted, in its folder: only cells that are not complete are "
        "asked, from their beginning. Refused when the profile, prompts, models, versions or hardware are others.",
    ),
]
_TAKEN = ("profile", "cell", "scenario", "out", "mutant", "together")
"""Options that the run says itself."""


def resume_run(
    context: typer.Context,
    run_dir: Path,
    engine_python: str | None,
    choice: ExecutorChoice,
    base_port: int | None,
) -> Outcome:
    """Go on with a run, as ``harness run`` would have. Raises UsageError for options that the run says itself."""
    from harness.engine.executor import make_executor
    from harness.progress import Reporter
    from harness.resume import prepare_resume, resume

    _refuse(context, _TAKEN)
    left = prepare_resume(run_dir)
    chosen = make_executor(choice, list(left.history.run.mutants), base_port)
    with chosen, Reporter(left.rest.expected_s) as reporter:
        reporter.line(
            f"going on with {left.history.run.run_id}: {len(left.again)} of {len(left.history.run.cells)} cells, "
            f"{left.rest.requests} requests, about {left.rest.expected_s / 60:.0f} minutes"
        )
        return resume(left, engine_python, reporter, chosen)


def _refuse(context: typer.Context, names: Sequence[str]) -> None:
    sources = {n: context.get_parameter_source(n) for n in names}
    # typer has a click of its own, whose sources are others than click's.
    given = [n for n, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    if given:
        options = ", ".join(f"--{n}" for n in given)
        raise UsageError(f"--resume: expected no {options} with it: the run that is gone on with says it; leave it out")
