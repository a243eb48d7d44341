"""Index of the baselines stored in a folder: headers are read once, rows on demand.

All rows of a large run do not fit into memory, so only those of the most recently used baselines are cached.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from harness.baselines.model import Baseline, Header
from harness.baselines.store import load_header, read_table, stored, with_rows
from harness.errors import DataError
from harness.util.byte_cache import ByteCache

CACHED = 8 << 20
"""Size of the row cache, in bytes of CSV text."""
_AT_LEAST = 2
"""Baselines that stay cached whatever their size: a cell's own method, and plain decoding."""


class StoredBaseline(NamedTuple):
    """A baseline on disk whose header has been read."""

    path: Path
    header: Header

    def load(self) -> Baseline:
        """Return the baseline with its rows, possibly from the cache. Raises DataError if it is damaged or changed."""
        kept = _CACHE.get(self._key)
        return kept[1] if kept is not None and kept[0] == self.header else self.read()

    def read(self) -> Baseline:
        """Do the same as ``load``, but always read from disk."""
        if load_header(self.path) != self.header:
            raise DataError(
                f"baseline {self.path} was changed while it was read; judge again when nothing is writing to it"
            )
        text = read_table(self.path, self.header)
        baseline = with_rows(self.path, self.header, text)
        _CACHE.put(self._key, (self.header, baseline), len(text))
        return baseline

    @property
    def _key(self) -> tuple[str, str]:
        return str(self.path), self.header.rows_sha256


_CACHE: ByteCache[tuple[str, str], tuple[Header, Baseline]] = ByteCache(CACHED, _AT_LEAST)


class BaselineIndex:
    """The headers of all baselines in a folder. Rows are not read."""

    def __init__(self, folder: Path) -> None:
        self.by_method: dict[str, list[StoredBaseline]] = defaultdict(list)
        """Those whose header is readable, sorted by path."""
        self.damaged: dict[str, list[str]] = defaultdict(list)
        """What is wrong with the other ones, by the method that their file is named after."""
        for path in stored(folder):
            try:
                header = load_header(path)
            except DataError as error:
                self.damaged[path.stem.split("-", 1)[0]].append(str(error))
                continue
            self.by_method[header.identity.method].append(StoredBaseline(path, header))
