"""The figures that charts draw, from a recorded run and its references: plain data, computed in one place.

Acceptance per position and by step since the hand-off, survival of identity, and the worst prompts. Shares are
between 0 and 1; an absent figure is None, never zero.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from harness.acceptance import by_step, real_steps
from harness.baseline.lookup import Lookup
from harness.baseline.model import Baseline
from harness.baseline.published import load_published, published_for
from harness.checks.evidence import CellView, Evidence
from harness.checks.night import cell_counts
from harness.checks.registry import judging_of
from harness.errors import DataError
from harness.findings import CheckResult, Finding, Judgement
from harness.history import COLD, Form, History, Leg, Observation
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
    """Smallest change that the test of this cell shows, as a share; None where there is no such test."""


class Seen(NamedTuple):
    """The smallest change of acceptance that the comparison of a cell with its baseline shows, in words."""

    method: str
    cell: str
    text: str


class Published(NamedTuple):
    """What others published for one draft position of a method, with their tolerance; advisory."""

    method: str
    position: int
    rate: float
    low: float
    high: float


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


class Side(NamedTuple):
    """What one engine said of its part in a hand-off, as names and values for people."""

    name: str
    facts: tuple[tuple[str, str], ...]


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
    sides: tuple[Side, ...]
    """What each engine of the request said of its part, in the order in which they were asked."""


class Figures(NamedTuple):
    positions: tuple[Position, ...]
    seen: tuple[Seen, ...]
    """One of each speculative cell."""
    published: tuple[Published, ...]
    steps: tuple[Step, ...]
    survival: tuple[Survival, ...]
    equal_runs: tuple[Survival, ...]
    """The same for two equal runs of each method (A/A of its baseline); ``cell`` is the method."""
    worst: tuple[Worst, ...]


MOST_WORST = 24
_LONGEST_FACT = 400
_COUNTED = {
    "prompt_tokens_external_kv_transfer": "prompt tokens from P",
    "prompt_tokens_local_compute": "prompt tokens computed",
    "prefix_hits": "prompt tokens from its own prefix cache",
    "nixl_transfers": "NIXL transfers",
    "nixl_bytes": "NIXL bytes",
    "nixl_descriptors": "NIXL descriptors",
    "nixl_failed_transfers": "NIXL transfers that failed",
    "nixl_expired": "leases that ended",
    "preemptions": "preemptions",
}
_ALWAYS = {
    "prefill": ("prompt_tokens_local_compute", "prefix_hits"),
    "decode": (
        "prompt_tokens_external_kv_transfer",
        "prompt_tokens_local_compute",
        "prefix_hits",
        "nixl_bytes",
        "nixl_descriptors",
    ),
    "single": ("prompt_tokens_local_compute", "prefix_hits"),
}
"""Counters that say something also when they did not grow."""


def figures_of(history: History, judgement: Judgement, baselines: Mapping[str, Lookup]) -> Figures:
    """All figures of a judged run. Raises DataError when the recorded profile is damaged."""
    evidence = Evidence(history, baselines, judging_of(history))
    views = [CellView(evidence, r) for r in history.run.cells if r.planned or not r.scenarios]
    known = {m: lookup for m, lookup in baselines.items() if lookup.found}
    cells = [_of_cell(v, known, judgement) for v in views]
    return Figures(
        tuple(_positions(views, cells, known)),
        tuple(c.seen for c in cells if c.seen is not None),
        tuple(_published(history, views)),
        tuple(s for c in cells for s in c.steps),
        tuple(s for c in cells for s in c.survival),
        tuple(s for m in known for s in _equal_runs(m, _known(known, m))),
        tuple(_worst(history, judgement)),
    )


def _known(baselines: Mapping[str, Lookup], method: str) -> Baseline | None:
    """One at a time: those of a large run do not fit into memory. None also when it changed since the run was judged:
    the verdict is known, and is not to be lost by a chart."""
    lookup = baselines.get(method)
    with contextlib.suppress(DataError):
        return lookup.baseline if lookup is not None else None
    return None


class _Cell(NamedTuple):
    """The figures of one cell; those of speculation are empty without it."""

    tonight: tuple[Position, ...]
    seen: Seen | None
    steps: tuple[Step, ...]
    survival: tuple[Survival, ...]


def _of_cell(view: CellView, baselines: Mapping[str, Lookup], judgement: Judgement) -> _Cell:
    """All of a cell at once: the observations of a large run are read anew for each cell."""
    survival = tuple(_survival(view, baselines))
    if not view.speculative:
        return _Cell((), None, (), survival)
    return _Cell(tuple(_tonight(view, judgement)), _seen(view, baselines, judgement), tuple(_steps(view)), survival)


# --- acceptance ------------------------------------------------------------------------------------------------------


def _positions(
    views: Sequence[CellView], cells: Sequence[_Cell], baselines: Mapping[str, Lookup]
) -> Iterable[Position]:
    tonight: dict[str, list[Position]] = {}
    for view, cell in zip(views, cells, strict=True):
        if view.speculative:
            tonight.setdefault(view.lineup, []).extend(cell.tonight)
    for method, found in tonight.items():
        baseline = _known(baselines, method)
        if baseline is not None:
            summary = baseline.header.summary
            intervals = summary.get("rates_interval_99", [])
            for p, rate in enumerate(summary.get("rates", [])):
                low, high = intervals[p] if p < len(intervals) else (None, None)
                yield Position(method, p, "baseline", rate, low, high, None, summary.get("steps"), None)
        yield from found


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
            view.lineup,
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


def _comparison(judgement: Judgement, cell: str) -> CheckResult | None:
    """What the comparison of a cell's acceptance with its baseline says."""
    cold = (c for c in judgement.cells if c.cell == cell and c.scenario == COLD)
    return next((r for c in cold for r in c.results if r.check == "acceptance-baseline"), None)


def _detectable(judgement: Judgement, cell: str) -> float | None:
    result = _comparison(judgement, cell)
    points = result.figures.get("detectable_points") if result is not None else None
    return float(points) / 100 if points is not None else None


def _seen(view: CellView, baselines: Mapping[str, Lookup], judgement: Judgement) -> Seen:
    result, change = _comparison(judgement, view.id), _detectable(judgement, view.id)
    if view.lineup not in baselines:
        text = "unknown, as there is no baseline to compare with"
    elif result is None or not result.judged:
        text = "unknown, as nothing was compared"
    elif change is not None:
        text = f"{100 * change:.2f} points"
    elif view.evidence.judging.tier == "bitwise":
        counted, _ = cell_counts(view)
        steps = sum(c.steps for c in counted.values())
        share = f" of {steps} steps ({100 / steps:.2f} points)" if steps else ""
        text = f"one draft{share}, as every prompt is compared draft by draft"
    else:
        text = "unknown, as too few prompts were compared"
    return Seen(view.lineup, view.id, text)


def _published(history: History, views: Sequence[CellView]) -> Iterable[Published]:
    try:
        bands = load_published()
    except DataError:
        # Advisory figures must not cost the report; the summary says what is wrong with them.
        return
    for method in dict.fromkeys(v.lineup for v in views if v.speculative):
        for band in published_for(bands, history.run.profile, method):
            for p, rate in enumerate(band.rates):
                yield Published(method, p, rate, rate * (1 - band.tolerance), min(1.0, rate * (1 + band.tolerance)))


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


def _survival(view: CellView, baselines: Mapping[str, Lookup]) -> Iterable[Survival]:
    baseline = _known(baselines, view.lineup)
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


def _equal_runs(method: str, baseline: Baseline | None) -> Iterable[Survival]:
    rows = [r for r in baseline.rows if r.again is not None] if baseline is not None else []
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
        tuple(_side(o, leg) for leg in o.legs) if o is not None else (),
    )


def _side(o: Observation, leg: Leg) -> Side:
    """What an engine handed over and what it counted; a counter that stood still is told from one never read."""
    handed = [(f"handed over: {name}", _short(value)) for name, value in (leg.kv_transfer_params or {}).items()]
    counters, alone = leg.counters, ""
    if not counters and leg.role in o.shared_counters:
        counters, alone = o.shared_counters[leg.role], f" (of {o.concurrent} requests together)"
    counted = [
        (f"counted: {words}{alone}", f"{counters[key]:,.0f}" if key in counters else "did not grow")
        for key, words in _COUNTED.items()
        if counters and (key in counters or key in _ALWAYS[leg.role])
    ]
    name = {"prefill": "P", "decode": "D", "single": "the engine"}[leg.role]
    return Side(name, (*handed, *(counted or [("counted", "its counters were not read for this request")])))


def _short(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= _LONGEST_FACT else text[:_LONGEST_FACT] + " …"


def _observation(history: History, f: Finding) -> Observation | None:
    key = f.part or f.prompt_id
    form: Form = "text" if f.form == "text" else "ids"
    return history.of(f.cell, form, f.scenario).get(key) if key is not None else None
