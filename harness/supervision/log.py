"""A server's log file, and the parts of it that error messages quote."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from harness import redact
from harness.util.files import ends_of

_TAIL_LINES = 8
STARTED_AGAIN = "harness: started again"
"""Line in the log of an engine, behind which is what its next process wrote."""
_MOST = 8 * 2**20
"""Bytes read from each end of a log. A start writes far less, and what is searched for is in it or at the end."""
# A traceback's last line, behind vLLM's prefix of process and place. EngineDeadError only repeats that there was one.
_EXCEPTION = re.compile(
    r"^(?:\(.*?\) )?(?:ERROR [^\]]*\] )?((?!\S*EngineDeadError)[A-Za-z_.]*(?:Error|Exception|Interrupt)\b(?:: .*)?"
    # Of a command line that argparse refuses.
    r"|[\w.-]+: error: .*)$",
    re.MULTILINE,
)
_PREFIX = re.compile(r"^(?:\(.*?\) )?(?:ERROR [^\]]*\] )?")


def _signal(number: int) -> str:
    """Real-time signals have no names."""
    return signal.Signals(number).name if number in set(signal.Signals) else str(number)


def _raised_by(before: str) -> str:
    """Return the last line of code of the traceback that a text ends with, without the marks below it; empty without
    one."""
    lines = [_PREFIX.sub("", line).strip() for line in before.splitlines()[-3:]]
    code = [line for line in lines if line.strip("^~ ")]
    place, raised = code[-2:] if len(code) > 1 else ("", "")
    return raised if place.startswith('File "') else ""


class EngineLog:
    """The log file of a server."""

    def __init__(self, path: Path) -> None:
        self.log_path = path

    def log_text(self) -> str:
        """Return what the engine has written so far; of a very large log, its beginning and its end."""
        try:
            return ends_of(self.log_path, _MOST)
        except OSError:
            return ""

    def root_error(self) -> str:
        """Return the first exception that the engine logged, or what it refused of its command line, as
        `` (it logged: …)``; empty if it logged none.

        A client only sees "EngineCore encountered an issue"; the reason is hundreds of lines earlier in the log.
        """
        logged = self.exception()
        return f" (it logged: {logged})" if logged else ""

    def exception(self) -> str:
        """Return the first exception that the engine logged since it was started, or started again; empty if none. One
        without a message is returned with the line of code that raised it."""
        text = self.log_text().rpartition(STARTED_AGAIN)[2]
        found = _EXCEPTION.search(text)
        if found is None:
            return ""
        said = found.group(1)
        if ":" not in said and (raised := _raised_by(text[: found.start()])):
            said = f"{said}: {raised}"
        return redact.text(said)[:300]

    def log_tail(self) -> str:
        """Return the last lines of the log that are not blank, indented and without secrets."""
        kept = [line.rstrip() for line in self.log_text().splitlines() if line.strip()]
        return (
            "\n".join(f"    | {redact.text(line)[:300]}" for line in kept[-_TAIL_LINES:])
            or "    | (no log, or an empty one)"
        )

    def obituary(self, name: str, code: int) -> str:
        """Return a sentence about a server that ended by itself; ``code`` is negative for a signal."""
        how = f"signal {_signal(-code)}" if code < 0 else f"exit status {code}"
        return (
            f"the {name} ended by itself with {how}{self.root_error()}; last lines of {self.log_path}:\n"
            f"{self.log_tail()}"
        )
