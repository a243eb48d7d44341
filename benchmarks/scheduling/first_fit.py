"""A scheduler without planning, for comparison."""

from __future__ import annotations

import time
from collections.abc import Sequence

from harness.scheduling.model import Device, Job
from harness.scheduling.scheduler import Clock, PlacementRule, Scheduler


def first_fit(jobs: Sequence[Job], devices: Sequence[Device], clock: Clock = time.monotonic) -> Scheduler:
    """Return a scheduler that starts whatever fits, in the given order, on the first devices with room."""
    rule = PlacementRule("first fit", tuple(j.id for j in jobs), "first", reserve=False)
    return Scheduler(jobs, devices, rule, clock)
