"""``harness baseline``: recorded references that runs are compared with."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli import completion, shapes
from harness.cli.help import HelpfulGroup
from harness.cli.options import (
    ATTACH,
    BaselinesFolderOption,
    CellOption,
    EngineOptions,
    GivenRunDir,
    JsonOption,
    KeyVariableOption,
    ProfileOption,
    ServedModelOption,
    key_in,
    make_console,
    print_json,
    refuse_ignored,
    refuse_without_servers,
)
from harness.errors import EXIT_REGRESSION, EXIT_UNKNOWN, UsageError
from harness.util.tables import folding_table
from harness.util.text import counted

if TYPE_CHECKING:
    from harness.baselines.build import NewBaselines

baseline_app = typer.Typer(
    cls=HelpfulGroup, no_args_is_help=True, help="Recorded references that runs are compared with."
)


_OF_RECORDED = ("from_run", "again", "profile", "baselines")
"""Parameters that count with ``--from``. The profile has the prompts, and the folder to write to."""


@baseline_app.command("record")
def record(
    context: typer.Context,
    *,
    profile: ProfileOption = "cpu",
    cell: CellOption = None,
    engines: EngineOptions,
    repeat: Annotated[
        int,
        typer.Option(
            "--repeat",
            "-n",
            metavar="N",
            min=1,
            max=2,
            help="2 asks everything twice, to measure run-to-run noise (A/A).",
        ),
    ] = 2,
    from_run: Annotated[
        Path | None, typer.Option("--from", metavar="RUN_DIR", help="Use a recorded run instead of starting engines.")
    ] = None,
    again: Annotated[
        Path | None, typer.Option(metavar="RUN_DIR", help="With --from: a repetition of that run, for A/A.")
    ] = None,
    baselines: BaselinesFolderOption = None,
    single: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            rich_help_panel=ATTACH,
            help="Record from this server, an engine alone that runs already, instead of starting engines.",
        ),
    ] = None,
    key_variable: KeyVariableOption = None,
    model: ServedModelOption = None,
) -> None:
    """Record baselines from single engines (never from P/D) and write them to the profile's folder.

    The exit code is 2 when a cell could not be recorded, or only once; the others' baselines are written all the same.
    """
    from harness.baselines.build import new_baselines
    from harness.cli.run import on_trust
    from harness.commands.baseline import cells_of, folder_for
    from harness.commands.baseline import record as record_single_engines
    from harness.history.folder import load_history
    from harness.util.progress import Reporter
    from harness.workload.prepare import prepare

    if from_run is not None:
        refuse_ignored(context, _OF_RECORDED, "--from takes all single cells of a recorded run and starts no engines")
    server = executor = None
    if single is not None:
        from harness.engines.attached import AttachedExecutor, look_at

        _require_alone(engines)
        server = look_at("single", single, key_in(key_variable), model)
    else:
        refuse_without_servers({"--key-variable": key_variable, "--model": model}, "--single URL")
    patterns = cell or (cells_of(server, profile) if server is not None else ["single-*"])
    prepared = prepare(profile, patterns, record=True)
    flags = engines.flags_for(prepared)
    added: Sequence[str] = flags.options
    if server is not None:
        executor = AttachedExecutor({"single": server})
        executor.require_fit(prepared.plan, prepared.profile, prepared.works)
    if again is not None and from_run is None:
        raise UsageError("--again needs --from RUN_DIR, the run that it is another recording of; add it")
    if from_run is not None:
        repetition = load_history(again) if again is not None else None
        history = load_history(from_run)
        added = history.run.engine_flags
        folder = folder_for(prepared, baselines, added)
        made = new_baselines(history, repetition, prepared.sets, folder)
    else:
        folder = folder_for(prepared, baselines, added)
        # Engines start once, whatever they are asked.
        expected = repeat * (prepared.expected_s - prepared.starts_s) + prepared.starts_s
        with Reporter(expected, starts_s=prepared.starts_s) as reporter:
            where = (engines.out, engines.engine_python)
            for sentence in on_trust(executor, prepared):
                reporter.line(sentence)
            made = record_single_engines(prepared, *where, reporter, repeat, folder, flags, executor)
    given = {"--single": single, "--engine-python": engines.engine_python, "--baselines": baselines}
    options = [part for option, value in given.items() if value is not None for part in (option, str(value))]
    _print_made(made, profile, [*added, *options])
    if made.left_out or made.once:
        raise typer.Exit(EXIT_UNKNOWN)


def _require_alone(engines: EngineOptions) -> None:
    """Raise UsageError for options about engines that are started, beside a server that runs already."""
    given = {
        "--engine-python": engines.engine_python,
        "--engine-arg": engines.engine_arg,
        "--engine-env": engines.engine_env,
        "--prefill-python": engines.prefill_python,
    }
    for option in (option for option, value in given.items() if value):
        raise UsageError(f"--single and {option} exclude each other: the server runs as it was started; leave one out")


def _print_made(made: NewBaselines, profile: str, options: Sequence[str]) -> None:
    for item in made.recorded:
        typer.echo(
            f"{item.method}: {counted(item.rows, 'prompt')}: {item.path}" + ("" if item.change else ": unchanged")
        )
        for line in item.change:
            typer.echo(f"  {line}")
    for cell, reason in made.left_out.items():
        # The lines of a log were shown when its engine ended.
        typer.echo(f"{cell}: no baseline was recorded: {reason.partition('; last lines of ')[0]}")
    for cell, reason in made.once.items():
        typer.echo(f"{cell}: A/A noise was not measured, because the repetition is incomplete: {reason}")
    if again := dict.fromkeys([*made.left_out, *made.once]):
        cells = [part for cell in again for part in ("-c", cell)]
        typer.echo(f"next: {shlex.join(['harness', 'baseline', 'record', '-p', profile, *cells, *options])}")


@baseline_app.command("accept")
def accept(
    run_dir: GivenRunDir,
    again: Annotated[Path | None, typer.Option(metavar="RUN_DIR", help="A repetition of that run, for A/A.")] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            "--profile",
            "-p",
            autocompletion=completion.profiles,
            help="Profile of the baselines. Default: the run's own.",
        ),
    ] = None,
    baselines: BaselinesFolderOption = None,
) -> None:
    """Accept a recorded run as the new reference, after a DRIFT or IMPROVED that is intended.

    Prints what changed and exits with 1 even on success: an accepted change must never look like a pass.
    """
    from harness.commands.baseline import accept as accept_run
    from harness.history.folder import load_history

    made = accept_run(run_dir, again, profile, baselines)
    run = load_history(run_dir).run
    folder = ["--baselines", str(baselines)] if baselines else []
    _print_made(made, profile or run.asked_for.source, [*run.engine_flags, *folder])
    typer.echo("accepted: review and commit the files; the exit code is 1, because an accepted change is not a pass")
    raise typer.Exit(EXIT_REGRESSION)


@baseline_app.command("diff")
def diff(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="A baseline (.json) or a folder of them.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="The one to compare with it.")],
) -> None:
    """Print what changed between two baselines. Exit code 0 when nothing did, otherwise 1."""
    from harness.commands.baseline import compare

    changes = compare(old, new)
    for change in changes:
        typer.echo(change.name)
        for line in change.lines:
            typer.echo(f"  {line}")
    if not changes:
        typer.echo("no difference")
    raise typer.Exit(EXIT_REGRESSION if changes else 0)


@baseline_app.command("list")
def list_stored(
    profile: ProfileOption = "cpu",
    baselines: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder to list. Default: the profile's.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the stored baselines. Exit code 1 when one is damaged, orphaned, or used by no cell."""
    from harness.commands.baseline import overview

    rows, problems = overview(profile, baselines)
    if as_json:
        print_json(shapes.baselines(rows, problems))
        raise typer.Exit(EXIT_REGRESSION if problems else 0)
    if not rows and not problems:
        where = f"in {baselines}" if baselines is not None else f"of profile {profile}"
        typer.echo(f"there are no baselines {where}; `harness baseline record` makes them")
        return
    columns = ("file", "prompts", "rates", "length", "equal runs", "vLLM", "hardware", "recorded")
    table = folding_table("baselines", *columns)
    for name, header in rows:
        s = header.summary
        again = s.get("again")
        table.add_row(
            name,
            str(s.get("prompts")),
            " ".join(f"{r:.3f}" for r in s.get("rates", [])) or "–",
            f"{s['acceptance_length_pooled']:.3f}" if "acceptance_length_pooled" in s else "–",
            f"{again['diverged']} of {again['prompts']} diverge" if again else "not measured",
            header.identity.vllm or "?",
            header.identity.hardware,
            header.provenance.recorded[:10],
        )
    make_console().print(table)
    for problem in problems:
        typer.echo(problem)
    raise typer.Exit(EXIT_REGRESSION if problems else 0)
