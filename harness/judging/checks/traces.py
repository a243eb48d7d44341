"""``logprob-trace``, the gate of the normal tier for each answer by itself: what the engine thought of its own tokens,
against what the plain engine thinks of them when it reads them afresh.

Registered tests count answers, so a few that are wrong are chance to them. Wrong KV moves the log-probs of all tokens
behind it; rounding moves each by itself, and by how much, the plain engine's own answers of the same run show: decoded
one by one, and read afresh (``harness.stats.trace``). A token that the plain engine dislikes more than rounding can
make, by the same answers, is found too: a fault of sampling leaves log-probs as they are.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from harness.history.folder import History
from harness.history.records import RESCORE, Observation
from harness.judging.checks.asked_again import NOT_ASKED, AnswerId, AskedAgain, Judged
from harness.judging.checks.rescored import applies, scores
from harness.judging.evidence import CellView
from harness.judging.figures import TraceMoved, WrongWhenRescored
from harness.judging.findings import CheckResult, Finding, conclude
from harness.judging.near_ties import near_tie_nats
from harness.profiles.model import Judging
from harness.stats.paired import Matrix
from harness.stats.trace import CAP, LEAST_TOKENS, RoundingLimits, in_units, window_means

NAME = "logprob-trace"
_FEW = 20
"""Answers of a kind of cell below which they do not show how it rounds."""


class RunRounding(NamedTuple):
    """What rounding does to log-probs in this run, by the plain engine's own answers."""

    tokens: int
    """Tokens of these answers."""
    usual_nats: float
    """By how much it moves a token, over all texts."""
    by_prompt: Mapping[str, float]
    """The same in the answer to each prompt, in nats."""
    limits: Mapping[int, float]
    """By window: the mean that no right answer has, in units of what is usual for its text. Empty with too few
    tokens."""
    gap_nats: float
    """By how much the plain engine may dislike a token that rounding alone has chosen."""
    coarser: Mapping[tuple[str, str], float]
    """By topology and method: how many times as much log-probs move in most of the answers, at least 1. P/D may round
    otherwise than a single engine and be right; the tests of all answers say whether it is."""

    def size_of(self, cell: CellView, prompt_id: str) -> float:
        """Return by how many nats rounding moves a token in a cell's answer to a prompt."""
        return self.times(cell) * self.by_prompt.get(prompt_id, self.usual_nats)

    def times(self, cell: CellView) -> float:
        """Return how many times as much as the plain engine's the log-probs of a cell are rounded."""
        return self.coarser.get((cell.topology, cell.method), 1.0)


def roundings(views: Iterable[CellView], judging: Judging) -> dict[str, RunRounding | str]:
    """Return how log-probs are rounded in a run, by the id of the plain engine, one for each variant of the profile; in
    its place, why that cannot be told of a damaged record."""
    cold = [v for v in views if v.cold and applies(v)]
    found: dict[str, RunRounding | str] = {}
    for plain in (v for v in cold if v.is_plain):
        try:
            found[plain.id] = _rounding(plain, [c for c in cold if c.name.reference == plain.id], judging)
        except Exception as error:
            # As for any check, a crash must not hide the others.
            found[plain.id] = f"the check itself failed: {type(error).__name__}: {error}"
    return found


def _rounding(plain: CellView, cells: Iterable[CellView], judging: Judging) -> RunRounding:
    right = {s.observation.prompt_id: s.moved for s in scores(plain) if s.moved is not None}
    limits = RoundingLimits.of(list(right.values()), judging.single_alpha, _tokens(plain.history))
    sizes = dict(zip(right, limits.sizes, strict=True))
    largest = sorted(max(s.gaps) for s in scores(plain) if s.gaps)
    return RunRounding(
        tokens=sum(map(len, right.values())),
        usual_nats=limits.usual_nats,
        by_prompt=sizes,
        limits=limits.windows,
        gap_nats=max(
            limits.flipped_nats or judging.rounding_nats,
            # Engines that round nothing may still part at a near tie.
            near_tie_nats(plain),
            # In two texts: one wrong answer of the plain engine itself must not excuse others.
            *largest[-2:-1],
        ),
        coarser=_coarser(cells, sizes, limits.usual_nats),
    )


def _tokens(history: History) -> int:
    """Return how many output tokens the answers of a run have, which share the level."""
    said = (o.final for o in history.observations if o.scenario != RESCORE)
    return sum(len(leg.output_ids or ()) for leg in said if leg is not None)


def _coarser(cells: Iterable[CellView], sizes: Mapping[str, float], usual: float) -> dict[tuple[str, str], float]:
    times: dict[tuple[str, str], list[float]] = {}
    for cell in cells:
        for s in scores(cell):
            if s.moved is not None and len(s.moved):
                size = sizes.get(s.observation.prompt_id, usual)
                times.setdefault((cell.topology, cell.method), []).append(float(np.abs(s.moved).mean()) / size)
    return {kind: max(1.0, statistics.median(t)) for kind, t in times.items() if len(t) >= _FEW}


def judge_traces(cell: CellView, rounding: RunRounding | str | None, again: AskedAgain = NOT_ASKED) -> CheckResult:
    """Check the log-probs of each answer of a cell by themselves: one that rounding cannot have moved is SUSPECT, and a
    REGRESSION if that came again when it was asked again."""
    if isinstance(rounding, str):
        return conclude(NAME, cell.id, 0, [], note=rounding)
    known = rounding or RunRounding(0, 0.0, {}, {}, cell.judging.rounding_nats, {})
    findings: list[Finding] = []
    if not known.limits:
        message = (
            f"expected {LEAST_TOKENS} tokens of {cell.name.reference} with the log-probs of both readings, to show how "
            f"they are rounded, found {known.tokens}: send more prompts, or ask for longer answers"
        )
        findings.append(cell.untested(NAME, message))
    for scored in scores(cell):
        if scored.gaps is None or scored.moved is None:
            message = (
                f"expected {cell.name.reference} to re-score this output, with its log-probs, found no score "
                f"({scored.reason or 'the answer, or the record, has no log-probs'})"
            )
            findings.append(cell.untested(NAME, message, scored.observation))
    judged = moved_answers(cell, known, again)
    findings += filter(None, judged.values())
    return conclude(NAME, cell.id, len(judged), findings, note=_could_see(cell, known))


def moved_answers(cell: CellView, rounding: RunRounding | str | None, again: AskedAgain = NOT_ASKED) -> Judged:
    """Return what is wrong with each answer of a cell whose log-probs can be judged."""
    if rounding is None or isinstance(rounding, str):
        return {}
    return {
        AnswerId.of(cell, o): _moved_too_far(cell, o, moved, rounding, again)
        or _disliked(cell, o, gaps, rounding, again)
        for o, gaps, moved, _ in scores(cell)
        if gaps is not None and moved is not None
    }


def _could_see(cell: CellView, rounding: RunRounding) -> str:
    if not rounding.limits:
        return f"could have seen a token disliked by {rounding.gap_nats:.2g} nats"
    times = rounding.times(cell)
    usual = rounding.usual_nats * times
    windows = ", ".join(f"{usual * limit:.2g} over {size}" for size, limit in rounding.limits.items() if limit < CAP)
    coarser = f", {times:.2g} times the plain engine's" if times > 1 else ""
    return (
        f"rounding moves a token by {usual:.2g} nats{coarser}; could have seen a mean of {windows or 'nothing'} "
        f"tokens, and a token disliked by {rounding.gap_nats * times:.2g}"
    )


def _moved_too_far(
    cell: CellView, o: Observation, moved: Matrix, rounding: RunRounding, again: AskedAgain
) -> Finding | None:
    """Return the finding on an answer whose log-probs moved further over a window than rounding moves them."""
    size = rounding.size_of(cell, o.prompt_id)
    units = in_units(moved, size)
    windows = [(limit, *_worst_window(units, n)) for n, limit in rounding.limits.items()]
    limit, mean, start, tokens = max(windows, key=lambda w: w[1] / w[0], default=(CAP, 0.0, 0, 0))
    if mean <= limit:
        return None
    verdict, why = again.verdict(NAME, cell, o, "differ")
    message = (
        f"{o.prompt_id}: for {tokens} tokens from output token {start} on, the engine that said them and "
        f"{cell.name.reference}, which reads them afresh, differ by {size * mean:.2g} nats on average; rounding, "
        f"which moves a token of this text by {size:.2g} nats, explains at most {size * limit:.2g}: {why}"
    )
    evidence = TraceMoved(
        position=start, tokens=tokens, mean_nats=size * mean, limit_nats=size * limit, usual_nats=size
    )
    return cell.finding(NAME, verdict, cell.wrong_output, message, o, evidence)


def _disliked(
    cell: CellView, o: Observation, gaps: Sequence[float], rounding: RunRounding, again: AskedAgain
) -> Finding | None:
    """Return the finding on an answer with a token that rounding cannot have chosen."""
    bound = rounding.gap_nats * rounding.times(cell)
    if max(gaps, default=0.0) <= bound:
        return None
    wrong = [i for i, gap in enumerate(gaps) if gap > bound]
    verdict, why = again.verdict(NAME, cell, o, "differ")
    message = (
        f"expected no output token of {o.prompt_id} that {cell.name.reference} dislikes by more than {bound:.2g} nats "
        f"when it reads prompt and output afresh, found {len(wrong)} of {len(gaps)}, the first at output token "
        f"{wrong[0]}, by {gaps[wrong[0]]:.2f} nats: {why}"
    )
    found = WrongWhenRescored(
        position=wrong[0], gap_nats=gaps[wrong[0]], wrong_tokens=len(wrong), scored_tokens=len(gaps)
    )
    return cell.finding(NAME, verdict, cell.wrong_output, message, o, found)


def _worst_window(units: Matrix, size: int) -> tuple[float, int, int]:
    """Return the largest mean over windows of ``size`` tokens, the first token of that window, and its tokens."""
    means = window_means(units, size)
    if not len(means):
        return 0.0, 0, size
    worst = int(means.argmax())
    tokens = min(size, len(units))
    return float(means[worst]), min(worst * (size // 4), len(units) - tokens), tokens
