"""Progress of a run: a live bar with the time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from harness import redact


class Reporter:
    """Progress over the expected seconds of the plan, corrected as cells finish."""

    def __init__(self, expected_s: float, console: Console | None = None) -> None:
        self._console = console or Console(file=sys.stderr)
        self._live = self._console.is_terminal
        self._expected = expected_s
        self._done_s = 0.0
        self._lock = threading.Lock()
        self._begun = time.monotonic()
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=self._console,
            transient=True,
        )
        self._task = self._bar.add_task("starting", total=max(expected_s, 1.0), left="")

    def __enter__(self) -> Reporter:
        if self._live:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._bar.stop()

    def line(self, text: str) -> None:
        """Print a permanent line."""
        stamp = f"[{time.monotonic() - self._begun:6.1f} s] "
        self._console.print(stamp + redact.text(text), highlight=False, markup=False, soft_wrap=True)

    def step(self, text: str, seconds: float) -> None:
        """Advance by ``seconds`` of the plan's expected time; shown on a terminal only."""
        with self._lock:
            self._done_s += seconds
        if self._live:
            elapsed = time.monotonic() - self._begun
            share = min(self._done_s / max(self._expected, 1.0), 1.0)
            left = elapsed / share - elapsed if share > 0.02 else self._expected
            self._bar.update(self._task, description=text, completed=self._done_s, left=f"about {left:.0f} s left")
