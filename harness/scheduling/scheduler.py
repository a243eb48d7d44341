"""The scheduler: which job to start next, and where. It serves the runner and the simulation, each with its own clock.

Jobs have an order of importance. Those that fit are started in that order; the first that does not fit gets a
reservation: the devices on which it can start the earliest, given the expected ends of running jobs. Later jobs are
started only where they do not delay it, so that small jobs cannot starve one that needs many devices.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from harness.errors import UsageError
from harness.scheduling.model import Device, Job, Placement, check_devices, check_jobs
from harness.scheduling.packing import Fill, Picks, Shape, impossible, packer_of, shape_of

Clock = Callable[[], float]


class PlacementRule(NamedTuple):
    """How a scheduler decides; ``harness.scheduling.planning`` has the rules in use."""

    name: str
    order: tuple[str, ...]
    """Every job id, the most important first."""
    fill: Fill = "tight"
    reserve: bool = True
    """Whether the first job that does not fit reserves devices."""
    at_once: int | None = None
    """Most jobs that run at the same time; None sets no limit beyond the devices."""


class _Running(NamedTuple):
    takes: tuple[tuple[int, int], ...]
    """(position, MiB) of everything that the job holds."""
    placement: Placement
    end: float


class Scheduler:
    """A list scheduler: ``start_next`` returns the jobs to start now; report the end of each with ``done``.

    Not thread-safe. The constructor raises UsageError when jobs, devices or the rule make no sense. Jobs that can never
    fit are in ``refused`` from the beginning, and no job waits for them.
    """

    def __init__(
        self, jobs: Sequence[Job], devices: Sequence[Device], rule: PlacementRule, clock: Clock = time.monotonic
    ) -> None:
        check_devices(devices)
        check_jobs(jobs)
        _check_rule(rule, jobs)
        self._rule = rule
        self._clock = clock
        self._shapes = {j.id: shape_of(j) for j in jobs}
        self._packer = packer_of(jobs, devices)
        self._position = {d.id: i for i, d in enumerate(self._packer.devices)}
        self._free = list(self._packer.size)
        self._gone: dict[str, str] = {}
        by_id = {j.id: j for j in jobs}
        self._waiting = {i: by_id[i] for i in rule.order}
        self._running: dict[str, _Running] = {}
        self._over: set[str] = set()
        self._refused: dict[str, str] = {}
        self._refuse(impossible(jobs, devices))

    # --- queries ----------------------------------------------------------------------------------------------------

    @property
    def rule(self) -> PlacementRule:
        return self._rule

    @property
    def running(self) -> tuple[str, ...]:
        """Ids of jobs that hold devices: started and not yet reported with ``done``."""
        return tuple(self._running)

    @property
    def refused(self) -> dict[str, str]:
        """Why jobs never run, by id: they fit nowhere, or no longer do."""
        return dict(self._refused)

    @property
    def over(self) -> bool:
        """Whether there is nothing left to start or to wait for."""
        return not self._waiting and not self._running

    # --- events -----------------------------------------------------------------------------------------------------

    def done(self, job_id: str) -> None:
        """Report that a job's engines have ended **and their memory is free**, so that its devices may be used again.

        Call ``quarantine`` first for a device whose memory is not free. Raises UsageError when the job is not running.
        """
        if job_id not in self._running:
            raise UsageError(
                f"job {job_id}: expected the end of a running job ({', '.join(self._running) or 'none is running'}), "
                "found one that is not running; report the end of each start once"
            )
        self._give_back(self._running.pop(job_id), self._free)
        self._over.add(job_id)

    def _give_back(self, job: _Running, free: list[int]) -> None:
        """Add what the job holds to ``free``, except on devices that are never used again."""
        for position, mib in job.takes:
            if self._packer.devices[position].id not in self._gone:
                free[position] += mib

    def quarantine(self, name: str, reason: str) -> dict[str, str]:
        """Start nothing more on a device, or on any device of a node.

        Return the waiting jobs that no longer fit anywhere, with the reason. Jobs that run there keep what they hold
        until ``done``. Raises UsageError when no device or node has this id.
        """
        ids = [d.id for d in self._packer.devices if name in (d.id, d.node)]
        if not ids:
            raise UsageError(f"expected a device or node of this plan, found {name!r}")
        for device in ids:
            self._gone.setdefault(device, reason)
            self._free[self._position[device]] = 0
        left = [d for d in self._packer.devices if d.id not in self._gone]
        said = "; ".join(f"device {d}: {self._gone[d]}" for d in ids)
        refused = {i: f"{r} ({said})" for i, r in impossible(tuple(self._waiting.values()), left).items()}
        self._refuse(refused)
        return refused

    def _refuse(self, reasons: Mapping[str, str]) -> None:
        for job_id, reason in reasons.items():
            del self._waiting[job_id]
            self._refused[job_id] = reason

    # --- decisions --------------------------------------------------------------------------------------------------

    def start_next(self) -> list[Placement]:
        """Return the jobs to start now with their devices, which count as taken from here on."""
        return _Round(self, self._clock()).run()

    def _ready(self, job: Job) -> bool:
        return all(a in self._over or a in self._refused for a in job.after)


class _Round:
    """One call of ``start_next``."""

    def __init__(self, owner: Scheduler, now: float) -> None:
        self._s = owner
        self._now = now
        self._nowhere: set[tuple[Shape, bool]] = set()
        """(shape, whether it would end before the reservation) of shapes that fit nowhere in this round: starting
        further jobs cannot make them fit."""
        self._reserved_at = float("inf")
        self._later: list[int] | None = None
        """MiB that are still free at ``_reserved_at`` once the job with the reservation has started."""

    def run(self) -> list[Placement]:
        started: list[Placement] = []
        s = self._s
        for job in [j for j in s._waiting.values() if not j.after or s._ready(j)]:
            if s._rule.at_once is not None and len(s._running) >= s._rule.at_once:
                break
            picks = self._try(job)
            if picks is not None:
                started.append(self._start(job, picks))
        return started

    def _try(self, job: Job) -> Picks | None:
        shape = self._s._shapes[job.id]
        in_time = self._now + job.seconds <= self._reserved_at
        if (shape, in_time) in self._nowhere:
            return None
        free = self._s._free
        if self._later is not None and not in_time:
            free = list(map(min, free, self._later))
        picks = self._find(shape, free)
        if picks is None:
            self._nowhere.add((shape, in_time))
            if self._later is None and self._s._rule.reserve:
                self._reserve(shape)
        return picks

    def _find(self, shape: Shape, free: Sequence[int]) -> Picks | None:
        return self._s._packer.find(shape, free, self._s._rule.fill)

    def _start(self, job: Job, picks: Picks) -> Placement:
        s = self._s
        end = self._now + job.seconds
        takes = tuple(s._packer.takes(s._shapes[job.id], picks))
        for position, mib in takes:
            s._free[position] -= mib
            if self._later is not None and end > self._reserved_at:
                self._later[position] -= mib
        placement = s._packer.placement(job, picks)
        s._running[job.id] = _Running(takes, placement, end)
        del s._waiting[job.id]
        return placement

    def _reserve(self, shape: Shape) -> None:
        """Find the earliest expected end of a running job at which the shape fits, and reserve its devices."""
        for end in sorted({max(r.end, self._now) for r in self._s._running.values()}):
            free = self._free_at(end)
            picks = self._find(shape, free)
            if picks is not None:
                for position, mib in self._s._packer.takes(shape, picks):
                    free[position] -= mib
                self._reserved_at, self._later = end, free
                return

    def _free_at(self, moment: float) -> list[int]:
        s = self._s
        free = list(s._free)
        for job in s._running.values():
            if job.end <= moment:
                s._give_back(job, free)
        return free


def _check_rule(rule: PlacementRule, jobs: Sequence[Job]) -> None:
    if sorted(rule.order) != sorted(j.id for j in jobs):
        raise UsageError(f"rule {rule.name}: expected an order of all {len(jobs)} jobs, found {len(rule.order)} ids")
    if rule.at_once is not None and rule.at_once < 1:
        raise UsageError(f"rule {rule.name}: expected at least one job at a time, found {rule.at_once}")
