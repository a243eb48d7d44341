"""A lower bound of the makespan for a few jobs, by trying every order.

Jobs start at the beginning or when other jobs end, in every combination that memory allows. Each set of running jobs
is placed anew, as if engines could move to other devices: that can only shorten a schedule, so the result is still a
lower bound. The search proves that a time is too short; if the tries run out, nothing is proven.
"""

from __future__ import annotations

from collections.abc import Sequence

from harness.scheduling.model import Device, Job, tails
from harness.scheduling.packing import Packer, Shape, packer_of, shape_of

MOST_JOBS = 12


MOST_DEVICES = 8
_STEPS = 5
"""Bisection steps between the proven bound and a possible makespan."""


class _OutOfTries(Exception):
    pass


class _Proof:
    """Tries to find a schedule that takes no more than ``limit`` seconds."""

    def __init__(self, jobs: Sequence[Job], packer: Packer, tries: int) -> None:
        after = tails(jobs)
        self._jobs = sorted(jobs, key=lambda j: (-j.seconds - after[j.id], j.id))
        self._packer = packer
        self._fits: dict[frozenset[int], bool] = {}
        self._tries = tries
        self._limit = 0.0
        number = {j.id: i for i, j in enumerate(self._jobs)}
        self._before = [frozenset(number[a] for a in j.after) for j in self._jobs]
        self._chain = [j.seconds + after[j.id] for j in self._jobs]
        # Memory times time of each job: that of the remaining jobs must fit into what is left of the limit.
        total = sum(packer.size)
        self._area = [j.seconds * sum(n * m for n, m in shape_of(j).engines) / total for j in self._jobs]

    def possible(self, limit: float) -> bool:
        """Return whether such a schedule exists. Raises _OutOfTries when the tries do not suffice."""
        self._limit = limit
        every = frozenset(range(len(self._jobs)))
        return self._go(0.0, {}, every, frozenset(), frozenset())

    def _go(
        self, now: float, running: dict[int, float], left: frozenset[int], passed: frozenset[int], tried: frozenset[int]
    ) -> bool:
        """Search on from one moment.

        ``passed`` are jobs that fitted at the last moment but were not started; starting one now, with nothing started
        in between, cannot be better. ``tried`` are jobs whose start at this moment is considered elsewhere.
        """
        if not left:
            return True
        self._tries -= 1
        if self._tries < 0:
            raise _OutOfTries
        held = sum(self._area[i] * (end - now) / (self._jobs[i].seconds or 1.0) for i, end in running.items())
        room = self._limit - now + 1e-6
        if held + sum(self._area[i] for i in left) > room or any(self._chain[i] > room for i in left):
            return False
        ready = [i for i in sorted(left) if self._before[i].isdisjoint(left) and self._before[i].isdisjoint(running)]
        fitting = [i for i in ready if self._together(frozenset(running) | {i})]
        not_now = passed | tried
        for i in fitting:
            if i not in not_now:
                longer = {**running, i: now + self._jobs[i].seconds}
                if self._go(now, longer, left - {i}, frozenset(), not_now):
                    return True
                not_now |= {i}
        if not running:
            return False
        end = min(running.values())
        still = {i: e for i, e in running.items() if e > end}
        return self._go(end, still, left, frozenset(fitting), frozenset())

    def _together(self, running: frozenset[int]) -> bool:
        if running not in self._fits:
            self._fits[running] = self._fit(running)
        return self._fits[running]

    def _fit(self, running: frozenset[int]) -> bool:
        shape = self._merged(running)
        if sum(n * m for n, m in shape.engines) > sum(self._packer.size):
            return False
        return self._packer.find(shape, self._packer.size, "tight") is not None

    def _merged(self, running: frozenset[int]) -> Shape:
        """Return all engines as one job that may be placed anywhere; exclusive engines need whole devices."""
        shapes = [shape_of(self._jobs[i]) for i in sorted(running)]
        smallest = min(self._packer.size)
        engines = [(n, m if s.share else max(m, smallest)) for s in shapes for n, m in s.engines]
        return Shape(tuple(engines), "any", True, "any")


def raised(jobs: Sequence[Job], devices: Sequence[Device], bound: float, tries: int) -> float:
    """Return the bound in seconds, or a higher one proven within ``tries``. All jobs must fit on the devices."""
    if not jobs or len(jobs) > MOST_JOBS or len(devices) > MOST_DEVICES or tries <= 0:
        return bound
    proof = _Proof(jobs, packer_of(jobs, devices), tries)
    low, step = bound, bound / 100
    try:
        while not proof.possible(low + step):
            low, step = low + step, 2 * step
        high = low + step
        for _ in range(_STEPS):
            middle = (low + high) / 2
            low, high = (low, middle) if proof.possible(middle) else (middle, high)
    except _OutOfTries:
        pass
    return low
