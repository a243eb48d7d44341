"""Checks of re-scored outputs: whether the plain engine, given prompt and output, prefers the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from harness.history.records import RESCORE, Observation
from harness.history.token_ids import output_key
from harness.history.verdict import Verdict
from harness.judging.decision import Facts, decide
from harness.judging.evidence import CellView
from harness.judging.figures import WrongWhenRescored
from harness.judging.findings import CheckResult, Finding, conclude
from harness.judging.near_ties import near_tie_nats, rounding_nats

NAME = "rescored"
DISLIKED = "disliked-tokens"


class Scored(NamedTuple):
    observation: Observation
    gaps: tuple[float, ...] | None
    """By how many nats the plain engine prefers another token, per output token; None if it was not re-scored."""
    reason: str
    """Why it was not."""


def rescored(cell: CellView) -> CheckResult:
    """Check that each output token is the plain engine's choice after the tokens before it, or nearly ties with it."""
    bound = near_tie_nats(cell)

    def finding(o: Observation, wrong: WrongWhenRescored) -> Finding:
        message = (
            f"expected output tokens that {cell.name.reference} prefers when it reads prompt and output afresh, found "
            f"{wrong.wrong_tokens} of {wrong.scored_tokens} that it does not, the first at output token "
            f"{wrong.position}, by {wrong.gap_nats:.2f} nats (a near tie is at most {bound:g})"
        )
        return cell.finding(NAME, Verdict.REGRESSION, cell.wrong_output, message, o, wrong)

    findings, gaps = _beyond(cell, NAME, bound, finding)
    ties = sum(0 < gap <= bound for output in gaps for gap in output)
    return conclude(NAME, cell.id, len(gaps), findings, note=f"{ties} near ties, benign" if ties else "")


def disliked_tokens(cell: CellView) -> CheckResult:
    """Check that no answer has a token that the plain engine dislikes by more than rounding can make.

    The registered tests of the normal tier count answers, so a few that are garbage are chance to them. This is a gate
    per request: one such answer is SUSPECT, and only a test that sees it beyond chance makes it a REGRESSION.
    """
    bound = rounding_nats(cell)
    verdict, why = decide(Facts(change="differ", against="this run", few=True))

    def finding(o: Observation, wrong: WrongWhenRescored) -> Finding:
        message = (
            f"expected no output token of {o.prompt_id} that {cell.name.reference} dislikes by more than {bound:g} "
            f"nats when it reads prompt and output afresh, found {wrong.wrong_tokens} of {wrong.scored_tokens}, the "
            f"first at output token {wrong.position}, by {wrong.gap_nats:.2f} nats: {why}; repeat the request with "
            "`harness repro`"
        )
        return cell.finding(DISLIKED, verdict, cell.wrong_output, message, o, wrong)

    findings, gaps = _beyond(cell, DISLIKED, bound, finding)
    return conclude(DISLIKED, cell.id, len(gaps), findings, note=f"rounding is at most {bound:g} nats")


def scores(cell: CellView) -> Iterator[Scored]:
    by_key = cell.history.of(cell.name.reference, scenario=RESCORE)
    for o, _, output in cell.answers().values():
        if not output:
            continue
        score = by_key.get(f"{o.prompt_id}#0.{output_key(output)}")
        problem = _problem(cell, o, output, score)
        gaps = score.final.rescored if problem is None and score is not None and score.final is not None else None
        yield Scored(o, gaps, problem or "")


def _problem(cell: CellView, o: Observation, output: tuple[int, ...], score: Observation | None) -> str | None:
    """Return why a re-scoring request says nothing about an output, in words, or None.

    The end of an output for which the context has no room beside the one token that the engine generates is not scored.
    """
    if score is None:
        return "it was not asked"
    if score.error is not None:
        return score.error
    if score.final is None or score.final.rescored is None:
        return "its answer has none"
    context = cell.settings.context_tokens
    room = len(output) if context is None else max(0, context - len(o.sent_ids) - 1)
    scored = output[:room]
    if score.sent_ids != (*o.sent_ids, *scored):
        return "it was asked about other tokens"
    if score.final.usage_prompt_tokens != len(score.sent_ids) or score.final.echoed_ids != score.sent_ids:
        return "the engine saw other tokens than were sent"
    if len(score.final.rescored) != len(scored):
        return f"it has {len(score.final.rescored)} figures for {len(scored)} tokens"
    return "a figure is below 0" if any(gap < 0 for gap in score.final.rescored) else None


def _beyond(
    cell: CellView, check: str, bound: float, finding: Callable[[Observation, WrongWhenRescored], Finding]
) -> tuple[list[Finding], list[tuple[float, ...]]]:
    """Return the findings on outputs without a score or with gaps beyond ``bound`` nats, and the gaps of each scored
    output."""
    findings: list[Finding] = []
    scored: list[tuple[float, ...]] = []
    for o, gaps, reason in scores(cell):
        if gaps is None:
            message = f"expected {cell.name.reference} to re-score this output, found no score ({reason})"
            findings.append(cell.untested(check, message, o))
            continue
        scored.append(gaps)
        wrong = [i for i, gap in enumerate(gaps) if gap > bound]
        if wrong:
            evidence = WrongWhenRescored(
                position=wrong[0], gap_nats=gaps[wrong[0]], wrong_tokens=len(wrong), scored_tokens=len(gaps)
            )
            findings.append(finding(o, evidence))
    return findings, scored


def applies(cell: CellView) -> bool:
    """Return whether the checks apply: to cold and sampled cells, and in the normal tier to all scenarios, if the run
    re-scores and has the plain engine."""
    asked = cell.history.run.rescore and cell.selected(cell.name.reference)
    config = cell.config
    samples = config is not None and config.samples
    return asked and (cell.cold or cell.judging.tier == "normal" or samples)
