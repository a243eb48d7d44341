"""Answers that were set aside when a run was resumed: the run as it stood then, which is judged, too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from harness.errors import DataError
from harness.history.folder import History, recorded_cells
from harness.history.layout import files_by_cell
from harness.history.records import CellRecord, Resumption, numbered, unnumbered


def set_aside(history: History) -> Iterator[History]:
    """Yield the run as it stood before each resumption that set answers aside. Raises DataError where these answers are
    not all there, or are damaged."""
    files, kept = files_by_cell(history.folder), 0
    # The last one first: what an earlier one set aside, it had in the place of what followed.
    for number, resumption in reversed(list(enumerate(history.run.resumed, 1))):
        if not resumption.set_aside:
            continue
        found = {
            cell: paths for name in resumption.files for cell, paths in files_by_cell(history.folder, name).items()
        }
        for cell, paths in found.items():
            replaced = {p.name for p in paths}
            files = {**files, cell: [*paths, *(p for p in files.get(cell, ()) if p.name not in replaced)]}
        # What a resumption was killed before moving, the next one moved.
        kept += _count(history.folder, found)
        if kept < resumption.set_aside:
            raise DataError(
                f"{history.folder}: expected the {resumption.set_aside} answers that were set aside at "
                f"{resumption.at} in {', '.join(resumption.files)}, found {kept}; restore them from a copy, or run "
                "again"
            )
        yield _then(history, resumption, number, files)


def _count(folder: Path, found: Mapping[str, list[Path]]) -> int:
    try:
        return sum(1 for _ in recorded_cells(found))
    except OSError as error:
        raise DataError(f"{folder}: expected answers that were set aside, but they cannot be read ({error})") from error


def _then(history: History, resumption: Resumption, number: int, files: Mapping[str, list[Path]]) -> History:
    """Return the run with these files, by the engines of the time where cells were asked again."""
    groups = {e.group for e in history.run.engines}

    def earlier(cell: CellRecord) -> CellRecord:
        group = numbered(unnumbered(cell.group), number)
        asked_again = cell.cell in resumption.cells and group in groups
        return cell.model_copy(update={"group": group, "state": "interrupted"}) if asked_again else cell

    order = [c.cell for c in history.run.cells]
    run = history.run.model_copy(update={"cells": tuple(map(earlier, history.run.cells)), "resumed": ()})
    ordered = {cell: files[cell] for cell in dict.fromkeys((*order, *files)) if cell in files}
    return history.model_copy(update={"run": run, "observations": recorded_cells(ordered)})
