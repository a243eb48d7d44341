"""The command line of the fault tests: ``python -m faults``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from faults.catalogue import select
from faults.report import print_catalogue, print_drills, render_markdown
from faults.run import drill, load_joined
from harness.errors import UsageError
from harness.util.paths import DEFAULT_OUT

app = typer.Typer(
    name="faults",
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
def drill_command(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TEST]...", help="Ids or groups, as shell patterns. Default: all.", show_default=False),
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="Only print the catalogue.")] = False,
    profile: Annotated[
        str, typer.Option("--profile", "-p", help="A shipped profile or the path of a YAML file.")
    ] = "cpu",
    recorded: Annotated[
        list[Path] | None,
        typer.Option("--from", metavar="DRILLS.JSON", help="Only print earlier results. Repeat to join sets."),
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="With --from: print the table as Markdown, for docs/evidence/drills.md.")
    ] = False,
    moments: Annotated[
        int,
        typer.Option(
            "--moments", min=0, max=1000, help="Number of times the harness gets TERM or KILL at a random moment."
        ),
    ] = 20,
    seed: Annotated[int, typer.Option("--seed", help="Seed for the random moments.")] = 1,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for runs. Default: reports/ of the project.")
    ] = None,
    engine_python: Annotated[
        str | None, typer.Option("--engine-python", help="Interpreter with vllm. Default: this one.")
    ] = None,
) -> None:
    """Break real engines, their answers, their links and the harness itself, and check that no run is green, hangs,
    loses data or leaves processes behind.

    Each test states its verdict and reason beforehand. Exit code 0 only if all faults are survived; 1 on a false
    green, a wrong reason, lost data or a leak; 2 when faults could not be injected.
    """
    console = Console(width=None if sys.stdout.isatty() else 160)
    chosen = select(names or [], moments)
    if listed:
        print_catalogue(chosen, console)
        return
    if markdown and not recorded:
        raise UsageError("--markdown: expected --from, found none; new results are in drills.md of their folder")
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
