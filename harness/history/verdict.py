"""The verdicts and their order."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from harness.errors import EXIT_IMPROVED, EXIT_PASS, EXIT_REGRESSION, EXIT_SUSPECT, EXIT_UNKNOWN


class Verdict(StrEnum):
    """Outcome of a check, a cell or a run."""

    PASS = "PASS"
    KNOWN = "KNOWN"
    """All findings are known defects (expected failures of ``known-defects.yaml``)."""
    IMPROVED = "IMPROVED"
    UNKNOWN = "UNKNOWN"
    SUSPECT = "SUSPECT"
    DRIFT = "DRIFT"
    REGRESSION = "REGRESSION"

    @property
    def symbol(self) -> str:
        return {
            "PASS": "✔",
            "KNOWN": "◆",
            "IMPROVED": "▲",
            "SUSPECT": "≈",
            "UNKNOWN": "?",
            "DRIFT": "⇄",
            "REGRESSION": "✘",
        }[self]

    @property
    def exit_code(self) -> int:
        """Exit code: 0 for PASS, and for KNOWN, since every report lists the expected failures. An improvement fails
        until the baseline is updated, as a drift does, and a doubt until it is settled; a job may let them pass."""
        return _EXIT_CODES[self]

    @property
    def fails(self) -> bool:
        """Whether a difference was found that stays one until somebody acts: not a doubt and no missing evidence."""
        return self in (Verdict.REGRESSION, Verdict.DRIFT, Verdict.IMPROVED)

    @property
    def severity(self) -> int:
        """The place in the order from harmless to worst: whatever was found outweighs missing evidence elsewhere,
        but for an improvement."""
        return _SEVERITY.index(self)


_EXIT_CODES = {
    Verdict.PASS: EXIT_PASS,
    Verdict.KNOWN: EXIT_PASS,
    Verdict.REGRESSION: EXIT_REGRESSION,
    Verdict.DRIFT: EXIT_REGRESSION,
    Verdict.UNKNOWN: EXIT_UNKNOWN,
    Verdict.IMPROVED: EXIT_IMPROVED,
    Verdict.SUSPECT: EXIT_SUSPECT,
}

_SEVERITY = list(Verdict)


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the most severe verdict, or UNKNOWN when nothing was judged."""
    return max(verdicts, key=lambda v: v.severity, default=Verdict.UNKNOWN)
