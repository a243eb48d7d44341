"""The data of the charts, computed from a recorded run and its baselines.

Covers acceptance per position, acceptance by step since the hand-off, and how far answers stay identical.
Shares are between 0 and 1; an absent figure is None, never zero.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from harness.baselines.lookup import Lookup
from harness.baselines.model import Baseline
from harness.baselines.published import load_published, published_for
from harness.baselines.summary import summarise
from harness.errors import DataError
from harness.history.acceptance import begun_before, by_step
from harness.history.folder import History
from harness.history.records import Observation
from harness.history.token_ids import parted_at
from harness.judging.checks.registry import evidence_for
from harness.judging.figures import HypothesisFigures
from harness.judging.findings import Judgement
from harness.observed.recorded_cell import RecordedCell, recorded_cells
from harness.profiles.model import Tier
from harness.stats.paired import ratio

BASELINE = "baseline"
"""The side of a figure that is the baseline's, not a cell's."""
CONFIDENCE = 0.99
SURVIVAL_POINTS = 40
"""Survival is drawn at about this many output tokens."""


class Position(NamedTuple):
    """Acceptance at one draft position of one method, in the baseline or in one cell."""

    method: str
    position: int
    side: str
    """``BASELINE``, or the cell of this run."""
    rate: float
    low: float | None
    high: float | None
    accepted: int | None
    steps: int | None
    detectable: float | None
    """Smallest change that this cell's test detects, as a share; None where there is no such test."""


class SmallestChange(NamedTuple):
    """The smallest change of acceptance that comparing a cell with its baseline detects, as text."""

    method: str
    cell: str
    text: str


class Published(NamedTuple):
    """Published acceptance at one draft position of a method, with its tolerance; advisory."""

    method: str
    position: int
    rate: float
    low: float
    high: float


class StepMean(NamedTuple):
    """Mean accepted drafts at one step since the hand-off, over the aligned or unaligned prompts of one side."""

    method: str
    side: str
    """``BASELINE``, or the cell of this run."""
    aligned: str
    step: str
    """``0`` to ``7``, then ``8+``; padded steps are excluded."""
    order: int
    requests: int
    accepted: float


class Survival(NamedTuple):
    """Share of prompts whose first ``token`` output tokens equal the recorded ones."""

    cell: str
    token: int
    share: float


class Figures(NamedTuple):
    positions: tuple[Position, ...]
    smallest_changes: tuple[SmallestChange, ...]
    """One per speculative cell."""
    published: tuple[Published, ...]
    draft_tokens: Mapping[str, int]
    """Most drafts of a step (k), by method with speculation."""
    steps: tuple[StepMean, ...]
    survival: tuple[Survival, ...]
    equal_runs: tuple[Survival, ...]
    """Survival between two equal runs of each method (A/A of its baseline); ``cell`` is the method."""


def figures_of(history: History, judgement: Judgement, baselines: Mapping[str, Lookup]) -> Figures:
    """Compute all figures of a judged run. Raises DataError when the recorded profile is damaged."""
    tier = evidence_for(history, baselines).judging.tier
    views = recorded_cells(history)
    known = {m: lookup for m, lookup in baselines.items() if lookup.found}
    cells = [_of_cell(v, known, judgement, tier) for v in views]
    return Figures(
        tuple(_positions(views, cells, known)),
        tuple(c.smallest_change for c in cells if c.smallest_change is not None),
        tuple(_published(history, views)),
        _draft_tokens(views),
        (*(s for c in cells for s in c.steps), *_baseline_steps(views, cells, known)),
        tuple(s for c in cells for s in c.survival),
        tuple(s for m in known for s in _equal_runs(m, _known(known, m))),
    )


def _known(baselines: Mapping[str, Lookup], method: str) -> Baseline | None:
    """Read a method's baseline, or return None when there is none.

    Baselines are read one at a time, because those of a large run do not fit into memory together. One that changed
    since the run was judged counts as none, so that a chart cannot lose the verdict.
    """
    lookup = baselines.get(method)
    with contextlib.suppress(DataError):
        return lookup.baseline if lookup is not None else None
    return None


class _Cell(NamedTuple):
    """The figures of one cell; those of speculation are empty without it."""

    positions: tuple[Position, ...]
    smallest_change: SmallestChange | None
    steps: tuple[StepMean, ...]
    survival: tuple[Survival, ...]
    asked: Mapping[str, _Asked] = {}
    """By prompt."""


class _Asked(NamedTuple):
    """What a cell asked of one cold prompt."""

    group: str
    """``aligned`` or ``unaligned``."""
    most_tokens: int | None
    """Output tokens that were asked for; None for as many as the profile says."""


def _of_cell(view: RecordedCell, baselines: Mapping[str, Lookup], judgement: Judgement, tier: Tier) -> _Cell:
    """Compute all figures of a cell at once, because each access to the observations of a large run reads them anew."""
    survival = tuple(_survival(view, baselines))
    if not view.speculative:
        return _Cell((), None, (), survival)
    smallest_change = _smallest_change(view, baselines, judgement, tier)
    asked = {key: _Asked(_aligned(view, o), o.most_tokens) for key, o in view.answered().items()}
    return _Cell(tuple(_cell_positions(view, judgement)), smallest_change, tuple(_steps(view, asked)), survival, asked)


def _draft_tokens(views: Iterable[RecordedCell]) -> dict[str, int]:
    """Return the most drafts of a step of each method that has any."""
    found: dict[str, int] = {}
    for view in views:
        if view.speculative:
            found[view.lineup] = max(found.get(view.lineup, 0), view.record.draft_tokens)
    return found


# --- acceptance ------------------------------------------------------------------------------------------------------


def _positions(
    views: Sequence[RecordedCell], cells: Sequence[_Cell], baselines: Mapping[str, Lookup]
) -> Iterable[Position]:
    drafts = _draft_tokens(views)
    by_method: dict[str, list[Position]] = {}
    for view, cell in zip(views, cells, strict=True):
        if view.speculative:
            by_method.setdefault(view.lineup, []).extend(cell.positions)
    for method, found in by_method.items():
        baseline = _known(baselines, method)
        if baseline is not None:
            asked = {key for v in views if v.lineup == method for key in v.counts.by_key}
            # Of the prompts that this run sent: others may be easier or harder.
            summary = summarise([row for row in baseline.rows if row.prompt_id in asked], drafts[method])
            intervals = summary.get("rates_interval_99", [])
            for p, rate in enumerate(summary.get("rates", [])):
                low, high = map(_bound, intervals[p]) if p < len(intervals) else (None, None)
                yield Position(method, p, BASELINE, rate, low, high, None, summary.get("steps"), None)
        yield from found


def _cell_positions(view: RecordedCell, judgement: Judgement) -> Iterable[Position]:
    counted = view.counts.by_key
    k = view.record.draft_tokens
    if not counted:
        return
    at = np.array([c.accepted_at for c in counted.values()], float).reshape(len(counted), k)
    tried = np.array([c.trials for c in counted.values()], float).reshape(len(counted), k)
    if not tried.sum():
        return
    detectable = _detectable(judgement, view.id)
    for p in range(k):
        found = ratio(at[:, p], tried[:, p], CONFIDENCE)
        if math.isnan(found.rate):
            continue
        yield Position(
            view.lineup,
            p,
            view.id,
            round(found.rate, 5),
            _bound(found.low),
            _bound(found.high),
            int(at[:, p].sum()),
            int(tried[:, p].sum()),
            detectable,
        )


def _bound(value: float) -> float | None:
    """Clamp a bound of a share to 0 to 1; None when it is undefined, as it is for a single prompt."""
    return None if math.isnan(value) else round(min(1.0, max(0.0, value)), 5)


def _detectable(judgement: Judgement, cell: str) -> float | None:
    result = judgement.result(cell, "acceptance-baseline")
    figures = result.figures if result is not None else None
    points = figures.detectable_points if isinstance(figures, HypothesisFigures) else None
    return points / 100 if points is not None else None


def _smallest_change(
    view: RecordedCell, baselines: Mapping[str, Lookup], judgement: Judgement, tier: Tier
) -> SmallestChange:
    result, change = judgement.result(view.id, "acceptance-baseline"), _detectable(judgement, view.id)
    if view.lineup not in baselines:
        text = "unknown, because there is no baseline to compare with"
    elif result is None or not result.judged:
        text = "unknown, because nothing was compared"
    elif change is not None:
        text = f"{100 * change:.2f} points"
    elif tier == "bitwise":
        steps = sum(c.steps for c in view.counts.by_key.values())
        share = f" of {steps} steps ({100 / steps:.2f} points)" if steps else ""
        text = f"one draft{share}, because every prompt is compared draft by draft"
    else:
        text = "unknown, because too few prompts were compared"
    return SmallestChange(view.lineup, view.id, text)


def _published(history: History, views: Sequence[RecordedCell]) -> Iterable[Published]:
    try:
        bands = load_published()
    except DataError:
        # Advisory figures must not prevent the report; the summary says what is wrong with them.
        return
    for method in dict.fromkeys(v.lineup for v in views if v.speculative):
        for band in published_for(bands, history.run.asked_for, method):
            for p, rate in enumerate(band.rates):
                yield Published(method, p, rate, rate * (1 - band.tolerance), min(1.0, rate * (1 + band.tolerance)))


def _aligned(view: RecordedCell, o: Observation) -> str:
    """Return the group of a prompt: those that end on a block boundary are aligned."""
    return "unaligned" if len(o.sent_ids) % view.record.block_size else "aligned"


def _steps(view: RecordedCell, asked: Mapping[str, _Asked]) -> Iterable[StepMean]:
    found = ((asked[key].group, steps.accepted) for key, steps in view.steps().items())
    return _step_means(view.lineup, view.id, found)


def _baseline_steps(
    views: Sequence[RecordedCell], cells: Sequence[_Cell], baselines: Mapping[str, Lookup]
) -> Iterable[StepMean]:
    """Average the baselines' accepted drafts by step, over the prompts that the cells answered and as far as they did:
    without it, a cell whose drafts are all rejected has nothing to be seen against."""
    asked: dict[str, dict[str, _Asked]] = {}
    for view, cell in zip(views, cells, strict=True):
        if cell.steps:
            asked.setdefault(view.lineup, {}).update(cell.asked)
    for method, prompts in asked.items():
        baseline = _known(baselines, method)
        rows = [row for row in baseline.rows if row.prompt_id in prompts] if baseline is not None else []
        cut = ((prompts[row.prompt_id], row.accepted) for row in rows)
        yield from _step_means(method, BASELINE, ((a.group, _as_far(a, accepted)) for a, accepted in cut))


def _as_far(asked: _Asked, accepted: tuple[int, ...]) -> tuple[int, ...]:
    return accepted if asked.most_tokens is None else begun_before(accepted, asked.most_tokens)


def _step_means(method: str, side: str, found: Iterable[tuple[str, tuple[int, ...]]]) -> Iterable[StepMean]:
    """Average accepted drafts by step, separately for aligned prompts and others; ``found`` has each request's group
    and the accepted drafts of its steps."""
    groups: dict[str, list[tuple[int, ...]]] = {"aligned": [], "unaligned": []}
    for name, accepted in found:
        groups[name].append(accepted)
    for name, listed in groups.items():
        for order, (step, requests, mean) in enumerate(by_step(listed)):
            if requests:
                yield StepMean(method, side, name, step, order, requests, round(mean, 4))


# --- survival of identity --------------------------------------------------------------------------------------------


def _shares(name: str, divergences: Sequence[int | None], longest: int) -> Iterable[Survival]:
    """Compute survival from the output position at which each prompt diverged, None when it never did."""
    if not divergences:
        return
    stride = max(1, -(-longest // SURVIVAL_POINTS))
    for t in sorted({0, 1, 2, 4, *range(0, longest + 1, stride), longest}):
        left = sum(at is not None and at < t for at in divergences)
        yield Survival(name, t, round(1 - left / len(divergences), 4))


def _survival(view: RecordedCell, baselines: Mapping[str, Lookup]) -> Iterable[Survival]:
    baseline = _known(baselines, view.lineup)
    if baseline is None:
        return
    rows = baseline.by_prompt()
    divergences: list[int | None] = []
    longest = 0
    for o, _, output in view.answers().values():
        row = rows.get(o.prompt_id)
        if row is None or o.answered_otherwise:
            continue
        expected = row.output_ids[: o.most_tokens]
        divergences.append(parted_at(output, expected))
        longest = max(longest, len(expected))
    yield from _shares(view.id, divergences, longest)


def _equal_runs(method: str, baseline: Baseline | None) -> Iterable[Survival]:
    rows = [r for r in baseline.rows if r.again is not None] if baseline is not None else []
    longest = max((len(r.output_ids) for r in rows), default=0)
    yield from _shares(method, [r.again.divergence for r in rows if r.again is not None], longest)
