"""Observations of a large run: validated once, then parsed per cell on demand and cached.

A parsed observation takes about six times the memory of its line, so of a run above ``IN_MEMORY`` bytes only the most
recently used cells are kept parsed.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar, cast

import numpy as np
from pydantic import ValidationError

from harness.errors import DataError
from harness.history.records import Observation
from harness.util import json_io
from harness.util.byte_cache import ByteCache
from harness.util.garbage import collector_paused
from harness.util.invalid_data import describe_validation_error

_Found = TypeVar("_Found")
LONGEST_LINE = 16 << 20
"""Bytes of the longest line that is read, far above what an answer needs. The hole that a full disk leaves at the end
of a file would be one line."""
IN_MEMORY = 32 << 20
"""Bytes of lines up to which a run is parsed at once. A run of the ``cpu`` profile has 7 MB."""
CACHED = 64 << 20
"""Bytes of lines whose cells are kept parsed, over all runs; the most recently used cell always is."""


def _keys(o: Observation) -> int:
    """Return how many keys an observation took from its line, but for those in what is rarely there."""
    n = len(o.model_fields_set) + len(o.shared_counters) + len(o.fields) + len(o.aged_by)
    for counters in o.shared_counters.values():
        n += len(counters)
    for leg in o.legs:
        n += len(leg.model_fields_set) + len(leg.counters)
        n += len(leg.kv_transfer_params) if leg.kv_transfer_params is not None else 0
        for part in (leg.speculation, leg.streamed):
            n += len(part.model_fields_set) if part is not None else 0
    return n


class CellRows(NamedTuple):
    by_place: dict[tuple[str, str], list[Observation]]
    """Observations by form and scenario, in the order of the record."""
    ordered: list[Observation]
    """All observations, sorted by sequence."""
    found: dict[tuple[str, ...], Any]
    """What was found of them by key, as long as they are kept parsed."""

    def once(self, key: tuple[str, ...], find: Callable[[], _Found]) -> _Found:
        """Return what ``find`` finds of them, the first time that this key is asked for. It is shared, and not to be
        changed."""
        if key not in self.found:
            self.found[key] = find()
        return cast(_Found, self.found[key])


def cell_rows(observations: Sequence[Observation]) -> CellRows:
    by_place: dict[tuple[str, str], list[Observation]] = {}
    for o in observations:
        by_place.setdefault((o.form, o.scenario), []).append(o)
    return CellRows(by_place, sorted(observations, key=lambda o: o.sequence), {})


class RecordedFile:
    """The complete lines of a file of observations, which can be read any number of times; each pass parses them again.

    Every read raises DataError when the file has changed since it was first read.
    """

    def __init__(self, path: Path, cell: str, kept: list[Observation] | None = None) -> None:
        """Validate the complete lines as answers of the cell, and append them to ``kept`` if there is one. Raises
        DataError for damaged ones."""
        self.path = path
        self.cell = cell
        self.lines = self.size = 0
        self.said = 0
        """Output tokens of its answers, without those that were re-scored."""
        self.scenarios: set[str] = set()
        self.exchanges: array[int] = array("q")
        """A number for each exchange with an engine, which is its own."""
        self.torn = False
        """Whether there is anything after the last complete line of at most LONGEST_LINE bytes."""
        with self._open() as stream, collector_paused():
            self._stamp = self._stamp_of(stream)
            while line := stream.readline(LONGEST_LINE):
                if not line.endswith(b"\n"):
                    self.torn = bool(line.strip())
                    break
                text = line[:-1]
                o = self._parse(text, self.lines + 1)
                try:
                    # Once, when the file is first read: what is read again is the same.
                    if not json_io.has_keys(text, _keys(o)):
                        json_io.require_each_key_once(text)
                except ValueError as error:
                    where = self._where(self.lines + 1)
                    raise DataError(f"{where}: expected an observation, found damaged data: {error}") from error
                self.lines += 1
                self.size += len(line)
                self.scenarios.add(o.scenario)
                self.said += o.tokens_said
                self.exchanges.extend(hash((leg.request_id, leg.role)) for leg in o.legs)
                if kept is not None:
                    kept.append(o)

    def __iter__(self) -> Iterator[Observation]:
        with self._open_unchanged() as stream:
            for number, line in enumerate(islice(stream, self.lines), 1):
                yield self._parse(line[:-1], number)

    def _parse(self, text: bytes, line: int) -> Observation:
        try:
            observation = Observation.model_validate_json(text, strict=True)
        except ValidationError as error:
            raise DataError(
                f"{self._where(line)}: expected an observation, found damaged data:\n{describe_validation_error(error)}"
            ) from error
        if observation.cell != self.cell:
            where = self._where(line)
            raise DataError(f"{where}: expected an observation of {self.cell}, found one of {observation.cell}")
        return observation

    def _where(self, line: int) -> str:
        return f"{self.path}, line {line}"

    def copy_to(self, target: IO[bytes]) -> None:
        """Write the complete lines to another file."""
        with self._open_unchanged() as stream:
            target.writelines(islice(stream, self.lines))

    def _open(self) -> IO[bytes]:
        try:
            return self.path.open("rb")
        except OSError as error:
            raise DataError(f"{self.path}: expected JSON lines, but it cannot be read ({error})") from error

    @staticmethod
    def _stamp_of(stream: IO[bytes]) -> tuple[int, int]:
        found = os.fstat(stream.fileno())
        return found.st_size, found.st_mtime_ns

    def _open_unchanged(self) -> IO[bytes]:
        stream = self._open()
        if self._stamp_of(stream) != self._stamp:
            stream.close()
            raise DataError(f"{self.path} was changed while it was read; judge it again when no process writes to it")
        return stream


class RecordedCells:
    """Observations that are not in memory: they are read in passes, or by cell."""

    def __init__(self, files: Mapping[str, Sequence[RecordedFile]]) -> None:
        self.files = {cell: tuple(of_cell) for cell, of_cell in files.items()}

    @property
    def torn(self) -> bool:
        """Whether there is anything after the last complete line of a file."""
        return any(file.torn for files in self.files.values() for file in files)

    @property
    def repeated_exchanges(self) -> int:
        """How many exchanges are on record more than once: one that stands for two answers proves at most one."""
        every = np.concatenate([np.zeros(0, np.int64), *(f.exchanges for of in self.files.values() for f in of)])
        return len(every) - len(np.unique(every))

    @property
    def said(self) -> int:
        """Output tokens of all answers, without those that were re-scored."""
        return sum(file.said for files in self.files.values() for file in files)

    def __len__(self) -> int:
        return sum(file.lines for files in self.files.values() for file in files)

    def __iter__(self) -> Iterator[Observation]:
        return (o for files in self.files.values() for file in files for o in file)

    def of_scenario(self, scenario: str) -> Iterator[Observation]:
        """Iterate over the observations of a scenario, by cell; files without it are not read."""
        for files in self.files.values():
            for file in files:
                if scenario in file.scenarios:
                    yield from (o for o in file if o.scenario == scenario)

    def of_cell(self, cell: str) -> CellRows:
        """Return the observations of a cell, from the cache if possible; they are empty if it was not recorded."""
        files = self.files.get(cell, ())
        found = _CACHE.get(files)
        if found is None:
            with collector_paused():
                found = cell_rows([o for file in files for o in file])
            _CACHE.put(files, found, sum(file.size for file in files))
        return found

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RecordedCells | tuple):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]


_CACHE: ByteCache[tuple[RecordedFile, ...], CellRows] = ByteCache(CACHED)
