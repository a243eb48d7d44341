"""What to start next, and where. The same object serves the runner (wall clock) and the simulation (its own clock).

The jobs come in an order of importance. Whatever fits is started in that order; the first that does not fit gets a
reservation: the devices on which it can start the earliest, going by what running jobs are expected to take. Later jobs
are started only where they do not delay it, so a job that needs many devices is not starved by small ones.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from harness.errors import UsageError
from harness.schedule.model import Device, Job, Placement, check_devices, check_jobs
from harness.schedule.packing import Fill, Packer, Picks, Shape, impossible, packer_of, shape_of

Clock = Callable[[], float]


class Rule(NamedTuple):
    """How a scheduler decides; see `harness.schedule.planning` for those in use."""

    name: str
    order: tuple[str, ...]
    """Every job id, the most important first."""
    fill: Fill = "tight"
    reserve: bool = True
    """Whether the first job that does not fit holds devices free for itself."""
    at_once: int | None = None
    """Most jobs that run at one time; None leaves it to the devices."""


class Loss(NamedTuple):
    """What the end of devices means."""

    jobs: tuple[str, ...]
    """Running jobs with engines on them, by id. Each still has to be reported with ``done``."""
    refused: dict[str, str]
    """Waiting jobs that fit nowhere any more, with the reason."""


class _Running(NamedTuple):
    takes: tuple[tuple[int, int], ...]
    """(position, MiB) of everything that the job holds."""
    placement: Placement
    end: float


class Scheduler:
    """Call from any thread. ``start_next`` says what to start now; report every start's end with ``done``.

    ``packer`` of the same jobs and devices may be handed in to profit from what it remembers.
    Raises UsageError when jobs, devices or the rule make no sense. Jobs that can never fit are in ``refused`` from the
    beginning; those that wait for them do not wait.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        devices: Sequence[Device],
        rule: Rule,
        clock: Clock = time.monotonic,
        packer: Packer | None = None,
    ) -> None:
        check_devices(devices)
        check_jobs(jobs)
        _check_rule(rule, jobs)
        self._lock = threading.RLock()
        self._rule = rule
        self._clock = clock
        self._shapes = {j.id: shape_of(j) for j in jobs}
        self._packer = packer or packer_of(jobs, devices)
        self._position = {d.id: i for i, d in enumerate(self._packer.devices)}
        self._free = list(self._packer.size)
        self._gone: dict[str, str] = {}
        by_id = {j.id: j for j in jobs}
        self._waiting = {i: by_id[i] for i in rule.order}
        self._running: dict[str, _Running] = {}
        self._over: dict[str, bool] = {}
        self._hit: set[str] = set()
        self._refused: dict[str, str] = {}
        self._refuse(impossible(jobs, devices, self._packer))

    # --- what the caller asks ---------------------------------------------------------------------------------------

    @property
    def rule(self) -> Rule:
        return self._rule

    @property
    def waiting(self) -> tuple[str, ...]:
        """Ids of jobs that have not been started, the most important first."""
        with self._lock:
            return tuple(self._waiting)

    @property
    def running(self) -> tuple[str, ...]:
        """Ids of jobs that hold devices: started, and not yet reported with ``done``."""
        with self._lock:
            return tuple(self._running)

    @property
    def finished(self) -> tuple[str, ...]:
        """Ids of jobs that were reported with ``done``, in that order."""
        with self._lock:
            return tuple(self._over)

    @property
    def failed(self) -> tuple[str, ...]:
        """Ids of finished jobs that were not ok, or lost a device while they ran."""
        with self._lock:
            return tuple(i for i, ok in self._over.items() if not ok)

    @property
    def refused(self) -> dict[str, str]:
        """Reasons, by id, of jobs that never run because they fit nowhere (any more)."""
        with self._lock:
            return dict(self._refused)

    @property
    def gone(self) -> dict[str, str]:
        """Reasons, by device id, of devices that are never used again."""
        with self._lock:
            return dict(self._gone)

    @property
    def over(self) -> bool:
        """Whether there is nothing left to start or to wait for."""
        with self._lock:
            return not self._waiting and not self._running

    # --- what the caller reports ------------------------------------------------------------------------------------

    def done(self, job_id: str, ok: bool = True) -> None:
        """The engines of a job have ended **and their memory was given back**: its devices may be used again.

        A device that did not give its memory back is put away with ``quarantine`` first. Raises UsageError when the job
        does not run.
        """
        with self._lock:
            if job_id not in self._running:
                raise UsageError(
                    f"job {job_id}: expected the end of a running job ({', '.join(self._running) or 'none runs'}), "
                    "found one that does not run; report each start once"
                )
            job = self._running.pop(job_id)
            self._give_back(job, self._free)
            self._over[job_id] = ok and job_id not in self._hit

    def _give_back(self, job: _Running, free: list[int]) -> None:
        """Add to ``free`` what the job holds, but for devices that are never used again."""
        for position, mib in job.takes:
            if not self._gone or self._packer.devices[position].id not in self._gone:
                free[position] += mib

    def lost(self, name: str, reason: str = "") -> Loss:
        """A device or a node (by id) is gone with all engines on it. Raises UsageError when there is none so called."""
        ids = [d.id for d in self._packer.devices if name in (d.id, d.node)]
        if not ids:
            raise UsageError(f"expected a device or node of this plan, found {name!r}")
        with self._lock:
            refused = self._put_away(ids, reason or f"{name} was lost")
            hit = tuple(i for i, r in self._running.items() if not r.placement.devices.isdisjoint(ids))
            self._hit.update(hit)
            return Loss(hit, refused)

    def quarantine(self, device_id: str, reason: str) -> Loss:
        """Start nothing more on a device, for example because its memory was not given back. Jobs that run on it go on.
        Raises UsageError when there is no such device."""
        if device_id not in self._position:
            raise UsageError(f"expected a device of this plan, found {device_id!r}")
        with self._lock:
            return Loss((), self._put_away([device_id], reason))

    def _put_away(self, ids: Sequence[str], reason: str) -> dict[str, str]:
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

    # --- what to start ----------------------------------------------------------------------------------------------

    def start_next(self) -> list[Placement]:
        """Jobs to start now, with their devices, which count as taken from here on."""
        with self._lock:
            return _Round(self, self._clock()).run()

    def _ready(self, job: Job) -> bool:
        return all(a in self._over or a in self._refused for a in job.after)


class _Round:
    """One call of ``start_next``."""

    def __init__(self, owner: Scheduler, now: float) -> None:
        self._s = owner
        self._now = now
        self._blocked: set[Shape] = set()
        """Shapes that fit nowhere at present; taking more cannot make them fit."""
        self._hopeless: set[Shape] = set()
        """Shapes that fit nowhere beside the reservation."""
        self._reserved_at = float("inf")
        self._later: list[int] | None = None
        """MiB that stay free at ``_reserved_at`` when the job that has the reservation has started."""
        self._both: list[int] | None = None
        """MiB that are free both now and then; None when not known."""

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
        if shape in self._blocked:
            return None
        ends_in_time = self._now + job.seconds <= self._reserved_at
        if self._later is None or ends_in_time:
            picks = self._find(shape, self._s._free)
            if picks is None:
                self._blocked.add(shape)
                if self._later is None and self._s._rule.reserve:
                    self._reserve(shape)
            return picks
        if shape in self._hopeless:
            return None
        if self._both is None:
            self._both = list(map(min, self._s._free, self._later))
        picks = self._find(shape, self._both)
        if picks is None:
            self._hopeless.add(shape)
        return picks

    def _find(self, shape: Shape, free: Sequence[int]) -> Picks | None:
        return self._s._packer.find(shape, free, self._s._rule.fill)

    def _start(self, job: Job, picks: Picks) -> Placement:
        s = self._s
        end = self._now + job.seconds
        takes = tuple(s._packer.takes(s._shapes[job.id], picks))
        self._both = None
        for position, mib in takes:
            s._free[position] -= mib
            if self._later is not None and end > self._reserved_at:
                self._later[position] -= mib
        placement = s._packer.placement(job, picks)
        s._running[job.id] = _Running(takes, placement, end)
        del s._waiting[job.id]
        return placement

    def _reserve(self, shape: Shape) -> None:
        """Find the earliest time at which the shape fits, as running jobs end. More free memory never makes a shape fit
        worse, so the time is found by halving."""
        s = self._s
        ends = sorted({max(r.end, self._now) for r in s._running.values()})
        low, high = 0, len(ends) - 1
        found: tuple[Picks, list[int]] | None = None
        while low <= high:
            middle = (low + high) // 2
            free = self._free_at(ends[middle])
            picks = self._find(shape, free)
            if picks is None:
                low = middle + 1
            else:
                found, high = (picks, free), middle - 1
        if found is None:
            return
        picks, free = found
        for position, mib in s._packer.takes(shape, picks):
            free[position] -= mib
        self._reserved_at, self._later = ends[low], free

    def _free_at(self, moment: float) -> list[int]:
        s = self._s
        free = list(s._free)
        for job in s._running.values():
            if job.end <= moment:
                s._give_back(job, free)
        return free


def _check_rule(rule: Rule, jobs: Sequence[Job]) -> None:
    if sorted(rule.order) != sorted(j.id for j in jobs):
        raise UsageError(f"rule {rule.name}: expected an order of all {len(jobs)} jobs, found {len(rule.order)} ids")
    if rule.at_once is not None and rule.at_once < 1:
        raise UsageError(f"rule {rule.name}: expected at least one job at a time, found {rule.at_once}")
