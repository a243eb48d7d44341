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
    KNOWN = "KNOWN"
    """Nothing but findings that ``known-defects.yaml`` covers."""
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
        """0 for PASS, and for KNOWN, which says in every report what is known. An improvement fails until the baseline
        is updated, as a drift does."""
        if self in (Verdict.PASS, Verdict.KNOWN):
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
    "routing",
    "baseline",
]


class Location(Strict):
    """Which part of a prompt's KV the evidence points to."""

    blocks: tuple[int, ...] = ()
    """Indices of the prompt's blocks whose KV was wrong, missing or another's."""
    of: int = 0
    """Number of blocks that the prompt fills."""
    shift: int | None = None
    """By how many blocks the KV that D holds is shifted, when it is."""
    position: int | None = None
    """First prompt position that was read wrongly."""
    step: int | None = None
    """First verify step since the hand-off (or since the prefill) whose acceptance differs, padded ones left out."""
    text: str
    """The location in words, with its evidence."""


class Law(Strict):
    """Which prompt lengths fail and which do not."""

    text: str
    residues: tuple[int, ...] | None = None
    """Lengths modulo ``modulus`` that fail, when that is the law."""
    modulus: int | None = None
    tested: tuple[int, ...] = ()
    """Residues that were tested at all."""
    exact: bool = True
    """Whether the law explains every observation."""


class Diagnosis(Strict):
    """What the findings of a cell in a scenario say together."""

    damage: DamageClass
    failed: int
    """Requests with a finding."""
    judged: int
    law: Law | None = None
    location: Location | None = None
    """Of the first request that has one."""
    text: str


class Finding(Strict):
    """One thing that is not as it should be, with its evidence."""

    check: str
    cell: str
    scenario: str = "cold"
    verdict: Verdict
    damage: DamageClass
    message: str
    """What was expected, what was found, what to do."""
    prompt_id: str | None = None
    form: str | None = None
    part: str | None = None
    """In scenarios, which of the script's requests: prompt, instance and part."""
    stratum: str | None = None
    location: Location | None = None
    """Where in the prompt's KV the damage is, as far as the evidence goes."""
    law: str | None = None
    """Which prompt lengths fail in this cell, when the finding is one of those that show it."""
    known: str | None = None
    """Id of the known defect that covers it."""
    link: str | None = None
    """Where that defect is reported."""
    others: int = Field(default=0, ge=0)
    """Further findings of the check in this cell that differ in their request alone, and are counted here only."""
    evidence: dict[str, Any] = Field(default_factory=dict)

    @property
    def id(self) -> str:
        scenario = None if self.scenario == "cold" else self.scenario
        return "/".join(p for p in (self.cell, scenario, self.check, self.part or self.prompt_id, self.form) if p)


def how_many(findings: Iterable[Finding]) -> int:
    """Findings with those that they stand for."""
    return sum(1 + f.others for f in findings)


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

    @property
    def found(self) -> int:
        """Findings with those that are counted only."""
        return how_many(self.findings)


class CellVerdict(Strict):
    """What all checks say of one cell in one scenario."""

    cell: str
    scenario: str = "cold"
    verdict: Verdict
    diagnosis: Diagnosis | None = None
    results: tuple[CheckResult, ...]


class Judgement(Strict):
    """Everything the checks say of a run."""

    run_id: str
    verdict: Verdict
    cells: tuple[CellVerdict, ...]
    """One entry per cell and scenario, the cold one of a cell first."""
    notices: tuple[str, ...] = ()
    mutants: tuple[str, ...] = ()
    """Defects that were put in on purpose; such a run never passes."""

    def by_cell(self) -> dict[str, Verdict]:
        """The verdict of each cell over all its scenarios."""
        out: dict[str, list[Verdict]] = {}
        for item in self.cells:
            out.setdefault(item.cell, []).append(item.verdict)
        return {cell: worst(verdicts) for cell, verdicts in out.items()}

    @property
    def findings(self) -> list[Finding]:
        """Those that are listed; see ``how_many``."""
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
