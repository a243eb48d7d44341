"""Intervals of time, some of them at once."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from harness.util import clock


class Intervals:
    """Collects intervals in seconds of ``harness.util.clock``, from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: list[tuple[float, float]] = []

    def add(self, begin: float, end: float) -> None:
        with self._lock:
            self._found.append((begin, end))

    def took(self, seconds: float) -> None:
        """Add an interval that ends now."""
        now = clock.now()
        self.add(now - seconds, now)

    def outside(self, begin: float, end: float) -> float:
        """Return how many seconds between two times lie in no interval."""
        with self._lock:
            found = list(self._found)
        return max(0.0, end - begin - covered((max(a, begin), min(b, end)) for a, b in found))


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Return how many seconds lie in at least one interval; those that end before they begin are empty."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total
