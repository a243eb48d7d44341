"""The cells of a large run, shared out to several processes to be judged: each is judged alone, so it is judged alike.

What needs many cells together is found before, and inherited by the processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from harness.errors import DataError
from harness.history.folder import History, Learned
from harness.history.index import CACHED, RecordedCells, kept_parsed
from harness.judging.evidence import CellScenario
from harness.judging.findings import CellVerdict
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


class _JudgedShare(NamedTuple):
    verdicts: list[CellVerdict]
    learned: Learned


def processes_for(history: History) -> int:
    """Return in how many processes to judge a run: one, unless it is a large one and nothing else goes on here."""
    cells = history.observations
    if not isinstance(cells, RecordedCells) or sum(map(cells.bytes_of, cells.files)) <= CACHED or not may_fork():
        return 1
    each_gib = _OWN_GIB + _PARSED * _kept_by_each(cells) / 2**30
    return max(1, min(_MOST, len(allowance.cores()), int(allowance.memory_gib() / each_gib)))


def in_shares(
    history: History, places: Sequence[CellScenario], judge: Callable[[CellScenario], CellVerdict], processes: int
) -> tuple[CellVerdict, ...]:
    """Judge cells in scenarios in several processes. The history knows afterwards what those have read.

    Raises InfrastructureError when one of them is killed.
    """
    told = history.learned

    def judged(share: Sequence[int]) -> _JudgedShare:
        nonlocal told
        verdicts = [judge(places[at]) for at in share]
        news, told = history.learned.beyond(told), history.learned
        return _JudgedShare(verdicts, news)

    with suppress(DataError, OSError):
        # Once for all of them; checks that need it say what is wrong with it.
        _ = history.kv_witness
    shares = _shares(history, places, processes)
    cells = history.observations
    with kept_parsed(_kept_by_each(cells) if isinstance(cells, RecordedCells) else 0):
        found = in_forks(judged, shares, processes, f"judging {history.folder}")
    verdicts: dict[int, CellVerdict] = {}
    for share, of_share in zip(shares, found, strict=True):
        verdicts |= zip(share, of_share.verdicts, strict=True)
        history.learn(of_share.learned)
    return tuple(verdicts[at] for at in range(len(places)))


def _kept_by_each(cells: RecordedCells) -> int:
    """Return how many bytes of lines each process keeps parsed, so that no cell is parsed for each check anew."""
    largest = max(map(cells.bytes_of, cells.files), default=0)
    return min(CACHED, max(_LEAST_KEPT, _READ_TOGETHER * largest))


def _shares(history: History, places: Sequence[CellScenario], processes: int) -> list[list[int]]:
    """Return the indexes of places in shares, the largest first. The cells of a variant are compared with each other,
    so they stay together where there are enough variants."""
    shares = _grouped([CellName.of(p.record.cell).variant for p in places])
    if len(shares) < _FEW * processes:
        shares = _grouped([p.record.cell for p in places])
    cells = history.observations
    if isinstance(cells, RecordedCells):
        size = {cell: cells.bytes_of(cell) for cell in cells.files}
        shares.sort(key=lambda share: -sum(size.get(c, 0) for c in {places[at].record.cell for at in share}))
    return shares


def _grouped(keys: Sequence[str]) -> list[list[int]]:
    found: dict[str, list[int]] = {}
    for at, key in enumerate(keys):
        found.setdefault(key, []).append(at)
    return list(found.values())
