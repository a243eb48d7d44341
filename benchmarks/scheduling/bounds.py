"""Lower bounds of the makespan, in seconds.

All of them except the longest chain use the same argument. Divide the inventory into equal bins (devices, nodes, or all
of it), and determine for each item (an engine on one device, the engines of a job on a node, a whole job) its share of
a bin and its duration. A dual feasible function maps shares to shares such that whatever fitted into a bin still fits
(so two items above one half, mapped to 1 each, cannot be in a bin at the same time). Apply one such function to the
share, and one to the duration as a share of a supposed makespan C: if the sum of the products exceeds the number of
bins, C is too short (Fekete and Schepers; for jobs that run without interruption on any subset of a bin it holds
because interval graphs are perfect).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from benchmarks.scheduling.exhaustive import raised
from harness.scheduling.model import Device, Job, in_order, tails, without
from harness.scheduling.packing import impossible

Floats = NDArray[np.float64]
_EPSILON = 1e-9
_STEPS = 18
"""Bisection steps in the search for the longest C that is proven too short."""
_WAYS = 2_000
"""Most ways to fill a device that are considered."""
_HEADS, _TAILS = 4, 16
"""Most waiting times (before, after) at which schedules are cut."""


class _Items(NamedTuple):
    """The ``share`` of a bin in (0, 1], ``seconds`` and number of ``copies`` of each item, and the number of bins."""

    share: Floats
    seconds: Floats
    copies: Floats
    bins: int


def lower_bound(jobs: Sequence[Job], devices: Sequence[Device], tries: int = 20_000) -> float:
    """Return a lower bound in seconds for every schedule of these jobs; 0.0 without a job that fits.

    ``tries`` limits the proof by exhaustion, for a few jobs. Raises UsageError when the jobs wait for each other.
    """
    left = without(jobs, impossible(jobs, devices))
    if not left:
        return 0.0
    before, after = heads(left), tails(left)
    best = max(before[j.id] + j.seconds + after[j.id] for j in left)
    for some in _inventories(left, devices):
        for head, tail, chosen in _windows(some[0], before, after):
            for items in _views(chosen, some[1]) if head + tail < best else ():
                best = max(best, head + tail + _too_short(items, best - head - tail))
    return raised(left, devices, best, tries)


def heads(jobs: Sequence[Job]) -> dict[str, float]:
    """Return the seconds that must pass before each job can start: the longest chain of jobs that it waits for."""
    ends: dict[str, float] = {}
    before: dict[str, float] = {}
    for job in in_order(jobs):
        before[job.id] = max((ends[a] for a in job.after), default=0.0)
        ends[job.id] = before[job.id] + job.seconds
    return before


def _inventories(jobs: Sequence[Job], devices: Sequence[Device]) -> Iterator[tuple[Sequence[Job], Sequence[Device]]]:
    """Yield all jobs and devices; then, if devices differ, the engines that need the larger ones, on those alone."""
    sizes = sorted({d.memory_gib for d in devices})
    yield jobs, devices
    for small, large in pairwise(sizes):
        big = [j._replace(engines=tuple(e for e in j.engines if e.gib > small + 1e-6)) for j in jobs]
        if any(j.engines for j in big):
            yield [j for j in big if j.engines], [d for d in devices if d.memory_gib >= large]


def _windows(
    jobs: Sequence[Job], before: dict[str, float], after: dict[str, float]
) -> Iterator[tuple[float, float, Sequence[Job]]]:
    """Yield cuts: every schedule runs at least these (parts of) jobs but for its first ``head`` and last ``tail`` s."""
    for head in _cuts([before[j.id] for j in jobs], _HEADS):
        for tail in _cuts([after[j.id] for j in jobs], _TAILS):
            parts = [(j, _inside(j, head - before[j.id], tail - after[j.id])) for j in jobs]
            inside = [j._replace(start_s=0.0, run_s=seconds) for j, seconds in parts if seconds > 0]
            if inside:
                yield head, tail, inside


def _inside(job: Job, early: float, late: float) -> float:
    """Return the least seconds of a job between the cuts.

    A job that waits for nothing may start ``early`` seconds before the first cut, and one that nothing waits for may
    end ``late`` seconds after the second. A job that does both runs from cut to cut.
    """
    return job.seconds - max(0.0, early, late)


def _cuts(values: Sequence[float], most: int) -> list[float]:
    found = sorted(set(values))
    if len(found) <= most:
        return found
    return [found[round(i * (len(found) - 1) / (most - 1))] for i in range(most)]


def _views(jobs: Sequence[Job], devices: Sequence[Device]) -> Iterator[_Items]:
    """Yield the jobs as items of devices, of nodes, and of the whole inventory."""
    largest = max(d.memory_gib for d in devices)
    total = sum(d.memory_gib for d in devices)
    names = [d.node for d in devices]
    widest = max(names.count(n) for n in set(names))
    engines = [(e, j) for j in jobs for e in j.engines]
    shares = np.array([e.gib / largest if j.share else 1.0 for e, j in engines])
    counts = np.array([float(e.devices) for e, _ in engines])
    seconds = np.array([j.seconds for j in jobs])
    of_job = np.repeat(np.arange(len(jobs)), [len(j.engines) for j in jobs])
    yield _Items(shares, seconds[of_job], counts, len(devices))
    gib = np.bincount(of_job, weights=counts * np.array([e.gib for e, _ in engines]), minlength=len(jobs))
    yield _Items(gib / total, seconds, np.ones(len(jobs)), 1)
    together = np.array([j.placement == "together" for j in jobs])[of_job]
    # Engines that may be on different nodes are separate items.
    key = np.where(together, of_job, len(jobs) + np.arange(len(engines)))
    _, item = np.unique(key, return_inverse=True)
    of_item = np.zeros(item.max() + 1)
    of_item[item] = seconds[of_job]
    priced = _prices(shares, counts * seconds[of_job])
    if priced is not None:
        yield _Items(priced, seconds[of_job], counts, len(devices))
    for mapped in _maps(shares) if priced is None else [priced, *_maps(shares)]:
        weight = counts * mapped
        whole = np.bincount(of_job, weights=weight, minlength=len(jobs)) / len(devices)
        yield _Items(whole, seconds, np.ones(len(jobs)), 1)
        if len(set(names)) > 1:
            node = np.bincount(item, weights=weight) / widest
            yield _Items(node, of_item, np.ones(len(node)), len(set(names)))


def _prices(shares: Floats, amounts: Floats) -> Floats | None:
    """Return the best dual feasible function for these shares in these amounts (device-seconds).

    It consists of the prices of the linear programme that covers the amounts with ways to fill a device. None if there
    are too many ways.
    """
    kinds, of_item = np.unique(np.round(shares, 6), return_inverse=True)
    ways = _ways(tuple(np.maximum(kinds - 1e-6, 1e-6)))
    if ways is None:
        return None
    worth = np.bincount(of_item, weights=amounts)
    if not worth.max():
        return None
    found = linprog(-worth / worth.max(), A_ub=ways, b_ub=np.ones(len(ways)), bounds=(0, 1), method="highs")
    if found.x is None:
        return None
    prices = found.x / max(1.0, float((ways @ found.x).max()))
    return np.asarray(prices[of_item], dtype=np.float64)


def _ways(kinds: Sequence[float]) -> Floats | None:
    """Return the number of each kind (ascending shares) in each way to fill a device; None beyond ``_WAYS``."""
    full: list[tuple[int, ...]] = []

    def fill(place: int, left: float, taken: tuple[int, ...]) -> None:
        if len(full) > _WAYS:
            return
        if place < 0:
            full.append(taken)
            return
        most = int(left / kinds[place])
        # Only maximal fillings are needed: a device with room left gives no further constraint.
        for count in range(most, -1 if place else most - 1, -1):
            fill(place - 1, left - count * kinds[place], (count, *taken))

    fill(len(kinds) - 1, 1.0, ())
    return np.array(full, dtype=float) if len(full) <= _WAYS else None


def _too_short(items: _Items, known: float) -> float:
    """Return the longest time in seconds above ``known`` that is proven too short; ``known`` if there is none."""
    low = known
    mapped = np.array(list(_maps(items.share))) * items.copies
    if not _exceeds(mapped, items, low * (1 + 1e-6) + 1e-6):
        return known
    low, high = low, low + 2 * float((items.share * items.copies * items.seconds).sum() / items.bins) + low
    while _exceeds(mapped, items, high):
        low, high = high, 2 * high
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if _exceeds(mapped, items, middle) else (low, middle)
    return low


def _exceeds(mapped: Floats, items: _Items, supposed: float) -> bool:
    durations = np.array(list(_maps(items.seconds / supposed)))
    return bool((mapped @ durations.T).max() > items.bins * (1 + 1e-7))


def _maps(x: Floats) -> Iterator[Floats]:
    """Yield dual feasible functions of shares.

    All of them increase with x, so x is made slightly smaller: a rounding error then only weakens the bound.
    """
    # A longer duration counts as the supposed time; at exactly 1 the steps below would count too much.
    x = np.clip(x - _EPSILON, 0.0, 1.0 - _EPSILON)
    yield x
    for k in range(1, 9):
        yield np.floor((k + 1) * x) / k
    for cut in _thresholds(x):
        yield np.where(x > 1 - cut, 1.0, np.where(x >= cut, x, 0.0))
        slots = np.floor(1 / cut + _EPSILON)
        small = np.where(x >= cut, 1 / slots, 0.0)
        yield np.where(x > 0.5, 1 - np.floor((1 - x) / cut + _EPSILON) / slots, small)


def _thresholds(x: Floats) -> Sequence[float]:
    """Return the shares up to one half at which the functions change for these items."""
    near = np.concatenate([x[(x > 0.02) & (x <= 0.5)] - _EPSILON, 1 - x[(x > 0.5) & (x < 0.98)] + 2 * _EPSILON])
    found = np.unique(np.round(near, 9))
    if len(found) > 12:
        found = found[np.linspace(0, len(found) - 1, 12).round().astype(int)]
    return [float(v) for v in found if 0 < v <= 0.5]
