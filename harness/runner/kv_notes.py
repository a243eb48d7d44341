"""The notes of engines' KV caches, brought to the run whose requests they are of: a repetition, a try or a trial has a
folder of its own, and shares its engines with others."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from harness.history.layout import WITNESS, witness_files
from harness.util.storage import writing

_SETTLED_S = 0.1
"""Seconds without growth after which the last request is taken to be noted."""
_MOST_S = 5.0


@contextlib.contextmanager
def notes_brought(engines: Path, run: Path) -> Iterator[None]:
    """Copy what engines with this folder note meanwhile into the folder of a run, if that is another one. Raises
    StorageError when it cannot be written."""
    before = {path: path.stat().st_size for path in witness_files(engines)}
    try:
        yield
    finally:
        if engines.resolve() != run.resolve() and witness_files(engines):
            _settle(engines)
            _bring(engines, run, before)


def _settle(engines: Path) -> None:
    """Wait until the engines write no more: a thread of theirs does so behind each answer."""
    deadline = time.monotonic() + _MOST_S
    sizes: list[int] | None = None
    while time.monotonic() < deadline:
        now = [path.stat().st_size for path in witness_files(engines)]
        if now == sizes:
            return
        sizes = now
        time.sleep(_SETTLED_S)


def _bring(engines: Path, run: Path, before: Mapping[Path, int]) -> None:
    for path in witness_files(engines):
        target = run / WITNESS / path.name
        with writing(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            new = not target.exists()
            with path.open("rb") as source, target.open("ab") as copy:
                # The first line, which has the layers, comes once.
                header = source.readline()
                if new:
                    copy.write(header)
                source.seek(max(before.get(path, 0), len(header)))
                shutil.copyfileobj(source, copy)
