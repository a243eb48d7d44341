"""Files that a run keeps of one engine each, ``witness/<group>.<role>.<pid>.jsonl``: their names and their lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from harness.errors import DataError
from harness.history.index import LONGEST_LINE
from harness.util import json_io
from harness.util.invalid_data import describe_validation_error
from harness.util.strict import Strict

_Model = TypeVar("_Model", bound=Strict)


def engines_of(notes: Path) -> str:
    """Return the group of engines one of which wrote a file of notes."""
    # A group's name may contain dots.
    return notes.name.rsplit(".", 3)[0]


def role_of(notes: Path) -> str:
    """Return the role of the engine that wrote a file of notes, or that it is about."""
    return notes.name.rsplit(".", 3)[1]


def lines_of(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the offset and content of each complete line; what was being written when it was cut off is left out.

    Raises DataError for damaged ones.
    """
    with path.open("rb") as stream:
        while True:
            offset = stream.tell()
            line = stream.readline(LONGEST_LINE)
            if not line.endswith(b"\n"):
                return
            try:
                row = json_io.loads(line.decode())
            except ValueError as error:
                raise DataError(f"{path}: expected JSON, found damaged data ({error})") from error
            if not isinstance(row, dict):
                raise DataError(f"{path}: expected objects, found {type(row).__name__}")
            yield offset, row


def validated(model: type[_Model], row: Mapping[str, Any], path: Path) -> _Model:
    """Return a line's content as a model. Raises DataError for a damaged one."""
    try:
        return model.model_validate(row)
    except ValidationError as error:
        raise DataError(f"{path}: found damaged data:\n{describe_validation_error(error)}") from error
