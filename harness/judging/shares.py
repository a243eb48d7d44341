"""The cells of a large run, shared out to several processes: what is found of each alone is the same in any of them.

What needs many cells together is found before or after, by the process that shares out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from harness.errors import DataError
from harness.history.folder import History, Learned
from harness.history.index import CACHED, RecordedCells, kept_parsed
from harness.history.records import CellRecord
from harness.judging.evidence import Evidence
from harness.profiles.cells import CellName
from harness.util import allowance
from harness.util.forks import in_forks, may_fork

_MOST = 8
"""Processes at most, since what follows the cells is done by one."""
_READ_TOGETHER = 4
"""Cells of which the largest check of one reads: itself, its single engine, and the plain one with its scores."""
_LEAST_KEPT = 16 << 20
"""Bytes of lines that a process keeps parsed at least."""
_OWN_GIB = 0.2
"""Memory of a process without what it keeps parsed, that of others shared with it left out."""
_PARSED = 7
"""How many times the bytes of its line an answer takes in memory, and what is found of it."""
_FEW = 4
"""Shares for each process below which variants are divided."""


class _OfCell(Protocol):
    """A cell in a scenario, or a view of it."""

    @property
    def record(self) -> CellRecord: ...


Item = TypeVar("Item", bound=_OfCell)
Found = TypeVar("Found")


class _FoundInShare(NamedTuple, Generic[Found]):
    """What one process found of a few cells in scenarios, and beside it."""

    found: list[Found]
    learned: Learned
    remembered: dict[tuple[str, str, str], Any]
    """What is small and kept of cells (``FoundOfCells``)."""


def processes_for(history: History) -> int:
    """Return in how many processes to judge a run: one, unless it is a large one and nothing else goes on here."""
    cells = history.observations
    if not isinstance(cells, RecordedCells) or sum(map(cells.bytes_of, cells.files)) <= CACHED or not may_fork():
        return 1
    each_gib = _OWN_GIB + _PARSED * _kept_by_each(cells) / 2**30
    return max(1, min(_MOST, len(allowance.cores()), int(allowance.memory_gib() / each_gib)))


class SharedOut(NamedTuple):
    """What is done with each cell of a run, in one process or several."""

    evidence: Evidence | None
    """None for one process."""
    processes: int

    def each(self, items: Sequence[Item], find: Callable[[Item], Found]) -> list[Found]:
        """Return what ``find`` finds of each of these cells in scenarios. Whatever of it is kept is known afterwards.

        Raises InfrastructureError when one of several processes is killed.
        """
        if self.evidence is None or self.processes == 1:
            return [find(item) for item in items]
        return _in_shares(self.evidence, items, find, self.processes)


ONE_PROCESS = SharedOut(None, 1)


def _in_shares(evidence: Evidence, items: Sequence[Item], find: Callable[[Item], Found], processes: int) -> list[Found]:
    history, small = evidence.history, evidence.found.small
    learned, remembered = history.learned, set(small)

    def work(share: Sequence[int]) -> _FoundInShare[Found]:
        nonlocal learned
        found = [find(items[at]) for at in share]
        known, learned = learned, history.learned
        more = {key: value for key, value in small.items() if key not in remembered}
        remembered.update(more)
        return _FoundInShare(found, learned.beyond(known), more)

    with suppress(DataError, OSError):
        # Once for all of them; checks that need it say what is wrong with it.
        _ = history.kv_witness
    shares = _shares(history, [item.record.cell for item in items], processes)
    cells = history.observations
    with kept_parsed(_kept_by_each(cells) if isinstance(cells, RecordedCells) else 0):
        done = in_forks(work, shares, processes, f"judging {history.folder}")
    found: dict[int, Found] = {}
    for share, of_share in zip(shares, done, strict=True):
        found |= zip(share, of_share.found, strict=True)
        history.learn(of_share.learned)
        small.update(of_share.remembered)
    return [found[at] for at in range(len(items))]


def _kept_by_each(cells: RecordedCells) -> int:
    """Return how many bytes of lines each process keeps parsed, so that no cell is parsed for each check anew."""
    largest = max(map(cells.bytes_of, cells.files), default=0)
    return min(CACHED, max(_LEAST_KEPT, _READ_TOGETHER * largest))


def _shares(history: History, of: Sequence[str], processes: int) -> list[list[int]]:
    """Return the indexes of things to do, each of the cell ``of``, in shares, the largest first. The cells of a variant
    are compared with each other, so they stay together where there are enough variants."""
    shares = _grouped([CellName.of(cell).variant for cell in of])
    if len(shares) < _FEW * processes:
        shares = _grouped(of)
    cells = history.observations
    if isinstance(cells, RecordedCells):
        bytes_of = cells.bytes_of
        shares.sort(key=lambda share: -sum(map(bytes_of, {of[at] for at in share})))
    return shares


def _grouped(keys: Sequence[str]) -> list[list[int]]:
    found: dict[str, list[int]] = {}
    for at, key in enumerate(keys):
        found.setdefault(key, []).append(at)
    return list(found.values())
