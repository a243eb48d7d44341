"""The files of observations of a recorded run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from harness.history.folder import HistoryWriter
from harness.history.layout import CELLS, LINES, SCORES, files_by_cell
from harness.history.records import Observation


def write_observations(folder: Path, observations: Iterable[Observation]) -> None:
    """Write observations as a run does, without its record."""
    with HistoryWriter(folder) as writer:
        for o in observations:
            writer.append(o)


def answers(folder: Path, cell: str) -> Path:
    return folder / CELLS / cell / LINES


def scores(folder: Path, cell: str = "single-none") -> Path:
    return folder / CELLS / cell / SCORES


def all_lines(folder: Path) -> list[str]:
    """The lines of every file of observations of a run, or of a folder with such files that was set aside."""
    files = [f for of_cell in files_by_cell(folder).values() for f in of_cell]
    aside = [p / name for p in sorted(folder.glob("*")) for name in (LINES, SCORES) if (p / name).is_file()]
    return [line for f in (*files, *aside) for line in f.read_text().splitlines()]
