"""Slots: what a machine has room for, and what each group of engines needs of it.

A group of engines is a job; the scheduler packs jobs onto devices, so that engines of one start while others answer.
On CPU a device is a core with the memory of one engine; two engines never share one, because an engine that has to
share its core is several times slower.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from itertools import count
from typing import NamedTuple, cast

import psutil

from harness.config import Profile
from harness.engine.command import Role
from harness.engine.place import LocalPlace, Places, roles_of
from harness.matrix import Plan, start_expected_s
from harness.schedule.gpus import VisibleDevice, visible_here, wait_given_back
from harness.schedule.model import Device, EngineNeed, Job, Placement, PlacementRule
from harness.workload import CellWork, group_expected_s

ENGINE_GIB = 2.9
"""Resident memory of an engine of the cpu profile without its KV cache, summed over its processes (measured)."""
LOCAL_NODE = "localhost"
_GIVE_BACK_S = 60.0


class Inventory(NamedTuple):
    """Devices that engines can be put on."""

    devices: tuple[Device, ...]
    names: Mapping[str, str]
    """By device id, what an engine is told: the number of a core, or an entry of CUDA_VISIBLE_DEVICES. A CPU slot
    beyond the machine's cores has none."""
    shared: bool
    """Whether several engines may be on one device, as long as its memory is enough."""
    notes: tuple[str, ...] = ()
    """Sentences for the user."""
    whole: bool = False
    """Whether an engine of several devices gets each as a whole."""
    gpus: tuple[VisibleDevice, ...] = ()

    def need(self, profile: Profile, role: str) -> EngineNeed:
        """What an engine of a plain profile holds."""
        engine = profile.engine
        if engine.device == "cpu":
            gib = ENGINE_GIB + engine.kv_cache_gib
        else:
            # vLLM takes a share of each GPU; of unequal ones, the largest tells the most that it may be.
            wide = self.whole and engine.tensor_parallel.of(role) > 1
            share = 1.0 if wide else engine.gpu_memory_utilization
            gib = share * max((d.memory_gib for d in self.devices), default=1.0)
        return EngineNeed(role, engine.tensor_parallel.of(role), gib)


def cpu_engine_gib(profile: Profile) -> float:
    """GiB that a CPU engine of any variant needs, in whole MiB, as the scheduler counts."""
    return math.ceil(1024 * max(ENGINE_GIB + p.engine.kv_cache_gib for p in profile.parts)) / 1024


def cpu_inventory(profile: Profile) -> Inventory:
    """The cores that this process may use, as far as memory goes, and two slots at least: a pair must be able to run
    on one core, slowly."""
    cores = sorted(os.sched_getaffinity(0))
    gib = cpu_engine_gib(profile)
    room = int(psutil.virtual_memory().available / 2**30 / gib)
    count = max(2, min(len(cores), room))
    devices = tuple(Device(f"{LOCAL_NODE}/core-{n}", LOCAL_NODE, gib, n) for n in range(count))
    names = {d.id: str(core) for d, core in zip(devices, cores, strict=False)}
    return Inventory(devices, names, shared=False)


def gpu_inventory() -> Inventory:
    """The GPUs of this machine that CUDA_VISIBLE_DEVICES leaves."""
    found = visible_here(LOCAL_NODE)
    # A baseline belongs to one kind of GPU, and a run is judged by those of one kind.
    kinds = list(dict.fromkeys(d.gpu.name for d in found.devices))
    used = tuple(d for d in found.devices if d.gpu.name in kinds[:1])
    notes = found.notes
    if len(kinds) > 1:
        notes += (
            f"expected GPUs of one kind, found {', '.join(kinds)}; only {kinds[0]} is used: choose others with "
            "CUDA_VISIBLE_DEVICES",
        )
    return Inventory(tuple(d.device for d in used), {d.device.id: d.visible_as for d in used}, True, notes, gpus=used)


def local_inventory(profile: Profile) -> Inventory:
    """Of this machine, for the engines of a profile."""
    return cpu_inventory(profile) if profile.engine.device == "cpu" else gpu_inventory()


def jobs_of(
    plan: Plan,
    works: Sequence[CellWork],
    profile: Profile,
    inventory: Inventory,
    rescore: bool,
    rule: PlacementRule = "any",
) -> tuple[Job, ...]:
    """One job per group of engines. Where outputs are re-scored, the plain engine of a variant comes after all others
    of that variant."""
    jobs = []
    for group in plan.groups:
        part = profile.part(group.variant)
        start = start_expected_s(group)
        after = [g.id for g in plan.groups if g.variant == group.variant and g.id != group.id]
        jobs.append(
            Job(
                group.id,
                tuple(inventory.need(part, role) for role in roles_of(group)),
                start,
                group_expected_s(group, works) - start,
                placement=rule,
                after=tuple(after) if rescore and group.rescores else (),
                share=inventory.shared,
            )
        )
    return tuple(jobs)


def local_places(inventory: Inventory, placement: Placement, base_port: int | None) -> Places:
    """Places on this machine for the engines of a job, with consecutive ports from ``base_port`` on."""
    ports = None if base_port is None else count(base_port)
    return {
        cast(Role, engine.role): LocalPlace(
            [inventory.names[d.id] for d in engine.devices if d.id in inventory.names], ports=ports
        )
        for engine in placement.engines
    }


class Memory:
    """Watches that engines give back the memory of their GPUs."""

    def __init__(self, inventory: Inventory) -> None:
        self._gpus = {d.device.id: d for d in inventory.gpus}
        self._idle = {i: d.gpu.used_gib for i, d in self._gpus.items()}

    def kept(self, device_id: str) -> str:
        """Why a device that no engine is on any more cannot be used again; empty when it can."""
        before = self._idle.get(device_id)
        if before is None:
            return ""
        back = wait_given_back(self._gpus[device_id], before, _GIVE_BACK_S)
        return back.reason


def describe(placement: Placement, inventory: Inventory) -> str:
    """Where a group of engines runs, for the log; empty where there is nothing to choose."""
    if not inventory.gpus:
        return ""
    where = "; ".join(
        f"{e.role} on GPU {', '.join(inventory.names[d.id] for d in e.devices)}" for e in placement.engines
    )
    return f"{placement.job.id}: {where}"
