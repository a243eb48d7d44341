"""A test of the drafts of all P/D cells together, against their single engines, by position.

A drafter that lost a point of acceptance after every hand-off shows in no cell by itself: what a cell's texts add by
chance is as large. All cells together have as many requests to the same texts as there are methods and models, so that
chance is smaller by the root of their number. Accepted drafts and steps of all requests to one text are added up, and
the two sides are exchanged text by text. A defect that depends on a prompt's length gains nothing, because it meets the
same texts in every cell.

The test has one stage, and a level of its own (``Judging.drafts_alpha``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from harness.history.acceptance import RequestCounts
from harness.judging.checks.hypothesis_tests import units_of
from harness.judging.checks.model import Column, PooledDrafts, RegisteredTest, Tested, TestName
from harness.judging.detection import Floor, Level, Sample, seen_in_rate
from harness.judging.evidence import CellView
from harness.observed import acceptance
from harness.profiles.model import Judging
from harness.stats.paired import Arms, by_unit, count_arms, differences, label_swap

NAME: TestName = "acceptance-pooled"


class _Drafts(NamedTuple):
    """Drafts of the requests that a P/D cell and its single engine have in common, in the same order."""

    view: CellView
    texts: Sequence[str]
    theirs: Sequence[RequestCounts]
    ours: Sequence[RequestCounts]

    @property
    def k(self) -> int:
        return self.view.record.draft_tokens


def takes_part(view: CellView) -> bool:
    """Return whether a cell is one of those that are tested together: routed ones would count their single engine
    twice."""
    return view.cold and view.speculative and view.handed_off and not view.routed and view.sibling("single") is not None


def pooled_acceptance(views: Iterable[CellView], judging: Judging) -> PooledDrafts | None:
    """Return the test; None where fewer than two cells take part: one has a test of its own."""
    alpha = judging.drafts_alpha
    found = [_drafts(view) for view in views if takes_part(view)]
    if len(found) < 2:
        return None
    test = RegisteredTest("pd-*", "cold", NAME)
    cells = {d.view.id: _rates(d) for d in found}
    try:
        return PooledDrafts(_tested(test, [d for d in found if d.texts], judging, alpha), cells, alpha)
    except Exception as error:
        # As for any other test, a crash must not hide the others.
        problem = f"the test itself failed: {type(error).__name__}: {error}"
        return PooledDrafts(Tested(test, None, problem=problem), cells, alpha)


def _drafts(view: CellView) -> _Drafts:
    single = view.sibling("single")
    theirs, ours = (v.counts.by_key if v is not None else {} for v in (single, view))
    keys = sorted(theirs.keys() & ours.keys())
    return _Drafts(view, units_of(view, keys), [theirs[key] for key in keys], [ours[key] for key in keys])


def _tested(test: RegisteredTest, found: Sequence[_Drafts], judging: Judging, alpha: float) -> Tested:
    if not found:
        problem = "expected accepted drafts of P/D cells and their single engines for the same prompts, found none"
        return Tested(test, None, problem=problem)
    arms = by_unit(_arms(found, max(d.k for d in found)), [text for d in found for text in d.texts])
    swap = label_swap(arms, judging.permutations, judging.seed, alpha)
    columns = tuple(Column(d, a) for d, a in zip(differences(arms, judging.confidence), swap.adjusted, strict=True))
    requests = sum(len(d.texts) for d in found)
    level = Level(alpha, len(columns), judging.power)
    floor = Floor(judging.floor_points / 100, _slack(found), judging.confidence)
    seen = max(
        (
            seen_in_rate(d.error * d.units**0.5, d.rates[0], d.trials, Sample(requests, d.units), level, floor)
            for d, _ in columns
        ),
        key=lambda s: s.share,
    )
    note = f"{len(found)} P/D cells together with their single engines"
    return Tested(test, swap.p, swap.p, columns, Sample(requests, arms.units), seen=seen, note=note)


def _slack(found: Sequence[_Drafts]) -> float:
    return max(acceptance.mean_slack(d.view) for d in found)


def _arms(found: Sequence[_Drafts], k: int) -> Arms:
    """Return a row for each request of each cell, and a column for each position, without drafts where a cell has
    none."""
    theirs = [_padded(c, k) for d in found for c in d.theirs]
    ours = [_padded(c, k) for d in found for c in d.ours]
    return count_arms([theirs, ours], k)


def _padded(counts: RequestCounts, k: int) -> tuple[Sequence[int], Sequence[int]]:
    none = (0,) * (k - len(counts.accepted_at))
    return (*counts.accepted_at, *none), (*counts.trials, *none)


def _rates(drafts: _Drafts) -> Mapping[str, tuple[float, float]]:
    """Return the rates of the single engine and of the cell, by column."""
    if not drafts.texts:
        return {}
    arms = _arms([drafts], drafts.k)
    return {d.column: d.rates for d in differences(arms) if d.units}
