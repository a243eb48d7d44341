"""``harness attach``: a profile for servers that run already."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from harness.cli import completion
from harness.cli.options import key_in, make_console
from harness.cli.run import ServerOptions
from harness.errors import UsageError
from harness.util.tables import folding_table


def attach_command(
    *,
    servers: ServerOptions,
    extends: Annotated[
        str | None,
        typer.Option(
            metavar="PROFILE",
            autocompletion=completion.profiles,
            help="The profile to extend. Default: cpu or gpu, by what the servers run on.",
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="The servers' model, where its folder has another path on this machine."),
    ] = None,
    drafter: Annotated[str | None, typer.Option(metavar="MODEL", help="The same for the model that drafts.")] = None,
    method: Annotated[
        str | None, typer.Option(help="The speculation method, where the servers do not tell it: eagle3, ngram, …")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the profile. Default: that of the extended one.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File to write, never over another. Default: print it.")
    ] = None,
) -> None:
    """Read servers that run already, and write a profile that has their settings.

    Every reason for which the servers cannot be judged together is named at once, with exit code 64. What they do not
    tell is taken on trust, which is said. Scenarios that cannot be brought about on them are left out, with the reason.
    """
    from harness.commands.attach.compose import Wanted
    from harness.commands.attach.write import attach
    from harness.engines.attached import look_at, look_at_router
    from harness.profiles.load import require_profile

    if not servers.urls:
        raise UsageError("name the servers: --prefill URL and --decode URL, --single URL, or all three")
    if (servers.prefill is None) != (servers.decode is None):
        raise UsageError("--prefill and --decode are the two engines of a pair: give both, or --single")
    if out is not None and out.exists():
        raise UsageError(f"--out {out}: this file exists already; name another one, or remove it")
    if out is not None and not out.absolute().parent.is_dir():
        raise UsageError(f"--out {out}: there is no folder {out.absolute().parent}; make it, or name another file")
    servers.require_whole()
    extended = require_profile(extends) if extends is not None else None
    key = key_in(servers.key_variable)
    found = {role: look_at(role, url, key, servers.model) for role, url in servers.urls.items()}
    pair = [server for role, server in found.items() if role != "single"]
    router = look_at_router(servers.router, key, pair, servers.model) if servers.router is not None else None
    made = attach(found, router, Wanted(extended, out, name, target, drafter, method))
    _print(made.rows, list(found), make_console(file=None if out is not None else sys.stderr))
    for words in made.trust:
        typer.echo(words, err=out is None)
    for scenario, why in made.left_out.items():
        typer.echo(f"left out: {scenario}: {why}", err=out is None)
    for words in made.notes:
        typer.echo(words.replace("FILE", str(out or "FILE")), err=out is None)
    if out is None:
        typer.echo(made.text, nl=False)
        return
    with out.open("x", encoding="utf-8") as file:
        file.write(made.text)
    more = ["--key-variable", servers.key_variable] if servers.key_variable is not None else []
    more += ["--witness-notes", str(servers.witness_notes)] if servers.witness_notes is not None else []
    more += ["--model", servers.model] if servers.model is not None else []
    typer.echo(f"written: {out}; next: {shlex.join(['harness', 'run', '-p', str(out), *made.options, *more])}")


def _print(rows: list[tuple[str, ...]], roles: list[str], console: Console) -> None:
    table = folding_table("what the servers tell", "", *roles)
    for row in rows:
        table.add_row(*map(escape, row))
    console.print(table)
