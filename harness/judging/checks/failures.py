"""Requests at which an engine fails, although another one of the run answers them."""

from __future__ import annotations

from harness.history.records import Failure, Observation
from harness.judging.decision import DIFFERS
from harness.judging.evidence import CellView
from harness.judging.figures import FailedRequest
from harness.judging.findings import CheckResult, Finding, conclude
from harness.profiles.cells import CellName

NAME = "failed-requests"


def has_failures(cell: CellView) -> bool:
    """Return whether an engine of the cell failed by itself at a request."""
    return any(_failed(o) for o in cell.all_observations())


def _failed(o: Observation) -> bool:
    return o.mistake is None and o.failure is not None and o.failure.by_itself


def failed_requests(cell: CellView) -> CheckResult:
    """Check that no engine fails, twice, at a request that another cell of the run answers.

    What may be the machine's doing is left to ``complete``.
    """
    failed = [o for o in cell.all_observations() if _failed(o)]
    findings = [finding for o in failed if (finding := failure_of(cell, o)) is not None]
    return conclude(NAME, cell.id, len(failed), findings)


def failure_of(cell: CellView, o: Observation) -> Finding | None:
    """Return the finding that an engine fails at a request; None where that is not proven."""
    if not _failed(o) or (again := _again(o)) is None or (other := _answered_by(cell, o)) is None:
        return None
    failure = o.failure
    assert failure is not None
    message = (
        f"expected an answer, which {other} of this run gives to the same request, found {came(failure)}; when it was "
        f"sent again at once, {came(again, quoted=again.words != failure.words)}"
    )
    evidence = FailedRequest(
        role=failure.role, status=failure.status, exit_code=failure.ended, words=failure.words, answered_by=other
    )
    return cell.finding(NAME, DIFFERS, "no-answer", message, o, evidence)


def unproven(cell: CellView, o: Observation) -> str:
    """Return, to follow why there is no answer to a request, what is known and what is not of an engine that failed at
    it; empty where none did."""
    if not _failed(o):
        return ""
    tried = o.second_try
    if tried is None or (tried.error is not None and tried.failure is None):
        why = tried.error if tried is not None else "it was not sent again"
        return f"; it is not known whether the engine fails at this request every time: {why}"
    if _again(o) is None:
        return "; when the request was sent again at once, " + (
            "it was answered" if tried.error is None else f"something else came of it: {tried.error}"
        )
    return (
        "; it came again when the request was sent again, but no other cell of this run has answered the same request: "
        f"run {cell.name.reference} too"
    )


def _again(o: Observation) -> Failure | None:
    """Return what came of an engine in place of an answer when the request was sent again, if it failed again."""
    failure = o.second_try.failure if o.second_try is not None else None
    return failure if failure is not None and failure.by_itself else None


def _answered_by(cell: CellView, o: Observation) -> str | None:
    """Return another cell of this run that answered the same request: the plain engine, the single one, or any."""
    ours = cell.name.variant
    first = [cell.name.reference, cell.name.single]
    cells = dict.fromkeys([*first, *(c.cell for c in cell.history.run.cells)])
    for other in cells:
        if other == cell.id or not cell.selected(other) or CellName.of(other).variant != ours:
            continue
        if any(_answers(answered, o) for answered in cell.history.in_order(other)):
            return other
    return None


def _answers(other: Observation, o: Observation) -> bool:
    whole = not other.cut_short and other.final is not None and bool(other.final.output_ids)
    return whole and other.asked_for == o.asked_for


def came(failure: Failure, quoted: bool = True) -> str:
    words = f": {failure.words}" if quoted and failure.words else ""
    if failure.ended is None:
        return f"status {failure.status}{words}" if quoted else f"status {failure.status} again"
    how = f"signal {-failure.ended}" if failure.ended < 0 else f"exit status {failure.ended}"
    return f"that the {failure.role} engine ended with {how}{words}"
