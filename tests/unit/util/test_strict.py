"""Copies of models do not keep what was found of the original."""

from __future__ import annotations

from functools import cached_property

from harness.util.strict import Strict


class Doubled(Strict):
    of: int

    @cached_property
    def twice(self) -> int:
        return 2 * self.of


def test_a_copy_has_no_cached_property_of_the_original():
    first = Doubled(of=1)
    assert first.twice == 2
    assert first.model_copy(update={"of": 2}).twice == 4
    assert first.model_copy() == first
