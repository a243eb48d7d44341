"""Checks of re-scored outputs: whether the plain engine, given prompt and output, prefers the same tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from harness.history.records import RESCORE, Leg, Observation, Preferred
from harness.history.token_ids import output_key
from harness.history.verdict import Verdict
from harness.judging.decision import DIFFERS
from harness.judging.evidence import CellView
from harness.judging.figures import WrongWhenRescored
from harness.judging.findings import CheckResult, Finding, conclude
from harness.judging.near_ties import near_tie_nats
from harness.judging.rounding import allowed, bounds
from harness.stats.paired import Matrix

NAME = "rescored"


class Scored(NamedTuple):
    observation: Observation
    gaps: tuple[float, ...] | None
    """By how many nats the plain engine prefers another token, per output token; None if it was not re-scored."""
    moved: Matrix | None
    """Log-prob of each of these tokens as it was said, less the one that the plain engine gives it, in nats; None
    without either."""
    reason: str
    """Why it was not re-scored."""
    preferred: Mapping[int, Preferred] | None = None
    """By output token: those that are not the plain engine's best; None where the record does not tell."""

    def in_words(self, at: int) -> str:
        """Return which place a token has among all, behind which, to be put behind a figure; "" where it is not
        told."""
        told = (self.preferred or {}).get(at)
        return "" if told is None else f": it has rank {told.rank} there, and token {told.best} is the best"

    def place(self, at: int) -> dict[str, int]:
        """Return the same as figures."""
        told = (self.preferred or {}).get(at)
        return {} if told is None else {"rank": told.rank, "best_token": told.best}


def rescored(cell: CellView) -> CheckResult:
    """Check that each output token is the plain engine's choice after the tokens before it, or nearly ties with it, and
    as probable to it as to the engine that said it."""
    bound = near_tie_nats(cell)
    plain = cell.answers_of(cell.name.reference)
    findings: list[Finding] = []
    scored: list[tuple[float, ...]] = []
    known = scores(cell)
    has_logprobs = any(s.moved is not None for s in known)
    for said in known:
        o, gaps, moved = said.observation, said.gaps, said.moved
        if gaps is None:
            message = f"expected {cell.name.reference} to re-score this output, found no score ({said.reason})"
            findings.append(cell.untested(NAME, message, o))
            continue
        scored.append(gaps)
        wrong = [i for i, gap in enumerate(gaps) if gap > bound] if max(gaps, default=0.0) > bound else []
        if wrong:
            at = wrong[0]
            message = (
                f"{len(wrong)} of {len(gaps)} output tokens are not what {cell.name.reference} prefers when it reads "
                f"prompt and output afresh, the first at output token {at}, by {gaps[at]:.2f} nats (a near tie is at "
                f"most {bound:g}){said.in_words(at)}"
            )
            evidence = WrongWhenRescored(
                position=at, gap_nats=gaps[at], wrong_tokens=len(wrong), scored_tokens=len(gaps), **said.place(at)
            )
            found = cell.finding(NAME, Verdict.REGRESSION, cell.wrong_output, message, o, evidence)
            findings.append(_blamed(cell, found, o, plain.get(o.key)))
        elif moved is not None:
            findings += [_blamed(cell, f, o, plain.get(o.key)) for f in _less_probable(cell, o, moved, gaps)]
        elif has_logprobs:
            message = "expected log-probs of this output as it was said and as it was read, found none, unlike others"
            findings.append(cell.untested(NAME, message, o))
    findings += no_rank(cell, NAME, known)
    findings += [cell.untested(NAME, words)] if (words := bounds(cell).doubt) else []
    ties = sum(0 < gap <= bound for output in scored if any(output) for gap in output)
    return conclude(NAME, cell.id, len(scored), findings, note=f"{ties} near ties, benign" if ties else "")


_NO_RANK = "expected rank and best token where the plain engine prefers another one, found none, unlike in others"


def no_rank(cell: CellView, check: str, known: Sequence[Scored]) -> list[Finding]:
    """Return the findings on answers with tokens that are not the plain engine's best, of which it does not tell rank
    and best token, though it does of others; none in records of earlier versions."""
    if all(s.preferred is None for s in known):
        return []
    without = (s.observation for s in known if s.gaps and s.preferred is None and any(s.gaps))
    return [cell.untested(check, _NO_RANK, o) for o in without]


def _blamed(cell: CellView, finding: Finding, o: Observation, plain: Observation | None) -> Finding:
    """Return the finding, blamed on what reads the output afresh where the plain engine itself had said the same tokens
    with the same log-probs: then these are no KV's that the cell was handed."""
    theirs = plain.final if plain is not None and plain.error is None else None
    ours = o.final
    if cell.is_plain or theirs is None or ours is None or theirs.output_ids != ours.output_ids:
        return finding
    pairs = list(zip(ours.chosen_logprobs or (), theirs.chosen_logprobs or (), strict=False))
    if not pairs or max(abs(a - b) for a, b in pairs) > allowed(cell, o, plain):
        return finding
    said = f"; {cell.name.reference} itself said these tokens, as probable: its log-probs of prompts are wrong"
    return finding.model_copy(update={"damage": "sampler", "message": finding.message + said})


def _less_probable(cell: CellView, o: Observation, moved: Matrix, gaps: Sequence[float]) -> list[Finding]:
    """Return the finding on an answer whose tokens, right ones, have other log-probs than when they are read afresh."""
    bound = allowed(cell, o)
    apart = np.abs(moved)
    if not len(apart) or apart.max() <= bound:
        return []
    at = int(np.flatnonzero(apart > bound)[0])
    message = (
        f"{int((apart > bound).sum())} of {len(apart)} output tokens are not as probable as when "
        f"{cell.name.reference} reads them afresh, the first at output token {at}, by {apart[at]:.3g} nats (rounding "
        f"is at most {bound:.2g})"
    )
    evidence = WrongWhenRescored(
        position=at, gap_nats=gaps[at], wrong_tokens=int((apart > bound).sum()), scored_tokens=len(apart)
    )
    return [cell.finding(NAME, DIFFERS, cell.wrong_output, message, o, evidence)]


def scores(cell: CellView) -> list[Scored]:
    """Return what the plain engine says of each answer of a cell."""
    return cell.shared("scores", lambda: list(_scores(cell)))


class _Summary(NamedTuple):
    """What the tests of many cells need of the scores of one."""

    gaps: Mapping[str, float]
    moved: Sequence[tuple[str, float]]


def _summary(cell: CellView) -> _Summary:
    def find() -> _Summary:
        found = scores(cell)
        return _Summary(
            {s.observation.key: max(s.gaps, default=0.0) for s in found if s.gaps is not None},
            [
                (s.observation.prompt_id, float(np.abs(s.moved).mean()))
                for s in found
                if s.moved is not None and len(s.moved)
            ],
        )

    return cell.remembered("scores", find)


def largest_gaps(cell: CellView) -> Mapping[str, float]:
    """Return by how much the plain engine dislikes a token of each answer at most, in nats, by observation key."""
    return _summary(cell).gaps


def mean_moved(cell: CellView) -> Sequence[tuple[str, float]]:
    """Return by how many nats the log-probs of each answer moved on average, with its prompt."""
    return _summary(cell).moved


def _scores(cell: CellView) -> Iterator[Scored]:
    by_key = cell.history.of(cell.name.reference, scenario=RESCORE)
    # Found once for all cells that gave the same outputs.
    flaws = cell.history.of_cell(cell.name.reference).once(
        ("flaws of scores",), lambda: {key: flaw for key, s in by_key.items() if (flaw := _flaw(s)) is not None}
    )
    for o, said, output in cell.answers().values():
        if not output:
            continue
        key = f"{o.prompt_id}#0.{output_key(output)}"
        score = by_key.get(key)
        problem = _problem(cell, o, output, score, flaws.get(key))
        read = score.final if problem is None and score is not None else None
        yield (
            Scored(o, read.rescored, _moved(said, read), "", _by_token(read.rescored_preferred))
            if read is not None
            else Scored(o, None, None, problem or "")
        )


def _by_token(preferred: Sequence[Preferred] | None) -> Mapping[int, Preferred] | None:
    return None if preferred is None else {p.at: p for p in preferred}


def _moved(said: Leg, read: Leg) -> Matrix | None:
    ours, theirs = said.chosen_logprobs, read.rescored_logprobs
    if ours is None or theirs is None or len(theirs) != len(read.rescored or ()) or len(theirs) > len(ours):
        return None
    moved: Matrix = np.array(ours[: len(theirs)]) - np.array(theirs)
    return moved


_OTHERS_SEEN = "the engine saw other tokens than were sent"


def _flaw(score: Observation) -> str | None:
    """Return why a re-scoring request says nothing about any output, or None."""
    if score.error is not None:
        return score.error
    if score.final is None or score.final.rescored is None:
        return "its answer has none"
    if score.final.usage_prompt_tokens != len(score.sent_ids) or score.final.echoed_ids != score.sent_ids:
        return _OTHERS_SEEN
    if min(score.final.rescored, default=0.0) < 0:
        return "a figure is below 0"
    told = score.final.rescored_preferred
    if told is not None and [p.at for p in told] != [i for i, gap in enumerate(score.final.rescored) if gap > 0]:
        return "its ranks are of other tokens than those that it does not prefer"
    return None


def _problem(
    cell: CellView, o: Observation, output: tuple[int, ...], score: Observation | None, flaw: str | None
) -> str | None:
    """Return why a re-scoring request, which may have a ``flaw``, says nothing about an output, or None.

    The end of an output for which the context has no room beside the one token that the engine generates is not scored.
    """
    if score is None:
        return "it was not asked"
    if score.error is not None or score.final is None or score.final.rescored is None:
        return flaw
    context = cell.settings.context_tokens
    room = len(output) if context is None else max(0, context - len(o.sent_ids) - 1)
    scored = output[:room]
    if score.sent_ids != (*o.sent_ids, *scored):
        return "it was asked about other tokens"
    if flaw != _OTHERS_SEEN and len(score.final.rescored) != len(scored):
        return f"it has {len(score.final.rescored)} figures for {len(scored)} tokens"
    return flaw


def applies(cell: CellView) -> bool:
    """Return whether the checks apply: to cold and sampled cells, and in the normal tier to all scenarios, if the run
    re-scores and has the plain engine."""
    asked = cell.history.run.rescore and cell.selected(cell.name.reference)
    config = cell.config
    samples = config is not None and config.samples
    return asked and (cell.cold or cell.judging.tier == "normal" or samples)
