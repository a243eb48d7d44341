"""``harness plan`` and ``harness doctor``: what a profile needs, and whether this machine has it."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from harness.cli.options import (
    CellOption,
    ProfileOption,
    PythonOption,
    QuickOption,
    ScenarioOption,
    make_console,
    quick_form,
)
from harness.errors import EXIT_UNKNOWN


def plan_command(
    profile: ProfileOption = "cpu",
    cell: CellOption = None,
    scenario: ScenarioOption = None,
    quick: QuickOption = False,
    effect: Annotated[
        float,
        typer.Option("--effect", min=0.01, max=100, help="Effect size in percentage points to plan the prompts for."),
    ] = 1.0,
    full: Annotated[
        bool,
        typer.Option("--full", help="Print the profile instead, with everything it inherits and all defaults."),
    ] = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of profiles instead, for editors.")
    ] = False,
) -> None:
    """Show cells, engines, prompts, models, expected time and detectable effects, without starting anything.

    Neither models nor prompts need to be present: where a prompt set is not built yet, its recipe says how many."""
    from harness.commands.plan import print_models, print_plan
    from harness.profiles.schema import full_text, schema_text
    from harness.workload.prepare import prepare

    profile = quick_form(profile) if quick else profile
    if schema or full:
        print(schema_text() if schema else full_text(profile), end="")
        return
    print_plan(prepare(profile, cell or [], scenario or [], planned=True), effect, make_console())
    print_models(profile, make_console())


def doctor_command(engine_python: PythonOption = None, profile: ProfileOption = "cpu") -> None:
    """Show what this machine can run, and what is missing."""
    from harness.commands.doctor.examine import examine

    findings = examine(engine_python or sys.executable, profile)
    table = Table(title="doctor", title_justify="left")
    for column in ("what", "found", "", "what to do"):
        table.add_column(column, overflow="fold")
    for item in findings:
        mark = "[green]✔[/green]" if item.ok else "[red]✘[/red]" if item.needed else "[yellow]–[/yellow]"
        table.add_row(item.what, escape(item.found), mark, "" if item.ok else escape(item.advice))
    make_console().print(table)
    broken = [i for i in findings if i.needed and not i.ok]
    if broken:
        typer.echo(f"profile {profile} cannot run here: {', '.join(i.what for i in broken)}")
        raise typer.Exit(EXIT_UNKNOWN)
    typer.echo(f"profile {profile} can run here")
