"""Tests of many cells together, which see wrong answers that each shows too rarely: of all P/D cells against their
single engines, and of all cells in each scenario against their own cold answers.

A defect of one request in 300 leaves most cells untouched in a night, and none with enough damaged prompts to tell it
from chance. All P/D cells together have thousands of requests. Wrong answers to prompts that were made of one text are
added up over all cells and paddings, and the two sides, P/D and single or warm and cold, are exchanged text by text.

They have one stage, and share a level of their own: a second stage would have to run every cell again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from harness.history.records import COLD
from harness.judging.checks.hypothesis_tests import (
    divergences,
    of_cold,
    rows_with_repetition,
    units_of,
    wrong_when_rescored,
)
from harness.judging.checks.model import Column, Hits, Pooled, RegisteredTest, Tested
from harness.judging.detection import Detectable, Level, Sample, seen_in_answers
from harness.judging.evidence import CellView
from harness.profiles.model import Judging
from harness.stats.paired import Arms, Difference, by_unit, differences, label_swap, make_arms

COLUMNS = ("re-scored", "parted")
"""Ways in which an answer is wrong: the plain engine would not have said it, or it parts from the baseline other than
at a near tie."""
_NAMED = 20
"""Most prompts that a cell names."""


class _Pair(NamedTuple):
    ours: CellView
    theirs: CellView
    """What it is compared with: the single engine, or in a scenario the same cell's cold answers."""


class _Answer(NamedTuple):
    """Both answers to one prompt, in one of the ways to be wrong."""

    cell: str
    column: str
    key: str
    unit: str
    """The text that the prompt was made of."""
    theirs: bool
    ours: bool


def pooled(views: Iterable[CellView], judging: Judging) -> dict[str, Pooled]:
    """Return the tests of many cells together, by scenario. They share ``judging.pooled_alpha`` (Bonferroni).

    Each control is compared with one cell: a single engine with the P/D cell without a router if there is one, cold
    answers with the same cell's in one scenario at a time. If one control served several, its luck would count several
    times and the sides could not be exchanged.
    """
    pairs: dict[str, dict[str, _Pair]] = {}
    for view in sorted(views, key=lambda v: (v.routed, v.id)):
        theirs = replace(view, scenario=COLD) if not view.cold else view.sibling("single") if view.handed_off else None
        if theirs is not None:
            pairs.setdefault(view.scenario, {}).setdefault(theirs.id, _Pair(view, theirs))
    alpha = judging.pooled_alpha / max(1, len(pairs))
    return {scenario: _pooled(scenario, list(mine.values()), judging, alpha) for scenario, mine in pairs.items()}


def _pooled(scenario: str, pairs: Sequence[_Pair], judging: Judging, alpha: float) -> Pooled:
    cells = [p.ours.id for p in pairs]
    test = RegisteredTest("pd-*" if scenario == COLD else "*", scenario, "pooled")
    try:
        answers = [a for pair in pairs for a in _answers(pair)]
        tested = _tested(test, answers, len(cells), judging, alpha)
        return Pooled(tested, {c: _hits([a for a in answers if a.cell == c]) for c in cells}, alpha)
    except Exception as error:
        # As for any other test, a crash must not hide the others.
        problem = f"the test itself failed: {type(error).__name__}: {error}"
        return Pooled(Tested(test, None, problem=problem), {c: {} for c in cells}, alpha)


def _answers(pair: _Pair) -> list[_Answer]:
    """Return both answers to each prompt of which both are known."""
    out = []
    for column, wrong in zip(COLUMNS, (wrong_when_rescored, _parted), strict=True):
        theirs, ours = wrong(pair.theirs), wrong(pair.ours)
        if not pair.ours.cold:
            theirs = of_cold(pair.ours, theirs)
        keys = sorted(theirs.keys() & ours.keys())
        for key, unit in zip(keys, units_of(pair.ours, keys), strict=True):
            out.append(_Answer(pair.ours.id, column, key, unit, theirs[key], ours[key]))
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
        alone = [a.key for a in mine if a.ours and not a.theirs]
        out[f"all@{column}"] = Hits(sum(a.ours for a in mine), sum(a.theirs for a in mine), tuple(alone[:_NAMED]))
    return out


def _tested(test: RegisteredTest, answers: Sequence[_Answer], cells: int, judging: Judging, alpha: float) -> Tested:
    whose = "the P/D cells and their single engines" if test.scenario == COLD else f"{test.scenario} and the same cold"
    if not answers:
        problem = (
            f"expected outputs of {whose} that were re-scored, or a baseline that was recorded twice, found neither; "
            "record it with `harness baseline record --repeat 2`"
        )
        return Tested(test, None, problem=problem)
    arms = _arms(answers)
    swap = label_swap(arms, judging.permutations, judging.seed, alpha)
    columns = tuple(Column(d, a) for d, a in zip(differences(arms, judging.confidence), swap.adjusted, strict=True))
    level = Level(alpha, len(columns), judging.power)
    seen = [_seen(c.difference, sum(f"all@{a.column}" == c.difference.column for a in answers), level) for c in columns]
    note = (
        f"{cells} P/D cells together with their single engines" if test.scenario == COLD else f"{cells} cells together"
    )
    if cells > 1:
        # The same prompts are asked in each, so that more cells make no more texts.
        note += f"; what some prompts have in all cells shows from {level.least} of {arms.units} texts on"
    most = max(sum(a.column == column for a in answers) for column in COLUMNS)
    worst = max(seen, key=lambda s: s.share)
    return Tested(test, swap.p, swap.p, columns, Sample(most, arms.units), seen=worst, note=note)


def _seen(d: Difference, prompts: int, level: Level) -> Detectable:
    return seen_in_answers(d.error * d.units**0.5, Sample(prompts, d.units), level)


def _arms(answers: Sequence[_Answer]) -> Arms:
    """Return the wrong answers and all answers of both sides by text; a column without answers is left out."""
    columns = [c for c in COLUMNS if any(a.column == c for a in answers)]
    mine = np.array([[a.column == c for c in columns] for a in answers], float)
    wrong = np.array([[a.theirs, a.ours] for a in answers], float)
    rows = make_arms([f"all@{c}" for c in columns], (mine * wrong[:, :1], mine), (mine * wrong[:, 1:], mine))
    return by_unit(rows, [a.unit for a in answers])
