"""``harness repro --export``: write a case as a program that runs without this project, the models in an archive beside
it, and the text of an upstream issue."""

from __future__ import annotations

from pathlib import Path


def archive_of(program: Path) -> Path:
    """Return the file for the models of an exported program: beside it, ``repro-models.zip`` for ``repro.py``."""
    return program.with_name(f"{program.stem}-models.zip")
