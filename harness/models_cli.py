"""``harness models``: the models that a profile names on the hub."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from harness.errors import EXIT_UNKNOWN

if TYPE_CHECKING:
    from harness.hub import Model


def models(
    profile: Annotated[
        str, typer.Argument(metavar="PROFILE", help="A shipped profile or the path of a profile YAML file.")
    ] = "cpu",
    cell: Annotated[
        list[str] | None, typer.Option("--cell", help="Only the models of cells that match. Repeatable.")
    ] = None,
    download: Annotated[bool, typer.Option("--download", help="Fetch what the local cache lacks.")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every cached file and compare it with the hash it is filed under.")
    ] = False,
) -> None:
    """Show the models that a profile names on the Hugging Face hub: commit, size, whether they are here and gated.

    Exit code 0 when all can be used or fetched; 2 when access, network or disk forbids it; 64 when the profile names
    what does not exist or has moved.
    """
    from harness.config import read_profile
    from harness.hub import GIB, Hub, damaged_files, references_of, survey
    from harness.matrix import select_cells

    # A nightly job fetches models before anything else; its prompts may be made from them.
    wanted = read_profile(profile, with_prompts=False)
    if not any(references_of(part) for part in wanted.written_parts):
        typer.echo(f"profile {wanted.name} names no model on the hub; all are folders")
        return
    hub = Hub()
    methods: dict[str, set[str]] = {}
    for chosen in select_cells(wanted, cell or []):
        methods.setdefault(chosen.variant, set()).add(chosen.method.kind)
    found = survey(wanted, hub, download, methods)
    _show(found)
    typer.echo(
        f"hub: {hub.endpoint}, token: {'found' if hub.has_token else 'none'}; cache: {hub.cache}, "
        f"{hub.free() / GIB:.1f} GiB free"
    )
    problems = [f"{m.role}: {m.error}" for m in found if m.error is not None]
    code = max((m.error.exit_code for m in found if m.error is not None), default=0)
    if verify:
        for model in found:
            folder = hub.snapshot_folder(model.reference.repo, model.commit or "")
            damaged = damaged_files(folder) if model.cached else []
            problems += [f"{model.role}: {folder / n}: expected the contents it is filed under, found others; remove "
                         "the file it links to and download again" for n in damaged]  # fmt: skip
            code = max(code, EXIT_UNKNOWN if damaged else 0)
    for problem in problems:
        typer.echo(problem)
    raise typer.Exit(code)


def _show(found: list[Model]) -> None:
    from harness.hub import GIB

    table = Table(title="models", title_justify="left")
    for column in ("role", "repository", "revision", "commit", "size", "here", "gated"):
        table.add_column(column, overflow="fold")
    for m in found:
        size = "?" if m.size is None else f"{m.size / GIB:.2f} GiB"
        gated = {True: "yes", False: "no", None: "?"}[m.gated]
        here = "yes" if m.cached else "no"
        table.add_row(m.role, m.reference.repo, m.reference.revision, m.commit or "?", size, here, gated)
    # Wide enough for the table in a pipe, where rich would assume 80 columns.
    Console(width=None if sys.stdout.isatty() else 160).print(table)
