"""Judge whether a figure of a process tree grows: after a warm-up, from the medians of equal parts of what is left.

Memory is judged by the Theil–Sen slope through the medians and its confidence interval, counts by their medians at
either end. Medians of parts, because neighbouring samples resemble each other: an interval over all of them would be
far too narrow. How often either is wrong on noise alone is measured by ``benchmarks/soak_alarms.py``
(docs/evidence/soak.md).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from harness.history.verdict import Verdict
from harness.lab.soak.model import HARNESS, Growth

WARM_UP = 0.2
"""Share of the time that is not judged, because caches fill and allocators settle."""
PARTS = 12
SHORTEST_S = 1200.0
"""Minimum length in seconds of the window after the warm-up: a few minutes say nothing about an hour."""
CONFIDENCE = 0.99
"""Confidence level of each bound of a slope."""
_ENDS = 3
"""Number of parts at either end whose medians are compared for counts."""


class Limit(NamedTuple):
    """How much a figure may grow."""

    field: str
    """The field of ``Tree``."""
    quantity: str
    unit: str
    harness: float
    engine: float
    per_hour: bool = False


LIMITS = (
    Limit("rss_mib", "RSS", "MiB", 20, 0, per_hour=True),
    Limit("pss_mib", "PSS", "MiB", 20, 256, per_hour=True),
    Limit("descriptors", "descriptors", "", 4, 4),
    Limit("threads", "threads", "", 2, 2),
    Limit("processes", "processes", "", 0, 0),
    Limit("shm_files", "shared memory files", "", 0, 0),
    Limit("shm_mib", "shared memory", "MiB", 1, 1),
)
"""The engines' RSS is recorded but not judged, since it counts shared memory several times. The limit of their PSS
tolerates the growth of an engine's first hour (docs/evidence/soak.md)."""


def judge_growth(series: Mapping[str, Mapping[str, Sequence[float]]], times_s: Sequence[float]) -> list[Growth]:
    """Judge every limited figure of every tree.

    ``series[tree][field]`` has one value per entry of ``times_s``, which is in seconds since the start and not empty.
    """
    times = np.asarray(times_s, dtype=float)
    parts = split(times)
    return [
        _judge(tree, limit, times, parts, np.asarray(figures[limit.field], dtype=float))
        for tree, figures in series.items()
        for limit in LIMITS
        if tree == HARNESS or limit.field != "rss_mib"
    ]


def split(times: np.ndarray) -> list[np.ndarray] | str:
    """Return the indices of the samples in each part of the window, or a sentence saying why there are no parts."""
    start = times[0] + WARM_UP * (times[-1] - times[0])
    length = times[-1] - start
    if length < SHORTEST_S:
        return (
            f"too short to say: expected {SHORTEST_S / 60:.0f} minutes after the warm-up (a soak of "
            f"{SHORTEST_S / 60 / (1 - WARM_UP):.0f}), found {length / 60:.1f}"
        )
    parts = []
    for low, high in itertools.pairwise(np.linspace(start, times[-1], PARTS + 1)):
        parts.append(np.flatnonzero((times >= low) & (times <= high)))
        if not len(parts[-1]):
            return f"expected samples without gaps, found none from minute {low / 60:.0f} to {high / 60:.0f}"
    return parts


def _judge(tree: str, limit: Limit, times: np.ndarray, parts: list[np.ndarray] | str, values: np.ndarray) -> Growth:
    """Judge one figure: a leak if the lower bound of its growth is above the limit, flat if the upper bound is not."""
    most = limit.harness if tree == HARNESS else limit.engine
    slope: dict[str, float] = {}
    if isinstance(parts, str):
        first, last = values[0], values[-1]
        verdict, why = Verdict.UNKNOWN, parts
    else:
        medians = [np.median(values[p]) for p in parts]
        if limit.per_hour:
            first, last = medians[0], medians[-1]
            per_hour = low = high = 0.0
            if len(set(medians)) > 1:
                hours = [times[p].mean() / 3600 for p in parts]
                per_hour, _, low, high = map(float, stats.theilslopes(medians, hours, alpha=2 * CONFIDENCE - 1))
            slope = {"per_hour": round(per_hour, 2), "low": round(low, 2), "high": round(high, 2)}
            words = f"{per_hour:+.1f} MiB an hour, {low:.1f} to {high:.1f}; allowed: at most {most:g}"
        else:
            first, last = np.median(medians[:_ENDS]), np.median(medians[-_ENDS:])
            low = high = last - first
            words = f"from {first:g} to {last:g} {limit.unit}".rstrip() + f"; allowed: at most {most:g} more"
        verdict, word = Verdict.UNKNOWN, "cannot tell"
        if low > most:
            verdict, word = Verdict.REGRESSION, "leak"
        elif high <= most:
            verdict, word = Verdict.PASS, "flat"
        why = f"{word}: {words}"
    return Growth(
        tree=tree,
        quantity=limit.quantity,
        unit=limit.unit,
        first=round(float(first), 2),
        last=round(float(last), 2),
        limit=most,
        verdict=verdict,
        why=why,
        **slope,
    )
