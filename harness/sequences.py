"""Sequences of token ids."""

from __future__ import annotations

from collections.abc import Sequence

from harness.files import sha256_json


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of leading elements that are equal: the index of the first difference, or the shorter length."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def parted_at(ours: Sequence[int], expected: Sequence[int]) -> int | None:
    """Index at which one leaves the other, by another element or by ending; None when they are equal."""
    at = common_prefix(ours, expected)
    return None if at == len(ours) == len(expected) else at


def output_key(output: tuple[int, ...]) -> str:
    """Names an output; equal outputs of several cells are scored once."""
    return sha256_json(list(output))[:16]
