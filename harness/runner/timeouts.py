"""Time limits of cells and runs, enforced from another thread because the work itself may hang."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from harness.profiles.cells import EngineGroup
from harness.profiles.model import Timeouts, TopologyName

_MARGIN = 10.0
"""Factor on the expected time, well above the spread seen on slow machines (docs/evidence/performance.md)."""
_CELL_FLOOR_S = 600.0
"""Leaves room for a first request that compiles kernels, and for a few requests that time out."""
_RUN_FLOOR_S = 3600.0
_SLOWEST = 6.0


def requests_limit_s(
    timeouts: Timeouts, group: EngineGroup, topology: TopologyName, requests: int, start_s: float
) -> float:
    """Return the limit in seconds for so many requests, one after the other: ``timeouts.cell``, or ten times the
    expected time, at least 600 s.

    A machine that took longer than expected to start the engines, ``start_s``, gets as many times more.
    """
    if timeouts.cell is not None:
        return timeouts.cell
    slowness = min(max(1.0, start_s / group.expected.start_s(group.topology)), _SLOWEST)
    return slowness * max(_CELL_FLOOR_S, _MARGIN * group.expected.request_s(topology) * requests)


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
