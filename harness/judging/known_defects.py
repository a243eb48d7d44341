"""Known defects: expected failures, already reported, which do not fail the run but stay visible.

An entry names what it covers (class, cells, scenarios, strata, checks, versions, how many findings), a link, a reason
and an expiry date. A matching finding is shown as KNOWN, never as PASS and never hidden. It fails the run again once
the entry has expired, or where more findings match than the entry allows; findings that the entry does not cover fail
as before. An entry that no longer matches anything is reported as possibly fixed, with the lines to delete. Dates and
versions are those of the run, so that judging it again later gives the same answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import date, datetime

from harness.errors import DataError
from harness.history.folder import History
from harness.history.records import Form, Leg, Observation, in_words
from harness.history.verdict import Verdict, worst
from harness.judging.checks.aggregation import Covering
from harness.judging.findings import CellVerdict, CheckResult, Finding, Judgement, how_many
from harness.judging.notices import with_deciding
from harness.observed.cell import ObservedCell
from harness.profiles.cells import CellName
from harness.profiles.known_defects import Entry, KnownDefect, KnownDefects, matches_any
from harness.util.text import counted

UNTESTED = "untested: "
"""How a notice begins that says which states an expected failure makes say nothing."""


def apply_known(judgement: Judgement, known: KnownDefects | None, history: History) -> Judgement:
    """Return the judgement with matching findings marked KNOWN, and notices about entries that have expired, may be too
    narrow or match nothing. Raises DataError if the run's start time is damaged."""
    if known is None or not known.entries or judgement.mutants:
        # What a mutant breaks must not be excused as a known defect.
        return judgement
    valid: list[Entry] = []
    notices: list[str] = []
    deciding: list[str] = []
    for entry in _of_run(known, history):
        if _day(history.run.started) > entry.defect.expires:
            again = any(_fits(entry.defect, f, history) for f in judgement.findings)
            what = (
                "its findings fail the run again; renew it in" if again else "it matches nothing here; delete it from"
            )
            (deciding if again else notices).append(
                f"expected failure {entry.defect.id} expired on {entry.defect.expires}: {what} {known.path.name}, line "
                f"{entry.first_line}"
            )
            continue
        valid.append(entry)
    cells = tuple(_cell(c, valid, history) for c in judgement.cells)
    for entry in valid:
        others = list(_too_few_or_many(entry.defect, judgement, history))
        deciding += _deciding(entry, others, cells, known.path.name)
        notices += _entry_notices(entry, others, judgement, cells, known.path.name)
    verdict = worst([*(c.verdict for c in cells), *history.limiting_verdicts])
    said = with_deciding([*judgement.notices, *notices], deciding)
    return judgement.model_copy(update={"cells": cells, "verdict": verdict, "notices": said})


def covering(known: KnownDefects | None, history: History) -> Covering:
    """Return what tells by which entries a finding of a run may be covered."""
    defects = [entry.defect for entry in _of_run(known, history)] if known is not None else []
    return lambda finding: tuple(d.id for d in defects if _fits(d, finding, history))


def _of_run(known: KnownDefects, history: History) -> Iterator[Entry]:
    """Yield the entries for the vLLM, device and model runners of a run."""
    version = history.run.versions.get("vllm")
    device = "gpu" if history.run.asked_for.engine.on_gpu else "cpu"
    for entry in known.entries:
        narrowed = _with_its_runner(entry.defect, history)
        if narrowed is not None and narrowed.covers_run(version, device):
            yield entry._replace(defect=narrowed)


def expected_anyway(judgement: Judgement, known: KnownDefects | None, history: History) -> dict[str, str]:
    """Return the findings of a run with injected faults, by id, that known defects would cover in a run without; each
    with the id of its defect. No verdict follows from it."""
    if not judgement.mutants:
        return {}
    plain = apply_known(judgement.model_copy(update={"mutants": ()}), known, history)
    return {f.id: f.known for f in plain.findings if f.known}


def _with_its_runner(defect: KnownDefect, history: History) -> KnownDefect | None:
    """Return the entry, limited to the cells whose engines run a model runner that it names; None if there are none."""
    runners = {e.group: e.model_runner for e in history.run.engines if e.model_runner is not None}
    others = {c.cell for c in history.run.cells if runners.get(c.group, "V1") not in defect.model_runners}
    if not others:
        return defect
    cells = tuple(c.cell for c in history.run.cells if c.cell not in others and matches_any(c.cell, defect.cells))
    return defect.model_copy(update={"cells": cells}) if cells else None


def _day(text: str) -> date:
    try:
        return datetime.fromisoformat(text).date()
    except ValueError as error:
        raise DataError(
            f"run.json: started: expected a date and a time, found {text!r}: the record is damaged"
        ) from error


def _fits(defect: KnownDefect, finding: Finding, history: History) -> bool:
    certain = finding.verdict not in (Verdict.PASS, Verdict.UNKNOWN)
    # What other cells show may change the class, and does not make it another defect.
    here = certain and not defect.classes_apart(finding.classes) and defect.covers_place(finding)
    return here and _shows(defect, finding, history)


def _shows(defect: KnownDefect, finding: Finding, history: History) -> bool:
    """Return whether the answer that a finding is about looks as the defect makes it."""
    o = _answer(history, finding.cell, finding)
    name = CellName.of(finding.cell)
    if not _sent_as(defect, o) or (defect.beside_full_context and not _beside_full_context(history, name, o)):
        return False
    if o is None or o.final is None:
        return True
    twin = _answer(history, name.single if name.topology == "pd" else name.beside("pd").id, finding)
    other = twin.final if twin is not None else None
    sides = [(o.final, name.topology == "single")]
    if finding.check == _BESIDE_SINGLE and other is not None:
        # Either may have gone wrong first.
        sides.append((other, True))
    if defect.improbable and not any(_goes_wrong_impossibly(finding, leg, alone) for leg, alone in sides):
        return False
    return not defect.alike or other is None or other.output_ids == o.final.output_ids


def _sent_as(defect: KnownDefect, o: Observation | None) -> bool:
    """Return whether a request was sent as the defect needs it."""
    by_mistake = o is not None and any(mistake in defect.mistakes for mistake in o.mistakes)
    with_parameter = o is not None and o.feature in defect.parameters
    return (by_mistake or not defect.mistakes) and (with_parameter or not defect.parameters)


def _beside_full_context(history: History, name: CellName, o: Observation | None) -> bool:
    """Return whether an answer, or the single engine's that it is compared with, was under way together with a request
    that came to the end of its context."""
    if o is None:
        return False
    compared = history.first_answers(name.single).get((o.sent_ids, o.adapter))
    return any(
        (record := history.cell(one.cell)) is not None and ObservedCell(history, record).beside_full_context(one)
        for one in (o, compared)
        if one is not None
    )


_BESIDE_SINGLE = "tokens-single"
"""The check whose findings are about two answers of equal standing."""
_IMPOSSIBLE_NATS = 10.0
"""Below this log-prob no temperature at which margins force every token would ever draw a token. Seen: -25 to -53."""


def _goes_wrong_impossibly(finding: Finding, answer: Leg, alone: bool) -> bool:
    """Return whether an answer goes wrong with a token that its own engine finds impossible: with wrong KV an engine is
    sure of wrong tokens instead.

    It may have done so before the token that a finding is about: two engines may say the same wrong token, and part
    behind it. An engine ``alone`` gives the first token in the prompt's step, which verifies nothing; D gives it in a
    verify step.
    """
    at, values = finding.first_wrong, answer.chosen_logprobs or ()
    told = values if at is None else values[int(alone) : at + 1]
    return any(value < -_IMPOSSIBLE_NATS for value in told)


def _answer(history: History, cell: str, finding: Finding) -> Observation | None:
    """Return a cell's answer to the request that a finding is about; None if it is about no request."""
    form: Form = "text" if finding.form == "text" else "ids"
    return history.of(cell, form, finding.scenario).get(finding.part or finding.prompt_id or "")


def _matching(defect: KnownDefect, cell: CellVerdict, history: History) -> int:
    """Count the findings of a cell in a scenario that match an entry."""
    return how_many(f for r in cell.results for f in r.findings if _fits(defect, f, history))


def _cell(cell: CellVerdict, entries: Iterable[Entry], history: History) -> CellVerdict:
    # Which of too many findings are the known defect cannot be told, and fewer are a change: none of them is covered.
    usable = [e for e in entries if e.defect.at_least <= _matching(e.defect, cell, history) <= e.defect.at_most]
    results = tuple(_result(r, usable, history) for r in cell.results)
    if results == cell.results:
        return cell
    return cell.model_copy(update={"results": results, "verdict": worst(r.verdict for r in results)})


def _result(result: CheckResult, entries: list[Entry], history: History) -> CheckResult:
    if not result.findings:
        return result
    found = []
    for finding in result.findings:
        entry = next((e for e in entries if _fits(e.defect, finding, history)), None)
        if entry is not None:
            finding = finding.model_copy(
                update={"verdict": Verdict.KNOWN, "known": entry.defect.id, "link": entry.defect.link}
            )
        found.append(finding)
    return result.model_copy(update={"findings": tuple(found), "verdict": worst(f.verdict for f in found)})


_Mismatched = Sequence[tuple[CellVerdict, int]]
"""Cells in scenarios, each with the number of its findings that match an entry."""


def _deciding(entry: Entry, others: _Mismatched, after: Sequence[CellVerdict], name: str) -> Iterable[str]:
    """Yield why what looks like an entry's defect fails the run all the same; ``others`` have too few or too many
    findings to be covered."""
    defect, lines = entry.defect, _lines(entry, name)
    for cell, count in others:
        limit, key, what = (
            (f"at most {defect.at_most}", "at_most", "raise")
            if count > defect.at_most
            else (f"at least {defect.at_least}", "at_least", "lower")
        )
        yield (
            f"expected failure {defect.id} covers nothing in {in_words(cell.cell, cell.scenario)}: expected {limit} "
            f"findings, found {count}; if all of them are that defect, {what} {key} ({lines})"
        )
    if _covered(defect, after):
        uncovered = (f for f in _findings(after) if f.known is None and f.verdict.fails and _near(defect, f))
        wider = sorted({in_words(f.cell, f.scenario) for f in uncovered})
        if wider:
            yield f"expected failure {defect.id} may be wider than its entry ({lines}): also {', '.join(wider)}"
    elif not others and (failing := _failing(defect, after)):
        yield (
            f"expected failure {defect.id} covers nothing in {', '.join(failing)}, which fails otherwise than it "
            f"says: look whether it is the same defect before anything else is done about {lines}"
        )


def _entry_notices(
    entry: Entry, others: _Mismatched, before: Judgement, after: Sequence[CellVerdict], name: str
) -> Iterable[str]:
    """Yield what an entry covers and hides, or that it did not show."""
    defect = entry.defect
    if mine := _covered(defect, after):
        matched = counted(how_many(mine), "finding")
        yield f"KNOWN {defect.id}: {matched}, until {defect.expires}: {defect.reason} ({defect.link})"
        if defect.untested:
            yield (
                f"{UNTESTED}{in_words_of(mine)}: {defect.id} hides everything else there; test these states where it "
                "does not show"
            )
        return
    if defect.sometimes or _failing(defect, after) or others:
        return
    named = [c for c in before.cells if _names(defect, c) and _was_looked_for(defect, c)]
    judged = [c for c in named if c.verdict is not Verdict.UNKNOWN]
    if judged:
        yield (
            f"expected failure {defect.id} did not show in {len(judged)} cells that it names; if it is fixed, delete "
            f"{_lines(entry, name)}"
        )


def _lines(entry: Entry, name: str) -> str:
    return f"lines {entry.first_line} to {entry.last_line} of {name}"


def _findings(cells: Iterable[CellVerdict]) -> list[Finding]:
    return [f for c in cells for r in c.results for f in r.findings]


def _covered(defect: KnownDefect, cells: Iterable[CellVerdict]) -> list[Finding]:
    return [f for f in _findings(cells) if f.known == defect.id]


def _failing(defect: KnownDefect, cells: Iterable[CellVerdict]) -> list[str]:
    """Return the states that an entry names and that fail; none where its defect shows only sometimes."""
    if defect.sometimes:
        return []
    return sorted({in_words(c.cell, c.scenario) for c in cells if c.verdict.fails and _names(defect, c)})


def _too_few_or_many(defect: KnownDefect, before: Judgement, history: History) -> Iterable[tuple[CellVerdict, int]]:
    """Yield the cells and scenarios with findings that match an entry, but not as many as it allows."""
    for cell in before.cells:
        count = _matching(defect, cell, history)
        if count > defect.at_most or 0 < count < defect.at_least:
            yield cell, count


def in_words_of(findings: Iterable[Finding]) -> str:
    """Return the states that findings are about."""
    cells: dict[str, set[str]] = {}
    for f in findings:
        cells.setdefault(f.scenario, set()).add(f.cell)
    return ", ".join(f"{scenario} in {counted(len(of), 'cell')}" for scenario, of in cells.items())


def _was_looked_for(defect: KnownDefect, cell: CellVerdict) -> bool:
    """Return whether a check that shows the defect had something to judge."""
    return any(r.judged and matches_any(r.check, defect.checks) for r in cell.results)


def _near(defect: KnownDefect, finding: Finding) -> bool:
    """Return whether an uncovered finding may be the same defect: same class, or same cell and scenario."""
    return not defect.classes_apart(finding.classes) or _names(defect, finding)


def _names(defect: KnownDefect, place: Finding | CellVerdict) -> bool:
    """Return whether an entry names a cell and scenario."""
    return matches_any(place.cell, defect.cells) and matches_any(place.scenario, defect.scenarios)
