"""``harness selftest`` and ``harness aa``: evidence that faults are caught and that equal runs raise no alarm."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from harness.cli.options import (
    CellOption,
    EngineArgOption,
    EngineEnvOption,
    OnlyMutantOption,
    OutOption,
    ProfileOption,
    PythonOption,
    ScenarioOption,
    make_console,
)


def selftest_command(
    mutant: OnlyMutantOption = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Try only the five historic defects and the controls.")
    ] = False,
    complete: Annotated[
        bool, typer.Option("--all", help="Try those as well that restart an engine or need engines of another layout.")
    ] = False,
    method: Annotated[
        str | None,
        typer.Option(
            "--method",
            metavar="METHOD",
            help="Try the faults that this method can show with it. Default: each with one method, mostly EAGLE3.",
        ),
    ] = None,
    profile: ProfileOption = "cpu",
    out: OutOption = None,
    engine_python: PythonOption = None,
) -> None:
    """Inject faults into real engines, one at a time, and check that each is caught for the right reason.

    The exit code is 0 only if every fault is caught for its own reason and every control passes.
    """
    from harness.commands.selftest.report import print_selftest
    from harness.commands.selftest.run import self_test
    from harness.util.paths import DEFAULT_OUT

    result, folder = self_test(profile, mutant or [], quick, complete, method, out or DEFAULT_OUT, engine_python)
    console = make_console()
    print_selftest(result, console)
    console.print(f"report: {folder / 'report.html'}", soft_wrap=True, highlight=False)
    raise typer.Exit(result.exit_code)


def aa_command(
    repeat: Annotated[
        int, typer.Option("--repeat", "-n", metavar="N", min=2, help="Number of times each cell is run.")
    ] = 2,
    profile: ProfileOption = "cpu",
    cell: CellOption = None,
    scenario: ScenarioOption = None,
    prompts: Annotated[
        int | None,
        typer.Option("--prompts", metavar="N", min=1, help="Number of cold prompts per stratum. Default: all of them."),
    ] = None,
    out: OutOption = None,
    engine_python: PythonOption = None,
    engine_arg: EngineArgOption = None,
    engine_env: EngineEnvOption = None,
    recorded: Annotated[
        Path | None,
        typer.Option("--from", metavar="AA_DIR", help="Judge a recorded A/A run again instead of starting engines."),
    ] = None,
) -> None:
    """Run the same cells repeatedly and compare them with each other: every finding is a false alarm.

    The exit code is 0 only if no repetition had a finding in any cell and scenario.
    """
    from harness.commands.aa.report import print_repeat, write_repeat
    from harness.commands.aa.run import judge_again, repeat_cells
    from harness.engines.flags import parse_flags
    from harness.util.paths import DEFAULT_OUT

    if recorded is not None:
        result, folder = judge_again(recorded), recorded
        write_repeat(result, folder)
    else:
        result, folder = repeat_cells(
            profile,
            cell or [],
            scenario or [],
            prompts,
            repeat,
            out or DEFAULT_OUT,
            engine_python,
            parse_flags(engine_arg or [], engine_env or []),
        )
    console = make_console()
    print_repeat(result, console)
    console.print(f"counts: {folder / 'aa.json'}", soft_wrap=True, highlight=False)
    raise typer.Exit(result.exit_code)
