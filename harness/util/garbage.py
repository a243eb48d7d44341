"""Python's collector of reference cycles, which has little to find in answers that are parsed or judged."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Look for no reference cycles meanwhile. Each search goes through the answers in memory, which took a fifth of the
    time of judging them."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


class Seldom:
    """Looks for reference cycles after so many things were done."""

    def __init__(self, between: int) -> None:
        self._between = between
        self._done = 0

    def done(self) -> None:
        self._done += 1
        if self._done % self._between == 0:
            gc.collect()
