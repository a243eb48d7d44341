"""The file of observations of an interrupted run, put in order before the run goes on."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from pydantic import BaseModel, ConfigDict, ValidationError

from harness.errors import DataError
from harness.storage import writing


class _Place(BaseModel):
    """What a line is of."""

    model_config = ConfigDict(extra="ignore")
    cell: str
    scenario: str


def move_aside(lines: Path, stays: Callable[[str, str], bool], aside: Path, torn: Path) -> None:
    """Keep the lines of which ``stays`` says so, given cell and scenario; write the others to ``aside``, and a torn
    last line to ``torn``. These files are on the disk before the lines are replaced in one step, so that nothing is
    lost whenever this is killed; then a line may be in both.

    Raises StorageError, and DataError for lines that are none; the lines are as before then.
    """
    kept = lines.with_name(f".{lines.name}.kept")
    with writing(lines), ExitStack() as stack:
        source = stack.enter_context(lines.open("rb"))
        opened: dict[Path, IO[bytes]] = {}

        def write(path: Path, line: bytes) -> None:
            if path not in opened:
                opened[path] = stack.enter_context(path.open("wb"))
            opened[path].write(line)

        write(kept, b"")
        for number, line in enumerate(source, 1):
            if not line.endswith(b"\n"):
                write(torn, line)
                continue
            try:
                place = _Place.model_validate_json(line)
            except ValidationError as error:
                raise DataError(f"{lines}, line {number}: expected an observation, found damaged data") from error
            write(kept if stays(place.cell, place.scenario) else aside, line)
        for stream in opened.values():
            stream.flush()
            os.fsync(stream.fileno())
    with writing(lines):
        kept.replace(lines)
