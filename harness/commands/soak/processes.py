"""Measure memory, threads, descriptors and shared memory of process trees. Linux only."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import psutil

from harness.commands.soak.model import HARNESS, Tree
from harness.supervision import procfs
from harness.supervision.procfs import Segment, Stat

_MIB = 1 << 20


class Watcher:
    """Samples trees. Remembers the shared memory files of each, so that leaked ones are still counted."""

    def __init__(self, roots: Mapping[str, int]) -> None:
        """``roots`` has process ids by name of the tree; the harness's own process is a tree of its own."""
        self._roots = dict(roots)
        self._had: dict[str, set[Segment]] = {name: set() for name in roots}

    def sample(self) -> dict[str, Tree]:
        """Measure all trees, by name; a tree whose processes have all ended has zeros."""
        table, there = procfs.processes(), procfs.segments()
        return {name: self._tree(name, pid, table, there) for name, pid in self._roots.items()}

    def _tree(self, name: str, pid: int, table: Mapping[int, Stat], there: Collection[Segment]) -> Tree:
        members = {pid} & table.keys() if name == HARNESS else procfs.family(pid, table)
        used = procfs.users(there, members)
        self._had[name] = {s for s in there if used[s] or s in self._had[name]}
        counted = [found for member in members if (found := _figures(member)) is not None]
        return Tree(
            processes=len(counted),
            threads=sum(c.threads for c in counted),
            descriptors=sum(c.descriptors for c in counted),
            rss_mib=round(sum(c.rss for c in counted) / _MIB, 2),
            pss_mib=round(sum(c.pss for c in counted) / _MIB, 2),
            shm_files=len(self._had[name]),
            shm_mib=round(sum(map(procfs.allocated, self._had[name])) / _MIB, 2),
        )


class _Figures(NamedTuple):
    threads: int
    descriptors: int
    rss: int
    pss: int


def _figures(pid: int) -> _Figures | None:
    """Measure one process; None if it has ended."""
    try:
        process = psutil.Process(pid)
        memory = process.memory_full_info()
        return _Figures(process.num_threads(), process.num_fds(), memory.rss, memory.pss)
    except (OSError, psutil.Error):
        return None
