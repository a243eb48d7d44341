"""Hand-offs that a router mistook: D answers them as ever, or refuses them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from harness.history.records import Leg, Observation
from harness.history.verdict import Verdict
from harness.judging.checks.failures import came
from harness.judging.checks.tokens import difference, in_words
from harness.judging.evidence import CellView
from harness.judging.figures import FailedRequest
from harness.judging.findings import CheckResult, Finding, conclude
from harness.judging.near_ties import parting
from harness.scenarios.hand_off_mistakes import LOST
from harness.util.text import counted

NAME = "mistaken-hand-offs"


def has_mistakes(cell: CellView) -> bool:
    """Return whether hand-offs were mistaken in this scenario."""
    return any(o.mistake is not None for o in cell.all_observations())


def mistaken_hand_offs(cell: CellView) -> CheckResult:
    """Check that a request whose hand-off was mistaken gets the answer that its prompt has, or is refused."""
    mistaken = [o for o in cell.all_observations() if o.mistake is not None]
    findings = [finding for o in mistaken for finding in _of_mistake(cell, o)]
    refused = sum(o.failure is not None and o.failure.refused for o in mistaken)
    note = f"{refused} of {counted(len(mistaken), 'mistaken hand-off')} refused" if refused else ""
    return conclude(NAME, cell.id, len(mistaken), findings, note)


def _of_mistake(cell: CellView, o: Observation) -> Iterator[Finding]:
    what = f"a hand-off in which {' and '.join(map(_done, o.mistakes))} to be answered as its prompt is, or refused"
    failure = o.failure
    if o.final is not None and o.error is None:
        yield from _wrong_tokens(cell, o, what)
    elif failure is not None and failure.refused:
        return
    elif failure is not None and failure.by_itself:
        evidence = FailedRequest(role=failure.role, status=failure.status, exit_code=failure.ended, words=failure.words)
        silent = failure.status is None and o.abandon is not None
        first = f"no answer within {o.abandon.after_s:g} s, and at its end " if silent and o.abandon else ""
        message = f"expected {what}, found {first}{came(failure)}"
        yield cell.finding(NAME, Verdict.REGRESSION, "no-answer", message, o, evidence)
    elif o.error is not None:
        message = f"the exchange broke: {o.error}"
        yield cell.finding(NAME, Verdict.UNKNOWN, "infrastructure", message, o)
    elif _never_begun(o):
        patience = f" within {o.abandon.after_s:g} s" if o.abandon is not None else ""
        message = f"expected {what}, found no answer{patience}, and D computed nothing for it"
        yield cell.finding(NAME, Verdict.REGRESSION, "no-answer", message, o)
    else:
        yield cell.untested(NAME, f"expected {what}, found no answer yet when it was given up", o)


def _never_begun(o: Observation) -> bool:
    """Return whether D counted no token of a request that was given up."""
    grown = o.shared_counters.get("decode")
    return grown is not None and not grown.get("generation_tokens") and not grown.get("prompt_tokens")


def _wrong_tokens(cell: CellView, o: Observation, what: str) -> Iterator[Finding]:
    right = _right(cell, o)
    if right is None:
        yield cell.untested(NAME, "expected a right answer of the same prompt to compare with, found none", o)
        return
    tokens, leg, whose = right
    ours = o.output
    at = parting(cell, o, tokens, leg, cell.rows(cell.name.plain).get(o.prompt_id))
    if at is not None and not at.near_tie:
        message = f"expected {what}, found status 200 and other tokens: {in_words(at, ours, tokens, whose)}"
        yield cell.wrong_kv(NAME, message, o, difference(at, ours, tokens))


class _Right(NamedTuple):
    """A right answer."""

    tokens: tuple[int, ...]
    leg: Leg | None
    """Where it came from, unless that is a record."""
    whose: str


def _right(cell: CellView, o: Observation) -> _Right | None:
    """Return the right answer to the prompt: its only one, that of the same cell or the plain engine cold, or the
    recorded one."""
    if o.known_answer is not None:
        return _Right(o.known_answer[: o.max_tokens], None, "the only right answer to this prompt")
    for other in (cell.id, cell.name.reference):
        cold = cell.history.of(other).get(o.prompt_id)
        leg = cold.final if cold is not None and not cold.cut_short else None
        if leg is not None and leg.output_ids is not None:
            return _Right(leg.output_ids[: o.max_tokens], leg, f"{other}, which was asked the same prompt cold")
    row = cell.rows(cell.name.plain).get(o.prompt_id)
    return _Right(row.output_ids[: o.max_tokens], None, "the baseline") if row is not None else None


def _done(mistake: str) -> str:
    return _DONE.get(mistake) or f"P's parameter {mistake.removeprefix(LOST)} got lost"


_DONE = {
    "used-twice": "P's parameters were used a second time",
    "used-late": "P's parameters were used again after P had used its blocks for other prompts",
    "shared": "several requests at once used P's parameters",
    "retried": "P's parameters were used again after the client had given up the first answer",
    "more-tokens": "P was asked for more than one token",
    "asked-twice": "P was asked twice and the parameters of the first answer were used",
}
"""What was done, by mistake."""
