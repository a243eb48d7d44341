"""A thread that samples process trees at a fixed interval and keeps nothing: every sample is a line of the record."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import TracebackType

from harness.soak.model import HARNESS, SAMPLES, Round, Sample
from harness.soak.processes import Watcher
from harness.storage import LineFile

_LATE = 12
"""Intervals without a sample after which a leak could have come and gone unseen."""
_SHARE = 0.8
"""Least share of the samples that the time has room for."""


class Record:
    """``soak.jsonl``, appended to by the sampler and by whoever plays the rounds."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / SAMPLES
        self._lines = LineFile(self.path)
        self._lock = threading.Lock()

    def append(self, line: Sample | Round) -> None:
        """Raises StorageError when it cannot be written; what was written before stays as it is."""
        with self._lock:
            self._lines.append(line.model_dump_json())

    def close(self) -> None:
        with self._lock:
            self._lines.close()


class Sampler:
    """Use as a context manager; afterwards ``trouble`` says why its samples are not enough, if they are not."""

    def __init__(self, watcher: Watcher, record: Record, begun: float, interval_s: float) -> None:
        """``begun``: ``time.monotonic()`` at the start of the load."""
        self._watcher = watcher
        self._record = record
        self._begun = begun
        self._interval = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="soak-sampler", daemon=True)
        self._died: str | None = None
        self.samples = 0
        self._last = begun
        self._gap = 0.0
        self._ended: float | None = None

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(60)
        self._ended = time.monotonic()

    def _run(self) -> None:
        due = self._begun
        try:
            while not self._stop.wait(max(0.0, due - time.monotonic())):
                self._sample()
                # One that took long is followed by the next one that is due, not by all that were missed.
                due = max(due + self._interval, time.monotonic() + self._interval / 10)
        except Exception as error:
            self._died = f"{type(error).__name__}: {error}"

    def _sample(self) -> None:
        started = time.monotonic()
        trees = self._watcher.sample()
        took = time.monotonic() - started
        self._record.append(Sample(at_s=round(started - self._begun, 3), took_s=round(took, 3), trees=trees))
        self._gap = max(self._gap, started - self._last)
        self._last = started
        self.samples += 1
        gone = [name for name, tree in trees.items() if name != HARNESS and not tree.processes]
        if gone:
            raise ProcessLookupError(f"no process left of {', '.join(gone)}")

    @property
    def trouble(self) -> str | None:
        """Why the samples are not enough; None when they are."""
        if self._died is not None:
            return f"the sampler died: {self._died}"
        if self._thread.is_alive() and self._ended is not None:
            return "the sampler hangs"
        end = self._ended or time.monotonic()
        gap, room = max(self._gap, end - self._last), (end - self._begun) / self._interval
        if gap > _LATE * self._interval or self.samples < _SHARE * int(room):
            return (
                f"the sampler fell behind: expected a sample every {self._interval:g} s, found {self.samples} of "
                f"{int(room)} and {gap:.0f} s without one; the machine is too busy"
            )
        return None
