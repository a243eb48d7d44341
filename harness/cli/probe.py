"""``harness probe``: the probe models of the cpu profile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from harness.cli.help import HelpfulGroup
from harness.cli.options import LATEST, RunDir

probe_app = typer.Typer(
    cls=HelpfulGroup, no_args_is_help=True, help="The tiny trained models that the cpu profile runs on."
)


@probe_app.command("measure")
def measure(
    run_dir: RunDir = LATEST,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="File to write. Default: beside the weights.")
    ] = None,
) -> None:
    """Measure exactness, acceptance and top-2 gaps of the probe models from a recorded run with single-engine cells."""
    from harness.commands.probe_quality import write_quality
    from harness.history.folder import load_history
    from harness.prompts.probe_task import WEIGHTS

    typer.echo(json.dumps(write_quality(load_history(run_dir), out or WEIGHTS / "quality.json"), indent=2))
