"""The GPUs that a run may use, their names in CUDA_VISIBLE_DEVICES, and whether an engine's memory was freed."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from harness.scheduling.model import Device

QUERY = "index,uuid,name,memory.total,memory.used,driver_version"
_GPU_LINE = re.compile(r"GPU (\d+): ")
_MIG_LINE = re.compile(r"\s+MIG (\S+)\s+Device\s+\d+: \(UUID: (MIG-[^)]+)\)")
_MIG_SIZE = re.compile(r"\.(\d+)gb")

Ask = Callable[[Sequence[str]], str | None]
"""Runs a command and returns its output, or None when the command does not exist or failed."""


@dataclass(frozen=True)
class Gpu:
    """One GPU as nvidia-smi shows it, or one MIG instance of it."""

    index: int
    """Index of the GPU; instances have that of their GPU."""
    uuid: str
    name: str
    memory_gib: float
    """Total memory; for an instance the figure in the name of its profile, which is slightly less than it has."""
    used_gib: float | None
    """None where nvidia-smi does not report it: for instances, and on some systems with unified memory."""
    driver: str

    @property
    def is_instance(self) -> bool:
        return self.uuid.startswith("MIG-")


class VisibleDevice(NamedTuple):
    """A device that engines may use."""

    device: Device
    visible_as: str
    """Its name in an engine's CUDA_VISIBLE_DEVICES. Indices are those of nvidia-smi: set CUDA_DEVICE_ORDER=PCI_BUS_ID
    with it."""
    gpu: Gpu


class Visible(NamedTuple):
    """The devices that engines may use."""

    devices: tuple[VisibleDevice, ...]
    notes: tuple[str, ...]
    """Sentences for the user: entries that CUDA ignores, or that may not mean the GPU that the user expects."""


def ask_program(command: Sequence[str]) -> str | None:
    try:
        done = subprocess.run(list(command), capture_output=True, text=True, errors="replace", timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def query_gpus(ask: Ask = ask_program) -> list[Gpu]:
    """Return the GPUs and MIG instances that the driver shows; [] without nvidia-smi or a GPU, or when it fails.

    Lines whose index, UUID or memory cannot be read are left out.
    """
    text = ask(["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"])
    gpus = [g for line in (text or "").splitlines() if (g := _gpu(line)) is not None]
    if not gpus:
        return []
    return gpus + _instances(ask(["nvidia-smi", "-L"]) or "", gpus)


def _gpu(line: str) -> Gpu | None:
    fields = [f.strip() for f in line.split(",")]
    if len(fields) < 6:
        return None
    # Only a name can contain a comma.
    index, uuid, name = fields[0], fields[1], ", ".join(fields[2:-3])
    total, used = _mib(fields[-3]), _mib(fields[-2])
    if not index.isdecimal() or not uuid or not total:
        return None
    return Gpu(int(index), uuid, name, total / 1024, None if used is None else used / 1024, fields[-1])


def _mib(text: str) -> float | None:
    """Return a figure in MiB, or None for [N/A], [Not Supported] and [Insufficient Permissions]."""
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else None


def _instances(listing: str, gpus: Sequence[Gpu]) -> list[Gpu]:
    by_index = {g.index: g for g in gpus}
    found = []
    parent: Gpu | None = None
    for line in listing.splitlines():
        if gpu := _GPU_LINE.match(line):
            parent = by_index.get(int(gpu[1]))
        elif (mig := _MIG_LINE.match(line)) and parent is not None and (size := _MIG_SIZE.search(mig[1])):
            memory = int(size[1]) * 1e9 / 2**30
            found.append(Gpu(parent.index, mig[2], f"{parent.name} MIG {mig[1]}", memory, None, parent.driver))
    return found


def visible_devices(
    setting: str | None, found: Sequence[Gpu], node: str = "localhost", device_order: str | None = None
) -> Visible:
    """Return the devices that the caller's CUDA_VISIBLE_DEVICES allows: None allows all, an empty value none.

    As in CUDA, the list ends before the first entry that is -1, names no GPU, or differs in kind (index, GPU-, MIG-)
    from the first; a duplicate entry hides all GPUs. ``device_order`` is the caller's CUDA_DEVICE_ORDER.
    """
    if setting is None:
        return _named([(_own_name(g), g) for g in _usable(found)], node, ())
    chosen: list[tuple[str, Gpu]] = []
    notes: list[str] = []
    entries = [e.strip() for e in setting.split(",")] if setting.strip() else []
    for place, entry in enumerate(entries):
        gpu, trouble = _gpu_named(entry, entries[0], found)
        if gpu is None:
            notes.append(_ignored_note(setting, entry, trouble, entries[place + 1 :]))
            break
        if any(g.uuid == gpu.uuid for _, g in chosen):
            notes.append(
                f"CUDA_VISIBLE_DEVICES={setting}: expected each GPU once, found {entry} a second time, so that CUDA "
                "shows no GPU at all; remove it"
            )
            return Visible((), tuple(notes))
        chosen.append((_own_name(gpu) if _is_index(entry) else gpu.uuid, gpu))
    if chosen and _is_index(entries[0]) and device_order != "PCI_BUS_ID" and len({g.name for g in found}) > 1:
        notes.append(
            f"CUDA_VISIBLE_DEVICES={setting}: expected GPUs of one kind or CUDA_DEVICE_ORDER=PCI_BUS_ID, found "
            f"{', '.join(sorted({g.name for g in found}))}: CUDA numbers the fastest first, nvidia-smi does not; set "
            "CUDA_DEVICE_ORDER=PCI_BUS_ID, or name GPUs by UUID"
        )
    return _named(chosen, node, notes)


def visible_here(node: str = "localhost") -> Visible:
    """Return the devices of this machine that the caller's environment allows."""
    environment = os.environ
    return visible_devices(
        environment.get("CUDA_VISIBLE_DEVICES"), query_gpus(), node, environment.get("CUDA_DEVICE_ORDER")
    )


def gpus() -> list[str]:
    """Return name and memory of each NVIDIA GPU that CUDA_VISIBLE_DEVICES allows."""
    return [f"{d.gpu.name}, {1024 * d.gpu.memory_gib:.0f} MiB" for d in visible_here().devices]


def gpu_name(found: Sequence[str]) -> str:
    """Return the hardware's name in the identity of a baseline, given the result of ``gpus``."""
    return found[0].split(",")[0].strip() if found else "unknown GPU"


def _usable(found: Sequence[Gpu]) -> list[Gpu]:
    """Leave out GPUs that are partitioned into MIG instances: these are used through their instances."""
    partitioned = {g.index for g in found if g.is_instance}
    return [g for g in found if g.is_instance or g.index not in partitioned]


def _own_name(gpu: Gpu) -> str:
    return gpu.uuid if gpu.is_instance else str(gpu.index)


def _is_index(entry: str) -> bool:
    return re.match(r"[+-]?\d", entry) is not None


def _kind(entry: str) -> str:
    return "index" if _is_index(entry) else entry[:4]


def _gpu_named(entry: str, first: str, found: Sequence[Gpu]) -> tuple[Gpu | None, str]:
    """Return the GPU that an entry names, or None and the reason."""
    if _kind(entry) != _kind(first):
        return None, f"an entry of a different kind than {first}"
    if number := re.match(r"[+-]?\d+", entry):
        # CUDA reads the leading digits and ignores the rest of the entry.
        index = int(number[0])
        gpus = [g for g in found if g.index == index and not g.is_instance]
        indices = [str(g.index) for g in found if not g.is_instance]
        trouble = (
            "the end of the list" if index < 0 else f"no GPU with that index (found {', '.join(indices) or 'none'})"
        )
        return (gpus[0] if gpus else None), trouble
    gpus = [g for g in found if entry.startswith(("GPU-", "MIG-")) and g.uuid.startswith(entry) and len(entry) > 4]
    if len(gpus) == 1:
        return gpus[0], ""
    return None, f"{len(gpus)} GPUs whose UUID begins like that" if gpus else "no GPU with that name"


def _ignored_note(setting: str, entry: str, trouble: str, rest: Sequence[str]) -> str:
    after = f", and everything after it ({', '.join(rest)})" if rest else ""
    found = entry or "an empty entry"
    return (
        f"CUDA_VISIBLE_DEVICES={setting}: expected indices or UUIDs of GPUs, found {found}: {trouble}; "
        f"CUDA ignores it{after}: remove or correct it"
    )


def _named(chosen: Sequence[tuple[str, Gpu]], node: str, notes: Sequence[str]) -> Visible:
    devices = tuple(
        VisibleDevice(Device(f"{node}/{name}", node, gpu.memory_gib, place), name, gpu)
        for place, (name, gpu) in enumerate(chosen)
    )
    more = list(notes)
    if any(g.is_instance for _, g in chosen) and len(chosen) > 1:
        more.append(
            "expected whole GPUs, found MIG instances: an engine can use only one instance; keep tensor parallel size 1"
        )
    return Visible(devices, tuple(more))


def used_gib(device: VisibleDevice, ask: Ask = ask_program) -> float | None:
    """Return the GiB that all processes use on a device now, or None when nvidia-smi does not report it."""
    return next((g.used_gib for g in query_gpus(ask) if g.uuid == device.gpu.uuid), None)


def wait_given_back(
    device: VisibleDevice,
    before_gib: float,
    timeout_s: float = 30.0,
    tolerance_gib: float = 0.5,
    query: Callable[[VisibleDevice], float | None] = used_gib,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Wait until an engine's memory on a device is free; return "", or after ``timeout_s`` the problem as text.

    It is free when no more than ``before_gib`` + ``tolerance_gib`` GiB are in use. ``before_gib`` was in use before the
    engine started; where engines share a device, the caller adds what the others have taken since. Without a figure,
    the memory counts as not freed.
    """
    begun = clock()
    while True:
        used = query(device)
        waited = clock() - begun
        if used is not None and used <= before_gib + tolerance_gib:
            return ""
        if waited >= timeout_s:
            return _kept(device, before_gib + tolerance_gib, used, waited)
        sleep(min(0.5, timeout_s - waited))


def _kept(device: VisibleDevice, limit: float, used: float | None, waited: float) -> str:
    found = "no figure from nvidia-smi" if used is None else f"{used:.1f} GiB"
    return (
        f"expected at most {limit:.1f} GiB in use on {device.device.id} after its engine ended, found {found} for "
        f"{waited:.0f} s; end the process that holds it (nvidia-smi lists them)"
    )
