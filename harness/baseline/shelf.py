"""Stored baselines of a folder: their headers, read once, and the rows of those that are asked for.

A row of 100 tokens takes 4.6 KB of memory, and a run of a thousand cells has hundreds of baselines of as many rows as
it has prompts. So rows are held for the baselines that were asked for last, and read again for others.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from harness.baseline.model import Baseline, Header
from harness.baseline.store import load_header, read_table, stored, with_rows
from harness.errors import DataError

CACHED = 8 << 20
"""Bytes of rows, as text, whose baselines are held. Those of the ``cpu`` profile have 110 KB together."""
_AT_LEAST = 2
"""Baselines that are held however large they are: of a cell's own method, and of plain decoding."""


class StoredBaseline(NamedTuple):
    """A baseline on disk, whose header was read."""

    path: Path
    header: Header

    def load(self) -> Baseline:
        """With its rows, held for a while. Raises DataError when it is damaged, or no longer what it was."""
        return _CACHE.get(self) or self.read()

    def read(self) -> Baseline:
        """As ``load``, and never from memory."""
        if load_header(self.path) != self.header:
            raise DataError(
                f"baseline {self.path}: expected the record that was found at first, found it changed meanwhile; "
                "judge again when nothing writes to it any more"
            )
        text = read_table(self.path, self.header)
        baseline = with_rows(self.path, self.header, text)
        _CACHE.put(self, baseline, len(text))
        return baseline


class _Cache:
    """The baselines that were asked for last, up to ``CACHED`` bytes of rows."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, str], tuple[Header, Baseline, int]] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def get(self, wanted: StoredBaseline) -> Baseline | None:
        key = _key(wanted)
        with self._lock:
            kept = self._kept.get(key)
            if kept is None or kept[0] != wanted.header:
                return None
            self._kept.move_to_end(key)
            return kept[1]

    def put(self, read: StoredBaseline, baseline: Baseline, size: int) -> None:
        key = _key(read)
        with self._lock:
            self._forget(key)
            self._kept[key] = (read.header, baseline, size)
            self._size += size
            while self._size > CACHED and len(self._kept) > _AT_LEAST:
                self._forget(next(iter(self._kept)))

    def _forget(self, key: tuple[str, str]) -> None:
        if key in self._kept:
            self._size -= self._kept.pop(key)[2]


def _key(item: StoredBaseline) -> tuple[str, str]:
    return str(item.path), item.header.rows_sha256


_CACHE = _Cache()


class Shelf:
    """The headers of a folder's baselines. Rows are not read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._by_method: dict[str, list[StoredBaseline]] = {}
        self._damaged: dict[str, list[str]] = {}
        for path in stored(folder):
            try:
                header = load_header(path)
            except DataError as error:
                # What it is of is known by its name alone.
                self._damaged.setdefault(path.stem.split("-", 1)[0], []).append(str(error))
                continue
            self._by_method.setdefault(header.identity.method, []).append(StoredBaseline(path, header))

    def of_method(self, method: str) -> Sequence[StoredBaseline]:
        """Those whose header can be read, by path."""
        return self._by_method.get(method, ())

    def damaged(self, method: str) -> Sequence[str]:
        """A sentence for each whose name is of the method and whose header cannot be read."""
        return self._damaged.get(method, ())
