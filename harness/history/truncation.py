"""Selection of the observations that an interrupted run keeps when it is resumed."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from pydantic import BaseModel, ConfigDict, ValidationError

from harness.errors import DataError
from harness.util.storage import writing


class _Place(BaseModel):
    """The cell and scenario of a line."""

    model_config = ConfigDict(extra="ignore")
    cell: str
    scenario: str


def move_aside(lines: Path, keep: Callable[[str, str], bool], aside: Path, torn: Path) -> None:
    """Keep the lines for which ``keep(cell, scenario)`` is true; move the others to ``aside``, a torn one to ``torn``.

    These files are on the disk before ``lines`` is replaced atomically, so that nothing is lost if the process is
    killed; a line may then be in two files. Raises StorageError, and DataError for damaged lines; ``lines`` is
    unchanged then.
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
            write(kept if keep(place.cell, place.scenario) else aside, line)
        for stream in opened.values():
            stream.flush()
            os.fsync(stream.fileno())
    with writing(lines):
        kept.replace(lines)
