"""``harness ci``: a profile as the jobs of a CI system."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from harness.cli.help import HelpfulGroup
from harness.cli.options import CellOption, ProfileOption

ci_app = typer.Typer(
    cls=HelpfulGroup,
    no_args_is_help=True,
    help=(
        "Split a profile into parts for CI systems: each part records on its own machine, then one step merges and "
        "judges them all, and its exit code is the verdict. See docs/ci.md."
    ),
)

MinutesOption = Annotated[
    int | None,
    typer.Option(
        "--minutes-per-step",
        metavar="N",
        min=1,
        help="Expected minutes up to which groups of engines share a step. Default: those of the longest group.",
    ),
]
GpusOption = Annotated[
    str | None,
    typer.Option(
        "--gpus",
        metavar="all|N",
        help="GPUs of a part that runs in an image: 'all' or a number. Default: depends on the device.",
    ),
]


@ci_app.command("matrix")
def matrix(
    profile: ProfileOption = "cpu", cell: CellOption = None, minutes: MinutesOption = None, gpus: GpusOption = None
) -> None:
    """Print the parts of a profile as one line of JSON, the `strategy.matrix` of ci/github/nightly.yaml."""
    from harness.commands.ci.plan import split_run
    from harness.commands.ci.systems import github_matrix

    print(json.dumps(github_matrix(split_run(profile, cell or [], minutes), gpus)))


@ci_app.command("buildkite")
def buildkite(
    profile: ProfileOption = "cpu",
    cell: CellOption = None,
    minutes: MinutesOption = None,
    gpus: GpusOption = None,
    queue: Annotated[str, typer.Option("--queue", help="Agent queue of the parts.")] = "default",
    verdict_queue: Annotated[
        str | None,
        typer.Option("--verdict-queue", help="Agent queue of the merge step, which needs no GPU. Default: --queue."),
    ] = None,
) -> None:
    """Print the pipeline of all parts and the verdict as JSON.

    Pass it to `buildkite-agent pipeline upload --no-interpolation`.
    """
    from harness.commands.ci.plan import split_run
    from harness.commands.ci.systems import buildkite_pipeline

    run = split_run(profile, cell or [], minutes)
    print(json.dumps(buildkite_pipeline(run, queue, verdict_queue or queue, gpus)))
