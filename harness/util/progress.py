"""Progress of a run: a live bar with the time left on a terminal; elsewhere plain lines, never far apart."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from harness import redact
from harness.util.text import harmless

_LOG = logging.getLogger(__name__)
_SILENCE_S = 30.0
SAYING = "progress"
"""Name of the threads that say what is being waited for."""


@contextmanager
def saying(what: str, silence_s: float = _SILENCE_S) -> Iterator[None]:
    """Say on standard error, every ``silence_s`` s, what is being waited for."""
    begun, over = time.monotonic(), threading.Event()

    def say() -> None:
        while not over.wait(silence_s):
            text = harmless(redact.text(f"harness: … {what}, for {time.monotonic() - begun:.0f} s"))
            print(text, file=sys.stderr, flush=True)

    threading.Thread(target=say, name=SAYING, daemon=True).start()
    try:
        yield
    finally:
        over.set()


class _Share:
    """The starts, or the requests, of a run: what was expected of them, and what they took."""

    def __init__(self, expected_s: float) -> None:
        self.expected_s = expected_s
        self.done_s = 0.0
        """Of the expected seconds, those of what is done."""
        self._took_s = 0.0

    def add(self, expected_s: float, took_s: float) -> None:
        self.done_s += expected_s
        self._took_s += took_s

    @property
    def left_s(self) -> float:
        """The time left at the speed so far, or as expected where a little is done at most."""
        known = self.done_s > 0.02 * max(self.expected_s, 1.0)
        pace = self._took_s / self.done_s if known else 1.0
        return max(self.expected_s - self.done_s, 0.0) * pace


class Reporter:
    """Progress over the expected seconds of the plan. The time left is estimated from what the starts and the requests
    so far took, so that a bad guess in the profile counts until the first of each only."""

    def __init__(
        self, expected_s: float, console: Console | None = None, silence_s: float = _SILENCE_S, starts_s: float = 0.0
    ) -> None:
        """``starts_s`` of the expected seconds are starts of engines. Elsewhere than on a terminal, print what is under
        way when nothing else was for ``silence_s`` s."""
        self._console = console or Console(file=sys.stderr)
        self._live = self._console.is_terminal
        self._starts = _Share(starts_s)
        self._requests = _Share(expected_s - starts_s)
        self._lock = threading.Lock()
        self._begun = self._printed = self._since = self._stepped = time.monotonic()
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
            threading.Thread(target=self._break_silence, name=SAYING, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.rest()

    def _break_silence(self) -> None:
        while not self._over.wait(max(0.0, self._printed + self._silence - time.monotonic())):
            if time.monotonic() >= self._printed + self._silence:
                age = time.monotonic() - self._since
                self._print(f"… {self._latest}, for {age:.0f} s; about {self._left_s():.0f} s left")

    def _left_s(self) -> float:
        """Return the expected time left, at the speed so far; what is under way has used some of it."""
        with self._lock:
            left = self._starts.left_s + self._requests.left_s
            return max(left - (time.monotonic() - self._stepped), 0.0)

    def more(self, expected_s: float, starts_s: float = 0.0) -> None:
        """Add to what is expected: a second stage, which no plan knows of."""
        with self._lock:
            self._starts.expected_s += starts_s
            self._requests.expected_s += expected_s - starts_s
            total = self._starts.expected_s + self._requests.expected_s
        self._bar.update(self._task, total=max(total, 1.0))

    def line(self, text: str) -> None:
        """Print a permanent line."""
        self._latest, self._since = text, time.monotonic()
        self._print(text)

    def _print(self, text: str) -> None:
        _LOG.info("%s", text)
        self._printed = time.monotonic()
        stamp = f"[{self._printed - self._begun:6.1f} s] "
        self._console.print(stamp + harmless(redact.text(text)), highlight=False, markup=False, soft_wrap=True)

    def rest(self) -> None:
        """Show no progress any more: what is under way lasts as long as its user wants."""
        self._over.set()
        if self._live:
            self._bar.stop()

    def step(self, text: str, seconds: float, start: bool = False) -> None:
        """Advance by ``seconds`` of the plan's expected time, and name what is being waited for. ``start`` says that
        engines have started, and not that a request was answered."""
        with self._lock:
            now = time.monotonic()
            (self._starts if start else self._requests).add(seconds, now - self._stepped)
            _LOG.debug("%s, %.3f s after the step before", text, now - self._stepped)
            self._latest, self._since, self._stepped = text, now, now
            done = self._starts.done_s + self._requests.done_s
        if self._live:
            self._bar.update(self._task, description=text, completed=done, left=f"about {self._left_s():.0f} s left")
