"""Which prompt position an output token was read from. The outputs of copy and echo prompts repeat the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

COPY_SHARE = 0.8
"""Share of an output that must be found in the prompt, in order, before its tokens are taken to be copies."""


def sources(prompt: Sequence[int], output: Sequence[int]) -> list[int | None]:
    """Prompt position that each output token repeats; None where it repeats none.

    A token that occurs once in the prompt has one source. One that occurs more often is taken to follow the token
    before it, as in a copy; otherwise it has none.
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
    """Whether an output repeats its prompt: most tokens have a source, each the position after the one before."""
    if not origin:
        return False
    runs = sum(a is not None and b == a + 1 for a, b in pairwise(origin))
    return runs >= COPY_SHARE * max(len(origin) - 2, 1)


def repeated(origin: Sequence[int | None]) -> set[int]:
    """Positions that an output read and went on from: those with their successor behind them, or as the successor."""
    out: set[int] = set()
    for a, b in pairwise(origin):
        if a is not None and b == a + 1:
            out |= {a, b}
    return out
