"""Search for small failing cases. Pure: a function given by the caller says whether a case fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def fewest(items: Sequence[T], fails: Callable[[list[T]], bool]) -> list[T]:
    """Return a subsequence of ``items`` that still fails and from which no single item can be removed.

    Delta debugging (ddmin of Zeller and Hildebrandt, TSE 28(2), 2002). ``items`` as a whole must fail; the empty
    sequence is tried first.
    """
    kept = list(items)
    if kept and fails([]):
        return []
    parts = 2
    while len(kept) >= 2:
        size = -(-len(kept) // parts)
        chunks = [kept[i : i + size] for i in range(0, len(kept), size)]
        smaller = next((c for c in chunks if len(c) < len(kept) and fails(c)), None) if parts == 2 else None
        if smaller is not None:
            kept, parts = smaller, 2
            continue
        rest = _without_one(chunks, fails)
        if rest is not None:
            kept, parts = rest, max(parts - 1, 2)
        elif size == 1:
            break
        else:
            parts = min(len(kept), 2 * parts)
    return kept


def _without_one(chunks: list[list[T]], fails: Callable[[list[T]], bool]) -> list[T] | None:
    """Return the items without the first chunk that can be removed; None when none can."""
    for number in range(len(chunks)):
        rest = [item for i, chunk in enumerate(chunks) if i != number for item in chunk]
        if rest and fails(rest):
            return rest
    return None


def smallest_length(known: int, least: int, period: int, fails: Callable[[int], bool]) -> int:
    """Return the smallest length that fails, given that ``known`` does and ``least`` is the shortest possible.

    Lengths with the residue of ``known`` come first, from the shortest, then all of the period below what was found:
    exact where failing depends on the residue modulo ``period`` and on a threshold, with known / period + period tries
    at most.
    """
    same = range(known - period * ((known - least) // period), known, period)
    found = next((n for n in same if fails(n)), known)
    return next((n for n in range(max(least, found - period + 1), found) if fails(n)), found)


def smallest_number(known: int, least: int, likely: Sequence[int], fails: Callable[[int], bool]) -> int:
    """Return a small number that fails, given that ``known`` does.

    The likely ones are tried first, then bisection, which is exact if all larger numbers fail too.
    """
    high = next((n for n in likely if least <= n < known and fails(n)), known)
    low = least
    while low < high:
        middle = (low + high) // 2
        if fails(middle):
            high = middle
        else:
            low = middle + 1
    return high
