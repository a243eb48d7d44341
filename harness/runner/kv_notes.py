"""The notes of engines' KV caches, brought to the run whose requests they are of: a repetition, a try or a trial has a
folder of its own, and shares its engines with others."""

from __future__ import annotations

import contextlib
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from harness.history.kv_events import is_events
from harness.history.layout import WITNESS
from harness.history.notes import engines_of
from harness.util.storage import writing

_SETTLED_S = 0.1
"""Seconds without growth after which the last request is taken to be noted."""
_MOST_S = 5.0


_OF_SERVERS = re.compile(r"(prefill|decode|single)\.[0-9]+\.jsonl")
"""Names of the files of servers that were started with a role as KV_HARNESS_WITNESS_NAME."""


@contextlib.contextmanager
def notes_brought(folder: Path, run: Path, group: str) -> Iterator[None]:
    """Copy what a group of engines notes in a folder meanwhile into that of a run, if it is another one. Raises
    StorageError when it cannot be written."""
    if folder.resolve() == (run / WITNESS).resolve():
        yield
        return

    def files() -> dict[Path, str]:
        return {path: path.name for path in sorted(folder.glob("*.jsonl")) if engines_of(path) == group}

    with _brought(files, run):
        yield


@contextlib.contextmanager
def notes_of_servers(folder: Path, run: Path, group: str) -> Iterator[None]:
    """Copy what servers that run already note meanwhile in this folder into that of a run, as notes of a group of
    engines. Raises StorageError when it cannot be written."""

    def files() -> dict[Path, str]:
        return {
            path: f"{group}.{path.name}" for path in sorted(folder.glob("*.jsonl")) if _OF_SERVERS.fullmatch(path.name)
        }

    with _brought(files, run):
        yield


@contextlib.contextmanager
def _brought(files: Callable[[], Mapping[Path, str]], run: Path) -> Iterator[None]:
    before = {path: path.stat().st_size for path in files()}
    try:
        yield
    finally:
        if files():
            _settle(files)
            _bring(files(), run, before)


def _settle(files: Callable[[], Mapping[Path, str]]) -> None:
    """Wait until the engines write no more: a thread of theirs does so behind each answer."""
    deadline = time.monotonic() + _MOST_S
    sizes: list[int] | None = None
    while time.monotonic() < deadline:
        now = [path.stat().st_size for path in files()]
        if now == sizes:
            return
        sizes = now
        time.sleep(_SETTLED_S)


def _bring(files: Mapping[Path, str], run: Path, before: Mapping[Path, int]) -> None:
    for path, name in files.items():
        target = run / WITNESS / name
        with writing(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            new = not target.exists()
            with path.open("rb") as source, target.open("ab") as copy:
                # The first line, which has the layers, comes once.
                header = source.readline()
                if new:
                    copy.write(header)
                # What was told of a prefix cache before says what it holds: all of it that is not there yet.
                begin = target.stat().st_size if is_events(path) and not new else 0
                source.seek(max(begin if is_events(path) else before.get(path, 0), len(header)))
                shutil.copyfileobj(source, copy)
