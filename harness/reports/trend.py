"""Verdicts and acceptance over many runs, and drifts that are too small to show in a single one.

Each run is paired with the first one, prompt by prompt, and compared with the mean of all runs before it (recursive
residuals, which cancel the first run's own noise: Hawkins, "Self-starting CUSUM charts", The Statistician 36, 1987).
The residuals go through a two-sided CUSUM (Page, "Continuous inspection schemes", Biometrika 41, 1954) whose limit
follows from Siegmund's approximation of the mean time between false notices, over all series together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from scipy.optimize import brentq

from harness.errors import HarnessError, UsageError
from harness.history.acceptance import RequestCounts, pool_counts
from harness.history.folder import History, load_history
from harness.history.run_kind import require_plain
from harness.judging.findings import Judgement
from harness.judging.recorded_cell import recorded_cells
from harness.reports.compare import paired_by_prompt
from harness.reports.judge_run import assess
from harness.reports.trend_model import Drift, Point, Trend, TrendRun

ALLOWANCE = 0.5
"""Drift per run, in standard errors, that the CUSUM tolerates; 0.5 is optimal for shifts of one standard error."""


def load_trend(folder: Path, between: int = 365) -> Trend:
    """Load and judge all runs below a folder, in order of time. Raises UsageError when there are fewer than two."""
    if not folder.is_dir():
        raise UsageError(f"{folder}: expected a folder of recorded runs, found none")
    runs: list[TrendRun] = []
    left_out: list[str] = []
    for path in sorted(folder.glob("*/run.json")):
        if path.parent.is_symlink():
            continue
        try:
            history = load_history(path.parent)
            require_plain(history)
            if history.run.mutants:
                left_out.append(f"{path.parent.name}: mutants were enabled")
                continue
            runs.append(_run(history, assess(history).judgement))
        except HarnessError as error:
            left_out.append(f"{path.parent.name}: {error}")
    if len(runs) < 2:
        raise UsageError(
            f"{folder}: expected at least two recorded runs, found {len(runs)}"
            + (f" ({'; '.join(left_out)[:300]})" if left_out else "")
        )
    runs.sort(key=lambda n: n.started)
    return trend_of(runs, between, left_out)


def _run(history: History, judgement: Judgement) -> TrendRun:
    views = [v for v in recorded_cells(history) if v.speculative]
    return TrendRun(
        history.run.run_id,
        history.run.started,
        history.folder,
        judgement.verdict,
        judgement.by_cell(),
        {v.id: v.counts.by_key for v in views},
        {v.id: v.record.draft_tokens for v in views},
        str(history.run.versions.get("vllm")),
    )


def trend_of(runs: Sequence[TrendRun], between: int, left_out: Sequence[str] = ()) -> Trend:
    """Compute points and drifts of runs that are in order of time."""
    series = [
        (cell, p)
        for cell in dict.fromkeys(c for n in runs for c in n.counts)
        for p in range(max(n.draft_tokens.get(cell, 0) for n in runs))
    ]
    limit = limit_for(between * max(1, len(series)))
    points: list[Point] = []
    drifts: list[Drift] = []
    for cell, position in series:
        mine = _series(runs, cell, position)
        points += mine
        found = _first_passage(mine, limit)
        if found is not None:
            drifts.append(found)
    return Trend(tuple(runs), tuple(points), tuple(drifts), limit, between, tuple(left_out))


def _series(runs: Sequence[TrendRun], cell: str, position: int) -> list[Point]:
    out: list[Point] = []
    first: dict[str, RequestCounts] | None = None
    before: list[float] = []
    upper = lower = 0.0
    for index, run in enumerate(runs):
        counted = run.counts.get(cell)
        k = run.draft_tokens.get(cell, 0)
        if not counted or position >= k:
            continue
        rate = pool_counts(counted.values(), k).rates[position]
        effect = None
        if first is None:
            first, effect = counted, 0.0
            before.append(0.0)
        else:
            found = paired_by_prompt(first, counted, k)
            if found and not math.isnan(found[position].effect):
                effect = found[position].effect
                z = _residual(effect, found[position].error, before)
                before.append(effect)
                upper, lower = max(0.0, upper + z - ALLOWANCE), max(0.0, lower - z - ALLOWANCE)
        out.append(Point(index, cell, position, rate, effect, upper, lower))
    return out


def _residual(effect: float, error: float, before: Sequence[float]) -> float:
    """Return the distance of a run from the mean of those before it, in standard errors of that distance.

    ``error`` is the standard error of a difference of two runs, sqrt(2) times that of one. It is zero for runs that
    are bitwise equal; any change is then a large one.
    """
    distance = effect - sum(before) / len(before)
    if abs(distance) < 1e-12:
        return 0.0
    if not error > 0:
        return math.copysign(10.0, distance)
    return distance / (error / math.sqrt(2) * math.sqrt(1 + 1 / len(before)))


def _first_passage(points: Sequence[Point], limit: float) -> Drift | None:
    since = [0, 0]
    for previous, point in zip([None, *points], points, strict=False):
        sums = (point.upper, point.lower)
        before = (previous.upper, previous.lower) if previous is not None else (0.0, 0.0)
        for side in (0, 1):
            if before[side] == 0 and sums[side] > 0:
                since[side] = point.run
            if sums[side] > limit:
                return Drift(point.cell, point.position, point.run, since[side], side == 1, point.effect or 0.0)
    return None


def limit_for(runs: float) -> float:
    """Return the limit h at which a two-sided CUSUM of one series gives one false notice in ``runs`` runs.

    Siegmund's approximation of the one-sided mean run length is (exp(2 k b) - 2 k b - 1) / (2 k^2) with
    b = h + 1.166 (Sequential Analysis, 1985, p. 27); two sides halve it.
    """

    def excess(h: float) -> float:
        b = h + 1.166
        return (math.exp(2 * ALLOWANCE * b) - 2 * ALLOWANCE * b - 1) / (2 * ALLOWANCE**2) / 2 - runs

    return float(brentq(excess, 0.0, 60.0)) if excess(0.0) < 0 else 0.0
