"""Limits in time of cells and runs: what is done when one is over, from another thread, while the work still hangs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from harness.config import Timeouts
from harness.matrix import EngineGroup
from harness.workload import CellWork

_MARGIN = 10.0
"""A whole cell took 0.7 to 1.9 times its expected time on two cores, on slow days included (docs/performance.md)."""
_CELL_FLOOR_S = 600.0
"""Room for a first request that compiles kernels, and for a handful of requests that are not answered at all."""
_RUN_FLOOR_S = 3600.0


def cell_limit_s(timeouts: Timeouts, group: EngineGroup, work: CellWork) -> float:
    """Seconds for all requests of a cell: ``timeouts.cell``, or ten times the expected time, 600 s at least."""
    if timeouts.cell is not None:
        return timeouts.cell
    return max(_CELL_FLOOR_S, _MARGIN * group.expected.request_s(work.cell.topology) * work.requests)


def rescore_limit_s(timeouts: Timeouts, group: EngineGroup, outputs: int) -> float:
    """Seconds for reading ``outputs`` once more on the plain engine: as for so many requests of a cell of its own."""
    if timeouts.cell is not None:
        return timeouts.cell
    return max(_CELL_FLOOR_S, _MARGIN * group.expected.request_s("single") * outputs)


def run_limit_s(timeouts: Timeouts, expected_s: float) -> float:
    """Seconds for a run: ``timeouts.run``, or ten times the expected time, an hour at least."""
    return timeouts.run if timeouts.run is not None else max(_RUN_FLOOR_S, _MARGIN * expected_s)


@contextlib.contextmanager
def limited(limit_s: float, over: Callable[[], None]) -> Iterator[None]:
    """Call ``over`` from another thread when the block takes longer; leaving the block waits for a call that has
    begun."""
    timer = threading.Timer(min(limit_s, threading.TIMEOUT_MAX), over)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
