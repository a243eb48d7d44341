"""Plans before engines cost anything: rules are tried in simulation, and the best one is what the run uses."""

from __future__ import annotations

import heapq
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from harness.schedule.bounds import lower_bound
from harness.schedule.model import Device, Job, Placement, check_devices, check_jobs, tails, without
from harness.schedule.packing import Fill, impossible, packer_of
from harness.schedule.scheduler import Clock, Rule, Scheduler

Policy = Callable[[Sequence[Job], Sequence[Device], Clock], Scheduler]

IMPROVED = ", improved"
PATIENCE = ((1.01, 0), (1.04, 3_000), (1.07, 6_000), (1.09, 12_000), (1.10, 24_000), (float("inf"), 90_000))
"""(makespan as a multiple of the lower bound, simulated starts of jobs after which no further rule is tried)"""
_SHARES = (0.3, 0.35, 0.35)
"""How often further rules are drawn afresh, are the best packed from its end, or are the best with jobs moved."""


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


class _Jumping:
    """A clock that is set from event to event."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def simulate(
    jobs: Sequence[Job],
    devices: Sequence[Device],
    policy: Policy = planned,
    seconds: Mapping[str, float] | None = None,
) -> Schedule:
    """Run a policy against a clock that jumps from end to end. ``seconds`` says, by job id, how long jobs really take
    where that is not what they were expected to take."""
    clock = _Jumping()
    scheduler = policy(jobs, devices, clock)
    slots = tuple(_play(scheduler, clock, seconds or {}))
    return Schedule(slots, scheduler.refused, tuple(devices), scheduler.rule.name)


def _play(scheduler: Scheduler, clock: _Jumping, seconds: Mapping[str, float]) -> Iterator[Slot]:
    """Each job with its times, when it starts."""
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


def best_rule(jobs: Sequence[Job], devices: Sequence[Device]) -> Rule:
    """The rule with the shortest simulated makespan, the first of equals. The same for the same jobs and devices.
    Raises UsageError when jobs or devices make no sense."""
    check_devices(devices)
    check_jobs(jobs)
    refused = impossible(jobs, devices)
    # Refused jobs have no say; their place in the order does not matter.
    behind = tuple(sorted(refused))
    left = without(jobs, refused)
    if not left:
        return Rule("critical path", behind)
    rule = _Trials(left, devices).run()
    return rule._replace(order=rule.order + behind)


class _Trials:
    """Rules tried one after the other: the known ones, then the best so far with parts of its order changed."""

    def __init__(self, jobs: Sequence[Job], devices: Sequence[Device]) -> None:
        self._jobs = jobs
        self._devices = devices
        self._packer = packer_of(jobs, devices)
        self._largest = max(d.memory_gib for d in devices)
        after = tails(jobs)
        self._chain = {j.id: j.seconds + after[j.id] for j in jobs}
        self._bound = lower_bound(jobs, devices, tries=2_000)
        self._starts = 0
        self._best: Rule | None = None
        self._makespan = float("inf")
        self._slots: list[Slot] = []
        """What the best rule gives, in order of start."""
        self._backwards = [j._replace(after=tuple(k.id for k in jobs if j.id in k.after)) for j in jobs]

    def run(self) -> Rule:
        for rule in self._known():
            self._both_ways(rule)
            if self._good_enough():
                break
        assert self._best is not None
        generator = random.Random(len(self._jobs))
        while not self._good_enough():
            kind = generator.choices(("drawn", "packed", "shaken"), _SHARES)[0]
            if kind == "drawn":
                self._both_ways(self._drawn(generator))
            elif kind == "packed":
                self._try(self._there_and_back(self._best, self._slots, generator))
            else:
                changed = self._best._replace(order=self._shaken(self._best.order, generator))
                self._try(changed._replace(name=_improved(self._best.name)))
        return self._best

    def _both_ways(self, rule: Rule) -> None:
        slots = self._try(rule, whole=True)
        if not self._good_enough():
            self._try(self._there_and_back(rule, slots))

    def _drawn(self, generator: random.Random) -> Rule:
        """Which of time, width and what waits for a job should count how much differs from matrix to matrix, and there
        are far fewer weights than orders: with many jobs, drawing weights finds what moving single jobs does not."""
        seconds, width, wait = generator.uniform(0.3, 1.2), generator.uniform(-0.2, 1.0), generator.uniform(0.0, 3.0)
        noise = generator.choice((0.0, 0.05, 0.15))
        fill: Fill = generator.choice(("waste", "tight"))
        weight = {
            j.id: seconds * math.log(max(j.seconds, 1.0))
            + width * math.log(_width(j, self._largest))
            + wait * (self._chain[j.id] - j.seconds) / (self._bound or 1.0)
            + generator.gauss(0.0, noise)
            for j in self._jobs
        }
        return Rule(f"drawn weights, {fill}", tuple(sorted(weight, key=lambda i: (-weight[i], i))), fill)

    def _there_and_back(self, rule: Rule, found: Sequence[Slot], generator: random.Random | None = None) -> Rule:
        """The order in which jobs start when a schedule is packed from its end: what may start late then does, and
        what has to be over early goes first. With a generator, jobs that end at about the same time change places."""
        near = 0.1 * max(s.end_s for s in found)
        ends = {s.placement.job.id: s.end_s + (generator.uniform(-near, near) if generator else 0.0) for s in found}
        last_first = tuple(sorted(ends, key=lambda i: -ends[i]))
        clock = _Jumping()
        scheduler = Scheduler(self._backwards, self._devices, rule._replace(order=last_first), clock, self._packer)
        slots = list(_play(scheduler, clock, {}))
        self._starts += len(slots)
        order = tuple(s.placement.job.id for s in sorted(slots, key=lambda s: -s.end_s))
        return rule._replace(name=_improved(rule.name), order=order)

    def _good_enough(self) -> bool:
        """What is near the bound is found quickly, or further tries hardly help."""
        ratio = self._makespan / self._bound if self._bound else 1.0
        return self._best is not None and any(ratio <= r and self._starts >= s for r, s in PATIENCE)

    def _try(self, rule: Rule, whole: bool = False) -> list[Slot]:
        """What the rule gives; unless it is wanted whole, only until it is worse than the best."""
        clock = _Jumping()
        scheduler = Scheduler(self._jobs, self._devices, rule, clock, self._packer)
        makespan = 0.0
        slots = []
        for slot in _play(scheduler, clock, {}):
            job = slot.placement.job.id
            self._starts += 1
            slots.append(slot)
            makespan = max(makespan, slot.start_s + self._chain[job])
            if makespan > self._makespan and not whole:
                return slots
        # One that is as good replaces the best: a search that only takes better ones is soon stuck.
        if makespan < self._makespan or (makespan == self._makespan and rule.name.endswith(IMPROVED)):
            self._best, self._makespan, self._slots = rule, makespan, slots
        return slots

    def _known(self) -> Iterator[Rule]:
        orders = _orders(self._jobs, self._devices)
        fills: tuple[Fill, ...] = ("waste", "tight")
        for fill in fills:
            for name, order in orders.items():
                yield Rule(f"{name}, {fill}", order, fill)
        for name, order in list(orders.items())[:3]:
            yield Rule(f"{name}, waste, no reservation", order, "waste", reserve=False)

    def _shaken(self, order: Sequence[str], generator: random.Random) -> tuple[str, ...]:
        """One to three jobs moved: any to anywhere, or one that starts late to a place before its own."""
        changed = list(order)
        late = [s.placement.job.id for s in self._slots[-max(3, len(self._slots) // 3) :]]
        for _ in range(generator.choice((1, 1, 2, 3))):
            if generator.random() < 0.5:
                place = changed.index(generator.choice(late))
                changed.insert(generator.randint(0, place), changed.pop(place))
            else:
                job = changed.pop(generator.randrange(len(changed)))
                changed.insert(generator.randint(0, len(changed)), job)
        return tuple(changed)


def _improved(name: str) -> str:
    return name.removesuffix(IMPROVED) + IMPROVED


def _width(job: Job, largest: float) -> float:
    """Devices' worth of memory; an engine that leaves no room for another counts in full."""
    full = largest if not job.share else 0.0
    return sum(e.devices * (max(e.gib, full) / largest if e.gib <= largest / 2 else 1.0) for e in job.engines)


def _orders(jobs: Sequence[Job], devices: Sequence[Device]) -> dict[str, tuple[str, ...]]:
    after = tails(jobs)
    largest = max(d.memory_gib for d in devices)

    def width(job: Job) -> float:
        return _width(job, largest)

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
