"""Does a figure grow? Judged after a warm-up, from medians of equal parts of what is left.

Memory: a straight line through the medians. It leaks when the growth per hour is above the limit with 99 % confidence,
and is flat when it is below with 99 % confidence; anything between is UNKNOWN. Medians of parts, because samples five
seconds apart resemble their neighbours: a line through all of them would be far too sure of itself.

Counts (descriptors, threads, …): the last part against the first one. How often either is wrong on noise alone:
docs/soak.md, measured by ``benchmarks/soak_alarms.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from harness.findings import Verdict
from harness.soak.model import HARNESS, Growth

WARM_UP = 0.2
"""Share of the time that is left out: caches fill and allocators settle."""
PARTS = 12
SHORTEST_S = 1200.0
"""Of the window after the warm-up. Shorter ones say nothing about an hour: in the first three minutes under load P's
PSS grew by 97 MiB, 67 of them in the first minute."""
CONFIDENCE = 0.99


class Limit(NamedTuple):
    """What a figure may grow by."""

    field: str
    """Of ``Tree``."""
    quantity: str
    unit: str
    harness: float
    engine: float
    per_hour: bool = False


LIMITS = (
    Limit("rss_mib", "RSS", "MiB", 20, 0, per_hour=True),
    Limit("pss_mib", "PSS", "MiB", 20, 256, per_hour=True),
    Limit("descriptors", "descriptors", "", 4, 4),
    Limit("sockets", "sockets", "", 4, 4),
    Limit("threads", "threads", "", 2, 2),
    Limit("processes", "processes", "", 0, 0),
    Limit("shm_files", "shared memory files", "", 0, 0),
    Limit("shm_mib", "shared memory", "MiB", 1, 1),
)
"""RSS of engines is recorded, not judged: it counts what their processes share several times. In its first hour, less
and less, vLLM 0.32.0's D grew by 135 MiB and P by 20 (docs/soak.md): what an engine may is for its makers to say, and
this limit finds what is far beyond."""


def judge_growth(series: Mapping[str, Mapping[str, Sequence[float]]], times_s: Sequence[float]) -> list[Growth]:
    """One result per tree and limited figure; ``series[tree][field]`` belongs to ``times_s``, seconds since the
    beginning."""
    return [
        _judge(tree, limit, times_s, figures[limit.field])
        for tree, figures in series.items()
        for limit in LIMITS
        if tree == HARNESS or limit.field != "rss_mib"
    ]


def _judge(tree: str, limit: Limit, times_s: Sequence[float], values: Sequence[float]) -> Growth:
    parts = split(times_s, values)
    most = limit.harness if tree == HARNESS else limit.engine
    if isinstance(parts, str):
        medians = (float(values[0]), float(values[-1])) if len(values) else (0.0, 0.0)
        return Growth(
            tree=tree,
            quantity=limit.quantity,
            unit=limit.unit,
            first=round(medians[0], 2),
            last=round(medians[1], 2),
            limit=most,
            verdict=Verdict.UNKNOWN,
            why=parts,
        )
    judge = _memory if limit.per_hour else _count
    return judge(tree, limit, most, parts)


class Parts(NamedTuple):
    """Medians of equal parts of the window."""

    hours: tuple[float, ...]
    """Middle of each part."""
    medians: tuple[float, ...]


def split(times_s: Sequence[float], values: Sequence[float]) -> Parts | str:
    """The parts after the warm-up, or why there are none."""
    times, figures = np.asarray(times_s, dtype=float), np.asarray(values, dtype=float)
    if not len(times):
        return "nothing was sampled"
    start = times[0] + WARM_UP * (times[-1] - times[0])
    length = times[-1] - start
    if length < SHORTEST_S:
        return (
            f"too short to say: expected {SHORTEST_S / 60:.0f} minutes after the warm-up (a soak of "
            f"{SHORTEST_S / 60 / (1 - WARM_UP):.0f}), found {length / 60:.1f}"
        )
    edges = np.linspace(start, times[-1], PARTS + 1)
    hours, medians = [], []
    for low, high in _pairs(edges):
        inside = (times >= low) & (times <= high)
        if not inside.any():
            return f"expected samples all the time, found none from minute {low / 60:.0f} to {high / 60:.0f}"
        hours.append((low + high) / 7200)
        medians.append(float(np.median(figures[inside])))
    return Parts(tuple(hours), tuple(medians))


def _pairs(edges: np.ndarray) -> Iterator[tuple[float, float]]:
    for i in range(len(edges) - 1):
        yield float(edges[i]), float(edges[i + 1])


class Line(NamedTuple):
    """Slope per hour with its bounds."""

    slope: float
    low: float
    high: float


def line(parts: Parts) -> Line:
    """Least squares; each bound holds with 99 % confidence (t distribution, parts − 2 degrees of freedom)."""
    if len(set(parts.medians)) == 1:
        # The error of a line through equal points is not a number.
        return Line(0.0, 0.0, 0.0)
    fit = stats.linregress(parts.hours, parts.medians)
    reach = float(stats.t.ppf(CONFIDENCE, len(parts.hours) - 2) * fit.stderr)
    return Line(float(fit.slope), float(fit.slope) - reach, float(fit.slope) + reach)


def _memory(tree: str, limit: Limit, most: float, parts: Parts) -> Growth:
    found = line(parts)
    words = f"{found.slope:+.1f} MiB an hour, {found.low:.1f} to {found.high:.1f}; at most {most:g} are allowed"
    verdict, why = Verdict.UNKNOWN, f"cannot tell: {words}"
    if found.low > most:
        verdict, why = Verdict.REGRESSION, f"leak: {words}"
    elif found.high <= most:
        verdict, why = Verdict.PASS, f"flat: {words}"
    return Growth(
        tree=tree,
        quantity=limit.quantity,
        unit=limit.unit,
        first=round(parts.medians[0], 2),
        last=round(parts.medians[-1], 2),
        per_hour=round(found.slope, 2),
        low=round(found.low, 2),
        high=round(found.high, 2),
        limit=most,
        verdict=verdict,
        why=why,
    )


_ENDS = 3
"""Parts at either end whose median is compared."""


def _count(tree: str, limit: Limit, most: float, parts: Parts) -> Growth:
    first, last = float(np.median(parts.medians[:_ENDS])), float(np.median(parts.medians[-_ENDS:]))
    grown = last - first
    words = f"from {first:g} to {last:g} {limit.unit}".rstrip() + f"; at most {most:g} more are allowed"
    return Growth(
        tree=tree,
        quantity=limit.quantity,
        unit=limit.unit,
        first=round(first, 2),
        last=round(last, 2),
        limit=most,
        verdict=Verdict.REGRESSION if grown > most else Verdict.PASS,
        why=("leak: " if grown > most else "flat: ") + words,
    )
