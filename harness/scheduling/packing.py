"""Where the engines of a job fit. The search is complete: a job is refused only if there is no way to place it.

Memory is counted in whole MiB, so that releasing restores exactly what was taken. An engine that shares no device takes
all of its memory.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from harness.scheduling.model import Device, EnginePlace, Job, Overlap, Placement, PlacementRule

MIB = 1024
Fill = Literal["first", "tight", "waste"]
"""Which of several suitable devices an engine gets: the ``first`` in order, the one where the least stays free
(``tight``), or the one whose rest the engines of the same jobs can fill best (``waste``)."""

Picks = tuple[tuple[int, ...], ...]
"""Positions of devices for each engine of a job."""


class Shape(NamedTuple):
    """All that the placement of a job depends on: of jobs with one shape, all fit or none does."""

    engines: tuple[tuple[int, int], ...]
    """(devices, MiB on each)"""
    placement: PlacementRule
    share: bool
    overlap: Overlap


def shape_of(job: Job) -> Shape:
    engines = tuple((e.devices, max(1, math.ceil(e.gib * MIB - 1e-6))) for e in job.engines)
    # The rules make no difference to a single engine.
    alone = len(engines) < 2
    return Shape(engines, "any" if alone else job.placement, job.share, "any" if alone else job.overlap)


class Packer:
    """The usable devices and the search for places on them.

    It does not keep track of running jobs: callers pass the MiB that are free on each device, in the order of
    ``devices``.
    """

    def __init__(self, devices: Sequence[Device], shapes: Sequence[Shape] = ()) -> None:
        self.devices = tuple(sorted(devices, key=lambda d: (d.node, d.index, d.id)))
        self.size = [math.floor(d.memory_gib * MIB + 1e-6) for d in self.devices]
        names = sorted({d.node for d in self.devices})
        self.nodes = tuple(tuple(i for i, d in enumerate(self.devices) if d.node == n) for n in names)
        sizes = {mib for s in shapes if s.share for _, mib in s.engines}
        self._sums = _fillable(sorted(sizes), max(self.size, default=0))

    def takes(self, shape: Shape, picks: Picks) -> Iterator[tuple[int, int]]:
        """Yield (position, MiB) of everything that a placed shape holds."""
        for (_, mib), positions in zip(shape.engines, picks, strict=True):
            for position in positions:
                yield position, (mib if shape.share else self.size[position])

    def find(self, shape: Shape, free: Sequence[int], fill: Fill) -> Picks | None:
        """Return places for all engines of a shape, or None when it does not fit."""
        if not self._enough(shape, free):
            return None
        return _Search(self, shape, list(free), fill).run()

    def placement(self, job: Job, picks: Picks) -> Placement:
        places = (
            EnginePlace(engine.role, tuple(self.devices[p] for p in positions))
            for engine, positions in zip(job.engines, picks, strict=True)
        )
        return Placement(job, tuple(places))

    def preference(self, left: int, fill: Fill) -> tuple[int, ...]:
        """Return the sort key of a device on which ``left`` MiB would stay free; the smallest is preferred."""
        if fill == "waste":
            return (left - self._sums[bisect_right(self._sums, left) - 1], left)
        return (left,) if fill == "tight" else ()

    def _enough(self, shape: Shape, free: Sequence[int]) -> bool:
        """Return whether the devices could suffice: a quick test, necessary but not sufficient."""
        if not shape.share:
            empty = sum(f == s > 0 for f, s in zip(free, self.size, strict=True))
            return empty >= sum(n for n, _ in shape.engines)
        if shape.overlap == "apart" and sum(n for n, _ in shape.engines) > len(free):
            return False
        ranked = sorted(free, reverse=True)
        return all(n <= len(ranked) and ranked[n - 1] >= mib for n, mib in shape.engines)


def _fillable(sizes: Sequence[int], limit: int) -> list[int]:
    """Return every amount up to ``limit`` MiB that engines of these sizes fill exactly, ascending from 0.

    The search stops at about 20,000 amounts.
    """
    sums = {0}
    edge = {0}
    while edge and len(sums) < 20_000:
        edge = {s + size for s in edge for size in sizes if s + size <= limit} - sums
        sums |= edge
    return sorted(sums)


class _Search:
    """A depth-first search over engines (largest first), nodes and kinds of devices; equal devices are one kind."""

    def __init__(self, packer: Packer, shape: Shape, free: list[int], fill: Fill) -> None:
        self._packer = packer
        self._shape = shape
        self._free = free
        self._fill = fill
        engines = shape.engines
        # The widest first where the others have to be on its devices, otherwise the largest.
        wide = shape.overlap == "together"
        self._order = sorted(
            range(len(engines)), key=lambda i: (-engines[i][0] if wide else 0, -engines[i][1], -engines[i][0], i)
        )
        self._chosen: dict[int, tuple[int, ...]] = {}
        self._hopeless: set[tuple[object, ...]] = set()

    def run(self) -> Picks | None:
        if not self._place(0, ()):
            return None
        return tuple(self._chosen[i] for i in range(len(self._order)))

    def _place(self, depth: int, used: tuple[int, ...]) -> bool:
        if depth == len(self._order):
            return True
        # With two engines there is nothing to remember: each state of the second occurs once.
        state = self._state(depth, used) if depth and len(self._order) > 2 else ()
        if state in self._hopeless:
            return False
        engine = self._order[depth]
        count, mib = self._shape.engines[engine]
        allowed = self._allowed(depth)
        taken = self._taken(depth)
        seen: set[tuple[object, ...]] = set()
        nodes = self._nodes(used)
        for node in nodes:
            positions = [p for p in self._packer.nodes[node] if allowed is None or (p in allowed[0]) == allowed[1]]
            if len(nodes) > 1:
                kind = self._kind(node, used, taken)
                if kind in seen:
                    continue
                seen.add(kind)
            for picks in self._picks(positions, count, mib):
                before = [self._free[p] for p in picks]
                for p in picks:
                    self._free[p] -= mib if self._shape.share else self._free[p]
                self._chosen[engine] = picks
                if self._place(depth + 1, (*used, node)):
                    return True
                for p, value in zip(picks, before, strict=True):
                    self._free[p] = value
        if state:
            self._hopeless.add(state)
        return False

    def _allowed(self, depth: int) -> tuple[frozenset[int], bool] | None:
        """Return positions, and whether the next engine must be on them or must not be; None if it may be anywhere."""
        if not depth or self._shape.overlap == "any":
            return None
        if self._shape.overlap == "together":
            return frozenset(self._chosen[self._order[0]]), True
        return self._taken(depth), False

    def _taken(self, depth: int) -> frozenset[int]:
        """Return the positions of the engines placed so far, where it matters whose they are."""
        if self._shape.overlap == "any":
            return frozenset()
        return frozenset(p for i in self._order[:depth] for p in self._chosen[i])

    def _kind(
        self, node: int, used: tuple[int, ...], taken: frozenset[int]
    ) -> tuple[bool, tuple[tuple[int, int, bool], ...]]:
        """Return all that distinguishes a node in this search: nodes of one kind are interchangeable."""
        positions = self._packer.nodes[node]
        return node in used, tuple(sorted((self._free[p], self._packer.size[p], p in taken) for p in positions))

    def _state(self, depth: int, used: tuple[int, ...]) -> tuple[object, ...]:
        taken = self._taken(depth)
        return (depth, *sorted(self._kind(n, used, taken) for n in range(len(self._packer.nodes))))

    def _nodes(self, used: tuple[int, ...]) -> Sequence[int]:
        if self._shape.placement == "together" and used:
            return used[:1]
        nodes = range(len(self._packer.nodes))
        left = [n for n in nodes if n not in used] if self._shape.placement == "spread" else list(nodes)
        if self._fill == "first":
            return left
        # The fullest node first, and engines of one job close to each other.
        return sorted(left, key=lambda n: (n not in used, sum(self._free[p] for p in self._packer.nodes[n]), n))

    def _picks(self, positions: Sequence[int], count: int, mib: int) -> Iterator[tuple[int, ...]]:
        """Yield every choice of devices, the best first; interchangeable devices give one choice."""
        kinds: dict[tuple[int, int], list[int]] = {}
        for p in positions:
            if self._free[p] >= mib and (self._shape.share or self._free[p] == self._packer.size[p]):
                kinds.setdefault((self._free[p], self._packer.size[p]), []).append(p)
        if sum(map(len, kinds.values())) < count:
            return
        left = {k: (k[0] - mib if self._shape.share else 0) for k in kinds}
        ranked = sorted(kinds, key=lambda k: (self._packer.preference(left[k], self._fill), kinds[k][0]))
        yield from _choices([kinds[k] for k in ranked], count)


def _choices(kinds: Sequence[list[int]], count: int) -> Iterator[tuple[int, ...]]:
    if count == 0:
        yield ()
        return
    if not kinds or sum(map(len, kinds)) < count:
        return
    first, rest = kinds[0], kinds[1:]
    for taken in range(min(count, len(first)), -1, -1):
        for others in _choices(rest, count - taken):
            yield (*first[:taken], *others)


def packer_of(jobs: Sequence[Job], devices: Sequence[Device]) -> Packer:
    return Packer(devices, tuple(dict.fromkeys(map(shape_of, jobs))))


def impossible(jobs: Sequence[Job], devices: Sequence[Device]) -> dict[str, str]:
    """Return, by job id, why jobs do not fit on these devices even when nothing else runs."""
    packer = Packer(devices)
    answers: dict[Shape, bool] = {}
    refused = {}
    for job in jobs:
        shape = shape_of(job)
        if shape not in answers:
            answers[shape] = packer.find(shape, packer.size, "tight") is not None
        if not answers[shape]:
            refused[job.id] = _reason(job, packer)
    return refused


def _reason(job: Job, packer: Packer) -> str:
    if not packer.devices:
        return (
            f"expected devices for {' and '.join(e.role for e in job.engines)}, found none that may be used; "
            "`harness doctor --profile PROFILE` says what this machine lacks"
        )
    return f"expected {_needs(job)}, found {_inventory(packer)}; {_advice(job, packer)}"


def _needs(job: Job) -> str:
    engines = " and ".join(f"{e.devices} × {e.gib:g} GiB for {e.role}" for e in job.engines)
    if len(job.engines) > 1:
        engines += {"together": " on one node", "spread": " on different nodes", "any": ""}[job.placement]
        engines += {"together": ", on the same devices", "apart": ", on different devices", "any": ""}[job.overlap]
    return engines + ("" if job.share else ", devices shared with no other engine")


def _inventory(packer: Packer) -> str:
    kinds: dict[str, int] = {}
    for node in packer.nodes:
        sizes = [packer.devices[p].memory_gib for p in node]
        text = " + ".join(f"{sizes.count(s)} × {s:g} GiB" for s in sorted(set(sizes), reverse=True))
        kinds[text] = kinds.get(text, 0) + 1
    return ", ".join(f"{count} node{'s' if count > 1 else ''} with {text}" for text, count in kinds.items())


def _advice(job: Job, packer: Packer) -> str:
    """Return what to do about the first obstacle."""
    for engine, (count, mib) in zip(job.engines, shape_of(job).engines, strict=True):
        if mib > max(packer.size, default=0):
            return (
                f"give {engine.role} less memory (a larger tensor parallel size, a smaller KV pool) or use larger "
                "devices"
            )
        if not any(sum(packer.size[p] >= mib for p in node) >= count for node in packer.nodes):
            return f"lower the tensor parallel size of {engine.role} or use a node with more devices"
    if job.placement == "spread" and len(packer.nodes) < len(job.engines):
        return f"use {len(job.engines)} nodes or place the engines together"
    if job.overlap == "apart" and len(packer.devices) < sum(e.devices for e in job.engines):
        return "use more devices, or let the engines share them (engine.placement: any)"
    return "use more devices, give each engine less memory, or run the engines of this job as separate jobs"
