"""Differences between what two drafters sampled their drafts from, of the same tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from harness.history.token_ids import common_prefix
from harness.history.witness import NotedDrafts
from harness.observed.kv_notes import distance_of


class OtherDraft(NamedTuple):
    """A draft that two drafters sampled from other hidden states."""

    position: int
    """Of the last token that the target had verified in that step."""
    draft: int
    """Its number in the step, from 1."""
    distance: float
    """Distance of the two over the size of the second one, as their sketches estimate it: infinite where it is zero."""
    ours: int
    theirs: int
    """The tokens that they drafted."""


class DraftComparison(NamedTuple):
    """The comparison of what two drafters sampled from, in the steps that both had."""

    drafts: int
    """Drafts that were compared."""
    others: tuple[OtherDraft, ...]


def compare_drafts(
    ours: Iterable[NotedDrafts], theirs: Iterable[NotedDrafts], since: int, alike: int, bound: float
) -> DraftComparison:
    """Compare the drafts of steps that verified a token at position ``since`` or behind it, of requests that have
    ``alike`` tokens in common. Drafts behind unlike ones are left out, and distances up to ``bound`` are rounding."""
    known = {step.position: step for step in theirs}
    compared, others = 0, []
    for mine in ours:
        other = known.get(mine.position)
        # Drafts are made of the token behind the last one that is verified, too.
        if other is None or not since <= mine.position < alike - 1:
            continue
        first = min(common_prefix(mine.tokens, other.tokens) + 1, len(mine.tokens), len(other.tokens))
        for at in range(first):
            compared += 1
            distance = distance_of(mine.sketches[at], other.sketches[at])
            if not distance <= bound:
                others.append(OtherDraft(mine.position, at + 1, distance, mine.tokens[at], other.tokens[at]))
    return DraftComparison(compared, tuple(others))
