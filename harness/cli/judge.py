"""``harness check``, ``report``, ``trend`` and ``merge``: everything that judges recorded runs. Starts no engine."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer

from harness.cli import completion, shapes
from harness.cli.options import (
    LATEST,
    BaselinesOption,
    JsonOption,
    KnownOption,
    ReportsOption,
    RunDir,
    StrictOption,
    folder_alone,
    make_console,
    print_json,
    reports_folder,
)
from harness.errors import StorageError, UsageError
from harness.history.layout import require_run

if TYPE_CHECKING:
    from harness.judging.references import References
    from harness.reports.summary import RunSummary

MetricsFormat = Literal["csv", "openmetrics"]
CheckReportsOption = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="DIR",
        callback=reports_folder,
        help="Write the run's reports into this folder, which is made if it is missing.",
    ),
]


def check_command(
    run_dir: RunDir = LATEST,
    baselines: BaselinesOption = None,
    known: KnownOption = None,
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN_DIR",
            autocompletion=completion.runs,
            help="Compare with the single-engine cells of this run instead.",
        ),
    ] = None,
    expect: Annotated[
        str | None,
        typer.Option(
            metavar="PROFILE",
            autocompletion=completion.profiles,
            help="UNKNOWN unless the run planned every request of this profile, so that a part cannot pass for it.",
        ),
    ] = None,
    record: Annotated[
        str | None, typer.Option(metavar="SHA256", help="Judge only the record with this hash, or a prefix of it.")
    ] = None,
    out: CheckReportsOption = None,
    write: Annotated[
        bool, typer.Option("--write", help="Write reports into the run's folder, in place of those it has.")
    ] = False,
    strict: StrictOption = False,
    as_json: JsonOption = False,
) -> None:
    """Judge a recorded run again and print its verdict; equal inputs give equal verdicts. Starts no engine.

    The run and its reports stay as they are, unless --out or --write says otherwise.
    """
    if baselines is not None and against is not None:
        raise UsageError("--baselines and --against exclude each other; leave one out")
    if out is not None and write:
        raise UsageError("--out and --write exclude each other; leave one out")
    from harness.judging.references import References
    from harness.reports.judge_run import check as judge_again

    references = References(baselines=baselines, known=known, against=against, record=record, expect=expect)
    with _saying(f"judging {run_dir}"):
        outcome = judge_again(run_dir, references, run_dir if write else out)
    _end(outcome.summary, as_json, strict)


def report_command(
    run_dir: RunDir = LATEST,
    compare: Annotated[
        Path | None,
        typer.Option(
            metavar="FIRST",
            autocompletion=completion.runs,
            help="Compare this run with RUN_DIR: report --compare FIRST SECOND.",
        ),
    ] = None,
    out: ReportsOption = None,
    baselines: BaselinesOption = None,
    known: KnownOption = None,
    format_: Annotated[
        MetricsFormat | None,
        typer.Option(
            "--format",
            metavar="csv|openmetrics",
            help="Print the run's figures instead, for other programs, and write no reports.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Rewrite the reports of a recorded run, or compare two runs. The exit code is 0 whatever the verdict."""
    if format_ is not None and (compare is not None or out is not None or as_json):
        raise UsageError("--format prints figures and goes with none of --compare, --out and --json; leave those out")
    if compare is not None:
        require_run(compare)
    from harness.judging.references import References
    from harness.reports.judge_run import check as judge_again

    references = References(baselines, known)
    if format_ is not None:
        from harness.reports.metrics import RENDER

        with _saying(f"judging {run_dir}"):
            outcome = judge_again(run_dir, references)
        typer.echo(RENDER[format_](outcome.summary), nl=False)
        return
    if compare is not None:
        _compare(compare, run_dir, (out or run_dir) / "compare.html", references, as_json)
        return
    with _saying(f"judging {run_dir}"):
        outcome = judge_again(run_dir, references, out or run_dir)
    if outcome.summary.unwritten:
        raise StorageError(f"verdict: {outcome.summary.verdict}; {outcome.summary.unwritten}")
    if as_json:
        print_json(shapes.judged_run(outcome.summary))
        return
    for name in ("report.html", "summary.md", "junit.xml", "judgement.json"):
        typer.echo(str((out or run_dir) / name))
    typer.echo(f"verdict: {outcome.summary.verdict}")


def _compare(first: Path, second: Path, page: Path, references: References, as_json: bool) -> None:
    from harness.reports.across_runs import print_comparison, render_comparison
    from harness.reports.compare import compare_runs
    from harness.util.files import write_atomic

    with _saying(f"judging {first} and {second}"):
        found = compare_runs(first, second, references)
    if not as_json:
        print_comparison(found, make_console())
    write_atomic(page, render_comparison(found))
    if as_json:
        print_json({**shapes.compared_runs(found), "report": str(page)})
    else:
        typer.echo(f"report: {page}")


def trend_command(
    runs_dir: Annotated[Path, typer.Argument(metavar="RUNS_DIR", help="A folder of recorded runs, e.g. reports.")],
    out: ReportsOption = None,
    nights: Annotated[
        int,
        typer.Option(
            metavar="RUNS", min=2, help="Mean number of runs of unchanged engines between false drift notices."
        ),
    ] = 365,
    baselines: BaselinesOption = None,
    known: KnownOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show verdicts and acceptance over many runs, and detect drifts too small for a single run.

    The exit code is 0 whatever the verdicts of the runs.
    """
    from harness.judging.references import References
    from harness.reports.across_runs import print_trend, render_trend
    from harness.reports.trend import load_trend
    from harness.util.files import write_atomic

    with _saying(f"judging the runs in {runs_dir}"):
        found = load_trend(runs_dir, nights, References(baselines, known))
    if not as_json:
        print_trend(found, make_console())
    target = (out or runs_dir) / "trend.html"
    write_atomic(target, render_trend(found, target))
    if as_json:
        print_json({**shapes.trend(found), "report": str(target)})
    else:
        typer.echo(f"report: {target}")


def merge_command(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Recorded runs, or folders with runs below them.")
    ],
    out: Annotated[
        Path, typer.Option(metavar="DIR", callback=folder_alone, help="Folder of the merged run; new or empty.")
    ],
    expect: Annotated[
        str | None,
        typer.Option(
            metavar="PROFILE",
            autocompletion=completion.profiles,
            help="The profile that the parts cover: all its cells must be present, and its baselines are used. "
            "Default: the recorded profile.",
        ),
    ] = None,
    cell: Annotated[
        list[str] | None,
        typer.Option("--cell", "-c", metavar="PATTERN", help="Expect only the cells that match. Repeatable."),
    ] = None,
    scenario: Annotated[
        list[str] | None,
        typer.Option("--scenario", "-s", metavar="PATTERN", help="Expect only the scenarios that match. Repeatable."),
    ] = None,
    keep_going: Annotated[
        bool,
        typer.Option(
            "--keep-going",
            help="Skip parts that cannot be read or do not fit, use what interrupted parts recorded, and do without "
            "cells that no part completed. Whatever is missing is UNKNOWN.",
        ),
    ] = False,
    armed: Annotated[bool, typer.Option("--armed", help="Accept parts with injected faults.")] = False,
    baselines: BaselinesOption = None,
    known: KnownOption = None,
    strict: StrictOption = False,
    as_json: JsonOption = False,
) -> None:
    """Merge the parts of a run and judge them once, over all cells together. Starts no engine.

    Parts need the same profile, prompts, models, vLLM and kind of machine. Of each cell the first recording that
    completed it counts: a retry is not a second chance. Without one the merge is refused. The exit code is that of
    the verdict.
    """
    from harness.commands.merge import MergeOptions, merge
    from harness.judging.references import References
    from harness.judging.shares import processes_for
    from harness.reports.judge_run import judge_and_report

    options = MergeOptions(expect, tuple(cell or ()), tuple(scenario or ()), armed, keep_going)
    with _saying(f"merging into {out}"):
        history = merge(folders, out, options)
    with _saying(f"judging {out}"):
        references = References(baselines, known)
        summary = judge_and_report(history, references, carrying=True, processes=processes_for(history))
    _end(summary, as_json, strict)


def _saying(what: str) -> AbstractContextManager[None]:
    """Say what takes long. The module takes a while to import, which wrong command lines need not."""
    from harness.util.progress import saying

    return saying(what)


def _end(summary: RunSummary, as_json: bool, strict: bool) -> NoReturn:
    """Print a judged run, and exit with the code of its verdict."""
    from harness.reports.terminal import print_summary

    summary = summary._replace(strict=strict)
    if as_json:
        print_json(shapes.judged_run(summary))
    else:
        print_summary(summary, make_console())
    raise typer.Exit(summary.exit_code)
