"""Answers of the round under way, on disk as soon as they are there."""

from __future__ import annotations

import threading
from pathlib import Path

from harness.history import Observation
from harness.recorder import cleaned
from harness.storage import LineFile, writing

JOURNAL = "round.jsonl"


class Journal:
    """``round.jsonl``: what the history gets when the round is over and its counters are known. It is there only while
    a round is played, and after a soak that was killed in one."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / JOURNAL
        self._lock = threading.Lock()
        self._lines: LineFile | None = None

    def append(self, observation: Observation) -> None:
        """From any thread. Raises StorageError."""
        line = cleaned(observation).model_dump_json()
        with self._lock:
            if self._lines is None:
                self._lines = LineFile(self.path)
            self._lines.append(line)

    def clear(self) -> None:
        """The history has them all. Raises StorageError."""
        with self._lock:
            lines, self._lines = self._lines, None
            if lines is not None:
                lines.close()
                with writing(self.path):
                    self.path.unlink(missing_ok=True)
