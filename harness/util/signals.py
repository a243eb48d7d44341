"""Signal masking for INT, TERM and HUP, which the command line turns into KeyboardInterrupt.

Python handles signals in the main thread alone; in other threads these context managers do nothing.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def _handled(handler: Callable[[int, FrameType | None], Any] | signal.Handlers) -> Iterator[dict[int, Any]]:
    """Install ``handler`` for the block and yield the previous handlers, by signal."""
    if threading.current_thread() is not threading.main_thread():
        yield {}
        return
    before: dict[int, Any] = {number: signal.signal(number, handler) for number in ENDING}
    try:
        yield before
    finally:
        for number, handled in before.items():
            signal.signal(number, handled)


@contextmanager
def ignored() -> Iterator[None]:
    """Ignore the signals, for a short critical section."""
    with _handled(signal.SIG_IGN):
        yield


@contextmanager
def raise_once() -> Iterator[None]:
    """Raise KeyboardInterrupt for the first signal and ignore the later ones.

    The first one starts the shutdown, which ends the engines and saves the record; a second one must not stop that.
    """

    def first(_number: int, _frame: FrameType | None) -> None:
        for number in ENDING:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    with _handled(first):
        yield


@contextmanager
def deferred() -> Iterator[None]:
    """Defer the signals to the end of the block; the first one is handled then."""
    received: list[tuple[int, FrameType | None]] = []
    with _handled(lambda number, frame: received.append((number, frame))) as before:
        yield
    for number, frame in received[:1]:
        if callable(before.get(number)):
            before[number](number, frame)
