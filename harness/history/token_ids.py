"""Sequences of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import compress, count
from operator import ne
from typing import NamedTuple

from harness.util.files import sha256_bytes


def common_prefix(a: Sequence[int] | str, b: Sequence[int] | str) -> int:
    """Return the number of equal leading elements: the index of the first difference, or the shorter length."""
    return next(compress(count(), map(ne, a, b)), min(len(a), len(b)))


def parted_at(ours: Sequence[int], expected: Sequence[int]) -> int | None:
    """Return the index of the first difference, be it an element or an end, or None when the sequences are equal."""
    at = common_prefix(ours, expected)
    return None if at == len(ours) == len(expected) else at


class Divergence(NamedTuple):
    """The first difference of two outputs, and whether the reference was undecided there."""

    position: int
    gap: float | None
    """Top-2 log-prob gap (nats) of the reference at the position; None when unknown."""
    near_tie: bool


def compare(
    ours: tuple[int, ...],
    reference: tuple[int, ...],
    gaps: tuple[float | None, ...] | None,
    near_tie_nats: float,
    runner_ups: tuple[int | None, ...] | None = None,
) -> Divergence | None:
    """Return the first divergence of two outputs, or None when they are equal.

    A near tie needs proof: an unknown gap, or one output ending early, is a hard divergence. So is any token but the
    reference's runner-up; records of earlier versions have no ``runner_ups``, and there any token counts.
    """
    if ours == reference:
        return None
    at = common_prefix(ours, reference)
    gap = gaps[at] if gaps is not None and at < len(gaps) else None
    inside = at < min(len(ours), len(reference))
    second = runner_ups[at] if runner_ups is not None and at < len(runner_ups) else None
    close = inside and gap is not None and gap <= near_tie_nats
    return Divergence(at, gap, bool(close and second in (None, ours[at])))


@lru_cache(maxsize=4096)
def output_key(output: tuple[int, ...]) -> str:
    """Return a name for an output by its content; equal outputs of several cells are scored once."""
    # As JSON, which takes three times as long to make of numbers alone.
    return sha256_bytes(f"[{','.join(map(str, output))}]".encode())[:16]
