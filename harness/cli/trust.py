"""``harness selftest``, ``aa`` and ``soak``: evidence that faults are caught, that equal runs raise no alarm, and that
nothing grows under load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from harness.cli import completion
from harness.cli.options import (
    EngineOptions,
    FaultsArgument,
    OnlyMutantOption,
    OutOption,
    ProfileOption,
    PythonOption,
    Selection,
    make_console,
    refuse_ignored,
)
from harness.util.paths import DEFAULT_OUT


def selftest_command(
    fault: FaultsArgument = None,
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
            metavar="METHOD",
            help="Try the faults that this method can show with it. Default: each with one method, mostly EAGLE3.",
        ),
    ] = None,
    profile: ProfileOption = "cpu",
    out: OutOption = DEFAULT_OUT,
    engine_python: PythonOption = None,
) -> None:
    """Inject faults into real engines, one at a time, and check that each is caught for the right reason.

    The exit code is 0 only if every fault is caught for its own reason and every control passes.
    """
    from harness.lab.selftest.report import print_selftest
    from harness.lab.selftest.run import self_test

    result, folder = self_test(profile, [*(fault or []), *(mutant or [])], quick, complete, method, out, engine_python)
    console = make_console()
    print_selftest(result, console)
    console.print(f"report: {folder / 'report.html'}", soft_wrap=True, highlight=False)
    raise typer.Exit(result.exit_code)


def aa_command(
    context: typer.Context,
    *,
    repeat: Annotated[
        int, typer.Option("--repeat", "-n", metavar="N", min=2, max=10_000, help="Number of times each cell is run.")
    ] = 2,
    of: Selection,
    prompts: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Number of cold prompts per stratum. Default: all of them.")
    ] = None,
    engines: EngineOptions,
    recorded: Annotated[
        Path | None,
        typer.Option("--from", metavar="AA_DIR", help="Judge a recorded A/A run again instead of starting engines."),
    ] = None,
) -> None:
    """Run the same cells repeatedly and compare them with each other: every finding is a false alarm.

    The exit code is 0 only if no repetition had a finding in any cell and scenario.
    """
    from harness.lab.aa import judge_again, print_repeat, repeat_cells, write_repeat

    if recorded is not None:
        refuse_ignored(context, ("recorded",), "--from judges everything that was recorded and starts no engines")
        result, folder = judge_again(recorded), recorded
        write_repeat(result, folder)
    else:
        started = (engines.out, engines.engine_python, engines.flags())
        result, folder = repeat_cells(*of.names, prompts, repeat, *started)
    console = make_console()
    print_repeat(result, console)
    console.print(f"counts: {folder / 'aa.json'}", soft_wrap=True, highlight=False)
    raise typer.Exit(result.exit_code)


def soak_command(
    *,
    profile: ProfileOption = "cpu",
    cell: Annotated[str, typer.Option("--cell", "-c", autocompletion=completion.cells, help="The cell.")] = "pd-eagle3",
    minutes: Annotated[
        float,
        typer.Option(
            metavar="N",
            min=0.1,
            max=10_080,
            help="Minutes under load, a week at most; a round that has begun is finished.",
        ),
    ] = 60,
    concurrency: Annotated[int, typer.Option(metavar="N", min=1, max=256, help="Number of concurrent requests.")] = 4,
    engines: EngineOptions,
) -> None:
    """Keep one cell under load for a long time and check that every answer is right and nothing grows.

    Sends the cold prompts in rounds, judges every answer, and samples memory, file descriptors, threads and shared
    memory of the harness and the engines (docs/evidence/soak.md). Exit codes: 0 flat and right; 1 a wrong answer or a
    leak; 2 undecided, e.g. after a soak of less than 25 minutes.
    """
    from harness.lab.soak.report import print_soak
    from harness.lab.soak.run import SoakOptions, prepare_soak, soak

    prepared = prepare_soak(profile, cell)
    flags = engines.flags_for(prepared)
    ended = soak(prepared, SoakOptions(minutes, concurrency), engines.out, engines.engine_python, flags)
    console = make_console()
    print_soak(ended.result, console)
    words = f"no report: {ended.unwritten}" if ended.unwritten else f"report: {ended.folder / 'soak.html'}"
    console.print(words, soft_wrap=True, highlight=False, markup=False)
    raise typer.Exit(ended.exit_code)
