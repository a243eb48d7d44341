"""Findings, check results and judgements: the output types of judging."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Literal

from pydantic import Field

from harness.history.verdict import Verdict, worst
from harness.judging.figures import (
    NO_EVIDENCE,
    CheckFigures,
    FindingEvidence,
    IncompleteCell,
    KVDifference,
    KVOfLayers,
    StepsDifference,
    TokenDifference,
    TokenTestEvidence,
    WrongWhenRescored,
)
from harness.util.strict import Strict

DamageClass = Literal[
    "input",
    "target-kv",
    "drafter-kv",
    "drafter-input",
    "sampler",
    "text",
    "delivery",
    "nothing-tested",
    "engine-changed",
    "known-answer",
    "infrastructure",
    "routing",
    "blocks-kept",
    "reuse-lost",
    "kv-events",
    "no-answer",
    "baseline",
]


class Location(Strict):
    """The part of a prompt's KV that the evidence points to."""

    blocks: tuple[int, ...] = ()
    """Indices of the prompt's blocks whose KV was wrong, missing or another prompt's."""
    of: int = 0
    """Number of blocks that the prompt fills."""
    shift: int | None = None
    """Number of blocks by which D's KV is shifted; None if it is not."""
    position: int | None = None
    """First prompt position that was read incorrectly."""
    step: int | None = None
    """First verify step since the hand-off (or the prefill) whose acceptance differs, not counting padded steps."""
    text: str
    """The location and its evidence as a sentence."""


class Law(Strict):
    """The rule that says which prompt lengths fail."""

    text: str
    residues: tuple[int, ...] | None = None
    """Failing lengths modulo ``modulus``, if the law is about residues."""
    modulus: int | None = None
    tested: tuple[int, ...] = ()
    """Residues that were tested."""
    exact: bool = True
    """Whether the law explains every observation."""
    of_age: bool = False
    """Whether it is about how many requests came before."""


class Diagnosis(Strict):
    """The joint diagnosis from all findings of a cell in a scenario."""

    damage: DamageClass
    failed: int
    """Requests with a finding."""
    judged: int
    law: Law | None = None
    location: Location | None = None
    """Location of the most telling finding, if any has one."""
    text: str


class Finding(Strict):
    """One deviation from the expected behaviour, with its evidence."""

    check: str
    cell: str
    scenario: str = "cold"
    verdict: Verdict
    damage: DamageClass
    taken_for: DamageClass | None = None
    """The class that the check itself took it for, where the diagnosis, which looks at other cells, gave another."""
    message: str
    """What was expected, what was found, and what to do."""
    prompt_id: str | None = None
    form: str | None = None
    part: str | None = None
    """In scenarios, the request of the script: prompt, instance and part."""
    stratum: str | None = None
    location: Location | None = None
    """Where in the prompt's KV the damage is, as far as the evidence shows."""
    law: str | None = None
    """The law of failing prompt lengths in this cell, if the finding is evidence for it."""
    known: str | None = None
    """Id of the known defect that covers it."""
    link: str | None = None
    """Link to the report of that defect."""
    others: int = Field(default=0, ge=0)
    """Number of further findings of this check and cell that differ only in their request and are not listed."""
    evidence: FindingEvidence = NO_EVIDENCE

    @property
    def classes(self) -> tuple[DamageClass, ...]:
        """The class of damage, and the one that the check itself took it for."""
        return (self.damage,) if self.taken_for is None else (self.damage, self.taken_for)

    @property
    def changed(self) -> tuple[str, ...]:
        """Columns (``stratum@position``) in which a registered test found a change; empty for other findings."""
        return self.evidence.changed if isinstance(self.evidence, TokenTestEvidence) else ()

    @property
    def last_step(self) -> bool:
        """Whether only the drafts that look past the end of an answer differ."""
        return isinstance(self.evidence, StepsDifference) and self.evidence.last_alone

    @property
    def lone_tokens(self) -> bool:
        """Whether KV differs at single tokens, of which none follows another; not so of other findings."""
        tokens = self.evidence.tokens if isinstance(self.evidence, KVDifference) else ()
        return bool(tokens) and all(after - before > 1 for before, after in pairwise(tokens))

    @property
    def kv_layers(self) -> tuple[KVOfLayers, ...]:
        """The layers in which KV differs; empty for other findings."""
        return self.evidence.by_layer if isinstance(self.evidence, KVDifference) else ()

    @property
    def tokens_from_end(self) -> int | None:
        """How far before the end of its prompt the first token stands whose KV differs; None of other findings."""
        found = self.evidence
        return found.prompt_tokens - min(found.tokens) if isinstance(found, KVDifference) and found.tokens else None

    @property
    def runs_on(self) -> bool:
        """Whether an answer is right up to its last token; so are those of findings that are not about tokens."""
        found = self.evidence
        return not isinstance(found, TokenDifference) or found.position >= found.output_tokens - 1

    @property
    def first_wrong(self) -> int | None:
        """The first output token that is wrong; None for findings that name none."""
        found = self.evidence
        return found.position if isinstance(found, (TokenDifference, WrongWhenRescored)) else None

    @property
    def reason(self) -> str:
        """Why the cell is incomplete; empty for other findings."""
        return self.evidence.reason if isinstance(self.evidence, IncompleteCell) else ""

    @property
    def id(self) -> str:
        scenario = None if self.scenario == "cold" else self.scenario
        return "/".join(p for p in (self.cell, scenario, self.check, self.part or self.prompt_id, self.form) if p)


def how_many(findings: Iterable[Finding]) -> int:
    """Count findings, including those that are counted but not listed."""
    return sum(1 + f.others for f in findings)


class CheckResult(Strict):
    """The result of one check on one cell."""

    check: str
    cell: str
    verdict: Verdict
    judged: int
    """Observations that were examined. Zero never passes."""
    findings: tuple[Finding, ...] = ()
    note: str = ""
    figures: CheckFigures = NO_EVIDENCE

    @property
    def found(self) -> int:
        """Number of findings, including those that are counted but not listed."""
        return how_many(self.findings)


class CellVerdict(Strict):
    """The results of all checks on one cell in one scenario."""

    cell: str
    scenario: str = "cold"
    verdict: Verdict
    diagnosis: Diagnosis | None = None
    results: tuple[CheckResult, ...]


class Judgement(Strict):
    """The judgement of a whole run."""

    run_id: str
    verdict: Verdict
    cells: tuple[CellVerdict, ...]
    """One entry per cell and scenario, each cell's cold scenario first."""
    notices: tuple[str, ...] = ()
    mutants: tuple[str, ...] = ()
    """Mutants that were enabled; such a run never passes."""

    def __repr_args__(self) -> list[tuple[str | None, object]]:
        return [("run_id", self.run_id), ("verdict", self.verdict.value), ("findings", len(self.findings))]

    def by_cell(self) -> dict[str, Verdict]:
        """Return the verdict of each cell over all its scenarios."""
        out: dict[str, list[Verdict]] = {}
        for item in self.cells:
            out.setdefault(item.cell, []).append(item.verdict)
        return {cell: worst(verdicts) for cell, verdicts in out.items()}

    def result(self, cell: str, check: str) -> CheckResult | None:
        """Return the result of a check on the cold prompts of a cell; None if it was not made."""
        cold = (c for c in self.cells if c.cell == cell and c.scenario == "cold")
        return next((r for c in cold for r in c.results if r.check == check), None)

    @property
    def findings(self) -> list[Finding]:
        """All listed findings; use ``how_many`` to count them."""
        return [f for c in self.cells for r in c.results for f in r.findings]


def conclude(
    check: str, cell: str, judged: int, findings: list[Finding], note: str = "", figures: CheckFigures = NO_EVIDENCE
) -> CheckResult:
    """Build a check result; with nothing examined and no findings it is UNKNOWN."""
    if findings:
        verdict = worst(f.verdict for f in findings)
    elif judged:
        verdict = Verdict.PASS
    else:
        verdict = Verdict.UNKNOWN
        note = note or "nothing to examine"
    return CheckResult(
        check=check, cell=cell, verdict=verdict, judged=judged, findings=tuple(findings), note=note, figures=figures
    )
