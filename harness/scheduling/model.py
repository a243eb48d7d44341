"""Jobs, devices and placements as plain data, and the checks that keep nonsense out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from harness.errors import UsageError

PlacementRule = Literal["together", "spread", "any"]
Overlap = Literal["together", "apart", "any"]
"""Whether the engines of a job are on the same devices (the narrower on some of the widest's), have none in common, or
either."""


@dataclass(frozen=True)
class Device:
    """One GPU (or MIG instance)."""

    id: str
    node: str
    memory_gib: float
    index: int = 0
    """Place within its node; devices with low indices are used first."""


class EngineNeed(NamedTuple):
    """The devices that one engine holds from start to end."""

    role: str
    devices: int
    """Distinct devices of one node: the tensor parallel size."""
    gib: float
    """Memory in GiB on each of them."""


class Job(NamedTuple):
    """Engines that start together, run cells one after the other, and end together."""

    id: str
    engines: tuple[EngineNeed, ...]
    start_s: float
    """Expected seconds until the engines answer."""
    run_s: float
    """Expected seconds for all cells and for ending the engines."""
    placement: PlacementRule = "any"
    """``together``: all engines on one node, on the same devices where memory allows. ``spread``: every engine on a
    node of its own. ``any``: either."""
    after: tuple[str, ...] = ()
    """Ids of jobs that must have ended first, whether they succeeded or not."""
    share: bool = True
    """False: no device of this job hosts a second engine, of this job or of another."""
    overlap: Overlap = "any"

    @property
    def seconds(self) -> float:
        return self.start_s + self.run_s


class EnginePlace(NamedTuple):
    role: str
    devices: tuple[Device, ...]
    """All of one node."""


class Placement(NamedTuple):
    """A job and the devices of its engines, in the order of ``job.engines``."""

    job: Job
    engines: tuple[EnginePlace, ...]

    @property
    def devices(self) -> frozenset[str]:
        """Ids of all devices that the job holds."""
        return frozenset(d.id for e in self.engines for d in e.devices)


def check_devices(devices: Sequence[Device]) -> None:
    """Raise UsageError for duplicate ids, or memory that is not a positive number."""
    _unique("device", [d.id for d in devices])
    for device in devices:
        _number(f"device {device.id}: memory_gib", device.memory_gib, positive=True)


def check_jobs(jobs: Sequence[Job]) -> None:
    """Raise UsageError for duplicate ids, unknown or circular ``after``, and figures that make no sense."""
    _unique("job", [j.id for j in jobs])
    known = {j.id for j in jobs}
    for job in jobs:
        _check_job(job)
        unknown = sorted(set(job.after) - known)
        if unknown:
            raise UsageError(
                f"job {job.id}: expected `after` to name jobs of this plan, found {', '.join(unknown)}; add these jobs "
                "or remove them from `after`"
            )
    in_order(jobs)


def _check_job(job: Job) -> None:
    if not job.engines:
        raise UsageError(f"job {job.id}: expected at least one engine, found none; leave the job out")
    if job.placement not in get_args(PlacementRule):
        raise UsageError(
            f"job {job.id}: expected placement {', '.join(get_args(PlacementRule))}, found {job.placement!r}"
        )
    if job.overlap not in get_args(Overlap):
        raise UsageError(f"job {job.id}: expected overlap {', '.join(get_args(Overlap))}, found {job.overlap!r}")
    _number(f"job {job.id}: start_s", job.start_s)
    _number(f"job {job.id}: run_s", job.run_s)
    for engine in job.engines:
        _number(f"job {job.id}: GiB of {engine.role}", engine.gib, positive=True)
        if engine.devices < 1:
            raise UsageError(
                f"job {job.id}: expected {engine.role} to need at least 1 device, found {engine.devices}; give its "
                "tensor parallel size"
            )


def in_order(jobs: Sequence[Job]) -> list[Job]:
    """Return the jobs, each after those it waits for. Raises UsageError when they wait for each other."""
    done: set[str] = set()
    ordered: list[Job] = []
    left = list(jobs)
    while left:
        ready = [j for j in left if done.issuperset(j.after)]
        if not ready:
            raise UsageError(
                f"expected jobs that can be ordered, found {', '.join(j.id for j in left)} waiting for each other; "
                "remove one from `after`"
            )
        ordered += ready
        done.update(j.id for j in ready)
        left = [j for j in left if j.id not in done]
    return ordered


def tails(jobs: Sequence[Job]) -> dict[str, float]:
    """Return the seconds that must pass after the end of each job: the longest chain of jobs that wait for it."""
    after: dict[str, float] = {j.id: 0.0 for j in jobs}
    for job in reversed(in_order(jobs)):
        for earlier in job.after:
            after[earlier] = max(after[earlier], job.seconds + after[job.id])
    return after


def without(jobs: Sequence[Job], refused: Mapping[str, str]) -> list[Job]:
    """Return the jobs that were not refused, no longer waiting for the refused ones."""
    return [j._replace(after=tuple(a for a in j.after if a not in refused)) for j in jobs if j.id not in refused]


def _unique(kind: str, ids: Sequence[str]) -> None:
    twice = sorted(i for i, times in Counter(ids).items() if times > 1)
    if twice:
        raise UsageError(f"expected unique {kind} ids, found {', '.join(twice)} more than once; rename them")


def _number(what: str, value: float, positive: bool = False) -> None:
    if not math.isfinite(value) or value < 0 or (positive and value == 0):
        wanted = "a number above 0" if positive else "a number of seconds, 0 or more"
        raise UsageError(f"{what}: expected {wanted}, found {value}")
