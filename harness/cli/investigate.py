"""``harness repro`` and ``harness bisect``, which try a finding of a run, or a cell with a prompt or scenario."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from harness.cli import completion
from harness.cli.options import (
    LATEST,
    EngineOptions,
    MutantOption,
    OutOption,
    ProfileOption,
    make_console,
    options_given,
    refuse_ignored,
)
from harness.errors import UsageError
from harness.history.layout import require_run
from harness.util.paths import DEFAULT_OUT

if TYPE_CHECKING:
    from harness.commands.export.case import Case
    from harness.commands.export.finding import Smallest
    from harness.commands.repro import Target
    from harness.engines.environment import EngineEnvironment
    from harness.engines.flags import EngineFlags
    from harness.workload.prepare import Prepared


RateOption = Annotated[
    float | None,
    typer.Option(
        "--rate",
        metavar="SHARE",
        min=0.001,
        max=1.0,
        help="Share of tries in which it shows, if you know it, for tries without it to exclude. Default: the share "
        "of requests that had it in the run, or 0.05 without one.",
    ),
]
TrustOption = Annotated[
    bool,
    typer.Option(
        "--trust-recorded-code", help="Allow trust_remote_code for the models for which the recorded profile sets it."
    ),
]


class TriedOptions(NamedTuple):
    """What is tried: a finding of a run, or a cell with a prompt or scenario."""

    run_dir: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN_DIR",
            help="The run that had the finding; may be left out.",
            show_default="reports/latest",
            autocompletion=completion.runs_or_findings,
        ),
    ] = None
    finding: Annotated[
        str | None,
        typer.Argument(
            metavar="FINDING",
            help="The finding's id, or a unique prefix of it.",
            show_default=False,
            autocompletion=completion.findings,
        ),
    ] = None
    cell: Annotated[
        str | None,
        typer.Option("--cell", "-c", autocompletion=completion.cells, help="Without a run: the cell, e.g. pd-eagle3."),
    ] = None
    prompt: Annotated[str | None, typer.Option(help="Without a run: the id of a prompt, or a stratum.")] = None
    scenario: Annotated[
        str, typer.Option("--scenario", "-s", autocompletion=completion.scenarios, help="Without a run: the scenario.")
    ] = "cold"
    profile: ProfileOption = "cpu"

    def origin(self) -> tuple[Path | None, str | None]:
        """Return the run and its finding to try, or twice None when a cell is given instead.

        The latest run is meant by a finding alone. Raises UsageError unless exactly one of the two ways is taken,
        and NotARunError when there is no such run.
        """
        given = self.run_dir
        if self.cell is not None:
            if given is not None:
                raise UsageError(
                    f"{given} and --cell {self.cell} exclude each other: a finding or a cell is tried; leave one out"
                )
            if self.prompt is None and self.scenario == "cold":
                raise UsageError("--cell needs --prompt ID or --scenario NAME, which say what to send; add one")
            if self.prompt is not None and self.scenario != "cold":
                raise UsageError(
                    f"--prompt names a cold prompt, and scenario {self.scenario} has prompts of its own; leave out "
                    "--prompt or --scenario"
                )
            return None, None
        if given is None or (self.finding is None and Path(given).is_dir()):
            found = f"no finding of {given}" if given is not None else "neither"
            raise UsageError(
                f"name what to try, [RUN_DIR] FINDING or --cell and --prompt; found {found}. `harness list findings "
                "RUN_DIR` lists the findings of a run"
            )
        folder, wanted = (Path(given), self.finding) if self.finding is not None else (LATEST, given)
        require_run(folder)
        return folder, wanted

    def to_try(
        self, trust_code: bool, rate: float | None, flags: EngineFlags | None = None
    ) -> tuple[Prepared, Target, tuple[str, ...]]:
        """Return the cell, the prompt or scenario in it, and the mutants that repro and bisect try.

        ``rate`` replaces that of the run. Raises UsageError when there is no such finding or prompt, or when ``flags``
        are not those of the run's engines.
        """
        from harness.commands.repro import Goal, from_names, from_run
        from harness.engines.flags import NO_FLAGS

        run, finding = self.origin()
        if run is not None and finding is not None:
            prepared, target, mutants = from_run(run, finding, trust_code, flags or NO_FLAGS)
        else:
            names = (self.profile, self.cell or "", self.prompt or "", self.scenario)
            prepared, target, mutants = from_names(*names)
        if rate is not None:
            target = target._replace(goal=Goal(rate, "as --rate says"))
        return prepared, target, mutants


_OF_CELLS = {"prompt", "scenario", "profile"}
"""Options that say how a cell is tried."""


def _refuse_unheard(context: typer.Context, unheard: set[str], why: str) -> None:
    refuse_ignored(context, options_given(context).keys() - unheard, why)


def repro_command(
    context: typer.Context,
    *,
    of: TriedOptions,
    repeat: Annotated[
        int | None,
        typer.Option(
            "--repeat",
            "-n",
            metavar="N",
            min=1,
            max=10_000,
            help="Maximum attempts, on the same engines, to measure how often it shows. Default: until it shows, or "
            "until enough tries without it exclude the rate of the run, at most 60; with --keep one.",
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
        int, typer.Option(metavar="N", min=0, help="With --shrink: maximum engine restarts for trying fewer drafts.")
    ] = 4,
    mutant: MutantOption = None,
    export: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write a Python file that shows it without this project, and an archive with its models.",
        ),
    ] = None,
    export_issue: Annotated[
        bool, typer.Option("--export-issue", help="With --export: write the text of an issue beside the file.")
    ] = False,
    models_in_place: Annotated[
        bool,
        typer.Option(
            "--models-in-place", help="With --export: the file reads the models where they are; write no archive."
        ),
    ] = False,
    trust_code: TrustOption = False,
    engines: EngineOptions,
) -> None:
    """Try a finding again: the same cell, engine flags, prompt and scenario.

    Exit code 1 when it shows again; 0 when enough tries without it exclude the rate at which it showed in the run; 2
    when there were too few, or none was conclusive.
    """
    origin = of.origin()
    run, finding = origin
    if run is not None:
        _refuse_unheard(context, _OF_CELLS, f"{finding} is tried as in its run")
    if not shrink:
        _refuse_unheard(context, {"starts"}, "only --shrink tries fewer drafts")
        if export is not None:
            _refuse_unheard(context, {"out"}, "--export without --shrink makes no run")
    if export_issue and export is None:
        raise UsageError("--export-issue needs --export FILE, beside which the text is written; add it")
    if models_in_place and export is None:
        raise UsageError("--models-in-place needs --export FILE, which reads them; add it")
    if export is not None:
        _require_new(export, export_issue, models_in_place)
    if (keep or repeat is not None) and (export is not None or shrink):
        raise UsageError("--export and --shrink exclude --keep and --repeat; run them one after the other")
    if mutant and run is not None:
        raise UsageError(
            "--mutant and a run exclude each other, since the injected faults of the run are used; leave --mutant out"
        )
    from harness.commands.repro import MOST_TRIES, expected_s, measured, reproduce, settled
    from harness.mutants.install import require_alone
    from harness.reports.terminal import print_summary
    from harness.runner.run import require_free
    from harness.util.progress import Reporter

    flags = engines.flags()
    if flags.options and (shrink or export is not None):
        raise UsageError(
            f"--shrink and --export exclude {shlex.join(flags.options)}, since an exported case could not tell what "
            "these do; write them into a profile (engine.extra_args, engine.env)"
        )
    prepared, target, mutants = of.to_try(trust_code, rate, flags)
    require_free(prepared, flags, every_role=run is None)
    if mutant:
        require_alone(mutant, together=False)
        mutants = tuple(mutant)
    console = make_console()

    def write(make: Callable[[EngineEnvironment], Case], smallest: Smallest | None = None) -> None:
        from harness.commands.export.finding import export as write_export

        if export is not None:
            python = engines.engine_python
            reported = write_export(make, prepared, origin, export, export_issue, python, smallest, models_in_place)
            _print_exported(export, export_issue, reported, mutants)

    if shrink:
        raise typer.Exit(_shrink(prepared, target, mutants, engines, starts, write))
    if export is not None:
        from harness.commands.export.finding import case_from

        write(lambda environment: case_from(prepared, target, environment, mutants))
        return

    def wait(lines: list[str]) -> None:
        console.print("engines keep running until Ctrl-C:", highlight=False)
        for line in lines:
            print(f"  {line}", flush=True)
        signal.pause()

    most = repeat or (1 if keep else MOST_TRIES)
    with Reporter(expected_s(prepared, min(most, target.goal.tries))) as reporter:
        where = (engines.out, engines.engine_python, reporter)
        enough = settled if repeat is None else measured
        result = reproduce(prepared, target, mutants, *where, most, enough, wait if keep else None, flags)
    if result.summary is not None:
        print_summary(result.summary, console)
    console.print(f"{result.sentence}; {result.seconds:.0f} s", highlight=False)
    raise typer.Exit(result.exit_code)


def _shrink(
    prepared: Prepared,
    target: Target,
    mutants: tuple[str, ...],
    engines: EngineOptions,
    starts: int,
    write: Callable[[Callable[[EngineEnvironment], Case], Smallest], None],
) -> int:
    """Shrink, print the result, pass the smallest case on to ``write``, and return the exit code."""
    from harness.commands.export.finding import Smallest
    from harness.commands.shrink.run import expected_s, shrink
    from harness.util.progress import Reporter

    with Reporter(expected_s(prepared)) as reporter:
        result = shrink(prepared, target, mutants, engines.out, engines.engine_python, reporter, starts)
    print(result.sentence)
    if result.law:
        print(f"lengths: {result.law}")
    if result.symptom is not None:
        print(f"prompt: {list(result.variant.subject.prompt.ids)}")
    print(f"record: {result.folder / 'shrink.json'}")
    if result.symptom is not None:
        write(lambda _: result.case(prepared), Smallest(result.law, result.observed))
    return result.exit_code


def _require_new(export: Path, issue: bool, in_place: bool) -> None:
    """Raise UsageError unless the files can be written beside what is there."""
    if not export.parent.is_dir():
        raise UsageError(f"--export {export}: there is no folder {export.parent}; make it, or name another file")
    from harness.commands.export import archive_of

    beside = [*([] if in_place else [archive_of(export)]), *([export.with_suffix(".md")] if issue else [])]
    for file in (export, *beside):
        if file.exists():
            raise UsageError(f"--export {export}: {file} exists already; name another file, or remove it")


def _print_exported(file: Path, issue: bool, reported: str, mutants: tuple[str, ...]) -> None:
    from harness.commands.export import archive_of
    from harness.commands.export.case import injected

    print(f"{file}: `python {file.name}` starts the engines and says whether the defect shows")
    if archive_of(file).is_file():
        print(f"{archive_of(file)}: its models; keep both files in one folder")
    if issue:
        print(f"{file.with_suffix('.md')}: the text of an issue")
    if reported:
        print(f"note: {reported}")
    if mutants:
        print(f"note: {injected(mutants)}")


def bisect_command(
    context: typer.Context,
    *,
    good: Annotated[
        str,
        typer.Option(metavar="VERSION|PYTHON", help="The older end, without the defect: 0.30.0, or an interpreter."),
    ],
    bad: Annotated[str, typer.Option(metavar="VERSION|PYTHON", help="The newer end, with the defect.")],
    of: TriedOptions,
    candidate: Annotated[
        list[str] | None,
        typer.Option(
            metavar="VERSION|PYTHON",
            help="An intermediate version. Repeatable. Default: every release between the ends, or none when both ends "
            "are interpreters.",
        ),
    ] = None,
    repeat: Annotated[
        int | None,
        typer.Option(
            "--repeat",
            "-n",
            metavar="N",
            min=1,
            max=10_000,
            help="Maximum attempts per version: one that shows the defect makes it bad; it is good once its tries "
            "without it exclude the rate of the run. Default: 60.",
        ),
    ] = None,
    rate: RateOption = None,
    trust_code: TrustOption = False,
    out: OutOption = DEFAULT_OUT,
) -> None:
    """Find the first vLLM version in which a finding shows, by binary search with repro as the test.

    Versions are installed into a cache, both ends are tried first, and versions that cannot start or are inconclusive
    are skipped. Exit code 0 when the first bad version is found (or a few that it is among), 2 when undecided.
    """
    run, finding = of.origin()
    if run is not None:
        _refuse_unheard(context, _OF_CELLS, f"{finding} is tried as in its run")
    from harness.commands.bisect.run import VersionTrier, expected_total_s, print_bisection, start
    from harness.commands.bisect.run import bisect as search_versions
    from harness.commands.repro import MOST_TRIES
    from harness.engines.builds import DISTRIBUTIONS, in_order, installed, read_candidate, release, released_versions
    from harness.runner.run import new_folder
    from harness.util.progress import Reporter

    prepared, target, mutants = of.to_try(trust_code, rate)
    most = repeat or MOST_TRIES
    if most < target.goal.tries:
        raise UsageError(
            f"--repeat {most}: too few to call any version good, since it takes {target.goal.tries} tries without it "
            f"to exclude {target.goal.words}; give --repeat {target.goal.tries}, or --rate if it shows more often "
            "than that"
        )
    device = prepared.profile.engine.device
    package = DISTRIBUTIONS[device]
    candidates = in_order(
        read_candidate("--good", good),
        read_candidate("--bad", bad),
        [read_candidate("--candidate", c) for c in candidate or []],
        lambda: released_versions(package),
    )
    folder = new_folder(out, prepared.profile, "bisect")
    with Reporter(expected_total_s(prepared, target.goal.tries, len(candidates))) as reporter:
        reporter.line(f"{len(candidates)} versions from {candidates[0].version} to {candidates[-1].version}")
        cache = installed(device, reporter.line)
        trier = VersionTrier(
            prepared, target, mutants, most, lambda version, log: cache.python(release(package, version), log), reporter
        )
        begun = start(prepared, target, mutants, candidates, most)
        found = search_versions(begun, candidates, folder, trier, reporter.line)
    console = make_console()
    print_bisection(found, console)
    console.print(f"steps: {folder / 'bisect.json'}", soft_wrap=True, highlight=False)
    raise typer.Exit(found.exit_code)
