"""Decide from judgements whether a mutant was caught for the right reason. Pure functions."""

from __future__ import annotations

from collections.abc import Collection

from harness.history.folder import History
from harness.history.verdict import Verdict, worst
from harness.judging.diagnosis.law import IFF
from harness.judging.findings import CellVerdict, Judgement
from harness.mutants.model import Trial, View
from harness.profiles.cells import CellName
from harness.prompts.lengths import spills
from harness.reports.selftest_result import Caught, Kill


def classify_kill(
    trial: Trial,
    judgement: Judgement,
    fired: bool | None,
    lookahead: int,
    anyway: Collection[str] = (),
) -> tuple[Kill, str]:
    """Return how a mutant ended and why, in one sentence.

    ``fired`` is whether an engine reports that the mutant's code ran; None if the mutant is not in an engine.
    ``lookahead`` is that of the trial's method. ``anyway`` are the ids of findings that known defects cover in engines
    without a mutant: they do not make a view dirty that has to be clean.
    """
    views = {_view(c): c for c in judgement.cells}
    failed = {v: c for v, c in views.items() if c.verdict is not Verdict.PASS}
    if not views:
        return Kill.UNTESTED, "no cell was judged"
    if not failed:
        passed = f"every check of {', '.join(_name(v) for v in views)} passed"
        if fired is False:
            return Kill.UNTESTED, f"{passed}, but the fault's code never ran: these engines do not go that way"
        return Kill.SURVIVED, passed
    if fired is False:
        names = ", ".join(_name(v) for v in failed)
        return Kill.OTHER, f"{names} failed although the fault's code never ran: something else is wrong"
    reasons = []
    for view in trial.caught:
        cell = failed.get(view)
        if cell is None:
            reasons.append(f"{_name(view)} passed")
            continue
        why = _mismatch(trial, cell, lookahead)
        if why is None:
            dirty = [v for v in trial.clean if v not in views or (v in failed and not _expected(failed[v], anyway))]
            if dirty:
                found = failed[dirty[0]].verdict if dirty[0] in failed else "missing"
                reasons.append(f"{_name(dirty[0])} must pass and is {found}")
                continue
            return Kill.KILLED, f"{_name(view)}: {cell.diagnosis.text if cell.diagnosis else ''}"
        reasons.append(f"{_name(view)}: {why}")
    return Kill.OTHER, "; ".join(reasons)


def _expected(cell: CellVerdict, anyway: Collection[str]) -> bool:
    """Return whether known defects explain each check of the cell that does not pass."""
    bad = [r for r in cell.results if r.verdict is not Verdict.PASS]
    return bool(bad) and all(r.findings and all(f.id in anyway for f in r.findings) for r in bad)


def _view(cell: CellVerdict) -> View:
    name = CellName.of(cell.cell)
    return View("pd" if name.topology == "pd" else "single", cell.scenario, name.route)


def _name(view: View) -> str:
    return f"{view.topology} {view.scenario}" + (" through the router" if view.route == "router" else "")


_FAILED = (Verdict.REGRESSION, Verdict.DRIFT, Verdict.IMPROVED)


def _mismatch(trial: Trial, cell: CellVerdict, lookahead: int) -> str | None:
    """Return why a failing cell does not count as catching the mutant for its reason; None when it does."""
    diagnosis = cell.diagnosis
    if diagnosis is None or diagnosis.damage != trial.damage:
        return f"expected the class {trial.damage}, found {diagnosis.damage if diagnosis else 'none'}"
    # An UNKNOWN check has caught nothing, unless UNKNOWN is what the mutant must lead to.
    counted = (Verdict.UNKNOWN,) if trial.unknown else _FAILED
    bad = {r.check for r in cell.results if r.verdict in counted}
    if not bad & set(trial.checks):
        return f"expected {' or '.join(trial.checks)} to fail, found {', '.join(sorted(bad)) or 'that none did'}"
    if trial.unknown != (cell.verdict is Verdict.UNKNOWN):
        return f"expected the verdict {'UNKNOWN' if trial.unknown else 'REGRESSION or DRIFT'}, found {cell.verdict}"
    if trial.spills_only:
        return _law_mismatch(cell, lookahead)
    law = diagnosis.law
    if trial.aged_only and (law is None or not law.of_age or not law.text.startswith(IFF)):
        return f"expected failures from one request on, whatever the length, found {law.text if law else 'no law'}"
    return None


def _law_mismatch(cell: CellVerdict, lookahead: int) -> str | None:
    """Return why the law of lengths is not that of the lookahead; None when it is.

    It must name exactly those tested residues at which this lookahead takes one more block.
    """
    law = cell.diagnosis.law if cell.diagnosis else None
    if law is None or law.residues is None or law.modulus is None:
        return f"expected a law of residues, found {law.text if law else 'none'}"
    size = law.modulus
    wanted = {r for r in law.tested if spills(r or size, size, lookahead)}
    if wanted and wanted == set(law.residues):
        return None
    return f"expected failures at the residues {sorted(wanted)} of a lookahead of {lookahead} only, found: {law.text}"


def check_verdicts(judgement: Judgement) -> dict[str, Verdict]:
    """Return the worst verdict of each check over all cells and scenarios, for the kill matrix."""
    out: dict[str, Verdict] = {}
    for cell in judgement.cells:
        for result in cell.results:
            out[result.check] = worst([out.get(result.check, Verdict.PASS), result.verdict])
    return out


def first_caught(judgement: Judgement, history: History) -> Caught | None:
    """Return how much had been answered until the first finding on a request, in the cell and scenario that needed the
    fewest requests; None if all findings are about a cell as a whole."""
    found = []
    for cell in judgement.cells:
        named = {(f.part or f.prompt_id, f.form) for r in cell.results for f in r.findings if f.prompt_id}
        answered = tokens = 0
        for o in history.in_order(cell.cell):
            if o.scenario != cell.scenario:
                continue
            answered += 1
            tokens += len(o.final.output_ids or ()) if o.final is not None else 0
            if (o.key, o.form) in named:
                found.append(Caught(requests=answered, tokens=tokens))
                break
    return min(found, key=lambda c: c.requests, default=None)


def diagnoses(judgement: Judgement) -> tuple[str, ...]:
    """Return one line per cell and scenario that did not pass."""
    return tuple(
        f"{c.cell} {c.scenario}: {c.verdict}: {c.diagnosis.text}" for c in judgement.cells if c.diagnosis is not None
    )
