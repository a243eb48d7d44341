"""Find the prompt position that an output token was copied from, for copy and echo prompts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

COPY_SHARE = 0.8
"""Fraction of an output that must occur in the prompt, in order, for the output to count as a copy."""


def sources(prompt: Sequence[int], output: Sequence[int]) -> list[int | None]:
    """Return the prompt position that each output token repeats; None if it repeats none.

    A token that occurs once in the prompt has that source. One that occurs several times has a source only if it
    continues the copy of the token before it.
    """
    places: dict[int, list[int]] = {}
    for position, token in enumerate(prompt):
        places.setdefault(token, []).append(position)
    found: list[int | None] = []
    for token in output:
        candidates = places.get(token, [])
        previous = found[-1] if found else None
        if previous is not None and previous + 1 in candidates:
            found.append(previous + 1)
        elif len(candidates) == 1:
            found.append(candidates[0])
        else:
            found.append(None)
    return found


def is_copy(origin: Sequence[int | None]) -> bool:
    """Return whether an output repeats its prompt: most tokens follow the source of the token before."""
    if not origin:
        return False
    runs = sum(a is not None and b == a + 1 for a, b in pairwise(origin))
    return runs >= COPY_SHARE * max(len(origin) - 2, 1)


def repeated(origin: Sequence[int | None]) -> set[int]:
    """Return the prompt positions that an output copied as part of a run of at least two."""
    out: set[int] = set()
    for a, b in pairwise(origin):
        if a is not None and b == a + 1:
            out |= {a, b}
    return out
