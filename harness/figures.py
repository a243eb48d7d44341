"""The figures that charts draw, from a recorded run and its references: plain data, computed in one place.

Acceptance per position and by step since the hand-off, survival of identity, and the worst prompts. Shares are
between 0 and 1; an absent figure is None, never zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from harness.acceptance import by_step, real_steps
from harness.baseline.lookup import Lookup
from harness.baseline.model import Baseline
from harness.checks.evidence import CellView, Evidence
from harness.checks.night import cell_counts
from harness.checks.registry import judging_of
from harness.findings import Finding, Judgement
from harness.history import COLD, Form, History, Observation
from harness.sequences import parted_at
from harness.stats.paired import ratio
from harness.strata import blocks

CONFIDENCE = 0.99
SURVIVAL_POINTS = 40
"""Output tokens at which survival is drawn, at most."""


class Position(NamedTuple):
    """Acceptance at one draft position of one method, from every side that is known."""

    method: str
    position: int
    side: str
    """``baseline``, or the cell tonight."""
    rate: float
    low: float | None
    high: float | None
    accepted: int | None
    steps: int | None
    detectable: float | None
    """Smallest change that the test of this cell shows, as a share; None where every draft is compared."""


class Step(NamedTuple):
    """Mean accepted drafts at one step since the hand-off, of aligned or other prompts of one cell."""

    cell: str
    aligned: str
    step: str
    """``0`` to ``7``, then ``8+``; padded steps are left out."""
    order: int
    requests: int
    accepted: float


class Survival(NamedTuple):
    """Share of prompts whose output is still the recorded one after so many tokens."""

    cell: str
    token: int
    share: float


class Token(NamedTuple):
    at: int
    expected: int | None
    found: int | None


class Worst(NamedTuple):
    """A prompt whose output left the reference: the tokens around the first difference, and the prompt's blocks."""

    finding: Finding
    tokens: tuple[Token, ...]
    prompt: tuple[tuple[int, ...], ...]
    """The prompt's token ids, block by block."""
    damaged: tuple[int, ...]
    """Indices of blocks that the finding names."""
    gap: float | None
    """Distance in nats between the two best tokens at the difference."""
    prefill: Mapping[str, Any] | None
    """What P handed over."""
    counters: Mapping[str, float]
    """What D counted for the request."""


class Figures(NamedTuple):
    positions: tuple[Position, ...]
    steps: tuple[Step, ...]
    survival: tuple[Survival, ...]
    equal_runs: tuple[Survival, ...]
    """The same for two equal runs of each method (A/A of its baseline); ``cell`` is the method."""
    worst: tuple[Worst, ...]


MOST_WORST = 24


def figures_of(history: History, judgement: Judgement, baselines: Mapping[str, Lookup]) -> Figures:
    """All figures of a judged run. Raises DataError when the recorded profile is damaged."""
    evidence = Evidence(history, baselines, judging_of(history))
    views = [CellView(evidence, r) for r in history.run.cells if r.planned or not r.scenarios]
    known = {m: lookup.baseline for m, lookup in baselines.items() if lookup.baseline is not None}
    return Figures(
        tuple(_positions(views, known, judgement)),
        tuple(s for v in views if v.speculative for s in _steps(v)),
        tuple(s for v in views for s in _survival(v, known)),
        tuple(s for m, b in known.items() for s in _equal_runs(m, b)),
        tuple(_worst(history, judgement)),
    )


# --- acceptance ------------------------------------------------------------------------------------------------------


def _positions(
    views: Sequence[CellView], baselines: Mapping[str, Baseline], judgement: Judgement
) -> Iterable[Position]:
    speculative = [v for v in views if v.speculative]
    for method in dict.fromkeys(v.method for v in speculative):
        baseline = baselines.get(method)
        if baseline is not None:
            summary = baseline.header.summary
            intervals = summary.get("rates_interval_99", [])
            for p, rate in enumerate(summary.get("rates", [])):
                low, high = intervals[p] if p < len(intervals) else (None, None)
                yield Position(method, p, "baseline", rate, low, high, None, summary.get("steps"), None)
        for view in speculative:
            if view.method == method:
                yield from _tonight(view, judgement)


def _tonight(view: CellView, judgement: Judgement) -> Iterable[Position]:
    counted, _ = cell_counts(view)
    k = view.record.draft_tokens
    if not counted:
        return
    at = np.array([c.accepted_at for c in counted.values()], float).reshape(len(counted), k)
    steps = np.array([c.steps for c in counted.values()], float)
    if not steps.sum():
        return
    detectable = _detectable(judgement, view.id)
    for p in range(k):
        found = ratio(at[:, p], steps, CONFIDENCE)
        yield Position(
            view.method,
            p,
            view.id,
            round(found.rate, 5),
            _bound(found.low),
            _bound(found.high),
            int(at[:, p].sum()),
            int(steps.sum()),
            detectable,
        )


def _bound(value: float) -> float | None:
    """A bound of a share; None where one prompt gives none."""
    return None if math.isnan(value) else round(min(1.0, max(0.0, value)), 5)


def _detectable(judgement: Judgement, cell: str) -> float | None:
    for c in judgement.cells:
        if c.cell == cell and c.scenario == COLD:
            for r in c.results:
                points = r.figures.get("detectable_points") if r.check == "acceptance-baseline" else None
                if points is not None:
                    return float(points) / 100
    return None


def _steps(view: CellView) -> Iterable[Step]:
    """Aligned prompts end on a block boundary: a hand-off that shifts blocks shows at their first steps."""
    groups: dict[str, list[tuple[int, ...]]] = {"aligned": [], "unaligned": []}
    for o in view.answered().values():
        steps = real_steps(o.final) if o.final is not None else None
        if steps is not None:
            name = "unaligned" if len(o.sent_ids) % view.record.block_size else "aligned"
            groups[name].append(steps.accepted)
    for name, accepted in groups.items():
        for order, (step, requests, mean) in enumerate(by_step(accepted)):
            if requests:
                yield Step(view.id, name, step, order, requests, round(mean, 4))


# --- survival of identity --------------------------------------------------------------------------------------------


def _shares(name: str, partings: Sequence[int | None], longest: int) -> Iterable[Survival]:
    """``partings`` are the output tokens at which each prompt left the reference, None when it never did."""
    if not partings:
        return
    stride = max(1, -(-longest // SURVIVAL_POINTS))
    for t in sorted({0, 1, 2, 4, *range(0, longest + 1, stride), longest}):
        left = sum(at is not None and at < t for at in partings)
        yield Survival(name, t, round(1 - left / len(partings), 4))


def _survival(view: CellView, baselines: Mapping[str, Baseline]) -> Iterable[Survival]:
    baseline = baselines.get(view.method)
    if baseline is None:
        return
    rows = baseline.by_prompt()
    partings: list[int | None] = []
    longest = 0
    for o in view.answered().values():
        row = rows.get(o.prompt_id)
        if row is None or o.final is None or o.final.output_ids is None:
            continue
        expected = row.output_ids[: o.max_tokens]
        partings.append(parted_at(o.final.output_ids, expected))
        longest = max(longest, len(expected))
    yield from _shares(view.id, partings, longest)


def _equal_runs(method: str, baseline: Baseline) -> Iterable[Survival]:
    rows = [r for r in baseline.rows if r.again is not None]
    longest = max((len(r.output_ids) for r in rows), default=0)
    yield from _shares(method, [r.again.divergence for r in rows if r.again is not None], longest)


# --- worst prompts ---------------------------------------------------------------------------------------------------


def _worst(history: History, judgement: Judgement) -> Iterable[Worst]:
    seen: set[tuple[str, str, str | None]] = set()
    for f in judgement.findings:
        if f.check not in ("tokens-reference", "tokens-baseline") or "expected" not in f.evidence:
            continue
        place = (f.cell, f.scenario, f.part or f.prompt_id)
        if place in seen or len(seen) >= MOST_WORST:
            continue
        seen.add(place)
        yield _one(history, f)


def _one(history: History, f: Finding) -> Worst:
    o = _observation(history, f)
    record = history.cell(f.cell)
    size = record.block_size if record is not None else 0
    start = int(f.evidence.get("window_start", f.evidence.get("position", 0)))
    expected, found = (list(f.evidence.get(side, [])) for side in ("expected", "found"))
    width = max(len(expected), len(found))
    tokens = tuple(
        Token(start + i, expected[i] if i < len(expected) else None, found[i] if i < len(found) else None)
        for i in range(width)
    )
    ids = o.sent_ids if o is not None else ()
    prompt = tuple(ids[b * size : (b + 1) * size] for b in range(blocks(len(ids), size))) if size and ids else ()
    prefill = o.leg("prefill") if o is not None else None
    final = o.final if o is not None else None
    position = f.evidence.get("position")
    gaps = final.top_gaps if final is not None else None
    inside = gaps is not None and isinstance(position, int) and position < len(gaps)
    return Worst(
        f,
        tokens,
        prompt,
        f.location.blocks if f.location is not None else (),
        gaps[position] if inside and gaps is not None and isinstance(position, int) else None,
        prefill.kv_transfer_params if prefill is not None else None,
        final.counters if final is not None else {},
    )


def _observation(history: History, f: Finding) -> Observation | None:
    key = f.part or f.prompt_id
    form: Form = "text" if f.form == "text" else "ids"
    return history.of(f.cell, form, f.scenario).get(key) if key is not None else None
