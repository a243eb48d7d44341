"""Jobs that follow others by their own waiting where all fit at the same time."""

from __future__ import annotations

from harness.scheduling.model import Device, EngineNeed, Job
from harness.scheduling.planning import all_at_once, simulate

DEVICES = [Device(f"gpu-{n}", "node", 80.0, n) for n in range(2)]


def jobs(gib: float) -> tuple[Job, ...]:
    others = tuple(Job(f"j{n}", (EngineNeed("single", 1, gib),), 10.0, 50.0) for n in range(3))
    return (*others, Job("last", (EngineNeed("single", 1, gib),), 10.0, 50.0, after=tuple(j.id for j in others)))


def test_jobs_that_all_fit_need_no_order():
    found = all_at_once(jobs(40.0), DEVICES)
    assert all(not j.after for j in found) and simulate(found, DEVICES).makespan_s == 60.0


def test_jobs_that_do_not_all_fit_keep_theirs():
    for gib in (41.0, 90.0):
        assert all_at_once(jobs(gib), DEVICES) == jobs(gib)


def test_memory_that_suffices_in_sum_may_not_hold_them_all():
    assert all_at_once(
        jobs(38.0), [Device("a", "node", 76.0, 0), Device("b", "node", 37.0, 1), Device("c", "n", 40.0, 2)]
    )[-1].after
