"""``harness models``: the models of a profile that are fetched or converted; ``harness probe``: those of the cpu
profile."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli import shapes
from harness.cli.help import HelpfulGroup
from harness.cli.options import LATEST, CellOption, JsonOption, ProfileOption, RunDir, make_console, print_json
from harness.errors import EXIT_UNKNOWN
from harness.util.tables import folding_table

if TYPE_CHECKING:
    from harness.profiles.hub import Hub
    from harness.profiles.model_survey import Convertible, Model


def models_command(
    profile: ProfileOption = "cpu",
    cell: CellOption = None,
    download: Annotated[bool, typer.Option("--download", help="Fetch and convert what the local caches lack.")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every cached file and compare it with its checksum.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the models of a profile on the Hugging Face hub, in packages and in GGUF folders: size, and whether cached.

    Exit code 0 when all are cached or can be downloaded; 2 when access, network or disk prevents it; 64 when the
    profile names a model that does not exist or has moved.
    """
    from harness.profiles.availability import makeable, references_of
    from harness.profiles.cells import select_cells
    from harness.profiles.hub import GIB, Hub
    from harness.profiles.load import read_profile
    from harness.profiles.model_survey import survey, survey_convertible

    # A nightly job downloads models first; its prompts may be built with their tokenizers later.
    wanted = read_profile(profile, with_prompts=False)
    cells = select_cells(wanted, cell or [], profile)
    on_hub = any(references_of(part) for part in wanted.written_parts)
    if not on_hub and not any(makeable(part) for part in wanted.written_parts):
        if as_json:
            print_json(shapes.models(wanted.name, [], [], Hub(), []))
        else:
            typer.echo(f"profile {wanted.name} names no model on the hub, only folders")
        return
    hub = Hub()
    methods: dict[str, set[str]] = {}
    for chosen in cells:
        methods.setdefault(chosen.variant, set()).add(chosen.method.kind)
    found = survey(wanted, hub, download, methods) if on_hub else []
    made = survey_convertible(wanted, download, methods, lambda words: typer.echo(f"harness: {words}", err=True))
    errors = [(m.role, m.error) for m in found if m.error is not None]
    errors += [(m.role, m.error) for m in made if m.error is not None]
    problems = [f"{role}: {error}" for role, error in errors]
    code = max((error.exit_code for _, error in errors), default=0)
    if verify:
        from harness.util.progress import saying

        with saying("reading the files of the cache"):
            damaged = _damaged(hub, found, made)
        problems += damaged
        code = max(code, EXIT_UNKNOWN if damaged else 0)
    if as_json:
        print_json(shapes.models(wanted.name, found, made, hub, problems))
        raise typer.Exit(code)
    if found:
        _show(found)
        typer.echo(
            f"hub: {hub.endpoint}, token: {'found' if hub.has_token else 'none'}; cache: {hub.cache}, "
            f"{hub.free() / GIB:.1f} GiB free"
        )
    if made:
        _show_convertible(made)
    for problem in _each_once(problems):
        typer.echo(problem)
    raise typer.Exit(code)


def _each_once(problems: Sequence[str]) -> list[str]:
    """Return problems, ``ROLE: MODEL: what``; what is the same of several models, such as no network, is said once."""
    same: dict[str, list[str]] = {}
    for problem in problems:
        same.setdefault(problem.split(": ", 2)[-1], []).append(problem)
    return [each[0] if len(each) == 1 else f"{len(each)} models: {what}" for what, each in same.items()]


def _damaged(hub: Hub, found: list[Model], made: list[Convertible]) -> list[str]:
    """Return a sentence for each file in the caches that does not match its checksum."""
    from harness.profiles.converted import damaged
    from harness.profiles.hub import damaged_files

    out = []
    for model in found:
        folder = hub.snapshot_folder(model.reference.repo, model.commit or "")
        out += [
            f"{model.role}: {folder / n} does not match its checksum; remove the file it links to and download again"
            for n in (damaged_files(folder) if model.cached else [])
        ]
    for one in made:
        out += [
            f"{one.role}: {one.folder / n} does not match its checksum; remove {one.folder}, and it is made anew"
            for n in (damaged(one.folder) if one.folder is not None else [])
            if one.folder is not None
        ]
    return out


def _show_convertible(made: list[Convertible]) -> None:
    from harness.profiles import converted

    columns = ("role", "model", "file", "licence", "size", "converted", "here")
    table = folding_table("models in packages, and folders with model.gguf", *columns)
    for m in made:
        sizes = ["?" if size is None else f"{size / 1e6:.0f} MB" for size in (m.source_size, m.size)]
        table.add_row(m.role, m.name, m.file, m.license or "–", *sizes, "yes" if m.folder is not None else "no")
    make_console().print(table)
    typer.echo(
        f"cache: {converted.root()}, {converted.free() / 1e9:.1f} GB free; a run makes what is not here, and so does "
        "--download"
    )


def _show(found: list[Model]) -> None:
    from harness.profiles.hub import GIB

    table = folding_table("models", "role", "repository", "revision", "commit", "size", "here", "gated")
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
        Path | None, typer.Option(metavar="FILE", help="File to write. Default: beside the weights.")
    ] = None,
) -> None:
    """Measure exactness, acceptance and top-2 gaps of the probe models from a recorded run with single-engine cells."""
    from harness.commands.probe_quality import write_quality
    from harness.history.folder import load_history
    from harness.prompts.probe_task import WEIGHTS

    typer.echo(json.dumps(write_quality(load_history(run_dir), out or WEIGHTS / "quality.json"), indent=2))
