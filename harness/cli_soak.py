"""Command line of soaks: ``harness soak``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def soak_command(
    profile: Annotated[
        str, typer.Option("--profile", "-p", help="A shipped profile or the path of a YAML file.")
    ] = "cpu",
    cell: Annotated[str, typer.Option("--cell", "-c", help="The cell, e.g. pd-eagle3.")] = "pd-eagle3",
    minutes: Annotated[
        float, typer.Option("--minutes", min=0.1, help="Time under load; the round under way then is finished.")
    ] = 60,
    concurrency: Annotated[
        int, typer.Option("--concurrency", min=1, max=256, help="Requests under way at the same time.")
    ] = 4,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for runs. Default: reports/ of the project.")
    ] = None,
    engine_python: Annotated[
        str | None,
        typer.Option("--engine-python", help="Interpreter that has the vllm to be judged. Default: this one."),
    ] = None,
) -> None:
    """Keep one cell under load for a long time: every answer right, and nothing that grows.

    Sends the cold prompts in rounds, judges every answer, and samples memory, descriptors, threads and shared memory of
    the harness and the engines (docs/soak.md). Exit codes: 0 flat and right; 1 a wrong answer or a leak; 2 cannot tell,
    as after a soak of less than 25 minutes.
    """
    from harness.operations import DEFAULT_OUT
    from harness.report.soak import print_soak
    from harness.soak.run import Wanted, prepare_soak, soak

    prepared = prepare_soak(profile, cell)
    ended = soak(prepared, Wanted(minutes, concurrency), out or DEFAULT_OUT, engine_python)
    console = Console(width=None if sys.stdout.isatty() else 160)
    print_soak(ended.result, console)
    words = f"no report: {ended.unwritten}" if ended.unwritten else f"report: {ended.folder / 'soak.html'}"
    console.print(words, soft_wrap=True, highlight=False, markup=False)
    raise typer.Exit(ended.exit_code)
