"""By how much the plain engine rounds the same token otherwise when it computes it another way.

An engine computes a token as one row (decoding, and after a prefix hit that leaves one token), as one of k + 1 rows
(verifying drafts), or as one of many (prefill), alone or beside other requests. Kernels may sum each in another order.
What is measured here are the differences in nats between log-probs of the same token, and whether tokens part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np
from pydantic import Field

from harness.history.records import COLD, Leg, Observation
from harness.history.token_ids import common_prefix
from harness.util.strict import Strict

WayName = Literal["again", "hit", "prefill", "verify", "crowd"]
"""``again``: asked once more. ``hit``: one row, after a prefix hit. ``prefill``: read afresh, many rows. ``verify``:
k + 1 rows, by an engine with a drafter. ``crowd``: beside other requests."""
ASIDE: Mapping[WayName, int] = {"again": 1, "hit": 2, "crowd": 3}
"""Ways for which the plain engine is asked beside its cell, by the ``instance`` of these requests; 0 is re-scoring."""
HELD_AGAINST = "donor"
"""``part`` of a request whose answer is the one that others of its way are compared with."""
QUANTILES = (0.5, 0.9, 0.99)
RESOLUTION_NATS = 1e-5
"""Smallest bound: records have six decimals, so log-probs that differ by less are equal."""
MULTIPLE = 8
"""The bound as a multiple of the largest difference that was seen. Of 5,040 tokens of a real model on CPU, 99 % moved
by less than two fifths of the largest, so the largest of a few hundred is no outlier (docs/checks.md)."""


class Way(Strict):
    """How tokens that were computed this way differ from the same tokens computed the usual way."""

    answers: int
    """Answers compared."""
    tokens: int
    """Tokens compared: up to where an answer parted."""
    quantiles: tuple[float, ...]
    """Differences in nats at ``QUANTILES``: of a token's log-prob, or of the distance of the two best if that moved
    more."""
    largest: float
    parted: int = 0
    """Answers whose tokens part."""
    parted_nats: float | None = None
    """Largest distance of the two best tokens where answers parted, in nats; None if it is not known, or none did."""


class Rounding(Strict):
    """What was measured of one engine of one model on one machine, by way."""

    ways: dict[WayName, Way] = Field(default_factory=dict)

    def largest(self, *ways: WayName) -> float | None:
        """Return the largest difference that was seen in these ways, in nats; None if none of them was measured."""
        found = [self.ways[way].largest for way in ways if way in self.ways]
        return max(found, default=None)

    @property
    def repeats(self) -> bool | None:
        """Whether the same prompts, asked again one by one, gave the same tokens; None if that was not measured."""
        return None if "again" not in self.ways else self.ways["again"].parted == 0

    def __or__(self, other: Rounding) -> Rounding:
        """Return both measurements; of a way that both have, the one that differs more."""
        most = dict(self.ways)
        for way, found in other.ways.items():
            if way not in most or (most[way].parted, most[way].largest) < (found.parted, found.largest):
                most[way] = found
        return Rounding(ways=most)


class AnswerPair(NamedTuple):
    """Two answers to the same prompt, the second computed another way."""

    usual: Leg
    other: Leg


def way_of(pairs: Iterable[AnswerPair]) -> Way | None:
    """Compare answers. Return None where no token could be compared."""
    moved: list[float] = []
    answers = parted = 0
    known: list[float] = []
    for usual, other in pairs:
        found = list(differences(usual, other))
        if not found:
            continue
        answers += 1
        moved += found
        if (at := _parted(usual, other)) is not None:
            parted += 1
            gap = (usual.top_gaps or ())[at : at + 1]
            known += [gap[0]] if gap and gap[0] is not None else []
    if not moved:
        return None
    return Way(
        answers=answers,
        tokens=len(moved),
        quantiles=tuple(round(float(q), 9) for q in np.quantile(moved, QUANTILES)),
        largest=round(max(moved), 9),
        parted=parted,
        parted_nats=max(known) if known and len(known) == parted else None,
    )


def differences(usual: Leg, other: Leg) -> Iterator[float]:
    """Yield the difference of each token up to where the answers part, in nats: of its log-prob, or of the distance of
    the two best if that is more. A request that re-scores an answer has no such distance."""
    if usual.chosen_logprobs is None:
        return
    if other.rescored_logprobs is not None:
        yield from (abs(a - b) for a, b in zip(usual.chosen_logprobs, other.rescored_logprobs, strict=False))
        return
    if other.chosen_logprobs is None:
        return
    same = common_prefix(usual.output_ids or (), other.output_ids or ())
    gaps = zip(usual.top_gaps or (), other.top_gaps or (), strict=False)
    apart = [abs(a - b) if a is not None and b is not None else 0.0 for a, b in gaps]
    for at, (a, b) in enumerate(zip(usual.chosen_logprobs[:same], other.chosen_logprobs[:same], strict=False)):
        yield max(abs(a - b), apart[at] if at < len(apart) else 0.0)


def _parted(usual: Leg, other: Leg) -> int | None:
    """Return the index at which tokens part; an answer that was asked for fewer tokens does not part at its end."""
    if other.rescored_logprobs is not None:
        return None
    ours, theirs = usual.output_ids or (), other.output_ids or ()
    at = common_prefix(ours, theirs)
    return at if at < min(len(ours), len(theirs)) else None


def measured(
    answers: Sequence[Observation], scores: Iterable[Observation], aside: Sequence[Observation]
) -> dict[WayName, Way]:
    """Return the ways that one plain engine shows by itself.

    ``answers`` are those of its cell, ``scores`` its re-scorings of outputs, and ``aside`` what it was asked beside its
    cell (``ASIDE``).
    """
    usual = {o.prompt_id: o.final for o in answers if o.scenario == COLD and o.form == "ids" and _whole(o)}
    scored = {o.sent_ids: o.final for o in scores if o.final is not None and o.final.rescored_logprobs is not None}
    pairs: dict[WayName, list[AnswerPair]] = {"prefill": [], **{way: [] for way in ASIDE}}
    for o in (*answers, *(o for o in aside if o.part == HELD_AGAINST)):
        if not _whole(o) or o.final is None or o.temperature or o.feature is not None:
            continue
        if (score := scored.get((*o.sent_ids, *(o.final.output_ids or ())))) is not None:
            pairs["prefill"].append(AnswerPair(o.final, score))
    named = {number: way for way, number in ASIDE.items()}
    donors: dict[tuple[int, str], Leg] = {}
    # By themselves, in the cell or beside it.
    alone = {o.prompt_id: o.final for o in aside if o.instance == ASIDE["again"] and _whole(o)} | usual
    for o in aside:
        if not _whole(o) or o.final is None:
            continue
        if o.part == HELD_AGAINST:
            donors[o.instance, o.prompt_id] = o.final
            continue
        way = named.get(o.instance)
        reference = donors.get((o.instance, o.prompt_id)) or alone.get(o.prompt_id)
        if way is None or reference is None or (way == "hit" and not _left_one_row(o)):
            continue
        pairs[way].append(AnswerPair(reference, o.final))
    return {way: found for way, of in pairs.items() if (found := way_of(of)) is not None}


def compared(usual: Mapping[str, Observation], other: Mapping[str, Observation]) -> Way | None:
    """Return how the answers of a cell, or of one recording of it, differ from those of another; None where nothing can
    be compared."""
    return way_of(
        AnswerPair(ours.final, o.final)
        for key, o in other.items()
        if (ours := usual.get(key)) is not None and _whole(ours) and _whole(o)
        if ours.final is not None and o.final is not None
    )


def _whole(o: Observation) -> bool:
    return not o.cut_short and o.final is not None and bool(o.final.output_ids)


def _left_one_row(o: Observation) -> bool:
    """Return whether the engine took all of a prompt but its last token from its cache, as its counters say."""
    return o.final is not None and o.final.counters.get("prefix_hits") == len(o.sent_ids) - 1


def in_words(way: WayName) -> str:
    """Return what a way is, for readers."""
    return _WORDS[way]


_WORDS: Mapping[WayName, str] = {
    "again": "the same request again",
    "hit": "one row, behind a prefix hit",
    "prefill": "many rows, read afresh",
    "verify": "k + 1 rows, verifying drafts",
    "crowd": "beside other requests",
}
if set(_WORDS) != set(get_args(WayName)):
    raise AssertionError("expected words for every way of computing a token")
