"""Signals that ask for the end (INT, TERM, HUP), which the command line turns into KeyboardInterrupt: when one may
come, and when it has to wait. Only the main thread hears any; in others these do nothing."""

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
    """Handle them so inside; gives the handlers that were there before."""
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
def deaf() -> Iterator[None]:
    """Ignore them: for what is short and must be done whole."""
    with _handled(signal.SIG_IGN):
        yield


@contextmanager
def heard_once() -> Iterator[None]:
    """The first one is a KeyboardInterrupt, and those after it are ignored: a second one must not stop what ends the
    engines and keeps what was seen because of the first."""

    def first(_number: int, _frame: FrameType | None) -> None:
        for number in ENDING:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    with _handled(first):
        yield


@contextmanager
def held() -> Iterator[None]:
    """They wait until what is inside is done, and are handled then."""
    came: list[tuple[int, FrameType | None]] = []
    with _handled(lambda number, frame: came.append((number, frame))) as before:
        yield
    for number, frame in came[:1]:
        if callable(before.get(number)):
            before[number](number, frame)
