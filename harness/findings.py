"""Verdicts and findings: the words in which checks speak."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Any, Literal

from pydantic import Field

from harness.config import Strict
from harness.errors import EXIT_PASS, EXIT_REGRESSION, EXIT_UNKNOWN


class Verdict(StrEnum):
    """Outcome of a check, a cell or a run."""

    PASS = "PASS"
    IMPROVED = "IMPROVED"
    SUSPECT = "SUSPECT"
    UNKNOWN = "UNKNOWN"
    DRIFT = "DRIFT"
    REGRESSION = "REGRESSION"

    @property
    def symbol(self) -> str:
        return {
            "PASS": "✔",
            "IMPROVED": "▲",
            "SUSPECT": "≈",
            "UNKNOWN": "?",
            "DRIFT": "⇄",
            "REGRESSION": "✘",
        }[self]

    @property
    def exit_code(self) -> int:
        """0 only for PASS. An improvement fails until the baseline is updated, as a drift does."""
        if self is Verdict.PASS:
            return EXIT_PASS
        return EXIT_UNKNOWN if self in (Verdict.UNKNOWN, Verdict.SUSPECT) else EXIT_REGRESSION


# From harmless to worst. A certain regression outweighs evidence that is missing elsewhere.
_SEVERITY = list(Verdict)


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The gravest verdict; UNKNOWN when there is none, because nothing was judged."""
    return max(verdicts, key=_SEVERITY.index, default=Verdict.UNKNOWN)


DamageClass = Literal[
    "input",
    "target-kv",
    "drafter-kv",
    "sampler",
    "nothing-tested",
    "engine-changed",
    "infrastructure",
    "baseline",
]


class Finding(Strict):
    """One thing that is not as it should be, with its evidence."""

    check: str
    cell: str
    verdict: Verdict
    damage: DamageClass
    message: str
    """What was expected, what was found, what to do."""
    prompt_id: str | None = None
    form: str | None = None
    stratum: str | None = None
    evidence: dict[str, Any] = Field(default_factory=dict)

    @property
    def id(self) -> str:
        return "/".join(p for p in (self.cell, self.check, self.prompt_id, self.form) if p)


class CheckResult(Strict):
    """What one check says of one cell."""

    check: str
    cell: str
    verdict: Verdict
    judged: int
    """Observations that were examined. Zero never passes."""
    findings: tuple[Finding, ...] = ()
    note: str = ""
    figures: dict[str, Any] = Field(default_factory=dict)


class CellVerdict(Strict):
    cell: str
    verdict: Verdict
    results: tuple[CheckResult, ...]


class Judgement(Strict):
    """Everything the checks say of a run."""

    run_id: str
    verdict: Verdict
    cells: tuple[CellVerdict, ...]
    notices: tuple[str, ...] = ()

    @property
    def findings(self) -> list[Finding]:
        return [f for c in self.cells for r in c.results for f in r.findings]


def conclude(
    check: str, cell: str, judged: int, findings: list[Finding], note: str = "", figures: dict[str, Any] | None = None
) -> CheckResult:
    """A check result from its findings; nothing examined and nothing found is UNKNOWN."""
    if findings:
        verdict = worst(f.verdict for f in findings)
    else:
        verdict = Verdict.PASS if judged else Verdict.UNKNOWN
    if not judged and not findings:
        note = note or "nothing to examine"
    return CheckResult(
        check=check,
        cell=cell,
        verdict=verdict,
        judged=judged,
        findings=tuple(findings),
        note=note,
        figures=figures or {},
    )
