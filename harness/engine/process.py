"""One engine process: started in its own session, watched, and ended by the id that was recorded; never by name."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from pathlib import Path
from typing import IO, Protocol

import psutil

from harness.engine import stacks
from harness.engine.command import ServerCommand, full_environment, url_of
from harness.engine.log import EngineLog
from harness.errors import EngineDiedError


class Child(Protocol):
    """What is used of ``subprocess.Popen``."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float) -> int: ...
    def terminate(self) -> None: ...


def _lives(process: psutil.Process) -> bool:
    """A process may end between being found and being asked."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


class EngineProcess(EngineLog):
    """A started engine and its log file."""

    def __init__(self, command: ServerCommand, log_path: Path) -> None:
        super().__init__(log_path)
        self.command = command
        self.started = time.monotonic()
        log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log: IO[bytes] = log_path.open("ab")
        self._popen: Child = self._spawn()

    def _spawn(self) -> Child:
        return subprocess.Popen(
            self.command.argv,
            env=full_environment(self.command.env),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def url(self) -> str:
        return url_of(self.command.host, self.command.port)

    def exit_code(self) -> int | None:
        """None while it runs; negative for the signal that ended it."""
        return self._popen.poll()

    def alive(self) -> bool:
        return self.exit_code() is None

    def require_alive(self) -> None:
        """Raise EngineDiedError, quoting the log, when the process has ended."""
        code = self.exit_code()
        if code is not None:
            raise EngineDiedError(self.obituary(f"{self.command.name} (pid {self.pid})", code))

    def family(self) -> list[psutil.Process]:
        """The engine's processes: its children by parentage and whatever else lives in its session."""
        found: dict[int, psutil.Process] = {}
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.pid)
            found = {p.pid: p for p in [root, *root.children(recursive=True)]}
        for process in psutil.process_iter():
            with contextlib.suppress(ProcessLookupError, PermissionError, psutil.Error):
                if os.getsid(process.pid) == self.pid:
                    found[process.pid] = process
        return [p for p in found.values() if _lives(p)]

    def python_processes(self) -> list[int]:
        """Process ids of the engine's Python processes."""
        return [p.pid for p in self.family() if stacks.is_python(p)]

    def gather_threads(self) -> int:
        """Move all threads of the engine's worker onto the core that the engine was given; returns how many moved.

        NIXL's progress thread polls without pause (about 36,000 rounds a second, measured with strace), and vLLM's
        CPU build pins it to the last core of the machine, in every engine, and for a while the worker's own thread
        too. One hand-off of four then stalled for 5 to 35 seconds; with each worker's threads on a core of their own
        none did (docs/performance.md). The core is taken from the command, because the affinity found may be NIXL's.
        """
        core = self.command.env.get("VLLM_CPU_OMP_THREADS_BIND", "")
        if not core.isdigit():
            return 0
        moved = 0
        for process in self.family():
            with contextlib.suppress(OSError, psutil.Error):
                if "Worker" not in process.name():
                    continue
                for thread in process.threads():
                    with contextlib.suppress(OSError):
                        os.sched_setaffinity(thread.id, {int(core)})
                        moved += 1
        return moved

    def _ask_to_end(self, grace_s: float) -> None:
        """TERM to the server, and so much time for it."""
        if self.alive():
            with contextlib.suppress(ProcessLookupError):
                self._popen.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(grace_s)

    def stop(self, grace_s: float) -> list[str]:
        """End the whole process family: TERM to the server, KILL for what is left after ``grace_s`` seconds. Returns
        what is left then, in words."""
        family = self.family()
        self._ask_to_end(grace_s)
        members = {p.pid: p for p in [*family, *self.family()]}.values()
        _, left = psutil.wait_procs(list(members), timeout=1.0 if not self.alive() else 0)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        _, left = psutil.wait_procs(left, timeout=5)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(5)
        self._log.close()
        return [f"process {p.pid} of the {self.command.name}, which cannot be killed" for p in left if _lives(p)]
