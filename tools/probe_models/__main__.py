"""``python -m tools.probe_models``: train the probe models from scratch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from harness.cli.app import main
from harness.prompts.probe_task import WEIGHTS
from tools.probe_models.build import build

app = typer.Typer(name="probe_models", add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def commands() -> None:
    """The tiny trained models that the cpu profile runs on."""


@app.command("build")
def build_command(
    out: Annotated[Path, typer.Option("--out", help="Folder to write to. Default: the shipped weights.")] = WEIGHTS,
) -> None:
    """Train the probe models from scratch (about 110 minutes on two cores)."""
    description = build(out, typer.echo)
    typer.echo(f"wrote {out}: {description['weights_bytes'] / 1e6:.1f} MB in {description['training_seconds']} s")
    steps = ("prompts build copy --overwrite", "baseline record", "probe measure reports/latest")
    typer.echo(f"next: {', '.join(f'harness {step}' for step in steps)}")


@app.command("adapters")
def adapters_command(
    out: Annotated[Path, typer.Option("--out", help="Folder with the target. Default: the shipped weights.")] = WEIGHTS,
) -> None:
    """Train the LoRA adapters of the finished target (about 10 minutes on one core)."""
    from tools.probe_models import adapters

    description = adapters.build(out, typer.echo)
    typer.echo(f"wrote {', '.join(description['weights_sha256'])} in {description['training_seconds']} s")


if __name__ == "__main__":
    main(app)
