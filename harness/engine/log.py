"""What an engine wrote, and what of it is quoted when something goes wrong."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from harness import redact
from harness.files import ends_of

LOG_TAIL_LINES = 8
_MOST = 8 * 2**20
"""Bytes of each end of a log. A start writes under 100 KiB, and what is looked for stands in it or at the end."""
# A traceback's last line, behind vLLM's prefix of process and place. EngineDeadError only repeats that there was one.
_EXCEPTION = re.compile(
    r"^(?:\(.*?\) )?(?:ERROR [^\]]*\] )?((?!\S*EngineDeadError)[A-Za-z_.]*(?:Error|Exception|Interrupt)\b: .*)$",
    re.MULTILINE,
)


def _signal(number: int) -> str:
    """Real-time signals have no names."""
    return signal.Signals(number).name if number in set(signal.Signals) else str(number)


class EngineLog:
    """The log file of a server."""

    def __init__(self, path: Path) -> None:
        self.log_path = path

    def log_text(self) -> str:
        """What the engine has written so far; of a log of gigabytes its beginning and its end."""
        try:
            return ends_of(self.log_path, _MOST)
        except OSError:
            return ""

    def root_error(self) -> str:
        """The first exception that the engine logged, as `` (it logged: …)``; empty when there is none.

        What a client sees of it is "EngineCore encountered an issue"; the reason stands hundreds of lines earlier.
        """
        found = _EXCEPTION.search(self.log_text())
        return f" (it logged: {redact.text(found.group(1))[:300]})" if found else ""

    def log_tail(self, lines: int = LOG_TAIL_LINES) -> str:
        """Last lines of the log; of a traceback, the lines that name the error."""
        kept = [line.rstrip() for line in self.log_text().splitlines() if line.strip()]
        return (
            "\n".join(f"    | {redact.text(line)[:300]}" for line in kept[-lines:]) or "    | (no log, or an empty one)"
        )

    def obituary(self, name: str, code: int) -> str:
        """Sentence about a server that ended by itself; ``code`` is negative for a signal."""
        how = f"signal {_signal(-code)}" if code < 0 else f"exit status {code}"
        return (
            f"the {name} ended by itself with {how}{self.root_error()}; last lines of {self.log_path}:\n"
            f"{self.log_tail()}"
        )
