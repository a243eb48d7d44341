"""Command line: ``harness ps`` and ``harness clean``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.errors import EXIT_PASS, EXIT_UNKNOWN

if TYPE_CHECKING:
    from harness.engine.leftovers import Found


def ps_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show engines and routers of this user's harnesses, and what an earlier crash left of them: processes, ports,
    shared memory. Ends and removes nothing; see `harness clean`."""
    from harness.engine.leftovers import survey

    found = survey()
    if as_json:
        print(json.dumps(found.as_json(), indent=2))
        return
    console = Console(width=None if sys.stdout.isatty() else 160)
    if found.trees:
        table = Table("state", "engine", "pid", "harness", "ports", "age", "processes", "shared memory", "run")
        for tree in found.trees:
            table.add_row(*(Text(_printable(cell)) for cell in _row(tree)))
        console.print(table)
    else:
        print("no engines of this user's harnesses, and nothing left of any")
    for damaged in found.damaged:
        print(_printable(f"damaged: {damaged.path}: {damaged.why}"))
    if found.claims:
        print(f"claimed ports: {', '.join(map(str, found.claims))}")


def _printable(text: str) -> str:
    """What a ledger says goes to a terminal."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _row(tree: Found) -> list[str]:
    known = tree.ledger
    ports = [f"{p}*" if p in tree.listening else str(p) for p in known.ports]
    minutes, seconds = divmod(int(tree.age_s), 60)
    return [
        tree.state,
        known.name,
        str(known.engine.pid) if known.engine is not None else "-",
        str(known.holder.pid) + ("" if tree.state == "running" else " (gone)" if tree.state == "left over" else " (?)"),
        ", ".join(ports),
        f"{minutes}:{seconds:02d}",
        str(len(tree.processes)),
        str(len(tree.segments)),
        known.run,
    ]


def clean_command(
    logs: Annotated[
        list[Path] | None,
        typer.Option("--logs", metavar="FOLDER", help="Take secrets out of the logs of runs below it, too."),
    ] = None,
) -> None:
    """End processes and remove shared memory, claims and ledgers that an earlier crash left, only what is provably a
    harness's own, and take keys and tokens out of the logs of such runs. What belongs to a living harness is not
    touched. Exit code 0, or 2 when something is left."""
    from harness.engine.leftovers import clean, survey
    from harness.killed_logs import redacted

    runs = {Path(tree.ledger.run) for tree in survey().trees if tree.state == "left over" and tree.ledger.run}
    ended = clean()
    # Only now does nobody write to them.
    done, left = redacted(runs, logs or ())
    for words in (*ended.done, *done):
        print(_printable(words))
    for words in (*ended.left, *left):
        print(_printable(f"left: {words}"))
    if not (ended.done or done or ended.left or left):
        print("nothing to clean")
    raise typer.Exit(EXIT_UNKNOWN if ended.left or left else EXIT_PASS)
