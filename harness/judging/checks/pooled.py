"""The test of all P/D cells together against their single engines, which sees wrong answers that each shows too rarely.

A defect of one request in 300 leaves most cells untouched in a night, and none with enough damaged prompts to tell it
from chance. All P/D cells together have thousands of requests. Wrong answers to prompts that were made of one text are
added up over all cells and paddings, and the two sides, P/D and single, are exchanged text by text.

It has one stage, at a level of its own: a second stage would have to run every cell again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from harness.history.records import COLD
from harness.judging.checks.hypothesis_tests import divergences, rows_with_repetition, units_of, wrong_when_rescored
from harness.judging.checks.model import Column, Hits, Pooled, RegisteredTest, Tested
from harness.judging.evidence import CellView
from harness.judging.sight import Level, Sample, Seen, seen_in_answers
from harness.profiles.model import Judging
from harness.stats.paired import Arms, Difference, by_unit, differences, label_swap, make_arms

COLUMNS = ("re-scored", "parted")
"""Ways in which an answer is wrong: the plain engine would not have said it, or it parts from the baseline other than
at a near tie."""
_IDENTITY = RegisteredTest("pd-*", COLD, "pooled")
_NAMED = 20
"""Most prompts that a cell names."""


class _Pair(NamedTuple):
    pd: CellView
    single: CellView


class _Answer(NamedTuple):
    """The answers of both engines to one prompt, in one of the ways to be wrong."""

    cell: str
    column: str
    key: str
    unit: str
    """The text that the prompt was made of."""
    single: bool
    pd: bool


def pooled(views: Iterable[CellView], judging: Judging) -> Pooled | None:
    """Test all cold P/D cells together; None if no P/D cell has its single engine in the run.

    Each single engine is compared with one P/D cell, the one without a router if there is one: if one control served
    several cells, its luck would count several times and the sides could not be exchanged.
    """
    pairs: dict[str, _Pair] = {}
    for view in sorted((v for v in views if v.cold and v.handed_off), key=lambda v: (v.routed, v.id)):
        single = view.sibling("single")
        if single is not None:
            pairs.setdefault(single.id, _Pair(view, single))
    if not pairs:
        return None
    cells = [p.pd.id for p in pairs.values()]
    try:
        answers = [a for pair in pairs.values() for a in _answers(pair)]
        return Pooled(
            _tested(answers, len(cells), judging), {c: _hits([a for a in answers if a.cell == c]) for c in cells}
        )
    except Exception as error:
        # As for any other test, a crash must not hide the others.
        problem = f"the test itself failed: {type(error).__name__}: {error}"
        return Pooled(Tested(_IDENTITY, None, problem=problem), {c: {} for c in cells})


def _answers(pair: _Pair) -> list[_Answer]:
    """Return the answers of a P/D cell and its single engine, for the prompts of which both are known."""
    out = []
    for column, wrong in zip(COLUMNS, (wrong_when_rescored, _parted), strict=True):
        theirs, ours = wrong(pair.single), wrong(pair.pd)
        keys = sorted(theirs.keys() & ours.keys())
        for key, unit in zip(keys, units_of(pair.pd, keys), strict=True):
            out.append(_Answer(pair.pd.id, column, key, unit, theirs[key], ours[key]))
    return out


def _parted(view: CellView) -> dict[str, bool]:
    """Return, by observation key, whether an output parts from the baseline other than at a near tie."""
    rows = rows_with_repetition(view)
    return {} if isinstance(rows, str) else {key: now.hard for key, (_, now) in divergences(view, rows).items()}


def _hits(answers: Sequence[_Answer]) -> Mapping[str, Hits]:
    """Return what one cell contributes, by column."""
    out = {}
    for column in COLUMNS:
        mine = [a for a in answers if a.column == column]
        alone = [a.key for a in mine if a.pd and not a.single]
        out[f"all@{column}"] = Hits(sum(a.pd for a in mine), sum(a.single for a in mine), tuple(alone[:_NAMED]))
    return out


def _tested(answers: Sequence[_Answer], cells: int, judging: Judging) -> Tested:
    if not answers:
        return Tested(
            _IDENTITY,
            None,
            problem="expected outputs of the P/D cells and their single engines that were re-scored or have a baseline "
            "with A/A, found none",
        )
    arms = _arms(answers)
    swap = label_swap(arms, judging.permutations, judging.seed, judging.pooled_alpha)
    columns = tuple(Column(d, a) for d, a in zip(differences(arms, judging.confidence), swap.adjusted, strict=True))
    level = Level(judging.pooled_alpha, len(columns), judging.power)
    seen = [_seen(c.difference, sum(f"all@{a.column}" == c.difference.column for a in answers), level) for c in columns]
    note = f"{cells} P/D cells together with their single engines"
    most = max(sum(a.column == column for a in answers) for column in COLUMNS)
    worst = max(seen, key=lambda s: s.share)
    return Tested(_IDENTITY, swap.p, swap.p, columns, Sample(most, arms.units), seen=worst, note=note)


def _seen(d: Difference, prompts: int, level: Level) -> Seen:
    return seen_in_answers(d.error * d.units**0.5, Sample(prompts, d.units), level)


def _arms(answers: Sequence[_Answer]) -> Arms:
    """Return the wrong answers and all answers of both sides by text; a column without answers is left out."""
    columns = [c for c in COLUMNS if any(a.column == c for a in answers)]
    mine = np.array([[a.column == c for c in columns] for a in answers], float)
    wrong = np.array([[a.single, a.pd] for a in answers], float)
    rows = make_arms([f"all@{c}" for c in columns], (mine * wrong[:, :1], mine), (mine * wrong[:, 1:], mine))
    return by_unit(rows, [a.unit for a in answers])
