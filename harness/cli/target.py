"""What ``harness repro`` and ``harness bisect`` try: a finding of a run, or a cell with a prompt or scenario."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.errors import UsageError

if TYPE_CHECKING:
    from harness.commands.repro import Target
    from harness.engines.flags import EngineFlags
    from harness.workload.prepare import Prepared

CellOption = Annotated[str | None, typer.Option("--cell", "-c", help="Without a run: the cell, e.g. pd-eagle3.")]
PromptOption = Annotated[str | None, typer.Option("--prompt", help="Without a run: the id of a prompt, or a stratum.")]
ScenarioOption = Annotated[str, typer.Option("--scenario", "-s", help="Without a run: the scenario.")]
RateOption = Annotated[
    float | None,
    typer.Option(
        "--rate",
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

    ``rate`` replaces that of the run. Raises UsageError unless exactly one of a finding of a run and a cell is given,
    or when ``flags`` are not those of the run's engines.
    """
    from harness.commands.repro import Goal, from_names, from_run
    from harness.engines.flags import NO_FLAGS

    if (run_dir is None) == (cell is None) or (run_dir is None) != (finding is None):
        raise UsageError(
            "expected a run and one of its findings, or --cell and --prompt, found something else; see --help"
        )
    if run_dir is not None and finding is not None:
        prepared, target, mutants = from_run(run_dir, finding, trust_code, flags or NO_FLAGS)
    elif prompt is None and scenario == "cold":
        raise UsageError("--cell: expected --prompt ID or --scenario NAME with it, found neither")
    else:
        prepared, target, mutants = from_names(profile, cell or "", prompt or "", scenario)
    if rate is not None:
        target = target._replace(goal=Goal(rate, "as --rate says"))
    return prepared, target, mutants
