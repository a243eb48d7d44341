"""The devices of a machine, and what each group of engines needs of them.

A group of engines is a job; the scheduler packs jobs onto devices, so that the engines of one group start while others
answer. On CPU a device is a core with the memory of one engine. Two engines share one only where there are fewer cores
than a pair has ranks, because an engine that shares its core is several times slower.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from harness.errors import EngineStartError
from harness.profiles.cells import Plan, start_expected_s
from harness.profiles.model import Profile
from harness.profiles.model_reference import folder_of
from harness.scheduling.gpus import VisibleDevice, visible_here, wait_given_back
from harness.scheduling.links import Links, between, query_links
from harness.scheduling.model import Device, EngineNeed, Job, Placement, PlacementRule
from harness.supervision import gpus
from harness.supervision.cores import claimed
from harness.util import allowance
from harness.util.text import counted
from harness.workload.cells import CellWork, group_expected_s

ENGINE_GIB = 2.9
"""Measured resident memory of an engine of the cpu profile without its KV cache, summed over its processes."""
LOCAL_NODE = "localhost"
_GIVE_BACK_S = 60.0


class Inventory(NamedTuple):
    """Devices that engines can be put on."""

    devices: tuple[Device, ...]
    names: Mapping[str, str]
    """What an engine is told, by device id: the number of a core, or an entry of CUDA_VISIBLE_DEVICES. CPU devices
    beyond the machine's cores have those of the first ones."""
    shared: bool
    """Whether several engines may share a device, as far as its memory suffices."""
    notes: tuple[str, ...] = ()
    """Sentences for the user."""
    whole: bool = False
    """Whether an engine with several devices gets each of them exclusively."""
    gpus: tuple[VisibleDevice, ...] = ()
    links: Links = MappingProxyType({})
    """What connects the GPUs."""

    def need(self, profile: Profile, role: str) -> EngineNeed:
        """Return the devices and memory that an engine of a profile without variants needs."""
        engine = profile.engine
        if engine.device == "cpu":
            gib = ENGINE_GIB + engine.kv_cache_gib
        else:
            wide = self.whole and (engine.devices_of(role) > 1 or engine.placement == "apart")
            # Without a say in which GPU a share is of, only whole ones are different ones.
            whole = max((d.memory_gib for d in self.devices), default=1.0)
            share = 1.0 if wide else engine.gpu_memory_utilization
            # vLLM starts only where its share is free (if GPUs are unequal, that of the largest), and with a pool of a
            # fixed size takes what it needs, be that less or more. Ray's GPUs have no memory, only shares.
            gib = max(share * whole, 0.0 if self.whole else gpu_engine_gib(profile, role) or 0.0)
        return EngineNeed(role, engine.devices_of(role), gib)


WORKING_GIB = 2.0
"""Activations, CUDA graphs and context of a GPU engine, besides weights and KV: assumed, not measured."""


def gpu_engine_gib(profile: Profile, role: str) -> float | None:
    """Return the GiB of weights, KV and working space on each GPU of an engine, with the largest of the drafters; None
    if the weights are not on this machine."""
    named = [d for m in profile.methods for d in (m.drafter, m.prefill_drafter if role == "prefill" else None)]
    drafters = [d for d in named if d is not None]
    target, *others = [_weights_gib(folder_of(model)) for model in (profile.target, *drafters)]
    if target is None or any(gib is None for gib in others):
        return None
    weights = target + max((gib for gib in others if gib is not None), default=0.0)
    return weights / profile.engine.devices_of(role) + profile.engine.kv_cache_gib + WORKING_GIB


def _weights_gib(folder: Path | None) -> float | None:
    sizes = [f.stat().st_size for f in folder.glob("*.safetensors")] if folder is not None else []
    return sum(sizes) / 2**30 if sizes else None


def cpu_engine_gib(profile: Profile) -> float:
    """Return the GiB that a CPU engine of any variant needs, rounded up to whole MiB as the scheduler counts."""
    return math.ceil(1024 * max(ENGINE_GIB + p.engine.kv_cache_gib for p in profile.parts)) / 1024


def cpu_inventory(profile: Profile) -> Inventory:
    """Return the cores that this process may use, as far as memory suffices, without those of other harnesses' engines.

    There are at least as many devices as a pair has ranks, which must be able to run on one core, if slowly.
    """
    cores = allowance.cores()
    taken = claimed(cores)
    free = [core for core in cores if core not in taken]
    gib = cpu_engine_gib(profile)
    room = int(allowance.memory_gib() / gib)
    ranks = max(p.engine.devices_of("prefill") + p.engine.devices_of("decode") for p in profile.parts)
    count = max(ranks, min(len(free), room))
    devices = tuple(Device(f"{LOCAL_NODE}/core-{n}", LOCAL_NODE, gib, n) for n in range(count))
    names = {d.id: str(core) for d, core in zip(devices, cycle([*free, *taken]), strict=False)}
    notes = _of_others(len(taken), len(cores), len(free) < count)
    if ranks > len(cores):
        notes += (
            f"a pair has {ranks} ranks for {counted(len(cores), 'core')}: engines that share one are many "
            "times slower, and hand-offs may come after P's lease",
        )
    return Inventory(devices, names, shared=False, notes=notes)


def _of_others(taken: int, cores: int, shared: bool) -> tuple[str, ...]:
    if not taken:
        return ()
    slower = "; engines that share one are several times slower" if shared else ""
    return (f"{taken} of {cores} cores are in use by engines of another harness run{slower}",)


def gpu_inventory() -> Inventory:
    """Return the GPUs of this machine that CUDA_VISIBLE_DEVICES allows."""
    found = visible_here(LOCAL_NODE)
    # A baseline belongs to one kind of GPU, so the engines of a run must all be on one kind.
    kinds = list(dict.fromkeys(d.gpu.name for d in found.devices))
    used = tuple(d for d in found.devices if d.gpu.name in kinds[:1])
    notes = found.notes
    if len(kinds) > 1:
        notes += (
            f"expected GPUs of one kind, found {', '.join(kinds)}; only {kinds[0]} is used; select others with "
            "CUDA_VISIBLE_DEVICES",
        )
    names = {d.device.id: d.visible_as for d in used}
    links = query_links() if len(used) > 1 else {}
    return Inventory(tuple(d.device for d in used), names, True, notes, gpus=used, links=links)


def claimed_gpus() -> Inventory:
    """Return the GPUs of ``gpu_inventory`` without those of other harnesses, and claim them until this process ends.
    Raises EngineStartError when other harnesses have all of them."""
    found = gpu_inventory()
    taken = gpus.claim(d.gpu.uuid for d in found.gpus)
    if not taken:
        return found
    mine = tuple(d for d in found.gpus if d.gpu.uuid not in taken)
    advice = "give each harness GPUs of its own with CUDA_VISIBLE_DEVICES, or wait for the end of the other one"
    if not mine:
        raise EngineStartError(
            f"expected a free GPU, found {counted(len(taken), 'GPU')} in use by other harness runs; {advice}"
        )
    note = f"{len(taken)} of {len(found.gpus)} GPUs are left to another harness on this machine; {advice}"
    return found._replace(devices=tuple(d.device for d in mine), gpus=mine, notes=(*found.notes, note))


def local_inventory(profile: Profile) -> Inventory:
    """Return the devices of this machine for the engines of a profile; they are this process's until it ends."""
    return cpu_inventory(profile) if profile.engine.device == "cpu" else claimed_gpus()


def jobs_of(
    plan: Plan,
    works: Sequence[CellWork],
    profile: Profile,
    inventory: Inventory,
    rescore: bool,
    rule: PlacementRule = "any",
) -> tuple[Job, ...]:
    """Return one job per group of engines. If outputs are re-scored, the plain engine of a variant, which re-scores
    them, comes after all other groups of that variant."""
    jobs = []
    lone = {*too_few_to_part(plan, profile, inventory)}
    for group in plan.groups:
        part = profile.part(group.variant)
        start = start_expected_s(group)
        after = [g.id for g in plan.groups if g.variant == group.variant and g.id != group.id]
        jobs.append(
            Job(
                group.id,
                tuple(inventory.need(part, role) for role in group.roles),
                start,
                group_expected_s(group, works) - start,
                placement=rule,
                after=tuple(after) if rescore and group.rescores else (),
                share=inventory.shared,
                overlap="any" if group.id in lone or not inventory.shared else part.engine.placement,
            )
        )
    return tuple(jobs)


def too_few_to_part(plan: Plan, profile: Profile, inventory: Inventory) -> tuple[str, ...]:
    """Return the groups whose P and D are to be on different GPUs, of which there are too few: they share."""
    out = []
    for group in plan.groups:
        engine = profile.part(group.variant).engine
        wanted = sum(engine.devices_of(role) for role in group.roles)
        if group.engines > 1 and engine.placement == "apart" and inventory.shared and wanted > len(inventory.devices):
            out.append(group.id)
    return tuple(out)


def sharing_note(groups: Sequence[str], devices: int) -> str:
    """Return a sentence for the user about the groups of ``too_few_to_part``."""
    more = f" and {len(groups) - 3} more" if len(groups) > 3 else ""
    return (
        f"engine.placement: apart, but {counted(devices, 'GPU')} are too few for P and D of "
        f"{', '.join(groups[:3])}{more}: they share, so no KV goes from one GPU to another there"
    )


class Memory:
    """Checks that ended engines have released the memory of their GPUs."""

    def __init__(self, inventory: Inventory) -> None:
        self._gpus = {d.device.id: d for d in inventory.gpus}
        self._idle = {i: d.gpu.used_gib for i, d in self._gpus.items()}

    def kept(self, device_id: str) -> str:
        """Wait until the memory of a device without engines is released; return why it was not, or an empty string."""
        before = self._idle.get(device_id)
        if before is None:
            return ""
        return wait_given_back(self._gpus[device_id], before, _GIVE_BACK_S)


def describe(placement: Placement, inventory: Inventory) -> str:
    """Describe where a group of engines runs, for the log; return an empty string without GPUs."""
    if not inventory.gpus:
        return ""
    where = "; ".join(
        f"{e.role} on GPU {', '.join(inventory.names[d.id] for d in e.devices)}" for e in placement.engines
    )
    return f"{placement.job.id}: {where}{_link(placement, inventory)}"


def _link(placement: Placement, inventory: Inventory) -> str:
    """Return what connects P and D of a placed pair; an empty string for a single engine."""
    if len(placement.engines) < 2:
        return ""
    index = {d.device.id: d.gpu.index for d in inventory.gpus}
    first, second = ([index[d.id] for d in e.devices] for e in placement.engines[:2])
    return f"; link: {between(inventory.links, first, second)}"
