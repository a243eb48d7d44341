"""Binary search over versions, given as indexes, oldest first.

An answer is True when the finding shows, False when it does not, None when the version was skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

Answers = Mapping[int, bool | None]


class Bracket(NamedTuple):
    """The two versions between which the finding appeared."""

    good: int
    """Newest version known not to show it."""
    bad: int
    """Oldest version known to show it."""

    @property
    def first_bad(self) -> range:
        """The versions that can be the first to show the finding: one, unless versions in between were skipped."""
        return range(self.good + 1, self.bad + 1)


def bracket(count: int, answers: Answers) -> Bracket | None:
    """Return the narrowest bracket so far; None unless the oldest version is good and the newest is bad."""
    if answers.get(0) is not False or answers.get(count - 1) is not True:
        return None
    # A version outside the bracket is never tried, so that the newest good one is older than the oldest bad one.
    return Bracket(max(i for i, a in answers.items() if a is False), min(i for i, a in answers.items() if a is True))


def next_index(count: int, answers: Answers) -> int | None:
    """Return the version to try next: the ends, then the untried one nearest to the middle; None when done. Raises
    ValueError for fewer than two versions."""
    if count < 2:
        raise ValueError(f"expected two versions or more, found {count}")
    for end in (0, count - 1):
        if end not in answers:
            return end
    known = bracket(count, answers)
    if known is None:
        return None
    left = [i for i in range(known.good + 1, known.bad) if i not in answers]
    return min(left, key=lambda i: (abs(2 * i - known.good - known.bad), i), default=None)


def search(count: int, oracle: Callable[[int], bool | None]) -> dict[int, bool | None]:
    """Ask ``oracle`` until nothing more can be learnt; return its answers by index, in the order of asking."""
    answers: dict[int, bool | None] = {}
    while (index := next_index(count, answers)) is not None:
        answers[index] = oracle(index)
    return answers
