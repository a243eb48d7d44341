"""``harness ps`` and ``harness clean``: what harnesses of this user run, and what a crash left behind.

A ledger is the record that a harness keeps of one engine's process tree; a claim reserves a port.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from harness.cli.options import JsonOption, make_console, print_json
from harness.errors import EXIT_PASS, EXIT_UNKNOWN

if TYPE_CHECKING:
    from harness.supervision.orphans import Found


def ps_command(as_json: JsonOption = False) -> None:
    """Show running engines and routers of this user's harnesses, and what a crash left behind.

    Lists processes, ports and shared memory. Stops and removes nothing; see `harness clean`.
    """
    from harness.supervision.orphans import survey

    found = survey()
    if as_json:
        print_json(found.as_json())
        return
    if found.trees:
        table = Table("state", "engine", "pid", "harness", "ports", "age", "processes", "shared memory", "run")
        for tree in found.trees:
            table.add_row(*(Text(_printable(cell)) for cell in _row(tree)))
        make_console().print(table)
    else:
        print("no engines of this user's harnesses, and nothing left behind")
    for damaged in found.damaged:
        print(_printable(f"damaged: {damaged.path}: {damaged.why}"))
    if found.claims:
        print(f"claimed ports: {', '.join(map(str, found.claims))}")


def _printable(text: str) -> str:
    """Return the text of a ledger without the control characters that a terminal would obey."""
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
        typer.Option(metavar="FOLDER", help="Also redact secrets in the logs of all runs below this folder."),
    ] = None,
) -> None:
    """Clean up after an earlier crash.

    Stops leftover processes, removes shared memory and the records of processes and ports, and redacts keys and tokens
    in the logs of such runs. Touches only what provably belongs to a harness that is no longer running. Exit code 0, or
    2 when something is left.
    """
    from harness.commands.clean import redacted
    from harness.supervision.orphans import clean, survey

    runs = {Path(tree.ledger.run) for tree in survey().trees if tree.state == "left over" and tree.ledger.run}
    ended = clean()
    # Only now is no process left that writes to these logs.
    done, left = redacted(runs, logs or ())
    for words in (*ended.done, *done):
        print(_printable(words))
    for words in (*ended.left, *left):
        print(_printable(f"left: {words}"))
    if not (ended.done or done or ended.left or left):
        print("nothing to clean")
    raise typer.Exit(EXIT_UNKNOWN if ended.left or left else EXIT_PASS)
