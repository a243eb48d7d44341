"""Logs of runs whose harness was killed before it could take the secrets out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from harness import redact
from harness.engine.leftovers import survey
from harness.errors import HarnessError
from harness.history import RUN
from harness.storage import FolderLock


def redacted(runs: Iterable[Path], below: Iterable[Path] = ()) -> tuple[list[str], list[str]]:
    """Rewrite the logs of these runs, and of all runs in or below other folders; returns what was done and what could
    not be, in words. A run that somebody writes to, or whose engines are there, is left alone: a log that is replaced
    under its engine gets no more lines."""
    done: list[str] = []
    left: list[str] = []
    begun = {Path(tree.ledger.run) for tree in survey().trees}
    wanted = [*runs, *(run for folder in below for run in _runs(folder))]
    for folder in sorted({run.resolve() for run in wanted if run.is_dir()}):
        if folder in begun:
            left.append(f"logs of {folder}, whose engines may write to them")
            continue
        try:
            with FolderLock(folder):
                changed = redact.logs(folder)
        except (HarnessError, OSError) as error:
            left.append(f"logs of {folder}: {error}")
            continue
        if changed:
            done.append(f"took secrets out of {changed} logs of {folder}")
    return done, left


def _runs(folder: Path) -> Iterator[Path]:
    """Folders of runs: with logs, whether they came to a record or not."""
    if not folder.is_dir():
        return
    yield from {p.parent.parent for p in folder.rglob("logs/*.log")} | {p.parent for p in folder.rglob(RUN)}
