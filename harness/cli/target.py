"""What ``harness repro`` and ``harness bisect`` try: a finding of a run, or a cell with a prompt or scenario."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli import completion
from harness.cli.options import LATEST
from harness.errors import UsageError
from harness.history.layout import require_run

if TYPE_CHECKING:
    from harness.commands.repro import Target
    from harness.engines.flags import EngineFlags
    from harness.workload.prepare import Prepared

RunArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN_DIR",
        help="The run that had the finding; may be left out.",
        show_default="reports/latest",
        autocompletion=completion.runs_or_findings,
    ),
]
FindingArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="FINDING",
        help="The finding's id, or a unique prefix of it.",
        show_default=False,
        autocompletion=completion.findings,
    ),
]
CellOption = Annotated[
    str | None,
    typer.Option("--cell", "-c", autocompletion=completion.cells, help="Without a run: the cell, e.g. pd-eagle3."),
]
PromptOption = Annotated[str | None, typer.Option("--prompt", help="Without a run: the id of a prompt, or a stratum.")]
ScenarioOption = Annotated[
    str, typer.Option("--scenario", "-s", autocompletion=completion.scenarios, help="Without a run: the scenario.")
]
RateOption = Annotated[
    float | None,
    typer.Option(
        "--rate",
        metavar="SHARE",
        min=0.001,
        max=1.0,
        help="Share of attempts in which it shows, if you know it; quiet attempts must exclude it. Default: the share "
        "of requests that had it in the run, or 0.05 without one.",
    ),
]
TrustOption = Annotated[
    bool,
    typer.Option(
        "--trust-recorded-code", help="Allow trust_remote_code for the models for which the recorded profile sets it."
    ),
]


def run_and_finding(
    run_dir: str | None, finding: str | None, cell: str | None, prompt: str | None, scenario: str
) -> tuple[Path | None, str | None]:
    """Return the run and its finding to try, or twice None when a cell is given instead.

    The latest run is meant by a finding alone. Raises UsageError unless exactly one of the two ways is taken,
    and NotARunError when there is no such run.
    """
    if cell is not None:
        if run_dir is not None:
            raise UsageError(f"expected a finding of a run or --cell, found both: {run_dir} and --cell {cell}")
        if prompt is None and scenario == "cold":
            raise UsageError("--cell: expected --prompt ID or --scenario NAME with it, found neither")
        return None, None
    if run_dir is None or (finding is None and Path(run_dir).is_dir()):
        found = f"no finding of {run_dir}" if run_dir is not None else "neither"
        raise UsageError(
            f"expected [RUN_DIR] FINDING, or --cell and --prompt, found {found}; `harness check RUN_DIR --json` lists "
            "the findings of a run"
        )
    folder, wanted = (Path(run_dir), finding) if finding is not None else (LATEST, run_dir)
    require_run(folder)
    return folder, wanted


def what_to_try(
    run_dir: Path | None,
    finding: str | None,
    cell: str | None,
    prompt: str | None,
    scenario: str,
    profile: str,
    trust_code: bool,
    rate: float | None,
    flags: EngineFlags | None = None,
) -> tuple[Prepared, Target, tuple[str, ...]]:
    """Return the cell, the prompt or scenario in it, and the mutants that repro and bisect try.

    The run, finding and cell are those of ``run_and_finding``; ``rate`` replaces that of the run. Raises UsageError
    when there is no such finding or prompt, or when ``flags`` are not those of the run's engines.
    """
    from harness.commands.repro import Goal, from_names, from_run
    from harness.engines.flags import NO_FLAGS

    if run_dir is not None and finding is not None:
        prepared, target, mutants = from_run(run_dir, finding, trust_code, flags or NO_FLAGS)
    else:
        prepared, target, mutants = from_names(profile, cell or "", prompt or "", scenario)
    if rate is not None:
        target = target._replace(goal=Goal(rate, "as --rate says"))
    return prepared, target, mutants
