"""Plans before engines cost anything: rules are tried in simulation, and the best one is what the run uses."""

from __future__ import annotations

import heapq
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from harness.schedule.bounds import lower_bound
from harness.schedule.model import Device, Job, Placement, check_devices, check_jobs, tails, without
from harness.schedule.packing import Fill, impossible
from harness.schedule.scheduler import Clock, Rule, Scheduler

Policy = Callable[[Sequence[Job], Sequence[Device], Clock], Scheduler]

GOOD_ENOUGH = 1.01
"""Of the lower bound: no further rule is tried."""
STARTS = 6_000
"""Simulated starts of jobs that trying rules may cost: few jobs are tried in many orders, many jobs in few."""


class Slot(NamedTuple):
    placement: Placement
    start_s: float
    end_s: float


class Schedule(NamedTuple):
    """Times in seconds since the beginning, in order of start."""

    slots: tuple[Slot, ...]
    refused: dict[str, str]
    devices: tuple[Device, ...]
    rule: str

    @property
    def makespan_s(self) -> float:
        return max((s.end_s for s in self.slots), default=0.0)

    def use(self) -> dict[str, float]:
        """By device id, the share of the makespan in which it hosts an engine."""
        return {d.id: self._busy_s(d.id) / (self.makespan_s or 1.0) for d in self.devices}

    def _busy_s(self, device: str) -> float:
        busy = until = 0.0
        for slot in self.slots:
            if device in slot.placement.devices:
                busy += max(0.0, slot.end_s - max(slot.start_s, until))
                until = max(until, slot.end_s)
        return busy


def one_by_one(jobs: Sequence[Job], devices: Sequence[Device], clock: Clock = time.monotonic) -> Scheduler:
    """A scheduler that runs one job at a time, in the order given."""
    rule = Rule("one by one", tuple(j.id for j in jobs), "first", reserve=False, at_once=1)
    return Scheduler(jobs, devices, rule, clock)


def first_fit(jobs: Sequence[Job], devices: Sequence[Device], clock: Clock = time.monotonic) -> Scheduler:
    """A scheduler that starts whatever fits, in the order given, on the first devices with room."""
    rule = Rule("first fit", tuple(j.id for j in jobs), "first", reserve=False)
    return Scheduler(jobs, devices, rule, clock)


def planned(jobs: Sequence[Job], devices: Sequence[Device], clock: Clock = time.monotonic) -> Scheduler:
    """The scheduler for real runs: its rule is the one with the shortest simulated makespan."""
    return Scheduler(jobs, devices, best_rule(jobs, devices), clock)


def simulate(
    jobs: Sequence[Job],
    devices: Sequence[Device],
    policy: Policy = planned,
    seconds: Mapping[str, float] | None = None,
) -> Schedule:
    """Run a policy against a clock that jumps from end to end. ``seconds`` says, by job id, how long jobs really take
    where that is not what they were expected to take."""
    now = 0.0
    scheduler = policy(jobs, devices, lambda: now)
    slots: list[Slot] = []
    ends: list[tuple[float, str]] = []
    while True:
        for placement in scheduler.start_next():
            job = placement.job
            end = now + (seconds or {}).get(job.id, job.seconds)
            slots.append(Slot(placement, now, end))
            heapq.heappush(ends, (end, job.id))
        if not ends:
            return Schedule(tuple(slots), scheduler.refused, tuple(devices), scheduler.rule.name)
        now = ends[0][0]
        while ends and ends[0][0] <= now:
            scheduler.done(heapq.heappop(ends)[1])


def best_rule(jobs: Sequence[Job], devices: Sequence[Device]) -> Rule:
    """The rule with the shortest simulated makespan, the first of equals. The same for the same jobs and devices.
    Raises UsageError when jobs or devices make no sense."""
    check_devices(devices)
    check_jobs(jobs)
    refused = impossible(jobs, devices)
    left = without(jobs, refused)
    # Refused jobs have no say; their place in the order does not matter.
    behind = tuple(sorted(refused))
    if not left:
        return Rule("critical path", behind)
    bound = lower_bound(left, devices)
    tries = max(2, STARTS // len(left))
    best: tuple[float, Rule] | None = None
    for number, rule in enumerate(_rules(left, devices, lambda: best)):
        makespan = simulate(left, devices, lambda j, d, c, rule=rule: Scheduler(j, d, rule, c)).makespan_s
        if best is None or makespan < best[0]:
            best = (makespan, rule)
        if best[0] <= GOOD_ENOUGH * bound or number + 1 >= tries:
            break
    assert best is not None
    return best[1]._replace(order=best[1].order + behind)


def _rules(
    jobs: Sequence[Job], devices: Sequence[Device], best: Callable[[], tuple[float, Rule] | None]
) -> Iterator[Rule]:
    """Rules to try, the most promising first; then the best so far with parts of its order changed, without end."""
    orders = _orders(jobs, devices)
    fills: tuple[Fill, ...] = ("waste", "tight")
    for fill in fills:
        for name, order in orders.items():
            yield Rule(f"{name}, {fill}", order, fill)
    for name, order in list(orders.items())[:3]:
        yield Rule(f"{name}, waste, no reservation", order, "waste", reserve=False)
    generator = random.Random(len(jobs))
    while True:
        found = best()
        assert found is not None
        rule = found[1]
        name = rule.name.removesuffix(", improved")
        yield rule._replace(name=f"{name}, improved", order=_shaken(rule.order, generator))


def _shaken(order: Sequence[str], generator: random.Random) -> tuple[str, ...]:
    """One to three jobs moved to other places."""
    changed = list(order)
    for _ in range(generator.randint(1, 3)):
        job = changed.pop(generator.randrange(len(changed)))
        changed.insert(generator.randint(0, len(changed)), job)
    return tuple(changed)


def _orders(jobs: Sequence[Job], devices: Sequence[Device]) -> dict[str, tuple[str, ...]]:
    after = tails(jobs)
    largest = max(d.memory_gib for d in devices)

    def width(job: Job) -> float:
        """Devices' worth of memory; an engine that leaves no room for another counts in full."""
        full = largest if not job.share else 0.0
        return sum(e.devices * (max(e.gib, full) / largest if e.gib <= largest / 2 else 1.0) for e in job.engines)

    def chain(job: Job) -> float:
        return job.seconds + after[job.id]

    keys: dict[str, Callable[[Job], tuple[float, ...]]] = {
        "critical path": lambda j: (chain(j), width(j)),
        "area": lambda j: (after[j.id] + j.seconds * width(j), chain(j)),
        "chain × width": lambda j: (chain(j) * width(j), chain(j)),
        "width": lambda j: (width(j), chain(j)),
        "chain × root of width": lambda j: (chain(j) * width(j) ** 0.5, chain(j)),
        "wait, then width": lambda j: (after[j.id], width(j), j.seconds),
    }
    return {
        name: tuple(j.id for j in sorted(jobs, key=lambda j: (*(-v for v in key(j)), j.id)))
        for name, key in keys.items()
    }
