"""Observations of a large run: validated once, then parsed per cell on demand and cached.

A parsed observation takes about six times the memory of its line. So a run above ``IN_MEMORY`` bytes is kept as an
index of its file, about 30 bytes per observation, with a cache of the most recently used cells.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import IO, Any, Generic, NamedTuple, Protocol, TypeVar

from harness.errors import DataError
from harness.util.byte_cache import ByteCache


class Row(Protocol):
    """An observation, as far as the index needs to know it."""

    @property
    def cell(self) -> str: ...
    @property
    def form(self) -> str: ...
    @property
    def scenario(self) -> str: ...
    @property
    def sequence(self) -> int: ...


R = TypeVar("R", bound=Row)
IN_MEMORY = 32 << 20
"""Bytes of lines up to which a run is parsed at once. A run of the ``cpu`` profile has 7 MB."""
CACHED = 24 << 20
"""Bytes of lines whose cells are kept parsed, over all runs; the most recently used cell always is."""
Parse = Callable[[bytes, str], R]
"""Parses a line; the second argument locates it for the message of a DataError."""


class CellRows(NamedTuple, Generic[R]):
    """The observations of one cell."""

    by_place: dict[tuple[str, str], list[R]]
    """Observations by form and scenario, in the order of the file."""
    ordered: list[R]
    """All observations, sorted by sequence."""


def cell_rows(observations: Sequence[R]) -> CellRows[R]:
    by_place: dict[tuple[str, str], list[R]] = {}
    for o in observations:
        by_place.setdefault((o.form, o.scenario), []).append(o)
    return CellRows(by_place, sorted(observations, key=lambda o: o.sequence))


class Lazy(ABC, Generic[R]):
    """Observations that are not in memory: they are read in passes, or by cell."""

    @abstractmethod
    def __iter__(self) -> Iterator[R]: ...
    @abstractmethod
    def __len__(self) -> int: ...
    @abstractmethod
    def of_cell(self, cell: str) -> CellRows[R]:
        """Return the observations of a cell, which are empty for a cell that was not recorded."""

    @abstractmethod
    def of_scenario(self, scenario: str) -> Iterator[R]:
        """Iterate over the observations of a scenario, in the order of the record."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Lazy | tuple):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]


class RecordedLines(Lazy[R]):
    """A file of observations, which can be read any number of times; each pass parses it again.

    Every read raises DataError when the file has changed since it was indexed.
    """

    def __init__(self, path: Path, parse: Parse[R]) -> None:
        """Validate and index the complete lines. Raises DataError for damaged ones."""
        self._path = path
        self._parse = parse
        self._starts = array("Q")
        self._sizes = array("I")
        self._cells: dict[str, array[int]] = {}
        self._scenarios: dict[str, array[int]] = {}
        self.torn = False
        """Whether there is anything after the last complete line."""
        self._number = next(_NUMBERS)
        with self._open() as stream:
            self._stamp = self._stamp_of(stream)
            self._index(stream)

    def _index(self, stream: IO[bytes]) -> None:
        place = 0
        for number, line in enumerate(stream):
            if not line.endswith(b"\n"):
                self.torn = bool(line.strip())
                return
            o = self._parse(line[:-1], f"{self._path}, line {number + 1}")
            self._starts.append(place)
            self._sizes.append(len(line) - 1)
            self._cells.setdefault(o.cell, array("I")).append(number)
            self._scenarios.setdefault(o.scenario, array("I")).append(number)
            place += len(line)

    def _open(self) -> IO[bytes]:
        try:
            return self._path.open("rb")
        except OSError as error:
            raise DataError(f"{self._path}: expected JSON lines, but it cannot be read ({error})") from error

    @staticmethod
    def _stamp_of(stream: IO[bytes]) -> tuple[int, int]:
        found = os.fstat(stream.fileno())
        return found.st_size, found.st_mtime_ns

    def _open_unchanged(self) -> IO[bytes]:
        """Open the file. Raises DataError when it has changed since it was indexed."""
        stream = self._open()
        if self._stamp_of(stream) != self._stamp:
            stream.close()
            raise DataError(
                f"{self._path}: expected the file as it was first read, found it changed since; judge it again when no "
                "process writes to it"
            )
        return stream

    def _read(self, numbers: Sequence[int]) -> Iterator[R]:
        with self._open_unchanged() as stream:
            for number in numbers:
                stream.seek(self._starts[number])
                yield self._parse(stream.read(self._sizes[number]), f"{self._path}, line {number + 1}")

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[R]:
        return self._read(range(len(self)))

    def of_scenario(self, scenario: str) -> Iterator[R]:
        """Iterate over the observations of a scenario, in the order of the file; the others are not parsed."""
        return self._read(self._scenarios.get(scenario, ()))

    def of_cell(self, cell: str) -> CellRows[R]:
        """Return the observations of a cell, from the cache if possible."""
        key = (self._number, cell)
        found = _CACHE.get(key)
        if found is None:
            numbers = self._cells.get(cell, ())
            found = cell_rows(list(self._read(numbers)))
            _CACHE.put(key, found, sum(self._sizes[n] for n in numbers))
        return found


_CACHE: ByteCache[tuple[int, str], CellRows[Any]] = ByteCache(CACHED)
_NUMBERS = count()
"""Numbers that tell runs apart in the cache."""


class HeldCells(Generic[R]):
    """Observations in memory, by cell."""

    def __init__(self, observations: Iterable[R]) -> None:
        by_cell: dict[str, list[R]] = {}
        for o in observations:
            by_cell.setdefault(o.cell, []).append(o)
        self._rows = {cell: cell_rows(rows) for cell, rows in by_cell.items()}
        self._none: CellRows[R] = CellRows({}, [])

    def of_cell(self, cell: str) -> CellRows[R]:
        return self._rows.get(cell, self._none)
