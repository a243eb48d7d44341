"""Find what a drill leaves behind: processes, listening ports, shared memory, and ledgers (records of process trees).

Processes are recognized by a mark in their environment, which children inherit and which survives a change of session
or parent. Those that overwrite it, as vLLM's engine cores and workers do, are recognized by being new and by having no
ancestor that belongs to somebody else.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
import uuid
from collections.abc import Collection
from pathlib import Path

import psutil

from harness.supervision import procfs
from harness.supervision.orphans import Ledger, read_ledger

MARK = "KV_DRILL_MARK"
_SHARED = Path("/dev/shm")
_POLL_S = 0.25
_LOOK_S = 0.5
_SUPERVISORS_S = 35.0
"""Most seconds that a supervisor takes to end its process tree."""


def new_mark() -> str:
    return uuid.uuid4().hex


def marked(mark: str) -> list[psutil.Process]:
    """Return the living processes that carry the mark, except this one."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):
            ours = process.pid != os.getpid() and process.environ().get(MARK) == mark
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


class Watch:
    """Remembers all processes that were ever descendants of a marked one, even if they overwrite the mark.

    Only these may be killed. Use it as a context manager around all drills with the mark.
    """

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look_on, name="drill-watch", daemon=True)
        self.known: set[procfs.Process] = set()

    def __enter__(self) -> Watch:
        _WATCHES[self._mark] = self
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        del _WATCHES[self._mark]

    def look(self) -> None:
        for process in marked(self._mark):
            with contextlib.suppress(psutil.Error):
                below = (procfs.process(p.pid) for p in (process, *process.children(recursive=True)))
                self.known |= {p for p in below if p is not None}

    def _look_on(self) -> None:
        while not self._over.wait(_LOOK_S):
            self.look()


_WATCHES: dict[str, Watch] = {}


def _blank(pid: int) -> bool:
    """Return whether a process has overwritten its environment (as ``setproctitle`` does)."""
    with contextlib.suppress(OSError):
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        return bool(environment) and b"=" not in environment
    return False


def unmarked(known: Collection[procfs.Process]) -> list[psutil.Process]:
    """Return this user's processes, except ``known``, that overwrote their environment, as did all their ancestors.

    PID 1 does not count as an ancestor.
    """
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if procfs.process(process.pid) in known or process.uids().real != os.getuid():
                continue
            above = [p.pid for p in process.parents() if p.pid != 1]
            if _blank(process.pid) and all(_blank(pid) for pid in above):
                found.append(process)
    return found


def shared_memory() -> set[str]:
    """Return the names of the segments and semaphores of this machine."""
    with contextlib.suppress(OSError):
        return {p.name for p in _SHARED.iterdir()}
    return set()


def _in_use(names: set[str]) -> set[str]:
    """Return those names that a living process maps or has open."""
    used: set[str] = set()
    # psutil's memory_maps() is slow: it reads smaps, for which the kernel walks all pages.
    for folder in Path("/proc").glob("[0-9]*") if names else ():
        with contextlib.suppress(OSError):
            maps = (folder / "maps").read_text(errors="replace")
            used |= {n for n in names if f"{_SHARED}/{n}" in maps}
            for link in (folder / "fd").iterdir():
                with contextlib.suppress(OSError):
                    used |= {n for n in names if str(link.readlink()).startswith(f"{_SHARED}/{n}")}
    return used


def ledgers() -> set[Path]:
    """Return the ledgers of process trees of any harness."""
    folder = procfs.folder_path()
    return set(procfs.ledgers(folder)) if folder.is_dir() else set()


def _of_others(path: Path) -> bool:
    """Return whether a ledger belongs to another living harness or another machine, or no longer exists."""
    if not path.is_file():
        return True
    ledger = read_ledger(path)
    # It may have been removed meanwhile.
    if ledger is None:
        return True
    if not isinstance(ledger, Ledger):
        return False
    return not ledger.here or (ledger.holder_lives and ledger.holder.pid != os.getpid())


class Footprint:
    """A snapshot before a drill, for finding out afterwards what the drill left behind."""

    def __init__(self, mark: str) -> None:
        self.mark = mark
        self._shared = shared_memory()
        self._ledgers = ledgers()
        table = procfs.processes()
        self._processes = frozenset(procfs.Process(pid, known.start) for pid, known in table.items())

    def running(self) -> list[psutil.Process]:
        """Return the living processes of the drill."""
        return [*marked(self.mark), *unmarked(self._processes)]

    def left(self, patience_s: float) -> tuple[str, ...]:
        """Return what is left after a grace period of ``patience_s`` seconds, without ending anything."""
        deadline = time.monotonic() + patience_s
        while (found := self._now()) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return found

    def _now(self) -> tuple[str, ...]:
        found = []
        running = self.running()
        for process in running:
            with contextlib.suppress(psutil.Error):
                ports = [str(c.laddr.port) for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
                listening = f", listening on {', '.join(ports)}" if ports else ""
                found.append(f"process {process.pid} {process.name()} ({process.status()}){listening}")
        # A segment that a living process uses, or that is named after an unrelated one, is not a leak.
        ours = {p.pid for p in running}
        new = {name for name in shared_memory() - self._shared if not _of_another(name, ours)}
        found += [f"shared memory {name}" for name in sorted(new - _in_use(new))]
        found += [f"ledger {path.name}" for path in sorted(ledgers() - self._ledgers) if not _of_others(path)]
        return tuple(found)


def _of_another(name: str, ours: Collection[int]) -> bool:
    """Return whether OpenMP named a segment after a living process outside the drill.

    OpenMP keeps its segment neither open nor mapped.
    """
    found = re.fullmatch(r"__KMP_REGISTERED_LIB_(\d+)_\d+", name)
    return found is not None and int(found[1]) not in ours and psutil.pid_exists(int(found[1]))


def sweep(footprint: Footprint) -> None:
    """End what a drill left, once that was recorded, so that it does not disturb the next drill.

    Supervisors get TERM first: each ends its whole tree, whatever the processes have overwritten. A process that was
    never seen below a marked one may be somebody else's: it is reported as left behind, but not ended.
    """
    supervisors = [p for p in marked(footprint.mark) if _is_supervisor(p)]
    for process in supervisors:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    psutil.wait_procs(supervisors, timeout=_SUPERVISORS_S)
    watch = _WATCHES.get(footprint.mark)
    known = watch.known if watch else set()
    left = [*marked(footprint.mark), *(p for p in unmarked(()) if procfs.process(p.pid) in known)]
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(left, timeout=5)


def _is_supervisor(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return any(word.endswith("supervisor.py") for word in process.cmdline())
    return False
