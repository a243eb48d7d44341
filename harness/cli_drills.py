"""Command line of the fault drills: ``harness drill``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from harness.errors import UsageError


def drill_command(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[DRILL]...", help="Ids or groups, as shell patterns. Default: all.", show_default=False
        ),
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="Print the catalogue instead; starts nothing.")] = False,
    profile: Annotated[
        str, typer.Option("--profile", "-p", help="A shipped profile or the path of a YAML file.")
    ] = "cpu",
    recorded: Annotated[
        list[Path] | None,
        typer.Option("--from", metavar="DRILLS.JSON", help="Print earlier results instead. Repeatable: joins sets."),
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="With --from: print the table as Markdown, for docs/drills.md.")
    ] = False,
    moments: Annotated[
        int,
        typer.Option("--moments", min=0, max=1000, help="How often the harness gets TERM or KILL at a random moment."),
    ] = 20,
    seed: Annotated[int, typer.Option("--seed", help="Of the random moments.")] = 1,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for runs. Default: reports/ of the project.")
    ] = None,
    engine_python: Annotated[
        str | None, typer.Option("--engine-python", help="Interpreter that has the vllm. Default: this one.")
    ] = None,
) -> None:
    """Break real engines, their answers, their links and the harness itself, and see that no run is green, hangs, loses
    data or leaves processes behind.

    Each drill states its verdict and reason beforehand. Exit code 0 only if all are survived; 1 on a false green, a
    wrong reason, a loss or a left-over; 2 when drills could not be performed.
    """
    from harness.drills.catalogue import select
    from harness.drills.run import drill, load_joined
    from harness.operations import DEFAULT_OUT
    from harness.report.drills import print_catalogue, print_drills, render_markdown

    console = Console(width=None if sys.stdout.isatty() else 160)
    chosen = select(names or [], moments)
    if listed:
        print_catalogue(chosen, console)
        return
    if markdown and not recorded:
        raise UsageError("--markdown: expected --from with it, found none; results are in drills.md of their folder")
    if recorded:
        found = load_joined(recorded)
        if markdown:
            print(render_markdown(found), end="")
        else:
            print_drills(found, console)
        raise typer.Exit(found.exit_code)
    found, folder = drill(profile, chosen, out or DEFAULT_OUT, engine_python, seed)
    print_drills(found, console)
    console.print(f"results: {folder / 'drills.json'}", soft_wrap=True, highlight=False)
    raise typer.Exit(found.exit_code)
