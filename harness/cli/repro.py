"""``harness repro``: try a finding again, shrink it, or export it as a file of its own."""

from __future__ import annotations

import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli.options import (
    EngineArgOption,
    EngineEnvOption,
    MutantOption,
    OutOption,
    ProfileOption,
    PythonOption,
    make_console,
)
from harness.cli.target import (
    CellOption,
    FindingArgument,
    PromptOption,
    RateOption,
    RunArgument,
    ScenarioOption,
    TrustOption,
    run_and_finding,
    what_to_try,
)
from harness.errors import UsageError

if TYPE_CHECKING:
    from harness.commands.repro import Target
    from harness.workload.prepare import Prepared


def repro_command(
    run_dir: RunArgument = None,
    finding: FindingArgument = None,
    cell: CellOption = None,
    prompt: PromptOption = None,
    scenario: ScenarioOption = "cold",
    profile: ProfileOption = "cpu",
    repeat: Annotated[
        int | None,
        typer.Option(
            "--repeat",
            "-n",
            metavar="N",
            min=1,
            max=10_000,
            help="Maximum attempts, on the same engines, to measure how often it shows. Default: until it shows, or "
            "until the quiet attempts exclude the rate of the run, at most 60; with --keep one.",
        ),
    ] = None,
    rate: RateOption = None,
    keep: Annotated[
        bool,
        typer.Option("--keep", help="Keep the engines running until Ctrl-C; print their URLs and the curl commands."),
    ] = False,
    shrink: Annotated[
        bool,
        typer.Option("--shrink", help="Find the smallest case that shows it, and the rule of failing prompt lengths."),
    ] = False,
    starts: Annotated[
        int,
        typer.Option(
            "--starts", metavar="N", min=0, help="With --shrink: maximum engine restarts for trying fewer drafts."
        ),
    ] = 4,
    mutant: MutantOption = None,
    export: Annotated[
        Path | None,
        typer.Option("--export", metavar="FILE", help="Write one Python file that shows it without this project."),
    ] = None,
    export_issue: Annotated[
        bool, typer.Option("--export-issue", help="With --export: write the text of an issue beside the file.")
    ] = False,
    trust_code: TrustOption = False,
    out: OutOption = None,
    engine_python: PythonOption = None,
    engine_arg: EngineArgOption = None,
    engine_env: EngineEnvOption = None,
) -> None:
    """Try a finding again: the same cell, engine flags, prompt and scenario.

    Exit code 1 when it shows again, 0 when enough quiet attempts exclude the rate at which it showed in the run, 2 when
    there were too few or none was conclusive.
    """
    run, finding = run_and_finding(run_dir, finding, cell, prompt, scenario)
    if export_issue and export is None:
        raise UsageError("--export-issue: expected --export FILE with it, found none")
    if export is not None:
        _require_new(export, export_issue)
    if (keep or repeat is not None) and (export is not None or shrink):
        raise UsageError(
            "expected --export or --shrink without --keep and --repeat, found them together; run them separately"
        )
    if mutant and run is not None:
        raise UsageError("--mutant: expected none with a run, found one; the injected faults of the run are used")
    from harness.commands.repro import MOST_TRIES, expected_s, measured, reproduce, settled
    from harness.engines.flags import parse_flags
    from harness.mutants.install import require_alone
    from harness.reports.terminal import print_summary
    from harness.runner.run import require_free
    from harness.util.paths import DEFAULT_OUT
    from harness.util.progress import Reporter

    flags = parse_flags(engine_arg or [], engine_env or [])
    if flags.options and (shrink or export is not None):
        raise UsageError(
            f"expected --shrink and --export without --engine-arg and --engine-env, found {shlex.join(flags.options)}; "
            "an exported case could not tell what they do; write them into a profile (engine.extra_args, engine.env)"
        )
    prepared, target, mutants = what_to_try(run, finding, cell, prompt, scenario, profile, trust_code, rate, flags)
    require_free(prepared, flags, every_role=run is None)
    if mutant:
        require_alone(mutant, together=False)
        mutants = tuple(mutant)
    console = make_console()
    if shrink:
        raise typer.Exit(
            _shrink(prepared, target, mutants, out, engine_python, (run, finding), export, export_issue, starts)
        )
    if export is not None:
        from harness.commands.export.finding import case_from
        from harness.commands.export.finding import export as write_export

        write_export(
            lambda environment: case_from(prepared, target, environment, mutants),
            prepared,
            (run, finding),
            export,
            export_issue,
            engine_python,
        )
        _print_exported(export, export_issue, mutants)
        return

    def wait(lines: list[str]) -> None:
        console.print("engines keep running until Ctrl-C:", highlight=False)
        for line in lines:
            print(f"  {line}", flush=True)
        signal.pause()

    most = repeat or (1 if keep else MOST_TRIES)
    with Reporter(expected_s(prepared, min(most, target.goal.tries))) as reporter:
        result = reproduce(
            prepared,
            target,
            mutants,
            out or DEFAULT_OUT,
            engine_python or sys.executable,
            reporter,
            most,
            settled if repeat is None else measured,
            wait if keep else None,
            flags,
        )
    if result.summary is not None:
        print_summary(result.summary, console)
    console.print(f"{result.sentence}; {result.seconds:.0f} s", highlight=False)
    raise typer.Exit(result.exit_code)


def _shrink(
    prepared: Prepared,
    target: Target,
    mutants: tuple[str, ...],
    out: Path | None,
    engine_python: str | None,
    found: tuple[Path | None, str | None],
    export: Path | None,
    issue: bool,
    starts: int,
) -> int:
    """Shrink, print the result, export it when asked to, and return the exit code."""
    from harness.commands.export.finding import Smallest
    from harness.commands.export.finding import export as write_export
    from harness.commands.shrink.run import expected_s, shrink
    from harness.util.paths import DEFAULT_OUT
    from harness.util.progress import Reporter

    with Reporter(expected_s(prepared)) as reporter:
        python = engine_python or sys.executable
        result = shrink(prepared, target, mutants, out or DEFAULT_OUT, python, reporter, starts)
    print(result.sentence)
    if result.law:
        print(f"lengths: {result.law}")
    if result.symptom is not None:
        print(f"prompt: {list(result.variant.subject.prompt.ids)}")
    print(f"record: {result.folder / 'shrink.json'}")
    if export is not None and result.symptom is not None:
        smallest = Smallest(result.law, result.observed)
        write_export(lambda _: result.case(prepared), prepared, found, export, issue, engine_python, smallest)
        _print_exported(export, issue, mutants)
    return result.exit_code


def _require_new(export: Path, issue: bool) -> None:
    """Raise UsageError unless the files can be written beside what is there."""
    if not export.parent.is_dir():
        raise UsageError(f"--export {export}: expected a folder {export.parent}, found none; create it, or correct it")
    for file in (export, export.with_suffix(".md")) if issue else (export,):
        if file.exists():
            raise UsageError(f"--export {export}: expected no file {file}, found one; name another, or remove it")


def _print_exported(file: Path, issue: bool, mutants: tuple[str, ...]) -> None:
    from harness.commands.export.case import injected

    print(f"{file}: `python {file.name}` starts the engines and says whether the defect shows")
    if issue:
        print(f"{file.with_suffix('.md')}: the text of an issue")
    if mutants:
        print(f"note: {injected(mutants)}")
