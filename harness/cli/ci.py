"""``harness ci``: a profile as the jobs of a CI system."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import typer

from harness.cli.help import HelpfulGroup
from harness.cli.options import CellOption, ProfileOption
from harness.errors import UsageError

if TYPE_CHECKING:
    from harness.commands.ci.plan import SplitRun

ci_app = typer.Typer(
    cls=HelpfulGroup,
    no_args_is_help=True,
    help=(
        "Split a profile into parts for CI systems: each part records on its own machine, then one step merges and "
        "judges them all, and its exit code is the verdict. See docs/ci.md."
    ),
)


_SMOKE_MINUTES = 60
"""Expected minutes up to which the smoke stage is one step."""


class SplitOptions(NamedTuple):
    """What is split into parts, and how."""

    profile: ProfileOption = "cpu"
    cell: CellOption = None
    minutes: Annotated[
        int | None,
        typer.Option(
            "--minutes-per-step",
            metavar="N",
            min=1,
            max=10_080,
            help="Expected minutes up to which groups of engines share a step. Default: those of the longest group.",
        ),
    ] = None
    gpus: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, max=64, help="GPUs of each step's machine. Default: as few as its engines need."
        ),
    ] = None
    record: Annotated[
        bool, typer.Option("--record", help="Record baselines: the single engines alone, everything twice.")
    ] = False

    def split(self) -> SplitRun:
        """Return the parts. Raises UsageError for GPUs where engines run on CPUs, and as ``split_run`` does."""
        from harness.commands.ci.plan import split_run

        made = split_run(self.profile, self.cell or [], self.minutes, self.gpus, self.record)
        if self.gpus is not None and made.device != "gpu":
            raise UsageError(f"--gpus {self.gpus}: the engines of profile {self.profile} run on CPUs; leave it out")
        return made


def _queue_name(context: typer.Context, parameter: typer.CallbackParam, value: str | None) -> str | None:
    """Return the name of a queue. Raises UsageError for none, and for braces that nothing will stand for: such jobs
    would wait for ever."""
    if value is not None and not value.strip():
        raise UsageError(
            f"{parameter.opts[0]} {value!r}: expected the name of a queue; add it, or leave the option out"
        )
    of_parts = parameter.name == "queue"
    rest = (value or "").replace("{gpus}", "" if of_parts else "{gpus}")
    if context.resilient_parsing or not {"{", "}"} & set(rest):
        return value
    but = " but {gpus}, which becomes the GPUs of the step" if of_parts else ", since the merge step has no GPUs"
    raise UsageError(f"{parameter.opts[0]} {value!r}: expected no braces{but}; correct the name")


@ci_app.command("matrix")
def matrix(*, of: SplitOptions) -> None:
    """Print the parts of a profile as one line of JSON, the `strategy.matrix` of ci/github/nightly.yaml."""
    from harness.commands.ci.systems import github_matrix

    print(json.dumps(github_matrix(of.split())))


@ci_app.command("buildkite")
def buildkite(
    *,
    of: SplitOptions,
    queue: Annotated[
        str,
        typer.Option(callback=_queue_name, help="Agent queue of the parts; {gpus} in it becomes the GPUs of the step."),
    ] = "default",
    verdict_queue: Annotated[
        str | None,
        typer.Option(
            callback=_queue_name,
            help="Agent queue of the merge step, which needs no GPU. Default: --queue, if it is the same for all.",
        ),
    ] = None,
    smoke: Annotated[
        str | None,
        typer.Option(
            metavar="PROFILE", help="Run and judge this profile first, and start the parts only if it passes."
        ),
    ] = None,
) -> None:
    """Print the pipeline of all parts and the verdict as JSON.

    Pass it to `buildkite-agent pipeline upload --no-interpolation`.
    """
    from harness.commands.ci.plan import split_run
    from harness.commands.ci.systems import buildkite_pipeline

    last = verdict_queue or ("default" if "{gpus}" in queue else queue)
    gate = split_run(smoke, minutes=_SMOKE_MINUTES, gpus=of.gpus) if smoke is not None else None
    print(json.dumps(buildkite_pipeline(of.split(), queue, last, gate)))


@ci_app.command("engines")
def engines(
    vllm: Annotated[
        str,
        typer.Argument(
            metavar="VLLM",
            help="A version (0.33.0), a wheel (path or address), a commit of vLLM's main branch (40 digits), or an "
            "interpreter that has one. On CPUs, a wheel built for CUDA gives its Python files to the locked CPU build.",
        ),
    ],
    device: Annotated[Literal["cpu", "gpu"], typer.Option(metavar="cpu|gpu", help="What the engines run on.")] = "cpu",
) -> None:
    """Print an interpreter with this vLLM, for --engine-python; it is installed once per machine."""
    from harness.engines.builds import engine_python
    from harness.util.progress import saying

    with saying(f"installing vLLM {vllm}"):
        found = engine_python("VLLM", vllm, device, lambda words: typer.echo(f"harness: {words}", err=True))
    print(found)
