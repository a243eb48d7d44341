"""Observations of a large run: validated once, then parsed per cell when they are asked for, and forgotten again.

A parsed observation takes about six times the memory of its line. So a run above ``IN_MEMORY`` bytes is kept as an
index of its file: 30 bytes per observation (place, cell, order), and the cells that were asked for last.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

from harness.errors import DataError

if TYPE_CHECKING:
    from harness.history import Observation

IN_MEMORY = 32 << 20
"""Bytes of lines up to which a run is parsed whole. A night of the ``cpu`` profile has 7 MB."""
CACHED = 24 << 20
"""Bytes of lines whose cells are kept parsed, over all runs; the cell that was asked for last always is."""
Parse = Callable[[bytes, str], "Observation"]
"""Parses a line; the second argument says which, for the message of its DataError."""


class CellRows(NamedTuple):
    """The observations of one cell."""

    by_place: dict[tuple[str, str], list[Observation]]
    """By form and scenario, in the order of the file."""
    ordered: list[Observation]
    """By sequence."""


def cell_rows(observations: Sequence[Observation]) -> CellRows:
    by_place: dict[tuple[str, str], list[Observation]] = {}
    for o in observations:
        by_place.setdefault((o.form, o.scenario), []).append(o)
    return CellRows(by_place, sorted(observations, key=lambda o: o.sequence))


class Lazy(ABC):
    """Observations that are not in memory: read in passes, or by cell."""

    @abstractmethod
    def __iter__(self) -> Iterator[Observation]: ...
    @abstractmethod
    def __len__(self) -> int: ...
    @abstractmethod
    def of_cell(self, cell: str) -> CellRows:
        """The observations of a cell; none for a cell that was not recorded."""

    @abstractmethod
    def of_scenario(self, scenario: str) -> Iterator[Observation]:
        """The observations of a scenario, in the order of the whole."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Lazy | tuple):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]


class RecordedLines(Lazy):
    """A file of observations, in the order of the file. Any number of passes, each parses anew.

    Raises DataError, like the first pass, when the file is no longer the one that was indexed.
    """

    def __init__(self, path: Path, parse: Parse) -> None:
        """Validate and index the whole lines. Raises DataError for damaged ones."""
        self._path = path
        self._parse = parse
        self._starts = array("Q")
        self._sizes = array("I")
        self._cells: dict[str, array[int]] = {}
        self._scenarios: dict[str, array[int]] = {}
        self.torn = False
        """Whether there is more after the last whole line."""
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

    def _opened(self) -> IO[bytes]:
        """The file, if it is as it was indexed."""
        stream = self._open()
        if self._stamp_of(stream) != self._stamp:
            stream.close()
            raise DataError(
                f"{self._path}: expected the file that was read at first, found it changed meanwhile; judge it again "
                "when nothing writes to it any more"
            )
        return stream

    def _read(self, numbers: Sequence[int]) -> Iterator[Observation]:
        with self._opened() as stream:
            for number in numbers:
                stream.seek(self._starts[number])
                yield self._parse(stream.read(self._sizes[number]), f"{self._path}, line {number + 1}")

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[Observation]:
        return self._read(range(len(self)))

    def of_scenario(self, scenario: str) -> Iterator[Observation]:
        """The observations of a scenario, in the order of the file; the others are not parsed."""
        return self._read(self._scenarios.get(scenario, ()))

    def of_cell(self, cell: str) -> CellRows:
        """The observations of a cell."""
        key = (self._number, cell)
        found = _CACHE.get(key)
        if found is None:
            numbers = self._cells.get(cell, ())
            found = cell_rows(list(self._read(numbers)))
            _CACHE.put(key, found, sum(self._sizes[n] for n in numbers))
        return found


class _Cache:
    """The cells that were asked for last, up to ``CACHED`` bytes of lines."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[int, str], tuple[CellRows, int]] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def get(self, key: tuple[int, str]) -> CellRows | None:
        with self._lock:
            if key not in self._kept:
                return None
            self._kept.move_to_end(key)
            return self._kept[key][0]

    def put(self, key: tuple[int, str], rows: CellRows, size: int) -> None:
        with self._lock:
            if key in self._kept:
                return
            self._kept[key] = (rows, size)
            self._size += size
            while self._size > CACHED and len(self._kept) > 1:
                self._size -= self._kept.popitem(last=False)[1][1]


_CACHE = _Cache()
_NUMBERS = count()
"""Tell runs apart in the cache."""


class HeldCells:
    """The same by cell of observations that are in memory."""

    def __init__(self, observations: Iterable[Observation]) -> None:
        by_cell: dict[str, list[Observation]] = {}
        for o in observations:
            by_cell.setdefault(o.cell, []).append(o)
        self._rows = {cell: cell_rows(rows) for cell, rows in by_cell.items()}
        self._none = CellRows({}, [])

    def of_cell(self, cell: str) -> CellRows:
        return self._rows.get(cell, self._none)
