"""Acceptance of drafts, from the per-step counts of each request.

Step t drafts up to k tokens and accepts ``a_t`` of them; position p counts as accepted when ``a_t > p``, so the
marginal rates are nested: rate(p) = P(first p + 1 drafts are all accepted), as vLLM counts them.

Two definitions of acceptance length are in use. Here ``pooled`` is 1 + Σ accepted / Σ steps over all steps of all
prompts (= 1 + Σ_p rate(p)); ``per prompt`` is the mean over prompts of the same figure of each prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from harness.history import Leg


class Steps(NamedTuple):
    """Accepted counts of the real verify steps of one request."""

    accepted: tuple[int, ...]
    padded: bool
    """A padded first step was recognised and left out."""
    certain: bool
    """Whether the counts alone decide if the first step was padded."""


def real_steps(leg: Leg) -> Steps | None:
    """Verify steps of a request without the padded first step; None when the leg has no acceptance metrics.

    Only a decode leg, which follows a hand-off, can have one.

    From vLLM 0.26 on, D's first step after a hand-off recomputes the last prompt token together with k placeholder
    drafts, which count as drafted and rejected. T output tokens need Σ(a+1) = T - 1 + o over the real steps, where
    the overshoot o ≤ a_last counts tokens accepted past the end; a padded step adds one. So a surplus of
    Σ(a+1) - (T-1) ≥ 1 with nothing accepted in the first step of a handed-off request means padding, and it is
    certain when the last step accepted less than the surplus.
    """
    if leg.speculation is None or leg.output_ids is None:
        return None
    accepted = leg.speculation.per_step_accepted
    if not accepted or leg.role != "decode" or accepted[0] != 0:
        return Steps(accepted, padded=False, certain=True)
    surplus = sum(a + 1 for a in accepted) - (len(leg.output_ids) - 1)
    last = accepted[-1] if len(accepted) > 1 else 0
    if surplus < 1:
        return Steps(accepted, padded=False, certain=True)
    return Steps(accepted[1:], padded=True, certain=last < surplus)


def same_steps(leg: Leg, ours: Steps, reference: Sequence[int]) -> bool:
    """Whether the accepted counts equal the reference step for step; when the counts leave open if the first step
    was padded, either reading may match."""
    if ours.accepted == tuple(reference):
        return True
    if ours.certain or leg.speculation is None:
        return False
    return leg.speculation.per_step_accepted == tuple(reference)


def by_position(accepted: Sequence[int], produced: int = 1) -> dict[int, int]:
    """Accepted drafts of each verify step, by the number of output tokens that existed when the step began.

    ``produced`` counts those before the first step: one, from the prefill.
    """
    out = {}
    for count in accepted:
        out[produced] = count
        produced += count + 1
    return out


class Aligned(NamedTuple):
    """Two step lists compared where both begin a step at the same output position."""

    common: int
    differing: tuple[int, ...]
    """Output positions, ascending, at which the accepted counts differ."""
    found: int
    """Drafts accepted at common positions."""
    expected: int


def align(ours: Sequence[int], reference: Sequence[int], tokens: int) -> Aligned:
    """Compare steps by output position; those that begin at or after ``tokens`` output tokens are left out.

    Steps resynchronise by themselves: a wrong draft ends the step in both, wherever it began.
    """
    mine, theirs = by_position(ours), by_position(reference)
    positions = sorted(p for p in mine if p in theirs and p < tokens)
    wrong = tuple(p for p in positions if mine[p] != theirs[p])
    return Aligned(len(positions), wrong, sum(mine[p] for p in positions), sum(theirs[p] for p in positions))


class Rates(NamedTuple):
    """Pooled acceptance over requests."""

    steps: int
    accepted_at: tuple[int, ...]
    """Steps that accepted the draft at position p, for p = 0 … k-1."""
    requests: int
    length_per_prompt: float | None

    @property
    def rates(self) -> tuple[float, ...]:
        return tuple(a / self.steps for a in self.accepted_at) if self.steps else ()

    @property
    def length_pooled(self) -> float | None:
        """1 + Σ_p rate(p)."""
        return 1 + sum(self.rates) if self.steps else None


def pool(requests: Iterable[Sequence[int]], k: int) -> Rates:
    """Pool accepted counts per step of many requests into marginal rates per position."""
    steps = 0
    at = [0] * k
    lengths = []
    count = 0
    for accepted in requests:
        count += 1
        steps += len(accepted)
        for p in range(k):
            at[p] += sum(1 for a in accepted if a > p)
        if accepted:
            lengths.append(1 + sum(accepted) / len(accepted))
    return Rates(steps, tuple(at), count, sum(lengths) / len(lengths) if lengths else None)


class RequestCounts(NamedTuple):
    """Acceptance of one request, as far as its source goes."""

    steps: int
    accepted_at: tuple[int, ...]
    """Steps that accepted the draft at position p, for p = 0 … k-1."""
    source: Literal["per-request", "counters"]
    """``counters``: from the growth of the engine's counters over the request, which was alone on the engine. Then
    neither the order of the steps nor a padded first one is known."""
    surplus: int = 0
    """Tokens that the steps account for beyond the output: a padded first step adds one, an end within a step more."""

    def without_padding(self) -> RequestCounts:
        """The counts less one step that accepted nothing."""
        return self._replace(steps=self.steps - 1, surplus=self.surplus - 1)


def request_counts(leg: Leg, k: int) -> RequestCounts | None:
    """Counts of a request from its own metrics, or else from the engine's counters; None when neither is there."""
    steps = real_steps(leg)
    if steps is not None:
        at = tuple(sum(a > p for a in steps.accepted) for p in range(k))
        return RequestCounts(len(steps.accepted), at, "per-request")
    if not leg.counters.get("drafts") or leg.output_ids is None:
        return None
    drafts = int(leg.counters["drafts"])
    at = tuple(int(leg.counters.get(f"accepted_at_{p}", 0)) for p in range(k))
    return RequestCounts(drafts, at, "counters", drafts + sum(at) - (len(leg.output_ids) - 1))


def pool_counts(requests: Iterable[RequestCounts], k: int) -> Rates:
    """Pool the counts of many requests into marginal rates per position."""
    counted = list(requests)
    lengths = [1 + sum(c.accepted_at) / c.steps for c in counted if c.steps]
    return Rates(
        steps=sum(c.steps for c in counted),
        accepted_at=tuple(sum(c.accepted_at[p] for c in counted) for p in range(k)),
        requests=len(counted),
        length_per_prompt=sum(lengths) / len(lengths) if lengths else None,
    )


def by_step(requests: Iterable[Sequence[int]], single: int = 8) -> list[tuple[str, int, float]]:
    """Acceptance by step since the hand-off: (step, requests, mean accepted drafts), the first ``single`` steps one by
    one and the others pooled."""
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


def settle_padding(counted: Mapping[str, RequestCounts], handed_off: bool) -> tuple[dict[str, RequestCounts], bool]:
    """Counts of a cell with padded first steps taken out, and whether there were any, where only counters are known.

    A padded step leaves a surplus of at least one in every request that was handed off; without padding a request has
    one only when its output ends within a step. So padding is recognised when all of five requests or more have one.
    """
    from_counters = [c for c in counted.values() if c.source == "counters"]
    # A step that accepted something cannot be the padded one: then every request ended within a step.
    padded = (
        handed_off
        and len(from_counters) >= _RECOGNISED_FROM
        and all(c.surplus >= 1 and max(c.accepted_at, default=0) < c.steps for c in from_counters)
    )
    if not padded:
        return dict(counted), False
    return {key: c.without_padding() if c.source == "counters" else c for key, c in counted.items()}, True
