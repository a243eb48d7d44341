"""Command line of CI: ``harness merge`` and ``harness ci``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from harness.errors import EXIT_PASS, EXIT_UNKNOWN

ci_app = typer.Typer(
    no_args_is_help=True,
    help=(
        "Pipelines for CI systems, generated from a profile: parts that record, each on its own machine, and one step "
        "that merges and judges them, whose exit code is the verdict. See docs/ci.md."
    ),
)

Cells = Annotated[
    list[str] | None, typer.Option("--cell", "-c", help="Only cells that match this shell pattern. Repeatable.")
]
ProfileName = Annotated[str, typer.Option("--profile", "-p", help="A shipped profile or the path of a YAML file.")]
Minutes = Annotated[
    int | None,
    typer.Option(
        "--minutes-per-step",
        min=1,
        help="Expected time up to which groups of engines share a step. Default: that of the longest single one.",
    ),
]
Image = Annotated[
    str | None,
    typer.Option("--image", help="Run in this container image, pinned: NAME@sha256:DIGEST. Default: the checkout."),
]
Gpus = Annotated[
    str | None, typer.Option("--gpus", help="With --image: GPUs for a step, as docker takes them: 'all' or a number.")
]
File = Annotated[Path | None, typer.Option("--out", help="File to write. Default: standard output.")]


def merge_command(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Recorded runs, or folders with runs below them.")
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder of the merged run; new or empty.")],
    expect: Annotated[
        str | None,
        typer.Option(
            "--expect",
            metavar="PROFILE",
            help="The profile that the parts make up: its cells must be there, and its baselines judge them. Default: "
            "the recorded profile.",
        ),
    ] = None,
    cell: Annotated[
        list[str] | None,
        typer.Option("--cell", "-c", help="Only cells that match this pattern were to run. Repeatable."),
    ] = None,
    scenario: Annotated[
        list[str] | None,
        typer.Option("--scenario", "-s", help="Only scenarios that match this pattern were to run. Repeatable."),
    ] = None,
    keep_going: Annotated[
        bool,
        typer.Option(
            "--keep-going",
            help="Leave out parts that cannot be read or do not fit, and take interrupted ones as far as they got. "
            "What is missing then is UNKNOWN.",
        ),
    ] = False,
    armed: Annotated[bool, typer.Option("--armed", help="Take parts with known defects put in.")] = False,
    baselines: Annotated[
        Path | None, typer.Option("--baselines", help="Compare with this folder instead of the profile's baselines.")
    ] = None,
    known: Annotated[
        Path | None, typer.Option("--known", help="Known defects from this file instead of the profile's.")
    ] = None,
) -> None:
    """Merge parts of a night into one run and judge it once, over all cells together. Starts no engine.

    Parts need the same profile, prompts, models, vLLM and kind of machine. A cell that no part ran is UNKNOWN. Of two
    recordings of a cell the more complete one counts, of equals the earlier: a retry is no second chance. The exit
    code is that of the verdict.
    """
    from harness.merge import Wanted, merge
    from harness.operations import References, judge_and_report
    from harness.report.terminal import print_summary

    history = merge(
        folders, out, Wanted(expect, tuple(cell or ()), tuple(scenario or ()), armed, keep_going, baselines, known)
    )
    summary = judge_and_report(history, References(baselines, known))
    print_summary(summary, Console(width=None if sys.stdout.isatty() else 160))
    raise typer.Exit(summary.exit_code)


@ci_app.command("buildkite")
def buildkite(
    profile: ProfileName = "cpu",
    cell: Cells = None,
    minutes: Minutes = None,
    image: Image = None,
    gpus: Gpus = None,
    queue: Annotated[str, typer.Option("--queue", help="Agents that record.")] = "default",
    verdict_queue: Annotated[
        str | None, typer.Option("--verdict-queue", help="Agents that merge and judge; they need no GPU.")
    ] = None,
    out: File = None,
) -> None:
    """A Buildkite pipeline, for `buildkite-agent pipeline upload FILE`. Its schedule is set in Buildkite."""
    from harness.ci.buildkite import Options, render
    from harness.ci.plan import plan_night

    night = plan_night(profile, cell or [], minutes)
    _print(render(night, Options(queue, verdict_queue or queue, image, gpus)), out)


@ci_app.command("github")
def github(
    profile: ProfileName = "cpu",
    cell: Cells = None,
    minutes: Minutes = None,
    image: Image = None,
    gpus: Gpus = None,
    runner: Annotated[
        list[str] | None,
        typer.Option(
            "--runner", help="Label of the runners that record. Repeatable. Default: by the profile's device."
        ),
    ] = None,
    verdict_runner: Annotated[
        str, typer.Option("--verdict-runner", help="Label of the runner that merges and judges; it needs no GPU.")
    ] = "ubuntu-24.04",
    schedule: Annotated[str, typer.Option("--schedule", help="When to run, as cron in UTC.")] = "17 2 * * *",
    hf_token: Annotated[
        bool, typer.Option("--hf-token", help="Give parts the secret HF_TOKEN, for models behind a licence.")
    ] = False,
    out: File = None,
) -> None:
    """A GitHub Actions workflow, for .github/workflows."""
    from harness.ci.github import Options, render
    from harness.ci.plan import plan_night

    night = plan_night(profile, cell or [], minutes)
    _print(render(night, Options(tuple(runner or ()), verdict_runner, schedule, hf_token, image, gpus)), out)


def _print(text: str, out: Path | None) -> None:
    if out is None:
        print(text, end="")
        return
    from harness.files import write_atomic

    write_atomic(out, text)
    typer.echo(str(out))


def exit_of_part(folder: Path) -> int:
    """Exit code of ``harness run --part``: 0 when everything was recorded, whatever it says; 2 when something is
    missing, which is printed."""
    from harness.history import load_history
    from harness.parts import lacks

    missing = lacks(load_history(folder))
    for why in missing:
        print(f"not recorded: {why}")
    if not missing:
        print("part: everything was recorded; `harness merge` judges it with the other parts")
    return EXIT_UNKNOWN if missing else EXIT_PASS
