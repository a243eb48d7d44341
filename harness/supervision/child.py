"""One engine process: started in its own session, watched, and ended by its recorded id, never by name."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from abc import ABC, abstractmethod
from itertools import cycle
from pathlib import Path
from typing import IO, Protocol

import psutil

from harness.errors import EngineDiedError
from harness.supervision import procfs, stacks
from harness.supervision.log import EngineLog
from harness.supervision.server import ServerCommand, url_of

_POLLING_S = 0.1
"""CPU time of a thread, in seconds, above which it polls: by the time of the first requests, others have used none."""
_POLLING_NICENESS = 10
"""Leaves a thread a tenth of a core that another wants, and all of one that is idle."""


class Child(Protocol):
    """The part of ``subprocess.Popen`` that an engine process needs."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float) -> int: ...
    def terminate(self) -> None: ...


class EngineProcess(EngineLog, ABC):
    """A started engine and its log file."""

    def __init__(self, command: ServerCommand, log_path: Path) -> None:
        super().__init__(log_path)
        self.command = command
        self.started = time.monotonic()
        log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log: IO[bytes] = log_path.open("ab")
        self._popen: Child = self._spawn()

    @abstractmethod
    def _spawn(self) -> Child:
        """Start the command with its output going to the log."""

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def url(self) -> str:
        return url_of(self.command.host, self.command.port)

    def exit_code(self) -> int | None:
        """Return the exit code: None while the process runs, negative for the signal that ended it."""
        return self._popen.poll()

    def alive(self) -> bool:
        return self.exit_code() is None

    def require_alive(self) -> None:
        """Raise EngineDiedError, quoting the log, when the process has ended."""
        code = self.exit_code()
        if code is not None:
            name = f"{self.command.name} (pid {self.pid})"
            raise EngineDiedError(self.obituary(name, code), code, self.exception())

    def family(self) -> list[psutil.Process]:
        """Return the engine's processes: its descendants and every other process in its session."""
        found = []
        for pid in procfs.family(self.pid, procfs.processes()):
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(pid))
        return found

    def python_processes(self) -> list[int]:
        """Return the ids of the engine's Python processes."""
        return [p.pid for p in self.family() if stacks.is_python(p)]

    def settle_threads(self) -> int:
        """Move all threads of the processes that run the model, each onto its core, and lower the priority of those
        that poll; return how many moved.

        NIXL's progress thread polls without pause, and vLLM's CPU build pins it, in every engine, to the last core of
        the machine, and for a while the model's own thread too, so that hand-offs stall. On the engine's own core it
        would take half of the model's time at equal priority (docs/evidence/performance.md). The core is taken from the
        command, because the affinity found may be NIXL's.
        """
        cores = self.command.env.get("VLLM_CPU_OMP_THREADS_BIND", "").split("|")
        if not all(core.isdigit() for core in cores):
            return 0
        moved = 0
        for process, core in zip(self._runners(), cycle(cores), strict=False):
            with contextlib.suppress(OSError, psutil.Error):
                for thread in process.threads():
                    with contextlib.suppress(OSError):
                        os.sched_setaffinity(thread.id, {int(core)})
                        moved += 1
                        used_s = thread.user_time + thread.system_time
                        if thread.id != process.pid and used_s > _POLLING_S:
                            os.setpriority(os.PRIO_PROCESS, thread.id, _POLLING_NICENESS)
        return moved

    def _runners(self) -> list[psutil.Process]:
        """Return the processes that run the model: the workers in the order of the ranks in their names, or the engine
        core if it has none."""
        named: dict[str, list[tuple[int, str, psutil.Process]]] = {"Worker": [], "EngineCor": []}
        for process in self.family():
            with contextlib.suppress(psutil.Error):
                name = process.name()
                for kind in named:
                    if kind in name:
                        named[kind].append((len(name), name, process))
        return [process for _, _, process in sorted(named["Worker"] or named["EngineCor"], key=lambda found: found[:2])]

    def _ask_to_end(self, grace_s: float) -> None:
        """Send TERM to the server and wait up to ``grace_s`` seconds for it to end."""
        if self.alive():
            with contextlib.suppress(ProcessLookupError):
                self._popen.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(grace_s)

    @abstractmethod
    def stop(self, grace_s: float) -> list[str]:
        """End the whole process tree: TERM to the server, then KILL for what is left after ``grace_s`` seconds.

        Return descriptions of what could not be ended.
        """
