"""A strip of steps: how many drafts each verify step of an answer should have accepted, over how many it did.

Steps are compared where both begin at the same output token, as the checks do: a step that accepts fewer drafts is
followed by more steps, which would otherwise be compared with unlike ones. Where the drafters have seen unlike tokens,
nothing is compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from harness.history.acceptance import Steps, by_position, place, real_steps
from harness.history.records import Leg

MOST_COLUMNS = 40
_ALIKE = 4
"""Columns before the first difference that are shown where not all can be."""


class StepColumn(NamedTuple):
    """The step that begins at one output token, in the reference and in the answer."""

    token: int
    """Index of the first output token that it makes; where that is not known, the step's own index."""
    expected: int | None
    """Accepted drafts; None where no step of the reference begins here."""
    found: int | None

    @property
    def differs(self) -> bool:
        return None not in (self.expected, self.found) and self.expected != self.found


class StepStrip(NamedTuple):
    """The steps of one answer around the first that differs from its reference."""

    against: str
    """The reference: ``the baseline``, or a cell of this run."""
    columns: tuple[StepColumn, ...]
    before: int
    """Columns that are left out before the first, and after the last."""
    after: int
    took_over: bool
    """Whether the first of all columns is that at which D took over."""
    placed_by: str
    """What the columns count: ``token``, or ``step`` for a method that drafts up to k tokens."""

    @property
    def words(self) -> str:
        """The strip for those who cannot see it."""
        sides = [[c.expected for c in self.columns], [c.found for c in self.columns]]
        listed = [", ".join(str(n) for n in side if n is not None) for side in sides]
        since = " since D took over" if self.took_over and not self.before else ""
        return f"accepted drafts per step{since}: expected ({self.against}) {listed[0]}; found {listed[1]}"


def strip_of(leg: Leg, references: Iterable[tuple[str, Steps]], parted: int | None) -> StepStrip | None:
    """Return the strip of an answer beside the first reference, of those named, from which a step differs.

    ``parted`` is the first output token that is wrong. None where no step differs, or the engine told no steps.
    """
    ours = real_steps(leg)
    if ours is None:
        return None
    for against, theirs in references:
        placed = _by_token(ours, theirs, len(leg.output_ids or ()))
        columns = _columns(theirs, ours, parted) if placed is None or parted is not None else placed
        first = next((i for i, c in enumerate(columns) if c.differs), None)
        if first is not None:
            start = 0 if len(columns) <= MOST_COLUMNS else max(0, first - _ALIKE)
            shown = columns[start : start + MOST_COLUMNS]
            after = len(columns) - start - len(shown)
            counts = "token" if ours.drafted is None or placed is not None else "step"
            return StepStrip(against, tuple(shown), start, after, leg.role == "decode", counts)
    return None


def _by_token(ours: Steps, theirs: Steps, tokens: int) -> list[StepColumn] | None:
    """Return the columns of steps beside a crowd, where some had no drafts, with those that the other side has, too, as
    they may have begun; None for other steps."""
    if ours.drafted is None or not ours.unaccounted or theirs.unaccounted:
        return None
    found = place(ours, theirs, tokens, _MOST_GAPS)
    if found is None:
        return None
    told = zip(found.at, found.expected, ours.accepted, strict=True)
    return [StepColumn(at, right, accepted) for at, right, accepted in told if right is not None]


_MOST_GAPS = 8
"""Runs of steps without drafts that a strip may show: each begins when the engine turns crowded."""


def _columns(theirs: Steps, ours: Steps, parted: int | None) -> Sequence[StepColumn]:
    """Return the columns up to the step that made the first wrong token."""
    if ours.drafted is not None:
        # Steps without drafts are missing in both lists, so that the tokens at which the others begin are not known.
        return _placed(dict(enumerate(theirs.accepted)), dict(enumerate(ours.accepted))) if parted is None else ()
    found = _placed(by_position(theirs.accepted), by_position(ours.accepted))
    return [c for c in found if parted is None or c.token <= parted]


def _placed(expected: dict[int, int], found: dict[int, int]) -> list[StepColumn]:
    return [StepColumn(at, expected.get(at), found.get(at)) for at in sorted(expected.keys() | found.keys())]
