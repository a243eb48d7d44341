"""Measure memory, threads, descriptors and shared memory of process trees at a fixed interval. Linux only."""

from __future__ import annotations

import itertools
import threading
import time
from array import array
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path

import psutil

from harness.lab.soak.model import COUNTED, HARNESS, SAMPLES, ResourceSample, Round, TreeUsage
from harness.supervision import procfs
from harness.supervision.procfs import Segment, Stat
from harness.util.storage import LineFile

_MIB = 1 << 20
_LATE = 12
"""Most intervals without a sample: a longer gap could hide a leak."""
_SHARE = 0.8
"""Smallest acceptable share of the samples that the time allows."""


class Watcher:
    """Samples trees. Remembers the shared memory files of each, so that leaked ones are still counted."""

    def __init__(self, roots: Mapping[str, int]) -> None:
        """``roots`` has process ids by name of the tree; the harness's own process is a tree of its own."""
        self._roots = dict(roots)
        self._had: dict[str, set[Segment]] = {name: set() for name in roots}

    def sample(self) -> dict[str, TreeUsage]:
        """Measure all trees, by name; a tree whose processes have all ended has zeros."""
        table, there = procfs.processes(), procfs.segments()
        return {name: self._tree(name, pid, table, there) for name, pid in self._roots.items()}

    def _tree(self, name: str, pid: int, table: Mapping[int, Stat], there: Collection[Segment]) -> TreeUsage:
        members = {pid} & table.keys() if name == HARNESS else procfs.family(pid, table)
        used = procfs.users(there, members)
        self._had[name] = {s for s in there if used[s] or s in self._had[name]}
        measured = [found for member in members if (found := _measured(member)) is not None]
        threads, descriptors, rss, pss = (sum(figures[i] for figures in measured) for i in range(4))
        return TreeUsage(
            processes=len(measured),
            threads=threads,
            descriptors=descriptors,
            rss_mib=round(rss / _MIB, 2),
            pss_mib=round(pss / _MIB, 2),
            shm_files=len(self._had[name]),
            shm_mib=round(sum(map(procfs.allocated, self._had[name])) / _MIB, 2),
        )


def _measured(pid: int) -> tuple[int, int, int, int] | None:
    """Return a process's threads, descriptors, RSS and PSS, the last two in bytes; None if it has ended."""
    try:
        process = psutil.Process(pid)
        memory = process.memory_full_info()
        return process.num_threads(), process.num_fds(), memory.rss, memory.pss
    except (OSError, psutil.Error):
        return None


class Record:
    """``soak.jsonl``, an append-only log shared by the sampler and the rounds, with its columns and sums."""

    def __init__(self, folder: Path) -> None:
        self._lines = LineFile(folder / SAMPLES)
        self._lock = threading.Lock()
        self.seconds = 0.0
        """Time of the last line, since the start of the soak."""
        self.times_s = array("d")
        self.trees: dict[str, dict[str, array[float]]] = {}
        """Figures by tree and field of ``TreeUsage``, one per entry of ``times_s``."""
        self.sums: Counter[str] = Counter()
        """Sums of the fields in ``COUNTED`` over all rounds."""
        self.verdicts: Counter[str] = Counter()

    def append(self, line: ResourceSample | Round) -> None:
        """Append a line. Raises StorageError when it cannot be written; it is not counted then."""
        with self._lock:
            self._lines.append(line.model_dump_json())
            self.seconds = max(self.seconds, line.at_s)
            if isinstance(line, Round):
                self.verdicts[line.verdict] += 1
                self.sums.update({name: getattr(line, name) for name in COUNTED})
                return
            self.times_s.append(line.at_s)
            for name, tree in line.trees.items():
                for field, value in tree:
                    self.trees.setdefault(name, {}).setdefault(field, array("d")).append(value)

    def close(self) -> None:
        with self._lock:
            self._lines.close()


class Sampler:
    """Samples in a thread while used as a context manager; ``trouble`` then says whether the samples suffice."""

    def __init__(self, watcher: Watcher, record: Record, begun: float, interval_s: float) -> None:
        """``begun`` is ``time.monotonic()`` at the start of the load."""
        self._watcher = watcher
        self._record = record
        self._begun = begun
        self._interval = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="soak-sampler", daemon=True)
        self._died: str | None = None
        self._ended: float | None = None

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)
        self._ended = time.monotonic()

    def _run(self) -> None:
        due = self._begun
        try:
            while not self._stop.wait(max(0.0, due - time.monotonic())):
                started = time.monotonic()
                trees = self._watcher.sample()
                took = time.monotonic() - started
                self._record.append(
                    ResourceSample(at_s=round(started - self._begun, 3), took_s=round(took, 3), trees=trees)
                )
                if gone := [name for name, tree in trees.items() if name != HARNESS and not tree.processes]:
                    raise ProcessLookupError(f"no process left of {', '.join(gone)}")
                # After a slow sample, the missed ones are skipped.
                due = max(due + self._interval, time.monotonic() + self._interval / 10)
        except Exception as error:
            self._died = f"{type(error).__name__}: {error}"

    @property
    def trouble(self) -> str | None:
        """Why the samples do not suffice; None when they do."""
        if self._died is not None:
            return f"the sampler died: {self._died}"
        if self._thread.is_alive() and self._ended is not None:
            return "the sampler hangs"
        taken = list(self._record.times_s)
        end = (self._ended or time.monotonic()) - self._begun
        gap = max(after - before for before, after in itertools.pairwise([0.0, *taken, end]))
        due = int(end / self._interval)
        if gap > _LATE * self._interval or len(taken) < _SHARE * due:
            return (
                f"the sampler fell behind: expected a sample every {self._interval:g} s, found {len(taken)} of "
                f"{due} and {gap:.0f} s without one; the machine is too busy"
            )
        return None
