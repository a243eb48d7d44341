"""Observations of a large run: parsed per cell on demand, validated the first time, and cached.

A parsed observation takes about six times the memory of its line, so of a run above ``IN_MEMORY`` bytes only the most
recently used cells are kept parsed.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, islice
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
_BUFFER = 1 << 20
"""Bytes that are read at once."""
CACHED = 64 << 20
"""Bytes of lines whose cells are kept parsed, over all runs; the most recently used cell always is."""


_VALIDATOR = Observation.__pydantic_validator__


def _keys(o: Observation) -> int:
    """Return how many keys an observation took from its line, but for those in what is rarely there."""
    n = len(o.__pydantic_fields_set__) + len(o.shared_counters) + len(o.fields) + len(o.aged_by)
    for counters in o.shared_counters.values():
        n += len(counters)
    for leg in o.legs:
        n += len(leg.__pydantic_fields_set__) + len(leg.counters)
        if leg.kv_transfer_params is not None:
            n += len(leg.kv_transfer_params)
        if leg.speculation is not None:
            n += len(leg.speculation.__pydantic_fields_set__)
        if leg.streamed is not None:
            n += len(leg.streamed.__pydantic_fields_set__)
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


class FoundInFile(NamedTuple):
    """What the first reading of a file found."""

    lines: int
    size: int
    """Bytes of the complete lines."""
    said: int
    """Output tokens of its answers, without those that were re-scored."""
    scenarios: frozenset[str]
    exchanges: array[int]
    """A number for each exchange with an engine, which is its own."""
    torn: bool
    """Whether there is anything after the last complete line of at most LONGEST_LINE bytes."""


class RecordedFile:
    """The complete lines of a file of observations, which can be read any number of times; each pass parses them again.

    The first one validates them: it raises DataError for damaged lines. Whatever is asked of a file that nobody read is
    found by reading it. Every read raises DataError when the file has changed since it was opened first.
    """

    def __init__(self, path: Path, cell: str) -> None:
        """Look at a file that has answers of a cell, and read nothing of it."""
        self.path = path
        self.cell = cell
        self.found: FoundInFile | None = None
        """What was found by reading it; None if nobody has. Another process may have."""
        with self._open() as stream:
            self._stamp = self._stamp_of(stream)

    @property
    def on_disk(self) -> int:
        """Bytes of the file, which is not read for it."""
        return self._stamp[0]

    @property
    def seen(self) -> FoundInFile:
        """What is found by reading it, which is done now if nobody has."""
        return self.found if self.found is not None else self.read()

    def read(self, kept: list[Observation] | None = None) -> FoundInFile:
        """Validate the complete lines, and append them to ``kept`` if there is one. Raises DataError for damaged
        ones."""
        with collector_paused():
            for o in self._first_pass():
                if kept is not None:
                    kept.append(o)
        assert self.found is not None
        return self.found

    def __iter__(self) -> Iterator[Observation]:
        if self.found is None:
            yield from self._first_pass()
            return
        with self._open_unchanged() as stream:
            for number, line in enumerate(islice(stream, self.found.lines), 1):
                yield self._parse(line[:-1], number)

    def _first_pass(self) -> Iterator[Observation]:
        """Yield the observations, each validated, and keep what they say of the file."""
        lines = size = said = 0
        scenarios: set[str] = set()
        exchanges: array[int] = array("q")
        torn = False
        try:
            with self._open_unchanged() as stream:
                while line := stream.readline(LONGEST_LINE):
                    if not line.endswith(b"\n"):
                        torn = bool(line.strip())
                        break
                    o = self._validated(line[:-1], lines + 1)
                    lines += 1
                    size += len(line)
                    said += o.tokens_said
                    scenarios.add(o.scenario)
                    exchanges.extend([hash((leg.request_id, leg.role)) for leg in o.legs])
                    yield o
        except OSError as error:
            raise self._unreadable(error) from error
        self.found = FoundInFile(lines, size, said, frozenset(scenarios), exchanges, torn)

    def _validated(self, text: bytes, line: int) -> Observation:
        o = self._parse(text, line)
        try:
            # Once, when the file is first read: what is read again is the same.
            if not json_io.has_keys(text, _keys(o)):
                json_io.require_each_key_once(text)
        except ValueError as error:
            where = self._where(line)
            raise DataError(f"{where}: expected an observation, found damaged data: {error}") from error
        return o

    def _parse(self, text: bytes, line: int) -> Observation:
        try:
            # As model_validate_json does, whose own arguments take an eighth of the time.
            observation: Observation = _VALIDATOR.validate_json(text, strict=True)
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
            target.writelines(islice(stream, self.seen.lines))

    def _open(self) -> IO[bytes]:
        try:
            return self.path.open("rb", _BUFFER)
        except OSError as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: OSError) -> DataError:
        return DataError(f"{self.path}: expected JSON lines, but it cannot be read ({error})")

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

    def __init__(self, files: Mapping[str, Sequence[RecordedFile]], unread: bool = False) -> None:
        self.files = {cell: tuple(of_cell) for cell, of_cell in files.items()}
        self.unread = unread
        """Whether files were left to be validated by whoever reads them first."""

    @property
    def _every(self) -> Iterator[RecordedFile]:
        return chain.from_iterable(self.files.values())

    @property
    def torn(self) -> bool:
        """Whether there is anything after the last complete line of a file."""
        return any(file.seen.torn for file in self._every)

    @property
    def repeated_exchanges(self) -> int:
        """How many exchanges are on record more than once: one that stands for two answers proves at most one."""
        every = np.concatenate([np.zeros(0, np.int64), *(file.seen.exchanges for file in self._every)])
        return len(every) - len(np.unique(every))

    @property
    def said(self) -> int:
        """Output tokens of all answers, without those that were re-scored."""
        return sum(file.seen.said for file in self._every)

    @property
    def seen(self) -> dict[Path, FoundInFile]:
        """What was found in the files that somebody has read."""
        return {file.path: file.found for file in self._every if file.found is not None}

    def take(self, seen: Mapping[Path, FoundInFile]) -> None:
        """Take over what another process found in files."""
        for file in self._every:
            file.found = file.found or seen.get(file.path)

    def bytes_of(self, cell: str) -> int:
        """Return the bytes of a cell's files, which are not read for it."""
        return sum(file.on_disk for file in self.files.get(cell, ()))

    def __len__(self) -> int:
        return sum(file.seen.lines for file in self._every)

    def __iter__(self) -> Iterator[Observation]:
        return chain.from_iterable(self._every)

    def of_scenario(self, scenario: str) -> Iterator[Observation]:
        """Iterate over the observations of a scenario, by cell; files without it are not read."""
        for file in self._every:
            if scenario in file.seen.scenarios:
                yield from (o for o in file if o.scenario == scenario)

    def of_cell(self, cell: str) -> CellRows:
        """Return the observations of a cell, from the cache if possible; they are empty if it was not recorded."""
        files = self.files.get(cell, ())
        found = _CACHE.get(files)
        if found is None:
            with collector_paused():
                found = cell_rows([o for file in files for o in file])
            _CACHE.put(files, found, sum(file.seen.size for file in files))
        return found

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RecordedCells | tuple):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]


_CACHE: ByteCache[tuple[RecordedFile, ...], CellRows] = ByteCache(CACHED)


@contextmanager
def kept_parsed(limit: int) -> Iterator[None]:
    """Forget the parsed cells, and keep others of at most so many bytes of lines meanwhile."""
    global _CACHE
    _CACHE = ByteCache(limit)
    try:
        yield
    finally:
        _CACHE = ByteCache(CACHED)
