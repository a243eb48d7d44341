"""INT, TERM and HUP, which the command line turns into KeyboardInterrupt: which one it was, and masking.

Python handles signals in the main thread alone; in other threads these context managers do nothing.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Literal, NoReturn

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SignalName = Literal["INT", "TERM", "HUP"]
_NAMES: dict[int, SignalName] = {signal.SIGINT: "INT", signal.SIGTERM: "TERM", signal.SIGHUP: "HUP"}
_IN_WORDS: dict[SignalName, str] = {
    "INT": "interrupted by the user (Ctrl-C)",
    "TERM": "ended by a TERM signal (a time limit or job control)",
    "HUP": "ended by a HUP signal (its terminal was closed)",
}


class Signalled(KeyboardInterrupt):
    """A KeyboardInterrupt that knows its signal."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def interrupt(number: int, _frame: FrameType | None) -> NoReturn:
    """Handle a signal as Ctrl-C is handled."""
    raise Signalled(number)


def signal_of(error: BaseException | None) -> SignalName:
    """Return the first signal behind an exception: others, or other exceptions, may have been raised while it was
    handled. Python's own handler is that of INT."""
    first: SignalName = "INT"
    while error is not None:
        if isinstance(error, Signalled):
            first = _NAMES.get(error.number, "INT")
        elif isinstance(error, KeyboardInterrupt):
            first = "INT"
        error = error.__cause__ or error.__context__
    return first


def ended_by(name: SignalName | None) -> str:
    """Return in words what ended a run; None where the record does not tell the signal."""
    return _IN_WORDS[name] if name is not None else "interrupted by Ctrl-C or a signal"


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

    def first(received: int, _frame: FrameType | None) -> None:
        for number in ENDING:
            signal.signal(number, signal.SIG_IGN)
        raise Signalled(received)

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
