"""The result of a self-test, as written to selftest.json and shown in the reports of runs beside it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from pydantic import Field

from harness.errors import EXIT_PASS, EXIT_REGRESSION, EXIT_UNKNOWN
from harness.history.verdict import Verdict
from harness.util.strict import Strict
from harness.util.text import counted


class Kill(StrEnum):
    """The outcome of a mutant: whether a check caught it."""

    KILLED = "killed"
    OTHER = "killed for another reason"
    SURVIVED = "survived"
    UNTESTED = "not tested"

    @property
    def symbol(self) -> str:
        return {"killed": "✔", "killed for another reason": "≈", "survived": "✘", "not tested": "?"}[self.value]


class Caught(Strict):
    """How much of a cell in a scenario had been answered when the first request with a finding was."""

    requests: int
    tokens: int
    """Output tokens of these requests, including the one with the finding."""


class MutantOutcome(Strict):
    """The outcome of one mutant."""

    mutant: str
    kill: Kill
    reason: str
    """Why it has this outcome, in one sentence."""
    expected: str
    found: tuple[str, ...] = ()
    """Diagnoses of the cells and scenarios that did not pass."""
    checks: dict[str, Verdict] = Field(default_factory=dict)
    """Check → worst verdict over the trial's cells and scenarios."""
    fired: bool | None = None
    """Whether the engine's log says that the mutant took effect; None for mutants outside the engine."""
    caught: Caught | None = None
    """None if no single request shows it."""
    folder: str
    seconds: float


class Control(Strict):
    """A run of the same workload with every mutant disabled."""

    id: str
    verdict: Verdict
    requests: int
    folder: str
    seconds: float
    findings: tuple[str, ...] = ()


class SelfTest(Strict):
    """The result of a self-test."""

    run_id: str
    started: str
    profile: str
    versions: dict[str, str | None]
    hardware: dict[str, object]
    asked: tuple[str, ...]
    """Ids of the requested mutants; each must have an outcome."""
    outcomes: tuple[MutantOutcome, ...]
    controls: tuple[Control, ...]
    engine_starts: int
    seconds: float
    interrupted: bool = False
    not_tried: dict[str, str] = Field(default_factory=dict)
    """Mutants that the profile cannot show, and were not asked for by name, each with the reason."""

    @property
    def exit_code(self) -> int:
        """0 only if every mutant is killed for the right reason and every control passes, but for expected failures."""
        kills = [o.kill for o in self.outcomes]
        bad = any(k in (Kill.OTHER, Kill.SURVIVED) for k in kills)
        if bad or any(c.verdict.fails for c in self.controls):
            return EXIT_REGRESSION
        if self.interrupted or not kills or Kill.UNTESTED in kills or not self.controls or self.missing:
            return EXIT_UNKNOWN
        return EXIT_PASS if all(c.verdict.exit_code == EXIT_PASS for c in self.controls) else EXIT_UNKNOWN

    @property
    def missing(self) -> tuple[str, ...]:
        """Requested mutants that have no outcome."""
        had = {o.mutant for o in self.outcomes}
        return tuple(m for m in self.asked if m not in had)

    @property
    def sentence(self) -> str:
        counts = {k: sum(o.kill is k for o in self.outcomes) for k in Kill}
        passed = sum(c.verdict.exit_code == EXIT_PASS for c in self.controls)
        parts = [f"{n} {k.value}" for k, n in counts.items() if n]
        if self.missing:
            parts.append(f"no outcome for {', '.join(self.missing)}")
        if self.not_tried:
            parts.append(f"not tried: {', '.join(self.not_tried)}")
        return (
            f"{counted(len(self.asked), 'injected fault')}: {', '.join(parts) or 'none tried'}; {passed} of "
            f"{len(self.controls)} controls pass; {self.engine_starts} engine starts, {self.seconds:.0f} s."
        )


def matrix_columns(outcomes: Sequence[MutantOutcome]) -> list[str]:
    """Return the checks that any trial had, in the order of the registry: the columns of the kill matrix."""
    from harness.judging.checks.registry import CHECKS

    seen = {name for o in outcomes for name in o.checks}
    return [c.name for c in CHECKS if c.name in seen]
