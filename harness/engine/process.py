"""One engine process: started in its own session, watched, and ended by the id that was recorded; never by name."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import IO

import psutil

from harness.engine.command import LOOPBACK, ServerCommand, full_environment
from harness.errors import EngineDiedError

LOG_TAIL_LINES = 8
# A traceback's last line, behind vLLM's prefix of process and place. EngineDeadError only repeats that there was one.
_EXCEPTION = re.compile(
    r"^(?:\(.*?\) )?(?:ERROR [^\]]*\] )?((?!\S*EngineDeadError)[A-Za-z_.]*(?:Error|Exception|Interrupt)\b: .*)$",
    re.MULTILINE,
)


class EngineProcess:
    """A started engine and its log file."""

    def __init__(self, command: ServerCommand, log_path: Path) -> None:
        self.command = command
        self.log_path = log_path
        self.started = time.monotonic()
        log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log: IO[bytes] = log_path.open("ab")
        self._popen = self._spawn()

    def _spawn(self) -> subprocess.Popen[bytes]:
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
        return f"http://{LOOPBACK}:{self.command.port}"

    def alive(self) -> bool:
        return self._popen.poll() is None

    def log_text(self) -> str:
        """All that the engine has written so far."""
        try:
            return self.log_path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def root_error(self) -> str:
        """The first exception that the engine logged, as `` (it logged: …)``; empty when there is none.

        What a client sees of it is "EngineCore encountered an issue"; the reason stands hundreds of lines earlier.
        """
        found = _EXCEPTION.search(self.log_text())
        return f" (it logged: {found.group(1)[:300]})" if found else ""

    def log_tail(self, lines: int = LOG_TAIL_LINES) -> str:
        """Last lines of the log; of a traceback, the lines that name the error."""
        kept = [line.rstrip() for line in self.log_text().splitlines() if line.strip()]
        return "\n".join(f"    | {line[:300]}" for line in kept[-lines:]) or "    | (no log, or an empty one)"

    def require_alive(self) -> None:
        """Raise EngineDiedError, quoting the log, when the process has ended."""
        code = self._popen.poll()
        if code is not None:
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
            raise EngineDiedError(
                f"the {self.command.name} (pid {self.pid}) ended by itself with {how}{self.root_error()}; last lines "
                f"of {self.log_path}:\n{self.log_tail()}"
            )

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
        return [p for p in found.values() if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

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

    def stop(self, grace_s: float) -> None:
        """End the whole process family: TERM to the server, KILL for what is left after ``grace_s`` seconds."""
        family = self.family()
        if self.alive():
            with contextlib.suppress(ProcessLookupError):
                self._popen.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(grace_s)
        members = {p.pid: p for p in [*family, *self.family()]}.values()
        _, left = psutil.wait_procs(list(members), timeout=1.0 if not self.alive() else 0)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=5)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(5)
        self._log.close()
