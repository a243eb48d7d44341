"""Many nights together: verdicts and acceptance of each cell, and drifts that are too small for one night to see.

Each night is paired with the first one, prompt by prompt, and held against the mean of all nights before it (recursive
residuals, so that the first night's own noise cancels: Hawkins, "Self-starting CUSUM charts", The Statistician 36,
1987). These run through a two-sided CUSUM (Page, "Continuous inspection schemes", Biometrika 41, 1954) whose limit is
set by Siegmund's approximation of the mean time between false notices, over all series together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from scipy.optimize import brentq

from harness.acceptance import RequestCounts, pool_counts
from harness.checks.evidence import CellView, Evidence
from harness.checks.night import cell_counts
from harness.compare import paired_by_prompt
from harness.config import Judging
from harness.errors import HarnessError, UsageError
from harness.findings import Judgement, Verdict
from harness.history import History, load_history
from harness.kinds import require_plain
from harness.operations import assess

ALLOWANCE = 0.5
"""Drift per night, in standard errors, that the sum forgets: it is tuned to shifts of one standard error."""


class Night(NamedTuple):
    """One run."""

    run_id: str
    started: str
    folder: Path
    verdict: Verdict
    cells: dict[str, Verdict]
    counts: dict[str, dict[str, RequestCounts]]
    """Cell → prompt → counts."""
    draft_tokens: dict[str, int]
    vllm: str


class Point(NamedTuple):
    """Acceptance of a cell at one position in one night."""

    night: int
    cell: str
    position: int
    rate: float
    effect: float | None
    """Against the first night, paired by prompt; None when it cannot be compared."""
    upper: float
    """CUSUM of rises, in standard errors."""
    lower: float
    """CUSUM of falls."""


class Drift(NamedTuple):
    """A notice."""

    cell: str
    position: int
    night: int
    """Index of the night in which the limit was passed."""
    since: int
    """Index of the night from which on the sum grew."""
    falls: bool
    effect: float


class Trend(NamedTuple):
    nights: tuple[Night, ...]
    points: tuple[Point, ...]
    drifts: tuple[Drift, ...]
    limit: float
    """In standard errors."""
    between: int
    """Mean number of nights between false notices, over all series."""
    left_out: tuple[str, ...]
    """Runs that are no nights, and why."""

    @property
    def sentence(self) -> str:
        red = sum(n.verdict.exit_code != 0 for n in self.nights)
        return (
            f"{len(self.nights)} nights, {red} of them not green; {len(self.drifts)} notices of slow drift (limit "
            f"{self.limit:.1f} standard errors, one false notice in {self.between} nights of unchanged engines)"
        )


def load_trend(folder: Path, between: int = 365) -> Trend:
    """All judged runs below a folder, in order of time. Raises UsageError when there are fewer than two."""
    if not folder.is_dir():
        raise UsageError(f"{folder}: expected a folder of recorded runs, found none")
    nights: list[Night] = []
    left_out: list[str] = []
    for path in sorted(folder.glob("*/run.json")):
        if path.parent.is_symlink():
            continue
        try:
            history = load_history(path.parent)
            require_plain(history)
            if history.run.mutants:
                left_out.append(f"{path.parent.name}: a mutant was armed")
                continue
            nights.append(_night(history, assess(history).judgement))
        except HarnessError as error:
            left_out.append(f"{path.parent.name}: {error}")
    if len(nights) < 2:
        raise UsageError(
            f"{folder}: expected at least two recorded runs, found {len(nights)}"
            + (f" ({'; '.join(left_out)[:300]})" if left_out else "")
        )
    nights.sort(key=lambda n: n.started)
    return trend_of(nights, between, left_out)


def _night(history: History, judgement: Judgement) -> Night:
    evidence = Evidence(history, {}, Judging())
    views = [CellView(evidence, r) for r in history.run.cells if r.draft_tokens and (r.planned or not r.scenarios)]
    return Night(
        history.run.run_id,
        history.run.started,
        history.folder,
        judgement.verdict,
        judgement.by_cell(),
        {v.id: cell_counts(v)[0] for v in views},
        {v.id: v.record.draft_tokens for v in views},
        str(history.run.versions.get("vllm")),
    )


def trend_of(nights: Sequence[Night], between: int, left_out: Sequence[str] = ()) -> Trend:
    """Points and notices of nights in order of time."""
    series = [
        (cell, p)
        for cell in dict.fromkeys(c for n in nights for c in n.counts)
        for p in range(max(n.draft_tokens.get(cell, 0) for n in nights))
    ]
    limit = limit_for(between * max(1, len(series)))
    points: list[Point] = []
    drifts: list[Drift] = []
    for cell, position in series:
        mine = _series(nights, cell, position)
        points += mine
        found = _first_passage(mine, limit)
        if found is not None:
            drifts.append(found)
    return Trend(tuple(nights), tuple(points), tuple(drifts), limit, between, tuple(left_out))


def _series(nights: Sequence[Night], cell: str, position: int) -> list[Point]:
    out: list[Point] = []
    first: dict[str, RequestCounts] | None = None
    before: list[float] = []
    upper = lower = 0.0
    for index, night in enumerate(nights):
        counted = night.counts.get(cell)
        k = night.draft_tokens.get(cell, 0)
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
    """Distance of a night from the mean of those before it, in standard errors of that distance.

    ``error`` is that of a difference of two nights, sqrt(2) times that of one. Nights that are equal bit for bit have
    none, so any change there is a large one.
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
                since[side] = point.night
            if sums[side] > limit:
                return Drift(point.cell, point.position, point.night, since[side], side == 1, point.effect or 0.0)
    return None


def limit_for(nights: float) -> float:
    """Limit h at which a two-sided CUSUM of one series gives a false notice once in so many nights.

    Siegmund's approximation of the one-sided mean run length is (exp(2 k b) - 2 k b - 1) / (2 k^2) with
    b = h + 1.166 (Sequential Analysis, 1985, p. 27); two sides halve it.
    """

    def excess(h: float) -> float:
        b = h + 1.166
        return (math.exp(2 * ALLOWANCE * b) - 2 * ALLOWANCE * b - 1) / (2 * ALLOWANCE**2) / 2 - nights

    return float(brentq(excess, 0.0, 60.0)) if excess(0.0) < 0 else 0.0
