"""``harness soak``."""

from __future__ import annotations

from typing import Annotated

import typer

from harness.cli import completion
from harness.cli.options import (
    EngineArgOption,
    EngineEnvOption,
    OutOption,
    ProfileOption,
    PythonOption,
    flags_for,
    make_console,
)


def soak_command(
    profile: ProfileOption = "cpu",
    cell: Annotated[str, typer.Option("--cell", "-c", autocompletion=completion.cells, help="The cell.")] = "pd-eagle3",
    minutes: Annotated[
        float,
        typer.Option("--minutes", metavar="N", min=0.1, help="Minutes under load; a round that has begun is finished."),
    ] = 60,
    concurrency: Annotated[
        int, typer.Option("--concurrency", metavar="N", min=1, max=256, help="Number of concurrent requests.")
    ] = 4,
    out: OutOption = None,
    engine_python: PythonOption = None,
    engine_arg: EngineArgOption = None,
    engine_env: EngineEnvOption = None,
) -> None:
    """Keep one cell under load for a long time and check that every answer is right and nothing grows.

    Sends the cold prompts in rounds, judges every answer, and samples memory, file descriptors, threads and shared
    memory of the harness and the engines (docs/soak.md). Exit codes: 0 flat and right; 1 a wrong answer or a leak; 2
    undecided, e.g. after a soak of less than 25 minutes.
    """
    from harness.commands.soak.report import print_soak
    from harness.commands.soak.run import Wanted, prepare_soak, soak
    from harness.util.paths import DEFAULT_OUT

    prepared = prepare_soak(profile, cell)
    flags = flags_for(prepared, engine_arg, engine_env)
    ended = soak(prepared, Wanted(minutes, concurrency), out or DEFAULT_OUT, engine_python, flags)
    console = make_console()
    print_soak(ended.result, console)
    words = f"no report: {ended.unwritten}" if ended.unwritten else f"report: {ended.folder / 'soak.html'}"
    console.print(words, soft_wrap=True, highlight=False, markup=False)
    raise typer.Exit(ended.exit_code)
