"""The record of a soak, and a thread that samples process trees into it at a fixed interval."""

from __future__ import annotations

import threading
import time
from array import array
from collections import Counter
from pathlib import Path
from types import TracebackType

from harness.commands.soak.model import COUNTED, HARNESS, SAMPLES, Round, Sample, Tree
from harness.commands.soak.processes import Watcher
from harness.util.storage import LineFile

_LATE = 12
"""Most intervals without a sample: a longer gap could hide a leak."""
_SHARE = 0.8
"""Smallest acceptable share of the samples that the time allows."""


class Record:
    """``soak.jsonl``, an append-only log shared by the sampler and the rounds, with its columns and sums."""

    def __init__(self, folder: Path) -> None:
        self._lines = LineFile(folder / SAMPLES)
        self._lock = threading.Lock()
        self.seconds = 0.0
        """Time of the last line, since the start of the soak."""
        self.times_s = array("d")
        self.trees: dict[str, dict[str, array[float]]] = {}
        """Figures by tree and field of ``Tree``, one per entry of ``times_s``."""
        self.sums: Counter[str] = Counter()
        """Sums of the fields in ``COUNTED`` over all rounds."""
        self.verdicts: Counter[str] = Counter()

    def append(self, line: Sample | Round) -> None:
        """Append a line. Raises StorageError when it cannot be written; it is not counted then."""
        with self._lock:
            self._lines.append(line.model_dump_json())
            self.seconds = max(self.seconds, line.at_s)
            if isinstance(line, Round):
                self.verdicts[line.verdict] += 1
                self.sums.update({name: getattr(line, name) for name in COUNTED})
                return
            self.times_s.append(line.at_s)
            for name, tree in line.trees.items():
                columns = self.trees.setdefault(name, {field: array("d") for field in Tree.model_fields})
                for field, column in columns.items():
                    column.append(getattr(tree, field))

    def close(self) -> None:
        with self._lock:
            self._lines.close()


class Sampler:
    """Samples in a thread while used as a context manager; ``trouble`` then says whether the samples suffice."""

    def __init__(self, watcher: Watcher, record: Record, begun: float, interval_s: float) -> None:
        """``begun`` is ``time.monotonic()`` at the start of the load."""
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
                # After a slow sample, the missed ones are skipped.
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
        """Why the samples do not suffice; None when they do."""
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
