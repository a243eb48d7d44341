"""Checks of re-scored outputs: whether the plain engine, given prompt and output, prefers the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from harness.history.records import RESCORE, Observation
from harness.history.token_ids import output_key
from harness.history.verdict import Verdict
from harness.judging.decision import Facts, decide
from harness.judging.evidence import CellView
from harness.judging.figures import WrongWhenRescored
from harness.judging.findings import CheckResult, DamageClass, Finding, conclude
from harness.judging.near_ties import near_tie_nats, rounding_nats
from harness.profiles.scenarios import Sampled

NAME = "rescored"
DISLIKED = "disliked-tokens"


class Scored(NamedTuple):
    """An output and its score."""

    observation: Observation
    gaps: tuple[float, ...] | None
    """By how many nats the plain engine prefers another token, per output token; None if it was not re-scored."""
    reason: str
    """Why it was not."""


def rescored(cell: CellView) -> CheckResult:
    """Check that each output token is the plain engine's choice after the tokens before it, or nearly ties with it."""
    bound = near_tie_nats(cell)
    findings: list[Finding] = []
    judged = ties = 0
    for output in _scored(cell):
        o, found = output.observation, output.gaps
        if found is None:
            findings.append(_not_scored(cell, NAME, output))
            continue
        judged += 1
        ties += sum(0 < gap <= bound for gap in found)
        wrong = _beyond(found, bound)
        if wrong is not None:
            message = (
                f"expected output tokens that {cell.name.reference} prefers when it reads prompt and output afresh, "
                f"found {wrong.wrong_tokens} of {len(found)} that it does not, the first at output token "
                f"{wrong.position}, by {wrong.gap_nats:.2f} nats (a near tie is at most {bound:g})"
            )
            findings.append(cell.finding(NAME, Verdict.REGRESSION, _damage(cell), message, o, wrong))
    return conclude(NAME, cell.id, judged, findings, note=f"{ties} near ties, benign" if ties else "")


def disliked_tokens(cell: CellView) -> CheckResult:
    """Check that no answer has a token that the plain engine dislikes by more than rounding can make.

    The registered tests of the normal tier count answers, so a few that are garbage are chance to them. This is a gate
    per request: one such answer is SUSPECT, and only a test that sees it beyond chance makes it a REGRESSION.
    """
    bound = rounding_nats(cell)
    findings: list[Finding] = []
    judged = 0
    for output in _scored(cell):
        o, found = output.observation, output.gaps
        if found is None:
            findings.append(_not_scored(cell, DISLIKED, output))
            continue
        judged += 1
        wrong = _beyond(found, bound)
        if wrong is not None:
            verdict, why = decide(Facts(change="differ", against="this run", few=True))
            message = (
                f"expected no output token of {o.prompt_id} that {cell.name.reference} dislikes by more than "
                f"{bound:g} nats when it reads prompt and output afresh, found {wrong.wrong_tokens} of {len(found)}, "
                f"the first at output token {wrong.position}, by {wrong.gap_nats:.2f} nats: {why}; repeat the request "
                "with `harness repro`"
            )
            findings.append(cell.finding(DISLIKED, verdict, _damage(cell), message, o, wrong))
    return conclude(DISLIKED, cell.id, judged, findings, note=f"rounding is at most {bound:g} nats")


def _scored(cell: CellView) -> Iterator[Scored]:
    """Yield the outputs of a cell with their scores."""
    scores = cell.history.of(cell.name.reference, scenario=RESCORE)
    for o in cell.answered().values():
        leg = o.final
        if leg is None or not leg.output_ids:
            continue
        score = scores.get(f"{o.prompt_id}#0.{output_key(leg.output_ids)}")
        gaps = score.final.rescored if score is not None and score.error is None and score.final else None
        yield Scored(o, gaps, score.error if score is not None and score.error else "it was not asked")


def _not_scored(cell: CellView, check: str, output: Scored) -> Finding:
    message = f"expected {cell.name.reference} to re-score this output, found no score ({output.reason})"
    return cell.untested(check, message, output.observation)


def _beyond(gaps: tuple[float, ...], bound: float) -> WrongWhenRescored | None:
    """Return the tokens that the plain engine dislikes by more than ``bound`` nats; None if there are none."""
    wrong = [i for i, gap in enumerate(gaps) if gap > bound]
    if not wrong:
        return None
    return WrongWhenRescored(
        position=wrong[0], gap_nats=gaps[wrong[0]], wrong_tokens=len(wrong), scored_tokens=len(gaps)
    )


def _damage(cell: CellView) -> DamageClass:
    return "target-kv" if cell.handed_off or not cell.cold else "sampler"


def applies(cell: CellView) -> bool:
    """Return whether the checks apply: to cold and sampled cells, if the run re-scores and has the plain engine."""
    asked = cell.history.run.rescore and cell.selected(cell.name.reference)
    return asked and (cell.cold or isinstance(cell.config, Sampled))
