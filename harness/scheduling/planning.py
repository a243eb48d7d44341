"""Planning by simulation: each rule is tried without engines, and the run uses the one that finishes first."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from harness.scheduling.model import Device, Job, Placement, check_devices, check_jobs, tails, without
from harness.scheduling.packing import Fill, impossible
from harness.scheduling.scheduler import Clock, PlacementRule, Scheduler

Policy = Callable[[Sequence[Job], Sequence[Device], Clock], Scheduler]


class Slot(NamedTuple):
    """A simulated job with its times."""

    placement: Placement
    start_s: float
    end_s: float


class Schedule(NamedTuple):
    """A simulated schedule, in order of start; times are seconds since the beginning."""

    slots: tuple[Slot, ...]
    refused: dict[str, str]
    rule: str

    @property
    def makespan_s(self) -> float:
        return max((s.end_s for s in self.slots), default=0.0)


def one_by_one(jobs: Sequence[Job], devices: Sequence[Device], clock: Clock = time.monotonic) -> Scheduler:
    """Return a scheduler that runs one job at a time, in the given order."""
    rule = PlacementRule("one by one", tuple(j.id for j in jobs), "first", reserve=False, at_once=1)
    return Scheduler(jobs, devices, rule, clock)


def planned(
    jobs: Sequence[Job], devices: Sequence[Device], clock: Clock = time.monotonic, first: Sequence[str] = ()
) -> Scheduler:
    """Return the scheduler for real runs, with the rule of the shortest simulated makespan; ``first`` are ids of jobs
    that the others need not wait for, and that matter most should the run be ended."""
    rule = best_rule(jobs, devices)
    order = (*(i for i in rule.order if i in first), *(i for i in rule.order if i not in first))
    return Scheduler(jobs, devices, rule._replace(order=order), clock)


def all_at_once(jobs: Sequence[Job], devices: Sequence[Device]) -> tuple[Job, ...]:
    """Return the jobs without their order if all of them can start at the same time: one that comes after others then
    waits for their ends itself, and need not start only then."""
    free = tuple(job._replace(after=()) for job in jobs)
    room, wanted = sum(d.memory_gib for d in devices), sum(e.devices * e.gib for job in jobs for e in job.engines)
    if wanted > room or not any(job.after for job in jobs):
        return tuple(jobs)
    schedule = simulate(free, devices)
    at_once = not schedule.refused and all(slot.start_s == 0 for slot in schedule.slots)
    return free if at_once else tuple(jobs)


class _Jumping:
    """A clock that is set from event to event."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def simulate(
    jobs: Sequence[Job], devices: Sequence[Device], policy: Policy = planned, seconds: Mapping[str, float] | None = None
) -> Schedule:
    """Run a policy against a clock that jumps from one end of a job to the next.

    ``seconds`` gives, by job id, the actual duration of jobs that do not take as long as expected.
    """
    clock = _Jumping()
    scheduler = policy(jobs, devices, clock)
    return Schedule(tuple(_play(scheduler, clock, seconds or {})), scheduler.refused, scheduler.rule.name)


def _play(scheduler: Scheduler, clock: _Jumping, seconds: Mapping[str, float]) -> Iterator[Slot]:
    """Yield each job with its times as it starts."""
    ends: list[tuple[float, str]] = []
    while True:
        for placement in scheduler.start_next():
            job = placement.job
            end = clock.now + seconds.get(job.id, job.seconds)
            heapq.heappush(ends, (end, job.id))
            yield Slot(placement, clock.now, end)
        if not ends:
            return
        clock.now = ends[0][0]
        while ends and ends[0][0] <= clock.now:
            scheduler.done(heapq.heappop(ends)[1])


def best_rule(jobs: Sequence[Job], devices: Sequence[Device]) -> PlacementRule:
    """Return the rule with the shortest simulated makespan, the first of equals.

    The result depends on jobs and devices alone. Raises UsageError when these make no sense.
    """
    check_devices(devices)
    check_jobs(jobs)
    refused = impossible(jobs, devices)
    left = without(jobs, refused)

    def makespan(rule: PlacementRule) -> float:
        return simulate(left, devices, lambda j, d, clock: Scheduler(j, d, rule, clock)).makespan_s

    rule = _shortest(_rules(left, devices), makespan, least_s(left, devices))
    # The position of refused jobs in the order does not matter.
    return rule._replace(order=rule.order + tuple(refused))


def _shortest(
    rules: Iterable[PlacementRule], makespan: Callable[[PlacementRule], float], least: float
) -> PlacementRule:
    """Return the rule with the shortest makespan, the first of equals. Of rules that do the same, one is simulated, and
    none after one that takes as little as any could."""
    by_what_it_does: dict[tuple[object, ...], PlacementRule] = {}
    for rule in rules:
        by_what_it_does.setdefault((rule.order, rule.fill), rule)
    best, shortest = next(iter(by_what_it_does.values())), math.inf
    for rule in by_what_it_does.values():
        if (seconds := makespan(rule)) < shortest:
            best, shortest = rule, seconds
        if shortest <= least:
            break
    return best


def least_s(jobs: Sequence[Job], devices: Sequence[Device]) -> float:
    """Return seconds that no schedule of the jobs goes below: those of the longest chain, and those that they take
    where the devices' memory is full all the time."""
    after = tails(jobs)
    room = sum(d.memory_gib for d in devices)
    held = sum(job.seconds * sum(e.devices * e.gib for e in job.engines) for job in jobs)
    return max(held / room if room else 0.0, max((j.seconds + after[j.id] for j in jobs), default=0.0))


def _rules(jobs: Sequence[Job], devices: Sequence[Device]) -> Iterator[PlacementRule]:
    """Yield each sorted order with each way of choosing devices."""
    fills: tuple[Fill, ...] = ("waste", "tight")
    orders = _orders(jobs, devices)
    for fill in fills:
        for name, order in orders.items():
            yield PlacementRule(f"{name}, {fill}", order, fill)


def _orders(jobs: Sequence[Job], devices: Sequence[Device]) -> dict[str, tuple[str, ...]]:
    """Return the job ids sorted by each measure of importance, the most important first."""
    after = tails(jobs)
    largest = max((d.memory_gib for d in devices), default=1.0)
    chain = {j.id: j.seconds + after[j.id] for j in jobs}
    width = {j.id: _width(j, largest) for j in jobs}
    keys: dict[str, Callable[[Job], tuple[float, ...]]] = {
        "critical path": lambda j: (chain[j.id], width[j.id]),
        "area": lambda j: (after[j.id] + j.seconds * width[j.id], chain[j.id]),
        "chain × width": lambda j: (chain[j.id] * width[j.id], chain[j.id]),
        "width": lambda j: (width[j.id], chain[j.id]),
        "chain × root of width": lambda j: (chain[j.id] * width[j.id] ** 0.5, chain[j.id]),
        "wait, then width": lambda j: (after[j.id], width[j.id], j.seconds),
    }
    return {
        name: tuple(j.id for j in sorted(jobs, key=lambda j: (*(-v for v in key(j)), j.id)))
        for name, key in keys.items()
    }


def _width(job: Job, largest: float) -> float:
    """Return the memory of a job in devices; an engine that leaves no room for another counts in full."""
    full = largest if not job.share else 0.0
    return sum(e.devices * (max(e.gib, full) / largest if e.gib <= largest / 2 else 1.0) for e in job.engines)
