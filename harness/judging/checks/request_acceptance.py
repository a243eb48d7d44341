"""``request-acceptance``, the gate of the normal tier for the drafts of each request by itself.

A drafter that lost its KV in a few requests moves no rate of a cell. Each request is held against its twin, another
answer to the same prompt: that of the single engine of this run, in a scenario the same cell's cold one, of a single
engine its baseline. As long as both say the same tokens, their drafters see the same. Steps that begin at the same
token should accept their first draft in both or in neither; rounding makes as many exceptions one way as the other, so
that their numbers are tested by their sign. Where steps are not known, or too few begin alike, Fisher's exact test of
all steps is on the safe side, since right drafts are accepted alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from harness.history.acceptance import RequestCounts
from harness.history.records import COLD, Observation
from harness.history.token_ids import common_prefix
from harness.judging.checks.asked_again import NOT_ASKED, AnswerId, AskedAgain, Judged
from harness.judging.checks.hypothesis_tests import full_answers, of_cold
from harness.judging.evidence import CellView
from harness.judging.figures import DraftsBeside
from harness.judging.findings import CheckResult, Finding, conclude
from harness.stats.exact import fisher_fewer, sign_more

NAME = "request-acceptance"
_NOTHING_IN = 20
"""Steps of a request without an accepted draft that are compared with all of its twin's, whatever their tokens."""


_WAYS = 3


class _FirstDrafts(NamedTuple):
    """Steps that accepted their first draft, and all steps."""

    accepted: int
    steps: int


_NONE = _FirstDrafts(0, 0)


class _Drafted(NamedTuple):
    """The verify steps of one answer."""

    output: tuple[int, ...]
    accepted: tuple[int, ...]
    """Accepted drafts of each step; empty where the steps do not say which tokens they made."""
    whole: _FirstDrafts

    @classmethod
    def of(cls, output: tuple[int, ...], accepted: tuple[int, ...], counts: RequestCounts) -> _Drafted:
        return cls(output, accepted, _FirstDrafts(counts.accepted_at[0], counts.trials[0]))

    def before(self, token: int) -> _FirstDrafts:
        """Return the share of the steps that begin before an output token."""
        if token >= len(self.output):
            return self.whole
        mine = [hit for start, hit in self.steps() if start < token]
        return _FirstDrafts(sum(mine), len(mine))

    def steps(self) -> Iterator[tuple[int, bool]]:
        """Yield the output token at which each step begins, and whether it accepted its first draft. The prefill says
        the first token."""
        start = 1
        for accepted in self.accepted:
            yield start, accepted > 0
            start += accepted + 1


def applies(cell: CellView) -> bool:
    return cell.speculative


def judge_requests(cell: CellView, requests: int, again: AskedAgain = NOT_ASKED) -> CheckResult:
    """Check the accepted drafts of each request of a cell: one with fewer than chance explains is SUSPECT, and a
    REGRESSION if that came again when it was asked again.

    ``requests`` are those of the whole run, which share the level of this gate.
    """
    against, twins = _twins(cell)
    judged = _beside(cell, against, twins, requests, again)
    note = f"{len(judged)} requests beside {against}" if judged else f"no request has another answer in {against}"
    return conclude(NAME, cell.id, len(judged), [f for f in judged.values() if f is not None], note=note)


def drafted_answers(cell: CellView, requests: int) -> Judged:
    """Return what is wrong with the drafts of each request of a cell that has a twin."""
    return _beside(cell, *_twins(cell), requests, NOT_ASKED)


def _beside(cell: CellView, against: str, twins: Mapping[str, _Drafted], requests: int, again: AskedAgain) -> Judged:
    both = {key: (mine, twins[key]) for key, mine in _drafted(cell).items() if key in twins}
    level = cell.judging.single_alpha / max(1, requests, len(both))
    asked = cell.observations()
    return {
        AnswerId.of(cell, asked[key]): _finding(cell, asked[key], mine, twin, against, level, again)
        for key, (mine, twin) in both.items()
    }


def _finding(
    cell: CellView,
    o: Observation,
    mine: _Drafted,
    twin: _Drafted,
    against: str,
    level: float,
    again: AskedAgain,
) -> Finding | None:
    """Return the finding on a request of which too few first drafts were accepted; None if they were not."""
    p, ours, theirs, what = min(_tests(mine, twin))
    # The ways to be too few share the level.
    if p > level / _WAYS:
        return None
    verdict, why = again.verdict(NAME, cell, o, "drop")
    message = (
        f"{ours.accepted} of {ours.steps} first drafts of {o.prompt_id} were accepted, {theirs.accepted} of "
        f"{theirs.steps} in {against}, {what} (p {p:.2g}, level {level:.2g}): "
        f"{why}; repeat the request with `harness repro`"
    )
    evidence = DraftsBeside(
        accepted=ours.accepted,
        steps=ours.steps,
        expected_accepted=theirs.accepted,
        expected_steps=theirs.steps,
        p=p,
    )
    return cell.finding(NAME, verdict, cell.wrong_drafts, message, o, evidence)


def _tests(mine: _Drafted, twin: _Drafted) -> Iterator[tuple[float, _FirstDrafts, _FirstDrafts, str]]:
    """Yield ways to compare a request with its twin: the p-value, the shares, and words for which steps these are."""
    same = common_prefix(mine.output, twin.output)
    ours, theirs = mine.before(same), twin.before(same)
    yield fisher_fewer(*ours, *theirs), ours, theirs, "while both outputs are the same"
    known = {start: hit for start, hit in twin.steps() if start < same}
    alike = [(hit, known[start]) for start, hit in mine.steps() if start in known]
    ours, theirs = (
        (_FirstDrafts(sum(side), len(side)) for side in zip(*alike, strict=True)) if alike else (_NONE, _NONE)
    )
    lost = sum(hit < other for hit, other in alike)
    yield (
        sign_more(lost, sum(hit > other for hit, other in alike)),
        ours,
        theirs,
        "in steps from the same token on",
    )
    if not mine.whole.accepted and mine.whole.steps >= _NOTHING_IN:
        yield fisher_fewer(*mine.whole, *twin.whole), mine.whole, twin.whole, "in the whole answer"


def _drafted(cell: CellView) -> dict[str, _Drafted]:
    """Return the steps of each full answer that reports them, by key."""
    answers, counts = cell.answers(), cell.counts.by_key
    # Of a method that drafts up to k tokens, steps without drafts are not reported.
    steps = {key: s.accepted for key, s in cell.steps().items() if s.drafted is None}
    return {
        key: _Drafted.of(answers[key].output, steps.get(key, ()), counts[key])
        for key in full_answers(cell, counts)
        if counts[key].accepted_at
    }


def _twins(cell: CellView) -> tuple[str, Mapping[str, _Drafted]]:
    """Return what the requests of a cell are compared with, and their twins by key."""
    if not cell.cold:
        return "the same cell's cold answer", of_cold(cell, _drafted(replace(cell, scenario=COLD)))
    single = cell.sibling("single") if cell.handed_off else None
    if single is not None:
        return f"{single.id} of this run", _drafted(single)
    k = cell.record.draft_tokens
    rows = cell.rows(cell.lineup)
    return "the baseline", {
        prompt: _Drafted.of(row.output_ids, () if row.drafted else row.accepted, row.counts(k))
        for prompt, row in rows.items()
        if row.accepted
    }
