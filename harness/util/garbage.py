"""Python's collector of reference cycles, which has little to find in answers that are parsed or judged."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


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


def collected_seldom(items: Iterable[T], between: int) -> Iterator[T]:
    """Yield the items, and look for reference cycles after so many of them."""
    for number, item in enumerate(items, 1):
        yield item
        if number % between == 0:
            gc.collect()
