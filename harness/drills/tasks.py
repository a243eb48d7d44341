"""What faults do beside the exchange that they strike: in threads that are ended before anything is judged."""

from __future__ import annotations

import threading
from collections.abc import Callable

_JOIN_S = 10.0
"""Longest that one may take to notice that it is called off: it may be waiting for an answer of /metrics."""


class Task:
    """A function in a thread. It is given an event that says that it is called off, and what it raises is kept."""

    def __init__(self, function: Callable[[threading.Event], object], trouble: Callable[[str], object]) -> None:
        self._function = function
        self._trouble = trouble
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._function(self._over)
        except Exception as error:
            self._trouble(f"the fault failed ({type(error).__name__}: {error})")

    def end(self) -> None:
        """Call it off, and wait until it has ended."""
        self._over.set()
        self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            self._trouble("a thread of the fault did not end")
