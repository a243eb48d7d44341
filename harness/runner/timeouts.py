"""Time limits of cells and runs, enforced from another thread because the work itself may hang."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from harness.profiles.cells import EngineGroup
from harness.profiles.model import Timeouts
from harness.workload.cells import CellWork

_MARGIN = 10.0
"""Factor on the expected time, well above the spread seen on slow machines (docs/performance.md)."""
_CELL_FLOOR_S = 600.0
"""Leaves room for a first request that compiles kernels, and for a few requests that time out."""
_RUN_FLOOR_S = 3600.0


def cell_limit_s(timeouts: Timeouts, group: EngineGroup, work: CellWork) -> float:
    """Return the limit for all requests of a cell: ``timeouts.cell``, or ten times the expected time, min. 600 s."""
    if timeouts.cell is not None:
        return timeouts.cell
    return max(_CELL_FLOOR_S, _MARGIN * group.expected.request_s(work.cell.topology) * work.requests)


def rescore_limit_s(timeouts: Timeouts, group: EngineGroup, outputs: int) -> float:
    """Return the limit for re-scoring that many outputs, in seconds, computed as for a cell of as many requests."""
    if timeouts.cell is not None:
        return timeouts.cell
    return max(_CELL_FLOOR_S, _MARGIN * group.expected.request_s("single") * outputs)


def run_limit_s(timeouts: Timeouts, expected_s: float) -> float:
    """Return the limit for a run in seconds: ``timeouts.run``, or ten times the expected time, at least an hour."""
    return timeouts.run if timeouts.run is not None else max(_RUN_FLOOR_S, _MARGIN * expected_s)


@contextlib.contextmanager
def limited(limit_s: float, over: Callable[[], None]) -> Iterator[None]:
    """Call ``over`` from another thread when the block takes longer than ``limit_s`` seconds; leaving the block waits
    for a call in progress."""
    timer = threading.Timer(min(limit_s, threading.TIMEOUT_MAX), over)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
