"""``logprob-trace``, the gate of the normal tier for each answer by itself: what the engine thought of its own tokens,
against what the plain engine thinks of them when it reads them afresh.

Registered tests count answers, so a few that are wrong are chance to them. Wrong KV moves the log-probs of all tokens
behind it; rounding moves each by itself, and by how much, the plain engine's own answers of the same run show: decoded
one by one, and read afresh (``harness.stats.trace``). A token that the plain engine dislikes more than rounding can
make, by the same answers, is found too: a fault of sampling leaves log-probs as they are. Near ties excuse the two best
tokens alone, which its rank and the best token there tell.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from harness.history.records import Preferred
from harness.judging.checks.asked_again import NOT_ASKED, AnswerId, AskedAgain, Judged
from harness.judging.checks.rescored import Scored, applies, mean_moved, no_rank, scores
from harness.judging.evidence import CellView
from harness.judging.figures import TraceMoved, WrongWhenRescored
from harness.judging.findings import CheckResult, Finding, conclude
from harness.judging.near_ties import near_tie_nats
from harness.profiles.model import Judging
from harness.stats.paired import Matrix
from harness.stats.trace import CAP, FLOOR_NATS, LEAST_TOKENS, RoundingLimits, WholeAnswers, in_units, worst_window

NAME = "logprob-trace"
_SECOND = 2
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
    whole: WholeAnswers | None
    """The same of means over whole answers; None with too few tokens."""
    gap_nats: float
    """By how much the plain engine may dislike a token that rounding alone has chosen."""
    near_tie_nats: float
    """The same of the second-best token, where the best one was second to the engine that said it."""
    coarser: Mapping[tuple[str, str], float]
    """By topology and method: how many times as much log-probs move in most of the answers, at least 1. P/D may round
    otherwise than a single engine and be right; the tests of all answers say whether it is."""

    def size_of(self, cell: CellView, prompt_id: str) -> float:
        """Return by how many nats rounding moves a token in a cell's answer to a prompt."""
        return self.times(cell) * self.by_prompt.get(prompt_id, self.usual_nats)

    def times(self, cell: CellView) -> float:
        """Return how many times as much as the plain engine's the log-probs of a cell are rounded."""
        return self.coarser.get((cell.name.topology, cell.name.method), 1.0)


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
    limits = RoundingLimits.of(list(right.values()), judging.single_alpha, plain.history.tokens_said)
    sizes = dict(zip(right, limits.sizes, strict=True))
    largest = sorted(max(s.gaps) for s in scores(plain) if s.gaps)
    return RunRounding(
        tokens=sum(map(len, right.values())),
        usual_nats=limits.usual_nats,
        by_prompt=sizes,
        limits=limits.windows,
        whole=limits.whole,
        gap_nats=max(
            limits.flipped_nats or judging.rounding_nats,
            2 * FLOOR_NATS,
            # In two texts: one wrong answer of the plain engine itself must not excuse others.
            *largest[-2:-1],
        ),
        # Engines that round nothing may still part at a near tie.
        near_tie_nats=near_tie_nats(plain),
        coarser=_coarser(cells, sizes, limits.usual_nats),
    )


def _coarser(cells: Iterable[CellView], sizes: Mapping[str, float], usual: float) -> dict[tuple[str, str], float]:
    times: dict[tuple[str, str], list[float]] = {}
    for cell in cells:
        for prompt, moved in mean_moved(cell):
            times.setdefault((cell.name.topology, cell.name.method), []).append(moved / sizes.get(prompt, usual))
    return {kind: max(1.0, statistics.median(t)) for kind, t in times.items() if len(t) >= _FEW}


def judge_traces(cell: CellView, rounding: RunRounding | str | None, again: AskedAgain = NOT_ASKED) -> CheckResult:
    """Check the log-probs of each answer of a cell by themselves: one that rounding cannot have moved is SUSPECT, and a
    REGRESSION if that came again when it was asked again."""
    if isinstance(rounding, str):
        return conclude(NAME, cell.id, 0, [], note=rounding)
    known = rounding or RunRounding(0, 0.0, {}, {}, None, cell.judging.rounding_nats, near_tie_nats(cell), {})
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
    findings += no_rank(cell, NAME, scores(cell))
    judged = moved_answers(cell, known, again)
    findings += filter(None, judged.values())
    return conclude(NAME, cell.id, len(judged), findings, note=_could_see(cell, known))


def moved_answers(cell: CellView, rounding: RunRounding | str | None, again: AskedAgain = NOT_ASKED) -> Judged:
    """Return what is wrong with each answer of a cell whose log-probs can be judged."""
    if rounding is None or isinstance(rounding, str):
        return {}
    return {
        AnswerId.of(cell, s.observation): _moved_too_far(cell, s, s.moved, rounding, again)
        or _disliked(cell, s, s.gaps, rounding, again)
        for s in scores(cell)
        if s.gaps is not None and s.moved is not None
    }


def sees_single_answers(cell: CellView, rounding: RunRounding | str | None) -> bool:
    """Return whether a wrong answer of a cell shows by itself, among however many: its log-probs are held against what
    rounding makes, which the run shows."""
    shown = isinstance(rounding, RunRounding) and any(limit < CAP for limit in rounding.limits.values())
    return shown and applies(cell)


def _could_see(cell: CellView, rounding: RunRounding) -> str:
    times = rounding.times(cell)
    gap = max(rounding.gap_nats, rounding.near_tie_nats) * times
    if not rounding.limits:
        return f"could have seen a token disliked by {gap:.2g} nats"
    usual = rounding.usual_nats * times
    windows = ", ".join(f"{usual * limit:.2g} over {size}" for size, limit in rounding.limits.items() if limit < CAP)
    coarser = f", {times:.2g} times the plain engine's" if times > 1 else ""
    whole = _longest(cell, rounding, usual)
    return (
        f"rounding moves a token by {usual:.2g} nats{coarser}; could have seen a mean of {windows or 'nothing'} "
        f"tokens{whole}, and a token disliked by {gap:.2g}"
    )


def _longest(cell: CellView, rounding: RunRounding, usual: float) -> str:
    """Return what could have been seen over the longest answer of a cell, as a part of a sentence."""
    tokens = max((len(s.moved) for s in scores(cell) if s.moved is not None), default=0)
    limit = rounding.whole.limit(tokens) if rounding.whole is not None and tokens else CAP
    return f", of {usual * limit:.2g} over a whole answer of {tokens}" if limit < CAP else ""


def _moved_too_far(
    cell: CellView, said: Scored, moved: Matrix, rounding: RunRounding, again: AskedAgain
) -> Finding | None:
    """Return the finding on an answer whose log-probs moved further, over a window or all of it, than rounding moves
    them."""
    o = said.observation
    size = rounding.size_of(cell, o.prompt_id)
    worst = worst_window(in_units(moved, size), rounding.limits, rounding.whole)
    if worst is None or worst.mean <= worst.limit:
        return None
    start, tokens = worst.start, worst.tokens
    verdict, why = again.verdict(NAME, cell, o, "differ")
    others = [p for p in (said.preferred or {}).values() if start <= p.at < start + tokens]
    message = (
        f"{o.prompt_id}: for {tokens} tokens from output token {start} on, the engine that said them and "
        f"{cell.name.reference}, which reads them afresh, differ by {size * worst.mean:.2g} nats on average; rounding, "
        f"which moves a token of this text by {size:.2g} nats, explains at most {size * worst.limit:.2g}"
        f"{_not_best(others)}: {why}"
    )
    evidence = TraceMoved(
        position=start,
        tokens=tokens,
        mean_nats=size * worst.mean,
        limit_nats=size * worst.limit,
        usual_nats=size,
        not_best=None if said.preferred is None else len(others),
    )
    return cell.finding(NAME, verdict, cell.wrong_output, message, o, evidence)


def _not_best(others: Sequence[Preferred]) -> str:
    """Return how many tokens of a window are not the plain engine's best, as a part of a sentence."""
    if not others:
        return ""
    last = max(others, key=lambda p: p.rank)
    return (
        f"; {len(others)} of them {'is' if len(others) == 1 else 'are'} not its best, the lowest at output token "
        f"{last.at}, of rank {last.rank} behind token {last.best}"
    )


def _disliked(
    cell: CellView, said: Scored, gaps: Sequence[float], rounding: RunRounding, again: AskedAgain
) -> Finding | None:
    """Return the finding on an answer with a token that rounding cannot have chosen."""
    o, times = said.observation, rounding.times(cell)
    bound, near = rounding.gap_nats * times, rounding.near_tie_nats * times
    if max(gaps, default=0.0) <= bound:
        return None
    wrong = [i for i, gap in enumerate(gaps) if gap > bound and (gap > near or not _is_swap(said, i))]
    if not wrong:
        return None
    at = wrong[0]
    most = bound if gaps[at] <= near else max(bound, near)
    verdict, why = again.verdict(NAME, cell, o, "differ")
    message = (
        f"expected no output token of {o.prompt_id} that {cell.name.reference} dislikes by more than {most:.2g} nats "
        f"when it reads prompt and output afresh, found {len(wrong)} of {len(gaps)}, the first at output token "
        f"{at}, by {gaps[at]:.2f} nats{said.in_words(at)}: {why}"
    )
    found = WrongWhenRescored(
        position=at, gap_nats=gaps[at], wrong_tokens=len(wrong), scored_tokens=len(gaps), **said.place(at)
    )
    return cell.finding(NAME, verdict, cell.wrong_output, message, o, found)


def _is_swap(said: Scored, at: int) -> bool:
    """Return whether a token that the plain engine does not prefer is second to it, behind the token that was second to
    the engine that said it, as far as both are known: of a greedy answer without parameters that move log-probs."""
    o = said.observation
    told, leg = (said.preferred or {}).get(at), o.final
    seconds = leg.runner_ups if leg is not None else None
    second = seconds[at] if seconds is not None and at < len(seconds) else None
    if told is None or o.temperature or o.feature is not None:
        return True
    return told.rank == _SECOND and second in (None, told.best)
