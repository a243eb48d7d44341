"""Was a mutant caught, and for the right reason? Pure functions of judgements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

from pydantic import Field

from harness.errors import EXIT_PASS, EXIT_REGRESSION, EXIT_UNKNOWN
from harness.findings import CellVerdict, Judgement, Verdict
from harness.history import COLD
from harness.matrix import CellName
from harness.selftest.trials import Trial, View
from harness.strata import spills
from harness.strict import Strict


class Kill(StrEnum):
    """How a mutant ended."""

    KILLED = "killed"
    OTHER = "killed for another reason"
    SURVIVED = "survived"
    UNTESTED = "not tested"

    @property
    def symbol(self) -> str:
        return {"killed": "✔", "killed for another reason": "≈", "survived": "✘", "not tested": "?"}[self.value]


class Outcome(Strict):
    """What became of one mutant."""

    mutant: str
    kill: Kill
    reason: str
    """Why it counts as what it counts, in one sentence."""
    expected: str
    found: tuple[str, ...] = ()
    """Diagnosis of each cell and scenario that did not pass."""
    checks: dict[str, Verdict] = Field(default_factory=dict)
    """Worst verdict of each check over the trial's cells and scenarios."""
    fired: bool | None = None
    """Whether the engine's log says that the mutant's code took effect; None for those outside of the engine."""
    folder: str
    seconds: float


class Control(Strict):
    """The same workload with every mutant off."""

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
    """Ids of the mutants that were to be tried: each must have an outcome."""
    outcomes: tuple[Outcome, ...]
    controls: tuple[Control, ...]
    engine_starts: int
    seconds: float
    interrupted: bool = False

    @property
    def exit_code(self) -> int:
        """0 only if every mutant is killed for its reason and every control passes."""
        kills = [o.kill for o in self.outcomes]
        bad = any(k in (Kill.OTHER, Kill.SURVIVED) for k in kills)
        if bad or any(c.verdict.exit_code == EXIT_REGRESSION for c in self.controls):
            return EXIT_REGRESSION
        if self.interrupted or not kills or Kill.UNTESTED in kills or not self.controls or self.missing:
            return EXIT_UNKNOWN
        return EXIT_PASS if all(c.verdict is Verdict.PASS for c in self.controls) else EXIT_UNKNOWN

    @property
    def missing(self) -> tuple[str, ...]:
        """Mutants that were asked for and have no outcome."""
        had = {o.mutant for o in self.outcomes}
        return tuple(m for m in self.asked if m not in had)

    @property
    def sentence(self) -> str:
        """What happened, in one sentence."""
        counts = {k: sum(o.kill is k for o in self.outcomes) for k in Kill}
        passed = sum(c.verdict is Verdict.PASS for c in self.controls)
        parts = [f"{n} {k.value}" for k, n in counts.items() if n]
        if self.missing:
            parts.append(f"no outcome of {', '.join(self.missing)}")
        return (
            f"{len(self.asked)} mutants: {', '.join(parts) or 'none tried'}; {passed} of {len(self.controls)} "
            f"controls pass; {self.engine_starts} engine starts, {self.seconds:.0f} s."
        )


def classify_kill(
    trial: Trial, judgement: Judgement, scenario_kinds: Mapping[str, str], fired: bool | None, lookahead: int
) -> tuple[Kill, str]:
    """Judge a trial. ``scenario_kinds`` maps the ids of the profile's scenarios to their kinds; ``lookahead`` is that
    of the trial's method; ``fired`` whether an engine says that the mutant's code ran (None: it is not in an engine).

    Returns how the mutant ended and why, in one sentence.
    """
    views = {_view(c, scenario_kinds): c for c in judgement.cells}
    failed = {v: c for v, c in views.items() if c.verdict is not Verdict.PASS}
    if not views:
        return Kill.UNTESTED, "no cell was judged"
    if not failed:
        never = "; its code never ran" if fired is False else ""
        return Kill.SURVIVED, f"every check of {', '.join(_name(v) for v in views)} passed{never}"
    if fired is False:
        names = ", ".join(_name(v) for v in failed)
        return Kill.OTHER, f"{names} failed although the mutant's code never ran: something else is wrong"
    reasons = []
    for view in trial.caught:
        cell = failed.get(view)
        if cell is None:
            reasons.append(f"{_name(view)} passed")
            continue
        why = _mismatch(trial, cell, lookahead)
        if why is None:
            dirty = [v for v in trial.clean if v in failed or v not in views]
            if dirty:
                found = failed[dirty[0]].verdict if dirty[0] in failed else "missing"
                reasons.append(f"{_name(dirty[0])} must pass and is {found}")
                continue
            return Kill.KILLED, f"{_name(view)}: {cell.diagnosis.text if cell.diagnosis else ''}"
        reasons.append(f"{_name(view)}: {why}")
    return Kill.OTHER, "; ".join(reasons)


def _view(cell: CellVerdict, kinds: Mapping[str, str]) -> View:
    name = CellName.of(cell.cell)
    return View("pd" if name.topology == "pd" else "single", kinds.get(cell.scenario, COLD), name.route)


def _name(view: View) -> str:
    return f"{view.topology} {view.kind}" + (" through the router" if view.route == "router" else "")


_FAILED = (Verdict.REGRESSION, Verdict.DRIFT, Verdict.IMPROVED)


def _mismatch(trial: Trial, cell: CellVerdict, lookahead: int) -> str | None:
    """Why a failing cell does not count as catching the mutant for its reason; None when it does."""
    diagnosis = cell.diagnosis
    if diagnosis is None or diagnosis.damage != trial.damage:
        return f"expected the class {trial.damage}, found {diagnosis.damage if diagnosis else 'none'}"
    # A check that could not tell has not caught anything, unless that is what the mutant must lead to.
    counted = (Verdict.UNKNOWN,) if trial.unknown else _FAILED
    bad = {r.check for r in cell.results if r.verdict in counted}
    if not bad & set(trial.checks):
        return f"expected {' or '.join(trial.checks)} to fail, found {', '.join(sorted(bad)) or 'none that did'}"
    if trial.unknown != (cell.verdict is Verdict.UNKNOWN):
        return f"expected the verdict {'UNKNOWN' if trial.unknown else 'REGRESSION or DRIFT'}, found {cell.verdict}"
    if trial.spills_only:
        return _other_law(cell, lookahead)
    return None


def _other_law(cell: CellVerdict, lookahead: int) -> str | None:
    """The law of lengths must name those residues at which this lookahead takes one more block, as far as they were
    tested, and nothing else."""
    law = cell.diagnosis.law if cell.diagnosis else None
    if law is None or law.residues is None or law.modulus is None:
        return f"expected a law of residues, found {law.text if law else 'none'}"
    size = law.modulus
    wanted = {r for r in law.tested if spills(r or size, size, lookahead)}
    if wanted and wanted == set(law.residues):
        return None
    return f"expected failures at the residues {sorted(wanted)} of a lookahead of {lookahead} only, found: {law.text}"


def check_verdicts(judgement: Judgement) -> dict[str, Verdict]:
    """Worst verdict of each check over all cells and scenarios, for the kill matrix."""
    order = list(Verdict)
    out: dict[str, Verdict] = {}
    for cell in judgement.cells:
        for result in cell.results:
            out[result.check] = max(out.get(result.check, Verdict.PASS), result.verdict, key=order.index)
    return out


def diagnoses(judgement: Judgement) -> tuple[str, ...]:
    """One line per cell and scenario that did not pass."""
    return tuple(
        f"{c.cell} {c.scenario}: {c.verdict}: {c.diagnosis.text}" for c in judgement.cells if c.diagnosis is not None
    )


def matrix_columns(outcomes: Sequence[Outcome]) -> list[str]:
    """Checks of the kill matrix, in the order of the registry, without those that no trial had."""
    from harness.checks.registry import CHECKS

    seen = {name for o in outcomes for name in o.checks}
    return [c.name for c in CHECKS if c.name in seen]
