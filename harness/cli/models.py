"""``harness models``: the models on the hub that a profile names; ``harness probe``: those of the cpu profile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from harness.cli import shapes
from harness.cli.help import HelpfulGroup
from harness.cli.options import LATEST, CellOption, JsonOption, ProfileOption, RunDir, make_console, print_json
from harness.errors import EXIT_UNKNOWN

if TYPE_CHECKING:
    from harness.profiles.model_survey import Model


def models_command(
    profile: ProfileOption = "cpu",
    cell: CellOption = None,
    download: Annotated[bool, typer.Option("--download", help="Download what the local cache lacks.")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every cached file and compare it with its checksum.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the models on the Hugging Face hub that a profile names: commit, size, whether cached and whether gated.

    Exit code 0 when all are cached or can be downloaded; 2 when access, network or disk prevents it; 64 when the
    profile names a model that does not exist or has moved.
    """
    from harness.profiles.cells import select_cells
    from harness.profiles.hub import GIB, Hub, damaged_files
    from harness.profiles.model import read_profile, references_of
    from harness.profiles.model_survey import survey

    # A nightly job downloads models first; its prompts may be built with their tokenizers later.
    wanted = read_profile(profile, with_prompts=False)
    if not any(references_of(part) for part in wanted.written_parts):
        if as_json:
            print_json(shapes.models(wanted.name, [], Hub(), []))
        else:
            typer.echo(f"profile {wanted.name} names no model on the hub, only folders")
        return
    hub = Hub()
    methods: dict[str, set[str]] = {}
    for chosen in select_cells(wanted, cell or []):
        methods.setdefault(chosen.variant, set()).add(chosen.method.kind)
    found = survey(wanted, hub, download, methods)
    problems = [f"{m.role}: {m.error}" for m in found if m.error is not None]
    code = max((m.error.exit_code for m in found if m.error is not None), default=0)
    if verify:
        for model in found:
            folder = hub.snapshot_folder(model.reference.repo, model.commit or "")
            damaged = damaged_files(folder) if model.cached else []
            problems += [
                f"{model.role}: {folder / n}: expected a file that matches its checksum, found one that does not; "
                "remove the file it links to and download again"
                for n in damaged
            ]
            code = max(code, EXIT_UNKNOWN if damaged else 0)
    if as_json:
        print_json(shapes.models(wanted.name, found, hub, problems))
        raise typer.Exit(code)
    _show(found)
    typer.echo(
        f"hub: {hub.endpoint}, token: {'found' if hub.has_token else 'none'}; cache: {hub.cache}, "
        f"{hub.free() / GIB:.1f} GiB free"
    )
    for problem in problems:
        typer.echo(problem)
    raise typer.Exit(code)


def _show(found: list[Model]) -> None:
    from harness.profiles.hub import GIB

    table = Table(title="models", title_justify="left")
    for column in ("role", "repository", "revision", "commit", "size", "here", "gated"):
        table.add_column(column, overflow="fold")
    for m in found:
        size = "?" if m.size is None else f"{m.size / GIB:.2f} GiB"
        gated = {True: "yes", False: "no", None: "?"}[m.gated]
        here = "yes" if m.cached else "no"
        table.add_row(m.role, m.reference.repo, m.reference.revision, m.commit or "?", size, here, gated)
    make_console().print(table)


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
