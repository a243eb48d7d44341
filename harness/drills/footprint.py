"""What a drill leaves behind: processes, listening ports, shared memory, ledgers. Processes are known by a mark in
their environment, which children inherit and a process cannot lose by changing its session or its parent."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from pathlib import Path

import psutil

from harness.engine import traces
from harness.engine.leftovers import Ledger, read_ledger

MARK = "KV_DRILL_MARK"
_SHARED = Path("/dev/shm")
_POLL_S = 0.25


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
    """Whether a ledger belongs to another harness that lives, or is gone by now."""
    if not path.is_file():
        return True
    ledger = read_ledger(path)
    # It may have gone meanwhile.
    return ledger is None or (isinstance(ledger, Ledger) and ledger.held and ledger.holder.pid != os.getpid())


class Footprint:
    """Taken before a drill; says afterwards what is there that was not."""

    def __init__(self, mark: str) -> None:
        self.mark = mark
        self._shared = shared_memory()
        self._ledgers = ledgers()

    def left(self, patience_s: float) -> tuple[str, ...]:
        """What is still there after at most so many seconds; nothing is ended by this."""
        deadline = time.monotonic() + patience_s
        while (found := self._now()) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return found

    def _now(self) -> tuple[str, ...]:
        found = []
        for process in marked(self.mark):
            with contextlib.suppress(psutil.Error):
                ports = [str(c.laddr.port) for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
                listening = f", listening on {', '.join(ports)}" if ports else ""
                found.append(f"process {process.pid} {process.name()} ({process.status()}){listening}")
        # Segments that another's process uses are another's.
        new = shared_memory() - self._shared
        found += [f"shared memory {name}" for name in sorted(new - _in_use(new))]
        found += [f"ledger {path.name}" for path in sorted(ledgers() - self._ledgers) if not _of_others(path)]
        return tuple(found)


def sweep(mark: str) -> None:
    """Kill what carries the mark, so that one drill's left-overs do not disturb the next; they are recorded before."""
    left = marked(mark)
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(left, timeout=5)
