"""Checks of log-probs, which show damage that leaves all tokens right (bitwise tier).

Compared are the log-prob of each output token and the distance of the two best, in answers with the same tokens: other
tokens fail the checks of tokens, and which of the two answers is wrong is theirs to say.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import get_args

from harness.baselines.model import BaselineRow
from harness.history.records import COLD, Form, Leg, Observation
from harness.history.verdict import Verdict
from harness.judging.checks.responses import ROUNDED
from harness.judging.decision import DIFFERS, Facts, decide
from harness.judging.evidence import CellView
from harness.judging.figures import LogprobDifference, OfEngine
from harness.judging.findings import CheckResult, DamageClass, Finding, conclude
from harness.judging.rounding import allowed, bounds
from harness.profiles.scenarios import SAMPLED

_RECORDED_NATS = 5e-4
"""Half of the last digit of the gaps in a baseline."""
_MOST = 16
"""Tokens that a finding lists, those that moved most."""

Values = Sequence[float | None]


def reference_of(cell: CellView) -> CellView | None:
    """Return the single engine to compare a cell with: a P/D cell with that of its method if the run has it, any other
    with the plain one, and that one in a scenario with itself, cold."""
    if cell.is_plain:
        return None if cell.cold else replace(cell, scenario=COLD)
    for name in (cell.name.single, cell.name.reference):
        record = cell.history.cell(name) if name != cell.id else None
        if record is not None and (record.planned or record.scenarios):
            return replace(cell, record=record)
    return None


def has_reference(cell: CellView) -> bool:
    """Return whether the run was asked for the same prompts on a single engine, in this scenario or cold."""
    single = reference_of(cell)
    if cell.is_plain:
        return single is not None and not single.answers().keys().isdisjoint(
            o.prompt_id for o in cell.answered().values() if not (o.answered_otherwise or o.drafts_filtered)
        )
    return single is not None and cell.asked_alike(single.id)


def logprobs_single(cell: CellView) -> CheckResult:
    """Check that log-probs equal those of a single engine of this run: with speculation those without, and in P/D those
    alone.

    The single engine's answer in the same scenario counts, or to the same prompt cold where it has no such scenario.
    """
    name = "logprobs-single"
    single = reference_of(cell)
    if single is None:
        raise ValueError(f"{cell.id} has no single engine in this run")
    cold = replace(single, scenario=COLD).answers()
    by_prompt = cell.is_plain or cell.has_own_crowd or not single.planned
    findings: list[Finding] = []
    judged = 0
    for form in get_args(Form):
        # The same ids give the same log-probs, in whichever form they were sent.
        same = {**single.answers("ids"), **single.answers(form)}
        for key, (o, ours, _) in cell.answers(form).items():
            if o.answered_otherwise and (by_prompt or (cell.speculative and o.feature in SAMPLED)):
                # No cold answer is to be the same, nor one that was drawn beside drafts.
                continue
            other = cold.get(o.prompt_id) if by_prompt else same.get(key)
            if cell.is_plain and o.drafts_filtered:
                # A grammar moves the log-probs of what it admits.
                continue
            if other is None and by_prompt:
                # The prompt belongs to a scenario that this single engine does not have.
                continue
            judged += 1
            against = f"{single.id} of this run"
            gaps = o.top_logprobs is None or o.top_logprobs > 1
            if other is None or not (_complete(ours, gaps) and _complete(other.leg, gaps)):
                message = f"log-probs of some tokens of the answer, or of that of {against}, are missing"
                findings.append(cell.untested(name, message, o))
                continue
            bound = allowed(cell, o, other.o)
            moved = _moved(ours, other.output, other.leg.chosen_logprobs, other.leg.top_gaps, bound)
            if moved is not None:
                findings.append(cell.finding(name, DIFFERS, cell.wrong_output, _describe(moved, against), o, moved))
            elif words := _other_tables(ours, other.leg, bound):
                message = f"expected the log-probs of {against}, found {words}"
                findings.append(cell.finding(name, DIFFERS, "sampler", message, o, OfEngine(role=ours.role)))
    findings += [cell.untested(name, words)] if (words := bounds(cell).doubt) else []
    return conclude(name, cell.id, judged, findings)


def _other_tables(ours: Leg, theirs: Leg, bound: float) -> str:
    """Return where the likeliest tokens of two answers with the same tokens, or their log-probs, are other ones; ""
    where they are the same.

    The last ones of a table may change places with those that just are not in it.
    """
    for at, (mine, wanted) in enumerate(zip(ours.top_logprobs or (), theirs.top_logprobs or (), strict=False)):
        least = max(min(mine.values(), default=0.0), min(wanted.values(), default=0.0))
        for token in mine.keys() | wanted.keys():
            said, right = mine.get(token), wanted.get(token)
            if said is None or right is None:
                lost = (said if said is not None else right) or 0.0
                if lost > least + bound:
                    return f"token {token} at output token {at} in one of the tables of likeliest tokens alone"
            elif abs(said - right) > bound:
                return f"{said:.4f} instead of {right:.4f} for token {token} at output token {at}"
    return ""


def has_prompt_logprobs(cell: CellView) -> bool:
    """Return whether the cell was asked for log-probs of prompts."""
    config = cell.config
    return config is not None and config.asks_prompt_logprobs


def prompt_logprobs(cell: CellView) -> CheckResult:
    """Check the log-probs of prompts that an engine returns: one for each token but the first, each a number, and those
    of the plain engine of this run, if it was asked for them."""
    name = "prompt-logprobs"
    plain = cell.history.of(cell.name.reference, scenario=cell.scenario)
    findings: list[Finding] = []
    judged = 0
    for key, o in cell.answered().items():
        other = plain.get(key)
        wanted = other.final.prompt_logprobs if other is not None and other.final is not None else None
        for leg in o.legs if o.feature == "prompt-logprobs" else ():
            if leg.prompt_logprobs is None:
                continue
            judged += 1
            problem = _prompt_problem(leg.prompt_logprobs, len(o.sent_ids), wanted, allowed(cell, o, other))
            if problem is not None:
                message = f"{leg.role} engine: {problem}"
                findings.append(cell.finding(name, DIFFERS, "sampler", message, o, OfEngine(role=leg.role)))
            elif wanted is None and cell.asked(cell.name.reference):
                message = f"expected log-probs of this prompt from {cell.name.reference} to compare with, found none"
                findings.append(cell.untested(name, message, o))
    return conclude(name, cell.id, judged, findings)


def _prompt_problem(found: Values, tokens: int, wanted: Values | None, bound: float) -> str | None:
    if len(found) != tokens - 1:
        return f"expected {tokens - 1} log-probs of the prompt, one for each token but the first, found {len(found)}"
    missing = sum(value is None for value in found)
    if missing:
        return f"expected numbers as log-probs of the prompt, found {missing} of {len(found)} that are none"
    if (most := max((v for v in found if v is not None), default=0.0)) > ROUNDED:
        return f"expected log-probs of the prompt of at most 0, found {most:.4g}"
    apart = [
        (abs(a - b), i)
        for i, (a, b) in enumerate(zip(found, wanted or (), strict=False))
        if a is not None and b is not None
    ]
    most, at = max(apart, default=(0.0, 0))
    if most <= bound:
        return None
    return (
        f"expected the log-probs of the prompt that the plain engine of this run returns, found "
        f"{sum(d > bound for d, _ in apart)} of {len(found)} that differ, most at prompt token {at + 1}, by {most:.4g} "
        "nats"
    )


def logprobs_baseline(cell: CellView) -> CheckResult:
    """Check that log-probs, and the distances of the two best tokens, are those of the method's baseline.

    Baselines of earlier versions have distances alone, those of the normal tier only the smallest of each output.
    """
    name = "logprobs-baseline"
    baseline = cell.baseline_or_reason(cell.lineup)
    if isinstance(baseline, str):
        return conclude(name, cell.id, 0, [cell.no_baseline(name, baseline)])
    rows = baseline.by_prompt()
    plain = cell.history.of(cell.name.reference, scenario=cell.scenario)
    bound = bounds(cell).recorded + _RECORDED_NATS
    findings: list[Finding] = []
    judged = smallest = by_distance = 0
    for o, leg, _ in cell.answers().values():
        row = rows.get(o.prompt_id)
        if o.drafts_filtered or o.answered_otherwise:
            # The grammar moves the distance to tokens that it does not admit.
            continue
        if row is None or row.min_top_gap is None:
            message = "expected the log-probs of this prompt in the baseline, found none; record the baseline again"
            findings.append(cell.no_baseline(name, message, o))
            continue
        if not _complete(leg):
            findings.append(cell.untested(name, "log-probs of some tokens of the answer are missing", o))
            continue
        judged += 1
        smallest += not row.gaps
        by_distance += bool(row.gaps) and not row.logprobs
        moved = _moved_from_row(leg, row, o.most_tokens, bound)
        if moved is not None:
            findings.append(_changed(cell, name, o, leg, moved, plain))
    findings += [cell.untested(name, words)] if (words := bounds(cell).doubt) else []
    notes = [
        f"{count} by the {what} only, which is all that their baseline has"
        for count, what in ((smallest, "smallest distance"), (by_distance, "distances"))
        if count
    ]
    return conclude(name, cell.id, judged, findings, note="; ".join(notes))


def _changed(
    cell: CellView, name: str, o: Observation, leg: Leg, moved: LogprobDifference, plain: Mapping[str, Observation]
) -> Finding:
    """Return the finding on an answer that is not as recorded: DRIFT if the plain engine of this run moved with it."""
    other = plain.get(o.key)
    theirs = other.final if other is not None and other.error is None else None
    same = cell.is_plain
    if theirs is not None and _complete(theirs):
        theirs_moved = _moved(
            leg, theirs.output_ids or (), theirs.chosen_logprobs, theirs.top_gaps, bounds(cell).beside
        )
        same |= theirs_moved is None
    # In a scenario two cells may share the same damage, so only cold prompts can show a drift.
    against, together = cell.against(cell.lineup), cell.cold and same
    drift = (verdict := decide(Facts(change="differ", against=against, together=together))[0]) is Verdict.DRIFT
    damage: DamageClass = "engine-changed" if drift else "sampler" if together else cell.wrong_output
    message = _describe(moved, "the baseline") + ("; the single engine of this run moved with it" if drift else "")
    return cell.finding(name, verdict, damage, message, o, moved)


def _complete(leg: Leg, gaps: bool = True) -> bool:
    """Return whether an answer has both figures, or without ``gaps`` its log-probs, for each of its tokens: what is
    missing would count as equal."""
    return leg.figures[gaps]


def _moved_from_row(leg: Leg, row: BaselineRow, max_tokens: int | None, bound: float) -> LogprobDifference | None:
    wanted = row.output_ids[:max_tokens]
    if row.gaps:
        return _moved(leg, wanted, row.logprobs or None, row.gaps, bound)
    known = [g for g in leg.top_gaps or () if g is not None]
    if leg.output_ids != wanted or not known or row.min_top_gap is None:
        return None
    least = min(known)
    # The first part of an output need not have the smallest distance of all.
    shorter = len(wanted) < len(row.output_ids) and least > row.min_top_gap
    if shorter or abs(least - row.min_top_gap) <= bound:
        return None
    return LogprobDifference(
        logprob_position=None,
        found_nats=least,
        expected_nats=row.min_top_gap,
        bound_nats=bound,
        moved_tokens=1,
        compared_tokens=1,
        most=(),
    )


def _moved(
    ours: Leg, output: tuple[int, ...], chosen: Values | None, gaps: Values | None, bound: float
) -> LogprobDifference | None:
    """Compare an answer with the log-probs of the same tokens; ``chosen`` is None where they are not known.

    Of two answers of different length the common part counts.
    """
    if (chosen is None or ours.chosen_logprobs == chosen) and ours.top_gaps == gaps and ours.output_ids == output:
        return None
    said = ours.output_ids or ()
    common = min(len(said), len(output))
    if said[:common] != output[:common]:
        return None
    figures = [(ours.top_gaps or (), gaps or ()), *([(ours.chosen_logprobs or (), chosen)] if chosen else [])]
    changes: dict[int, tuple[float, float, float]] = {}
    for found, expected in figures:
        for at, (a, b) in enumerate(zip(found[:common], expected[:common], strict=False)):
            # Asked in this order: there are millions of values, and hardly one has moved.
            if a is None or b is None or (nats := abs(a - b)) <= bound:
                continue
            if at not in changes or nats > changes[at][0]:
                changes[at] = (nats, a, b)
    if not changes:
        return None
    first = min(changes)
    _, found_nats, expected_nats = changes[first]
    most = sorted(changes, key=lambda at: -changes[at][0])[:_MOST]
    return LogprobDifference(
        logprob_position=first,
        found_nats=found_nats,
        expected_nats=expected_nats,
        bound_nats=bound,
        moved_tokens=len(changes),
        compared_tokens=common,
        most=tuple((at, round(changes[at][0], max(6, _digits(bound)))) for at in most),
    )


def _describe(moved: LogprobDifference, against: str) -> str:
    digits = _digits(moved.bound_nats)
    if moved.logprob_position is None:
        return (
            f"expected the smallest distance of the two best tokens of {against}, "
            f"{moved.expected_nats:.{digits}f} nats, found {moved.found_nats:.{digits}f} although all tokens are right"
        )
    at, largest = moved.most[0]
    return (
        f"the log-probs of {moved.moved_tokens} of {moved.compared_tokens} right tokens differ from {against} by "
        f"more than {moved.bound_nats:g} nats, first at output token {moved.logprob_position} "
        f"({moved.found_nats:.{digits}f} instead of {moved.expected_nats:.{digits}f}), most at output token {at} (by "
        f"{largest:.{digits}f} nats)"
    )


def _digits(bound: float) -> int:
    """Return how many decimals show a difference that is larger than the bound."""
    return max(4, 1 - math.floor(math.log10(bound))) if bound > 0 else 9
