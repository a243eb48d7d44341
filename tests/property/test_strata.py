"""Lengths and strata, for all block sizes and lookaheads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.prompts.lengths import Stratum, blocks, classify, spills, target_lengths

block_sizes = st.sampled_from([8, 16, 32, 64, 128])
lookaheads = st.integers(0, 7)
tokens = st.integers(1, 2000)


@given(tokens, block_sizes, lookaheads)
def test_spill_is_what_the_aligned_and_lookahead_strata_say(n, size, lookahead):
    """The published law: one block more exactly at N mod B in {0} ∪ {B-L+1 … B-1} (given any lookahead)."""
    residues = {0, *range(size - lookahead + 1, size)} if lookahead else set()
    assert spills(n, size, lookahead) == (n % size in residues)
    if n >= size and lookahead:
        assert spills(n, size, lookahead) == (classify(n, size, lookahead) in (Stratum.ALIGNED, Stratum.LOOKAHEAD))


@given(tokens, block_sizes)
def test_blocks_hold_the_tokens_with_none_to_spare(n, size):
    assert (blocks(n, size) - 1) * size < n <= blocks(n, size) * size


@given(block_sizes, lookaheads, st.integers(1, 6), st.integers(1, 7))
def test_target_lengths_hit_every_stratum_for_every_block_count(size, lookahead, most, minimum):
    lengths = [t.tokens for t in target_lengths(size, lookahead, most, minimum)]
    assert lengths == sorted(set(lengths)) and min(lengths) == minimum
    found = {(classify(n, size, lookahead), n // size) for n in lengths}
    for count in range(1, most + 1):
        assert (Stratum.ALIGNED, count) in found
        # One slot of lookahead at B = 8 or more leaves no lookahead residue beside "aligned".
        assert (Stratum.FIRST, count) in found or lookahead >= size - 1
        assert (Stratum.MIDDLE, count) in found or lookahead > size // 3
        if lookahead > 1:
            assert (Stratum.LOOKAHEAD, count) in found or count == most
    assert any(s is Stratum.SUB_BLOCK for s, _ in found)


@pytest.mark.parametrize("arguments", [(0, 32, 3), (5, 1, 0), (5, 32, 32), (5, 32, -1)])
def test_impossible_sizes_are_refused(arguments):
    with pytest.raises(ValueError, match="expected tokens"):
        classify(*arguments)
