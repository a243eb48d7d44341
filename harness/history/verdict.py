"""The verdicts and their order."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from harness.errors import EXIT_PASS, EXIT_REGRESSION, EXIT_UNKNOWN


class Verdict(StrEnum):
    """Outcome of a check, a cell or a run."""

    PASS = "PASS"
    KNOWN = "KNOWN"
    """All findings are known defects (expected failures of ``known-defects.yaml``)."""
    IMPROVED = "IMPROVED"
    SUSPECT = "SUSPECT"
    UNKNOWN = "UNKNOWN"
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
        """Exit code: 0 for PASS, and for KNOWN, since every report lists the known defects. An improvement fails until
        the baseline is updated, as a drift does."""
        if self in (Verdict.PASS, Verdict.KNOWN):
            return EXIT_PASS
        return EXIT_UNKNOWN if self in (Verdict.UNKNOWN, Verdict.SUSPECT) else EXIT_REGRESSION


# From harmless to worst. A proven regression outweighs missing evidence elsewhere.
_SEVERITY = list(Verdict)


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the most severe verdict, or UNKNOWN when nothing was judged."""
    return max(verdicts, key=_SEVERITY.index, default=Verdict.UNKNOWN)
