"""The answers of the round in progress, written to disk as they arrive."""

from __future__ import annotations

import threading
from pathlib import Path

from harness.history.records import Observation
from harness.runner.recorder import cleaned
from harness.util.storage import LineFile, writing

JOURNAL = "round.jsonl"


class Journal:
    """``round.jsonl``, an append-only log of answers that move to the history when the round is over.

    It exists only during a round, and after a soak that was killed during one.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / JOURNAL
        self._lock = threading.Lock()
        self._lines: LineFile | None = None

    def append(self, observation: Observation) -> None:
        """Append an answer. Thread-safe. Raises StorageError."""
        line = cleaned(observation).model_dump_json()
        with self._lock:
            if self._lines is None:
                self._lines = LineFile(self.path)
            self._lines.append(line)

    def clear(self) -> None:
        """Empty the journal once the history has all its answers. Raises StorageError."""
        with self._lock:
            lines, self._lines = self._lines, None
            if lines is not None:
                lines.close()
                with writing(self.path):
                    self.path.unlink(missing_ok=True)
