"""Acceptance of drafts from the per-step counts of each request.

Step t drafts up to k tokens and accepts ``a_t`` of them; position p counts as accepted when ``a_t > p``, so the
marginal rates are nested: rate(p) = P(first p + 1 drafts are all accepted), as vLLM counts them.

There are two definitions of acceptance length. Here ``pooled`` is 1 + Σ accepted / Σ steps over all steps of all
prompts (= 1 + Σ_p rate(p)); ``per prompt`` is the mean over prompts of each prompt's own figure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from operator import sub
from typing import Literal, NamedTuple

from harness.history.records import Leg


class Steps(NamedTuple):
    """Accepted counts of the real verify steps of one request."""

    accepted: tuple[int, ...]
    padded: bool
    """Whether a padded first step was recognised and left out."""
    certain: bool
    """Whether the counts alone decide if the first step was padded."""
    drafted: tuple[int, ...] | None = None
    """Drafts of these steps, for a method that drafts up to k (``Speculation.up_to``); None: k in every step."""
    unaccounted: int = 0
    """Output tokens that these steps do not account for, nor the prefill: at least so many steps had no drafts, which
    take one token each and are not reported."""

    @classmethod
    def recorded(cls, accepted: Sequence[int], drafted: Sequence[int], outputs: int) -> Steps:
        """Return the steps of a single engine's answer of so many tokens; ``drafted`` is empty where all had k."""
        return cls(tuple(accepted), False, True, tuple(drafted) or None, _unaccounted(accepted, outputs))


def _unaccounted(accepted: Sequence[int], outputs: int) -> int:
    return max(0, outputs - 1 - sum(accepted) - len(accepted))


def real_steps(leg: Leg) -> Steps | None:
    """Return the verify steps of a request without a padded first step, or None without acceptance metrics.

    Only a leg that follows a hand-off, or reads the turn before back, can have a padded step: since vLLM 0.26, D's
    first step after a hand-off recomputes the last prompt token together with k placeholder drafts, which count as
    drafted and rejected. Where P leaves more than the last token to D, there are none.

    T output tokens need Σ(a+1) = T - 1 + o over the real steps, where the overshoot o ≤ a_last counts tokens accepted
    past the end; a padded step adds one. So a surplus of Σ(a+1) - (T-1) ≥ 1 with nothing accepted in the first step of
    a handed-off request means padding, and it is certain when the last step accepted less than the surplus.

    Where the answer fills the context, a last step without drafts may be missing, so that padding leaves no surplus.

    Of a method that drafts up to k tokens, steps without drafts are not among these, so the surplus says nothing. There
    a first step that has as many drafts as any, and accepted none, is read as padded, which is never certain. Without a
    block of the prompt being dropped (``Traits.drops_block``), an engine alone also pads the first step after a prefix
    hit that leaves it one token of the prompt.
    """
    steps = _read_steps(leg)
    if steps is None:
        return None
    return steps._replace(unaccounted=_unaccounted(steps.accepted, len(leg.output_ids or ())))


def _read_steps(leg: Leg) -> Steps | None:
    spec = leg.speculation
    if spec is None or leg.output_ids is None:
        return None
    accepted = spec.per_step_accepted
    drafted = spec.per_step_drafted if spec.up_to and len(spec.per_step_drafted) == len(accepted) else None
    if not accepted or accepted[0] != 0 or not may_be_padded(leg):
        return Steps(accepted, padded=False, certain=True, drafted=drafted)
    if drafted is not None:
        padded = drafted[0] == max(drafted)
        return Steps(accepted[padded:], padded, certain=not padded, drafted=drafted[padded:])
    surplus = sum(accepted) + len(accepted) - (len(leg.output_ids) - 1)
    last = accepted[-1] if len(accepted) > 1 else 0
    if surplus < (0 if spec.at_limit else 1):
        return Steps(accepted, padded=False, certain=True)
    return Steps(accepted[1:], padded=True, certain=last < surplus)


def may_be_padded(leg: Leg) -> bool:
    """Return whether the engine had a single token of the prompt left to compute, which is when vLLM pads.

    D counts the token that it computes after an ordinary hand-off as one from outside, as P does after it has read a
    prompt back, so that the counter does not grow; nor is it known of requests together and of servers without
    counters.
    """
    computed = leg.counters.get("prompt_tokens_local_compute", 0)
    received = leg.role == "decode" or leg.external_tokens > 0
    may_pad = leg.speculation is not None and leg.speculation.may_pad
    return computed == 1 or (computed == 0 and received and may_pad)


def readings(leg: Leg, steps: Steps) -> tuple[tuple[int, ...], ...]:
    """Return the accepted counts; where they leave open whether the first step was padded, those with it come first."""
    if steps.certain or leg.speculation is None:
        return (steps.accepted,)
    return leg.speculation.per_step_accepted, steps.accepted


def same_steps(leg: Leg, ours: Steps, reference: Sequence[int]) -> bool:
    """Return whether the accepted counts equal the reference step for step, in either reading of the first one."""
    return tuple(reference) in readings(leg, ours)


def by_position(accepted: Sequence[int]) -> dict[int, int]:
    """Return the accepted drafts of each verify step, by the number of output tokens when the step began: one token,
    from the prefill, for the first step."""
    out = {}
    produced = 1
    for count in accepted:
        out[produced] = count
        produced += count + 1
    return out


def begun_before(accepted: Sequence[int], tokens: int) -> tuple[int, ...]:
    """Return the accepted counts of the steps that began before so many output tokens."""
    return tuple(count for produced, count in by_position(accepted).items() if produced < tokens)


class Aligned(NamedTuple):
    """Comparison of two lists of steps at the output positions where both begin a step."""

    common: int
    """Number of such positions."""
    differing: tuple[int, ...]
    """Output positions, ascending, at which the accepted counts differ."""
    found: int
    """Drafts accepted at these positions."""
    expected: int
    """Drafts that the reference accepted there."""
    begun: int
    """Steps of the reference that begin within the compared tokens."""


def align(ours: Sequence[int], reference: Sequence[int], tokens: int) -> Aligned:
    """Compare steps by output position; those that begin at or after ``tokens`` output tokens are left out.

    Steps resynchronise by themselves: a wrong draft ends the step in both lists, wherever it began.
    """
    mine = by_position(ours)
    if ours == reference:
        counts = [count for at, count in mine.items() if at < tokens]
        return Aligned(len(counts), (), sum(counts), sum(counts), len(counts))
    theirs = by_position(reference)
    positions = sorted(p for p in mine if p in theirs and p < tokens)
    wrong = tuple(p for p in positions if mine[p] != theirs[p])
    begun = sum(p < tokens for p in theirs)
    return Aligned(len(positions), wrong, sum(mine[p] for p in positions), sum(theirs[p] for p in positions), begun)


class Placed(NamedTuple):
    """Steps of unequal numbers of drafts, at the output positions where they may have begun."""

    at: tuple[int, ...]
    """Number of output tokens when each step began."""
    expected: tuple[int | None, ...]
    """Drafts that the reference accepts of as many there; None where it begins no step, so that it does not tell."""
    aligned: Aligned


def place(ours: Steps, reference: Steps, tokens: int, most_gaps: int, nested: bool = True) -> Placed | None:
    """Place steps at output positions; None where no placement makes ``tokens`` output tokens.

    Beside others a step may have fewer drafts than alone, or none, which takes one token and is not reported: how many
    there were follows from the tokens, and where they lie is not known. They come one after another while the engine is
    crowded, so in at most ``most_gaps`` gaps. Of all such placements this is one in which the fewest steps accept
    otherwise than the reference, cut to as many drafts, where both begin a step; the reference accounts for its tokens.
    Where fewer drafts are not the first ones of more (``nested``), only steps with as many drafts are compared.
    """
    wanted = by_position(reference.accepted)
    limits = dict(zip(wanted, reference.drafted or (), strict=False))
    starts = [0, *accumulate(a + 1 for a in ours.accepted)]

    def told(step: int, at: int) -> int | None:
        """Return what the reference accepts of the step's drafts; None if it does not tell, since it had fewer."""
        if at not in wanted:
            return None
        mine = ours.drafted[step] if ours.drafted is not None else None
        theirs = limits.get(at, mine)
        if mine is None or theirs is None or mine == theirs:
            return wanted[at]
        if not nested or (theirs < mine and wanted[at] == theirs):
            return None
        return min(wanted[at], mine)

    # By (tokens without a step so far, gaps so far): the fewest differing steps, and the placement behind them.
    found: dict[tuple[int, int], tuple[int, _Chain]] = {(0, 0): (0, None)}
    for step, accepted in enumerate(ours.accepted):
        following: dict[tuple[int, int], tuple[int, _Chain]] = {}
        for (gone, gaps), (cost, chain) in _with_a_gap(found, tokens - 1 - starts[step], most_gaps).items():
            at = 1 + starts[step] + gone
            if at >= tokens:
                continue
            right = told(step, at)
            following[gone, gaps] = cost + (right is not None and right != accepted), (at, chain)
        found = following
    most_beyond = ours.accepted[-1] if ours.accepted else 0
    ended = {
        (cost, gaps + (left > 0)): chain
        for (gone, gaps), (cost, chain) in sorted(found.items(), reverse=True)
        if -most_beyond <= (left := tokens - 1 - starts[-1] - gone) and gaps + (left > 0) <= most_gaps
    }
    if not ended:
        return None
    places = _unrolled(ended[min(ended)])
    expected = tuple(told(step, place) for step, place in enumerate(places))
    pairs = [(p, a, e) for p, a, e in zip(places, ours.accepted, expected, strict=True) if e is not None]
    aligned = Aligned(
        len(pairs),
        tuple(p for p, a, e in pairs if a != e),
        sum(a for _, a, _ in pairs),
        sum(e for _, _, e in pairs),
        sum(p < tokens for p in wanted),
    )
    return Placed(places, expected, aligned)


_Chain = tuple[int, "_Chain"] | None
"""Positions of steps, the last one first."""


def _with_a_gap(
    found: Mapping[tuple[int, int], tuple[int, _Chain]], room: int, most_gaps: int
) -> dict[tuple[int, int], tuple[int, _Chain]]:
    """Return the best ways to come so far, with or without a gap of any length at the end."""
    out = dict(found)
    for gaps in range(most_gaps):
        best: tuple[int, _Chain] | None = None
        for gone in range(room + 1):
            if best is not None and best[0] < out.get((gone, gaps + 1), (best[0] + 1, None))[0]:
                out[gone, gaps + 1] = best
            before = found.get((gone, gaps))
            if before is not None and (best is None or before[0] < best[0]):
                best = before
    return out


def _unrolled(chain: _Chain) -> tuple[int, ...]:
    out = []
    while chain is not None:
        at, chain = chain
        out.append(at)
    return tuple(reversed(out))


def same_but_for_undrafted(ours: Sequence[int], reference: Sequence[int], tokens: int, most: int) -> bool:
    """Return whether ``ours`` differs from the reference by at most so many steps without drafts, which it leaves out.

    Such a step takes one token: a request that was preempted is prefilled again, which gives the next token. Where
    these steps lie is not known, so any places will do at which the other steps accept as many drafts as the reference
    wherever both begin a step within ``tokens`` output tokens.
    """
    theirs = by_position(reference)
    produced, undrafted = 1, 0
    for accepted in ours:
        # The first place that fits leaves the most room for the steps behind it.
        while produced < tokens and theirs.get(produced, accepted) != accepted:
            produced, undrafted = produced + 1, undrafted + 1
        if produced >= tokens:
            return False
        produced += accepted + 1
    return undrafted + max(0, tokens - produced) <= most


class Rates(NamedTuple):
    """Acceptance pooled over requests."""

    steps: int
    accepted_at: tuple[int, ...]
    """Steps that accepted the draft at position p, for p = 0 … k-1."""
    requests: int
    length_per_prompt: float | None
    drafted_at: tuple[int, ...] | None = None
    """Steps that drafted a token at position p, for a method that drafts up to k; None: every step."""

    @property
    def rates(self) -> tuple[float, ...]:
        """Share of the drafts at position p that were accepted; 0 where nothing was drafted."""
        if self.drafted_at is not None:
            return tuple(a / max(d, 1) for a, d in zip(self.accepted_at, self.drafted_at, strict=True))
        return tuple(a / self.steps for a in self.accepted_at) if self.steps else ()

    @property
    def length_pooled(self) -> float | None:
        """Acceptance length 1 + Σ accepted / Σ steps, which is 1 + Σ_p rate(p) where every step drafts k tokens."""
        if self.drafted_at is not None:
            return 1 + sum(self.accepted_at) / self.steps if self.steps else None
        return 1 + sum(self.rates) if self.steps else None


def pool(requests: Iterable[Sequence[int]], k: int, drafted: Iterable[Sequence[int] | None] | None = None) -> Rates:
    """Pool the accepted counts per step of many requests into marginal rates per position.

    ``drafted`` has the drafts per step of each request, for a method that drafts up to k.
    """
    listed = [tuple(accepted) for accepted in requests]
    counted = [counts_of_steps(a, d, k) for a, d in zip(listed, drafted or [None] * len(listed), strict=True)]
    return pool_counts(counted, k)


class RequestCounts(NamedTuple):
    """Acceptance of one request, as detailed as its source allows."""

    steps: int
    accepted_at: tuple[int, ...]
    """Steps that accepted the draft at position p, for p = 0 … k-1."""
    source: Literal["per-request", "counters"]
    """``counters``: from the increase of the engine's counters during the request, which was alone on the engine. Then
    neither the order of the steps nor a padded first step is known."""
    drafted_at: tuple[int, ...] | None = None
    """Steps that drafted a token at position p, for a method that drafts up to k; None: every step."""
    surplus: int = 0
    """Tokens that the steps account for beyond the output: a padded first step adds one, an end within a step more."""

    @property
    def trials(self) -> tuple[int, ...]:
        """Drafts at each position."""
        return self.drafted_at if self.drafted_at is not None else (self.steps,) * len(self.accepted_at)

    def without_padding(self) -> RequestCounts:
        """Return the counts without one step that accepted nothing."""
        return self._replace(steps=self.steps - 1, surplus=self.surplus - 1)


def counts_of_steps(accepted: Sequence[int], drafted: Sequence[int] | None, k: int) -> RequestCounts:
    """Return the counts of a request's steps; ``drafted`` is None where every step drafted k tokens."""
    tried = None if drafted is None else _steps_beyond(drafted, k)
    return RequestCounts(len(accepted), _steps_beyond(accepted, k), "per-request", tried)


def _steps_beyond(drafts: Sequence[int], k: int) -> tuple[int, ...]:
    """Return how many of the steps have more than p drafts, for p = 0 … k-1."""
    return tuple(accumulate([drafts.count(p) for p in range(k)], sub, initial=len(drafts)))[1:]


def request_counts(leg: Leg, k: int) -> RequestCounts | None:
    """Return the counts of a request from its own metrics or else the engine's counters, or None without either."""
    return counts_by(real_steps(leg), leg, k)


def counts_by(steps: Steps | None, leg: Leg, k: int) -> RequestCounts | None:
    """Return the same of a request whose steps are known."""
    if steps is not None:
        return counts_of_steps(steps.accepted, steps.drafted, k)
    if not leg.counters.get("drafts") or leg.output_ids is None:
        return None
    drafts = int(leg.counters["drafts"])
    at = tuple(int(leg.counters.get(f"accepted_at_{p}", 0)) for p in range(k))
    return RequestCounts(drafts, at, "counters", surplus=drafts + sum(at) - (len(leg.output_ids) - 1))


def pool_counts(requests: Iterable[RequestCounts], k: int) -> Rates:
    """Pool the counts of many requests into marginal rates per position."""
    counted = list(requests)
    lengths = [1 + sum(c.accepted_at) / c.steps for c in counted if c.steps]
    return Rates(
        steps=sum(c.steps for c in counted),
        accepted_at=tuple(sum(c.accepted_at[p] for c in counted) for p in range(k)),
        requests=len(counted),
        length_per_prompt=sum(lengths) / len(lengths) if lengths else None,
        drafted_at=(
            tuple(sum(c.trials[p] for c in counted) for p in range(k))
            if any(c.drafted_at is not None for c in counted)
            else None
        ),
    )


def by_step(requests: Iterable[Sequence[int]], single: int = 8) -> list[tuple[str, int, float]]:
    """Return acceptance by step since the hand-off, as (step, number of requests, mean accepted drafts).

    The first ``single`` steps have an entry each; the others are pooled.
    """
    out = []
    steps = [list(r) for r in requests]
    for i in range(single):
        values = [s[i] for s in steps if len(s) > i]
        if values:
            out.append((str(i), len(values), sum(values) / len(values)))
    rest = [a for s in steps for a in s[single:]]
    if rest:
        out.append((f"{single}+", sum(len(s) > single for s in steps), sum(rest) / len(rest)))
    return out


_RECOGNISED_FROM = 5
"""Fewest requests from whose counters padding is recognised."""


def settle_padding(counted: Mapping[str, RequestCounts], handed_off: bool) -> tuple[dict[str, RequestCounts], bool]:
    """Remove padded first steps from the counts of a cell that come from counters; return whether there were any, too.

    A padded step leaves a surplus of at least one in every handed-off request; without padding, a request has a surplus
    only when its output ends within a step. So padding is recognised when all of at least five requests have one.
    """
    from_counters = [c for c in counted.values() if c.source == "counters"]
    # If every step of a request accepted something, none is padded, and the surplus is from an end within a step.
    padded = (
        handed_off
        and len(from_counters) >= _RECOGNISED_FROM
        and all(c.surplus >= 1 and max(c.accepted_at, default=0) < c.steps for c in from_counters)
    )
    if not padded:
        return dict(counted), False
    return {key: c.without_padding() if c.source == "counters" else c for key, c in counted.items()}, True
