"""Memory, threads, descriptors and shared memory of process trees, from /proc. Linux only."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import psutil

from harness.soak.model import Tree

_SHM = "/dev/shm/"
_MIB = 1 << 20
_DELETED = " (deleted)"


def tree_of(pid: int) -> list[psutil.Process]:
    """The process, everything below it, and whatever else lives in its session. Empty when it is gone."""
    found: dict[int, psutil.Process] = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        found = {p.pid: p for p in [root, *root.children(recursive=True)]}
    for other in psutil.pids():
        with contextlib.suppress(OSError, psutil.Error):
            if other not in found and os.getsid(other) == pid:
                found[other] = psutil.Process(other)
    return list(found.values())


class Open(NamedTuple):
    """What one process has open."""

    descriptors: int
    sockets: int
    shared: frozenset[str]
    """Paths below /dev/shm, of its descriptors and mappings."""


def opened(pid: int) -> Open:
    """Raises OSError when the process is gone."""
    links = []
    for entry in os.scandir(f"/proc/{pid}/fd"):
        # One that was closed since it was listed.
        with contextlib.suppress(FileNotFoundError):
            links.append(str(Path(entry.path).readlink()))
    with Path(f"/proc/{pid}/maps").open(encoding="utf-8", errors="replace") as maps:
        mapped = {line[line.index(_SHM) :].rstrip("\n") for line in maps if _SHM in line}
    shared = {link for link in links if link.startswith(_SHM)} | mapped
    return Open(len(links), sum(link.startswith("socket:") for link in links), frozenset(shared))


class Watcher:
    """Samples trees; remembers which shared memory files each had, so that those it forgot are still counted."""

    def __init__(self, roots: Mapping[str, int], alone: Iterable[str] = ()) -> None:
        """``roots``: process ids by name of the tree; of those in ``alone`` the process itself is the tree."""
        self._roots = dict(roots)
        self._alone = frozenset(alone)
        self._had: dict[str, set[str]] = {name: set() for name in roots}

    def sample(self) -> dict[str, Tree]:
        """All trees by name; one whose processes are all gone has zeros."""
        return {name: self._tree(name, pid) for name, pid in self._roots.items()}

    def _tree(self, name: str, pid: int) -> Tree:
        members = [psutil.Process(pid)] if name in self._alone else tree_of(pid)
        counted = [c for p in members if (c := _figures(p)) is not None]
        shared: set[str] = set().union(*(c.open.shared for c in counted))
        kept = {path for path in self._had[name] | shared if not path.endswith(_DELETED)}
        sizes = {path: size for path in kept if (size := _allocated(path)) is not None}
        # A file without a name lives as long as somebody has it; its size is known through the mapping alone.
        nameless = {path for path in shared if path.endswith(_DELETED)}
        self._had[name] = set(sizes)
        return Tree(
            processes=len(counted),
            threads=sum(c.threads for c in counted),
            descriptors=sum(c.open.descriptors for c in counted),
            sockets=sum(c.open.sockets for c in counted),
            rss_mib=round(sum(c.rss for c in counted) / _MIB, 2),
            pss_mib=round(sum(c.pss for c in counted) / _MIB, 2),
            shm_files=len(sizes) + len(nameless),
            shm_mib=round(sum(sizes.values()) / _MIB, 2),
        )


class _Figures(NamedTuple):
    threads: int
    rss: int
    pss: int
    open: Open


def _figures(process: psutil.Process) -> _Figures | None:
    """None for a zombie and for a process that ended meanwhile."""
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        memory = process.memory_full_info()
        return _Figures(process.num_threads(), memory.rss, memory.pss, opened(process.pid))
    except (OSError, psutil.Error):
        return None


def _allocated(path: str) -> int | None:
    """Bytes that a file takes; None when it is gone."""
    try:
        return Path(path).stat().st_blocks * 512
    except OSError:
        return None
