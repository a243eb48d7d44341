"""``harness plan``, ``doctor`` and ``init``: what a profile needs, whether this machine has it, and a first profile."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from harness.cli import shapes
from harness.cli.options import (
    JsonOption,
    ProfileOption,
    PythonOption,
    QuickSelection,
    make_console,
    print_json,
    refuse_ignored,
)
from harness.errors import EXIT_UNKNOWN, UsageError
from harness.util.tables import folding_table

_INSTEAD = {
    "schema": ("--schema prints the schema of all profiles", ()),
    "full": ("--full prints the profile", ("profile", "quick")),
    "commands": (
        "--commands prints the commands of engines",
        ("profile", "quick", "cell", "scenario", "engine_python", "witness_notes"),
    ),
}
"""What is printed instead of the plan, and the parameters that count for it."""


def plan_command(
    context: typer.Context,
    *,
    of: QuickSelection,
    effect: Annotated[
        float,
        typer.Option(
            metavar="POINTS", min=0.01, max=100, help="Effect size in percentage points to plan the prompts for."
        ),
    ] = 1.0,
    full: Annotated[
        bool, typer.Option("--full", help="Print the profile instead, with everything it inherits and all defaults.")
    ] = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of profiles instead, for editors.")
    ] = False,
    commands: Annotated[
        bool,
        typer.Option(
            "--commands",
            help="Print the commands that start these engines by hand instead, and a router, for `harness attach`.",
        ),
    ] = False,
    engine_python: PythonOption = None,
    witness_notes: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="With --commands: let the engines note in this folder what their KV caches hold.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show cells, engines, prompts, models, expected time and detectable effects, without starting anything.

    Neither models nor prompts need to be present: where a prompt set is not built yet, its recipe says how many.
    """
    from harness.profiles.schema import full_text, schema_text

    chosen = of.chosen()
    wanted = {"schema": schema, "full": full, "commands": commands}
    instead = next((name for name in _INSTEAD if wanted[name]), None)
    if instead is not None:
        why, counting = _INSTEAD[instead]
        refuse_ignored(context, (instead, *counting), why)
    elif engine_python is not None or witness_notes is not None:
        option = "--engine-python" if engine_python is not None else "--witness-notes"
        raise UsageError(f"{option} is for the commands of engines; add --commands, or leave it out")
    if commands:
        from harness.commands.serving_commands import environment_to_type, lines_of
        from harness.workload.prepare import prepare

        found = prepare(*chosen.names)
        environment = environment_to_type(engine_python, found.profile.engine.device)
        for line in lines_of(found, chosen.profile, environment, witness_notes):
            print(line)
        return
    if instead is not None:
        print(schema_text() if schema else full_text(chosen.profile), end="")
        return
    from harness.commands.plan import models_of_hub, print_models, print_plan
    from harness.judging.power import sensitivity
    from harness.workload.prepare import prepare

    prepared = prepare(*chosen.names, planned=True)
    if as_json:
        print_json(shapes.plan(prepared, sensitivity(prepared), effect, models_of_hub(chosen.profile)))
        return
    print_plan(prepared, effect, make_console())
    print_models(chosen.profile, make_console())


def doctor_command(
    profile: ProfileOption = "cpu", engine_python: PythonOption = None, as_json: JsonOption = False
) -> None:
    """Show what this machine can run, and what is missing. Exit code 2 when something needed is missing."""
    from harness.commands.doctor.examine import examine

    findings = examine(engine_python or sys.executable, profile)
    broken = [i for i in findings if i.needed and not i.ok]
    if as_json:
        print_json(shapes.doctor(profile, findings))
        raise typer.Exit(EXIT_UNKNOWN if broken else 0)
    table = folding_table("doctor", "what", "found", "", "what to do")
    for item in findings:
        mark = "[green]✔[/green]" if item.ok else "[red]✘[/red]" if item.needed else "[yellow]–[/yellow]"
        table.add_row(item.what, escape(item.found), mark, "" if item.ok else escape(item.advice))
    make_console().print(table)
    if broken:
        typer.echo(f"profile {profile} cannot run here: {', '.join(i.what for i in broken)}")
        raise typer.Exit(EXIT_UNKNOWN)
    typer.echo(f"profile {profile} can run here")


def init_command(
    target: Annotated[
        str, typer.Option(metavar="MODEL", help="A folder, or a name on the hub: Qwen/Qwen3-4B[@REVISION].")
    ],
    drafter: Annotated[
        str | None, typer.Option(metavar="MODEL", help="The model that drafts, named in the same way.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="MODEL", help="The tokenizer, if it is not beside the target.")
    ] = None,
    method: Annotated[
        str, typer.Option(help="Speculation method as vLLM calls it: eagle3, dflash, mtp, ngram, …")
    ] = "none",
    drafts: Annotated[int | None, typer.Option("-k", metavar="N", help="Drafts per step. Default: 3.")] = None,
    device: Annotated[str, typer.Option(metavar="cpu|gpu", help="What the engines run on.")] = "gpu",
    block_size: Annotated[
        int | None,
        typer.Option(
            min=16,
            max=1024,
            metavar="N",
            help="Tokens of a KV block: a multiple of 16 on GPU (default 16), of 32 on CPU (default 32; 16 for MLA).",
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the profile. Default: that of the target, in lower case.")
    ] = None,
    questions: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Texts for the prompts, which need no hub then: .jsonl, .parquet, or plain text with one a line.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File to write, never over another. Default: print it.")
    ] = None,
) -> None:
    """Write a profile for a model and its drafter: harness init --target Qwen/Qwen3-4B > mine.yaml.

    Models of the hub are pinned to the commit that they have now, if the hub answers. Prompts and baselines of the
    profile go into folders beside the file; `harness run -p FILE --prepare` makes them.
    """
    from harness.commands.init import InitOptions, new_profile
    from harness.profiles.engine_config import DeviceKind
    from harness.profiles.hub import Hub

    if device not in ("cpu", "gpu"):
        raise UsageError(f"--device {device}: expected cpu or gpu")
    on: DeviceKind = "cpu" if device == "cpu" else "gpu"
    wanted = InitOptions(target, drafter, method, drafts, on, block_size, name, tokenizer, questions)
    written = new_profile(wanted, out, Hub())
    if out is None:
        typer.echo(written.text, nl=False)
    else:
        with out.open("x", encoding="utf-8") as file:
            file.write(written.text)
        typer.echo(f"{out}: read it, then: harness run -p {out} --prepare")
    for note in written.notes:
        typer.echo(f"harness: {note}", err=True)
