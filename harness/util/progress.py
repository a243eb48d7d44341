"""Progress of a run: a live bar with the time left on a terminal; elsewhere plain lines, never far apart."""

from __future__ import annotations

import sys
import threading
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from harness import redact
from harness.util.text import harmless


class Reporter:
    """Progress over the expected seconds of the plan, corrected as cells finish."""

    def __init__(self, expected_s: float, console: Console | None = None, silence_s: float = 30.0) -> None:
        """Elsewhere than on a terminal, print what is under way when nothing else was for ``silence_s`` s."""
        self._console = console or Console(file=sys.stderr)
        self._live = self._console.is_terminal
        self._expected = expected_s
        self._done_s = 0.0
        self._lock = threading.Lock()
        self._begun = self._printed = self._since = time.monotonic()
        self._latest = "starting"
        self._silence = silence_s
        self._over = threading.Event()
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
        else:
            threading.Thread(target=self._break_silence, name="progress", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.rest()

    def _break_silence(self) -> None:
        while not self._over.wait(max(0.0, self._printed + self._silence - time.monotonic())):
            if time.monotonic() >= self._printed + self._silence:
                age = time.monotonic() - self._since
                self._print(f"… {self._latest}, for {age:.0f} s; about {self._left_s():.0f} s left")

    def _left_s(self) -> float:
        """Return the expected time left, at the speed so far."""
        elapsed = time.monotonic() - self._begun
        share = min(self._done_s / max(self._expected, 1.0), 1.0)
        return elapsed / share - elapsed if share > 0.02 else max(self._expected - elapsed, 0.0)

    def line(self, text: str) -> None:
        """Print a permanent line."""
        self._latest, self._since = text, time.monotonic()
        self._print(text)

    def _print(self, text: str) -> None:
        self._printed = time.monotonic()
        stamp = f"[{self._printed - self._begun:6.1f} s] "
        self._console.print(stamp + harmless(redact.text(text)), highlight=False, markup=False, soft_wrap=True)

    def rest(self) -> None:
        """Show no progress any more: what is under way lasts as long as its user wants."""
        self._over.set()
        if self._live:
            self._bar.stop()

    def step(self, text: str, seconds: float) -> None:
        """Advance by ``seconds`` of the plan's expected time, and name what is being waited for."""
        with self._lock:
            self._done_s += seconds
            self._latest, self._since = text, time.monotonic()
        if self._live:
            self._bar.update(
                self._task, description=text, completed=self._done_s, left=f"about {self._left_s():.0f} s left"
            )
