"""What this process may use of the machine: its cores and memory, within the limits of its control groups.

A container of 2 CPUs and 8 GiB on a large host sees all cores and all memory of the host; engines planned for those
are throttled, or killed by the kernel.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil

_FILES = Path("/sys/fs/cgroup")
_GROUPS = Path("/proc/self/cgroup")


def cores(files: Path = _FILES, groups: Path = _GROUPS) -> list[int]:
    """Return the cores that this process may run on, in order, and of those no more than its quota of time fills."""
    allowed = sorted(os.sched_getaffinity(0))
    quotas = [quota for folder in _folders("cpu", files, groups) if (quota := _quota(folder)) is not None]
    return allowed[: max(1, int(min(quotas, default=len(allowed))))]


def memory_gib(files: Path = _FILES, groups: Path = _GROUPS) -> float:
    """Return the memory that can be allocated without swapping, in GiB."""
    free = [room for folder in _folders("memory", files, groups) if (room := _room(folder)) is not None]
    return float(min([psutil.virtual_memory().available, *free])) / 2**30


def _folders(controller: str, files: Path, groups: Path) -> Iterator[Path]:
    """Yield the folders of this process's control group and of those above it, of version 2 and of version 1."""
    try:
        lines = groups.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, names, path = (*line.split(":", 2), "", "")[:3]
        if names == "" or controller in names.split(","):
            top = files if names == "" else files / controller
            here = top / path.strip("/")
            # In a container, the path may be one of the host, and its own group is the top.
            yield from (folder for folder in (here, *here.parents) if folder.is_relative_to(top))


def _quota(folder: Path) -> float | None:
    """Return the cores' worth of time that a group may use; None without a limit."""
    words = _read(folder / "cpu.max").split()
    if not words:
        words = [_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")]
    quota, period = (_number(word) for word in (*words, "", "")[:2])
    return quota / period if quota is not None and period else None


def _room(folder: Path) -> int | None:
    """Return the bytes that a group may still use, which include its cache of files; None without a limit."""
    for most, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        limit, now = _number(_read(folder / most)), _number(_read(folder / used))
        if limit is not None and now is not None:
            words = _read(folder / "memory.stat").split()
            cached = dict(zip(words[::2], words[1::2], strict=False)).get("inactive_file", "0")
            return max(0, limit - now + (_number(cached) or 0))
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""


def _number(word: str) -> int | None:
    """Return a limit; None where there is none (``max``, -1 or an empty word)."""
    return int(word) if word.isdigit() else None
