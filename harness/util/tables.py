"""Tables for the terminal."""

from __future__ import annotations

from rich.table import Column, Table


def folding_table(title: str, *columns: str) -> Table:
    """Return an empty table below its title, with columns that fold what is too long for them."""
    return Table(*(Column(name, overflow="fold") for name in columns), title=title, title_justify="left")
