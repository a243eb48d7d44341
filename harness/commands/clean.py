"""Redact the logs of runs whose harness was killed before it could do so."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from harness import redact
from harness.errors import HarnessError
from harness.history.layout import RUN
from harness.supervision.orphans import survey
from harness.util.storage import FolderLock


def redacted(runs: Iterable[Path], below: Iterable[Path] = ()) -> tuple[list[str], list[str]]:
    """Redact the logs of ``runs``, and of all runs in or below other folders.

    Returns sentences about what was done and what could not be. A run that is being written, or whose engines still
    run, is left alone: an engine whose log file is replaced would keep writing to the old one.
    """
    done: list[str] = []
    left: list[str] = []
    begun = {Path(tree.ledger.run) for tree in survey().trees}
    wanted = [*runs, *(run for folder in below for run in _runs(folder))]
    for folder in sorted({run.resolve() for run in wanted if run.is_dir()}):
        if folder in begun:
            left.append(f"logs of {folder}, whose engines may still write to them")
            continue
        try:
            with FolderLock(folder):
                changed = redact.logs(folder)
        except (HarnessError, OSError) as error:
            left.append(f"logs of {folder}: {error}")
            continue
        if changed:
            done.append(f"redacted secrets in {changed} logs of {folder}")
    return done, left


def _runs(folder: Path) -> Iterator[Path]:
    """Yield folders of runs, which have logs even when no record was written."""
    if not folder.is_dir():
        return
    yield from {p.parent.parent for p in folder.rglob("logs/*.log")} | {p.parent for p in folder.rglob(RUN)}
