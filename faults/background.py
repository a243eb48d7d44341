"""Background actions of faults, in threads that are ended before anything is judged."""

from __future__ import annotations

import threading
from collections.abc import Callable

_JOIN_S = 10.0
"""Seconds a cancelled action may take to end: it may be waiting for /metrics."""


class Task:
    """A function in a thread. It gets an event that is set on cancellation; what it raises goes to ``trouble``."""

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
        """Cancel it and wait until it has ended."""
        self._over.set()
        self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            self._trouble("a thread of the fault did not end")
