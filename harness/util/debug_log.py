"""What the harness does, for those who debug it: ``logging`` to standard error and to a file. Off unless asked for."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from harness import redact
from harness.errors import UsageError
from harness.util.text import harmless

_NAME = "harness"
_FORMAT = "%(asctime)s %(levelname)s %(threadName)s %(name)s: %(message)s"


class _Redacted(logging.Formatter):
    """Lines without secrets and without what terminals obey."""

    def format(self, record: logging.LogRecord) -> str:
        return harmless(redact.text(super().format(record)))


def log_to_terminal() -> None:
    """Write the log to standard error."""
    _add(logging.StreamHandler(sys.stderr))


def log_to_file(path: Path) -> None:
    """Append the log to a file. Raises UsageError when that cannot be written."""
    try:
        _add(logging.FileHandler(path, encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"--log-file {path}: cannot be written ({error.strerror}); name a file in a folder that is there"
        ) from error


def _add(handler: logging.Handler) -> None:
    handler.setFormatter(_Redacted(_FORMAT))
    log = logging.getLogger(_NAME)
    log.setLevel(logging.DEBUG)
    # Whoever imports the package has handlers of their own.
    log.propagate = False
    log.addHandler(handler)
