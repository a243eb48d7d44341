"""What a drill leaves behind: processes, listening ports, shared memory, ledgers. Processes are known by a mark in
their environment, which children inherit and a process cannot lose by changing its session or its parent; those that
overwrite it, as vLLM's engine cores and workers do, by their age, and by having no parent that is somebody else's."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
import uuid
from collections.abc import Collection
from pathlib import Path
from types import TracebackType

import psutil

from harness.engine import traces
from harness.engine.leftovers import Ledger, read_ledger

MARK = "KV_DRILL_MARK"
_SHARED = Path("/dev/shm")
_POLL_S = 0.25
_LOOK_S = 0.5
_WARDENS_S = 35.0
"""Longest that a warden takes to end its tree."""


def new_mark() -> str:
    return uuid.uuid4().hex


def marked(mark: str) -> list[psutil.Process]:
    """Living processes that carry the mark, without this one."""
    found = []
    wanted = f"{MARK}={mark}".encode()
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        with contextlib.suppress(OSError, psutil.Error):
            inherited = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
            if wanted in inherited and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


class Watch:
    """Remembers which processes were below a marked one at any time, also those that overwrite the mark: what may be
    killed. Use as a context manager around all drills with the mark."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look_on, name="drill-watch", daemon=True)
        self.known: set[traces.Process] = set()

    def __enter__(self) -> Watch:
        _WATCHES[self._mark] = self
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        del _WATCHES[self._mark]

    def look(self) -> None:
        for process in marked(self._mark):
            with contextlib.suppress(psutil.Error):
                below = (traces.process(p.pid) for p in (process, *process.children(recursive=True)))
                self.known |= {p for p in below if p is not None}

    def _look_on(self) -> None:
        while not self._over.wait(_LOOK_S):
            self.look()


_WATCHES: dict[str, Watch] = {}


def _blank(pid: int) -> bool:
    """Whether a process has overwritten its environment (``setproctitle``)."""
    with contextlib.suppress(OSError):
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        return bool(environment) and b"=" not in environment
    return False


def nameless(known: Collection[traces.Process]) -> list[psutil.Process]:
    """Living processes of this user, not among the known ones, that have overwritten their environment and are below
    no process that has not: below the machine's first one, or what adopts orphans."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if traces.process(process.pid) in known or process.uids().real != os.getuid():
                continue
            above = [p.pid for p in process.parents() if p.pid != 1]
            if _blank(process.pid) and all(_blank(pid) for pid in above):
                found.append(process)
    return found


def shared_memory() -> set[str]:
    """Names of the segments and semaphores of this machine."""
    with contextlib.suppress(OSError):
        return {p.name for p in _SHARED.iterdir()}
    return set()


def _in_use(names: set[str]) -> set[str]:
    """Those that a living process maps or has open."""
    used: set[str] = set()
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            maps = (folder / "maps").read_text(errors="replace")
            used |= {n for n in names if f"{_SHARED}/{n}" in maps}
            for link in (folder / "fd").iterdir():
                with contextlib.suppress(OSError):
                    used |= {n for n in names if str(link.readlink()).startswith(f"{_SHARED}/{n}")}
    return used


def ledgers() -> set[Path]:
    """Ledgers of process trees, whoever wrote them."""
    folder = traces.folder_path()
    return set(traces.ledgers(folder)) if folder.is_dir() else set()


def _of_others(path: Path) -> bool:
    """Whether a ledger belongs to another harness that lives, or to another machine, or is gone by now."""
    if not path.is_file():
        return True
    ledger = read_ledger(path)
    # It may have gone meanwhile.
    if ledger is None:
        return True
    if not isinstance(ledger, Ledger):
        return False
    return not ledger.here or (ledger.held and ledger.holder.pid != os.getpid())


class Footprint:
    """Taken before a drill; says afterwards what is there that was not."""

    def __init__(self, mark: str) -> None:
        self.mark = mark
        self._shared = shared_memory()
        self._ledgers = ledgers()
        table = traces.processes()
        self._processes = frozenset(traces.Process(pid, known.start) for pid, known in table.items())

    def running(self) -> list[psutil.Process]:
        """Processes of the drill that live."""
        return [*marked(self.mark), *nameless(self._processes)]

    def left(self, patience_s: float) -> tuple[str, ...]:
        """What is still there after at most so many seconds; nothing is ended by this."""
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
        # Segments that another's process uses, or is named in, are another's.
        ours = {p.pid for p in running}
        new = {name for name in shared_memory() - self._shared if not _of_another(name, ours)}
        found += [f"shared memory {name}" for name in sorted(new - _in_use(new))]
        found += [f"ledger {path.name}" for path in sorted(ledgers() - self._ledgers) if not _of_others(path)]
        return tuple(found)


def _of_another(name: str, ours: Collection[int]) -> bool:
    """Whether a segment is called after a living process that is none of the drill's: OpenMP has its own neither open
    nor mapped."""
    found = re.fullmatch(r"__KMP_REGISTERED_LIB_(\d+)_\d+", name)
    return found is not None and int(found[1]) not in ours and psutil.pid_exists(int(found[1]))


def sweep(footprint: Footprint) -> None:
    """End what a drill left, so that it does not disturb the next; it is recorded before. Wardens are told first: each
    ends its tree whole, whatever that has overwritten. What was never seen below a marked process may be somebody
    else's: it is told as left behind, and lives."""
    wardens = [p for p in marked(footprint.mark) if _is_warden(p)]
    for process in wardens:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    psutil.wait_procs(wardens, timeout=_WARDENS_S)
    watch = _WATCHES.get(footprint.mark)
    known = watch.known if watch else set()
    left = [*marked(footprint.mark), *(p for p in nameless(()) if traces.process(p.pid) in known)]
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(left, timeout=5)


def _is_warden(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return any(word.endswith("warden.py") for word in process.cmdline())
    return False
