"""Length classes of prompts relative to the KV block size, and the lengths that a workload must contain.

The classes follow from what vLLM's scheduler allocates: with ``lookahead`` slots reserved past the prompt, a prompt of
``N`` tokens needs ``ceil((N + lookahead) / B)`` blocks on P while it fills ``ceil(N / B)``. The two differ exactly
at N mod B in {0} ∪ {B - lookahead + 1 … B - 1}, which is where vLLM issue #43807 corrupted the hand-off.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple


class Stratum(StrEnum):
    """The length class of a prompt. Where classes overlap, the precedence is sub-block, aligned, lookahead, first."""

    SUB_BLOCK = "sub-block"
    ALIGNED = "aligned"
    LOOKAHEAD = "lookahead"
    FIRST = "first"
    MIDDLE = "middle"


def blocks(tokens: int, block_size: int) -> int:
    """Return the number of KV blocks that ``tokens`` tokens fill."""
    return math.ceil(tokens / block_size)


def published_blocks(tokens: int, block_size: int, window: int | None = None) -> int:
    """Return how many KV blocks P publishes of a prompt in a KV-cache group: those that it fills, and of layers with a
    sliding window of so many tokens the last ``ceil(window / block_size) + 1`` of them.

    The bound is that of NIXL's connector (``NixlBaseConnectorScheduler.blocks_per_sw`` in vLLM 0.32.0): one block more
    than a window fills, because it may begin inside a block.
    """
    filled = blocks(tokens, block_size)
    return filled if window is None else min(filled, blocks(window, block_size) + 1)


def freed_blocks(tokens: int, block_size: int, window: int) -> int:
    """Return how many of a prompt's first blocks P has given back when it hands over, in a KV-cache group with a
    sliding window: those of which the token after the prompt sees nothing. The null block is published in their place
    (``SlidingWindowManager.get_num_skipped_tokens`` in vLLM 0.32.0)."""
    return max(0, tokens - window + 1) // block_size


def held_blocks(tokens: int, block_size: int, windows: Iterable[int | None], recurrent: bool = False) -> int:
    """Return the fewest KV blocks that a request holds when its prompt is computed: for each kind of attention those
    that a window, if it has one, has not left, and one of recurrent state. Each kind may have several KV-cache groups.
    """
    filled = blocks(tokens, block_size)
    kinds = (filled if w is None else filled - freed_blocks(tokens, block_size, w) for w in windows)
    return sum(kinds) + int(recurrent)


def spills(tokens: int, block_size: int, lookahead: int) -> bool:
    """Return whether reserving ``lookahead`` slots past the prompt takes more blocks than the prompt fills."""
    return blocks(tokens + lookahead, block_size) > blocks(tokens, block_size)


def classify(tokens: int, block_size: int, lookahead: int) -> Stratum:
    """Return the stratum of a prompt of ``tokens`` tokens; ``lookahead`` is P's reservation in tokens. Raises
    ValueError when an argument is out of range."""
    if tokens < 1 or block_size < 2 or not 0 <= lookahead < block_size:
        raise ValueError(
            f"expected tokens >= 1, block_size >= 2 and 0 <= lookahead < block_size; "
            f"found {tokens}, {block_size}, {lookahead}"
        )
    if tokens < block_size:
        return Stratum.SUB_BLOCK
    residue = tokens % block_size
    if residue == 0:
        return Stratum.ALIGNED
    if residue > block_size - lookahead:
        return Stratum.LOOKAHEAD
    if residue == 1:
        return Stratum.FIRST
    return Stratum.MIDDLE


class LengthTarget(NamedTuple):
    """A prompt length that the workload must contain."""

    tokens: int
    blocks: int
    """Whole blocks before the residue (0 for sub-block prompts)."""


def target_lengths(block_size: int, lookahead: int, max_blocks: int, minimum: int) -> list[LengthTarget]:
    """Return the prompt lengths that hit every stratum for 1 … ``max_blocks`` blocks.

    For each block count: aligned, each lookahead residue of the preceding block, first, and two middles; below one
    block: the shortest possible prompt (``minimum`` tokens), a middle, and the lookahead residues.
    """
    wanted: set[int] = {minimum, block_size // 2}
    for count in range(1, max_blocks + 1):
        edge = count * block_size
        wanted.update(range(edge - max(lookahead, 1) + 1, edge))
        wanted.update({edge, edge + 1, edge + block_size // 3, edge + (2 * block_size) // 3})
    return [LengthTarget(n, n // block_size) for n in sorted(wanted) if n >= minimum]
