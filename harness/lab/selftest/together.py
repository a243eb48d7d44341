"""Setups of a self-test on GPUs: several at a time, as many as fit, and the largest in parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from harness.engines.inventory import Inventory, jobs_of
from harness.lab.selftest.setups import Setup, parted, setup_expected_s
from harness.profiles.cells import Plan, start_expected_s
from harness.prompts.model import PromptSet
from harness.scheduling.model import Job
from harness.scheduling.packing import impossible
from harness.scheduling.planning import simulate

MOST_PARTS = 6
"""Parts of a setup beyond which more starts of engines gain nothing."""


class Packed(NamedTuple):
    """Setups, and the jobs that they are for the scheduler."""

    setups: tuple[Setup, ...]
    jobs: tuple[Job, ...]
    seconds: float
    """How long they take by simulation."""


def best_parts(setups: Sequence[Setup], prompts: PromptSet, inventory: Inventory) -> Packed:
    """Return the setups with the largest in as many parts as make the self-test the shortest."""
    largest = max(setups, key=lambda setup: setup_expected_s(setup, prompts))
    tried = []
    for parts in range(1, MOST_PARTS + 1):
        whole = [p for s in setups for p in (parted(s, parts, prompts) if s is largest else [s])]
        jobs = tuple(_job(setup, prompts, inventory) for setup in whole)
        tried.append(Packed(tuple(whole), jobs, simulate(jobs, inventory.devices).makespan_s))
    return min(tried, key=lambda packed: packed.seconds)


def _job(setup: Setup, prompts: PromptSet, inventory: Inventory) -> Job:
    plan = Plan(setup.group.cells, (setup.group,))
    (job,) = jobs_of(plan, (), setup.profile, inventory, rescore=False)
    start = start_expected_s(setup.group)
    job = job._replace(id=setup.id, start_s=start, run_s=setup_expected_s(setup, prompts) - start)
    if setup.plain is None or setup.group.topology == "single":
        return job
    # Room for the plain engine, which is started beside a pair, where there is any.
    beside = job._replace(engines=(*job.engines, inventory.need(setup.profile, "single")))
    return job if impossible([beside], inventory.devices) else beside
