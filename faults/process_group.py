"""The processes of a started engine, and signals to them.

A process is identified by its pid and its start time, so that no signal goes to a process that reuses the pid.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence

import psutil

from faults.proxy import FaultError

_WAIT_S = 10.0
"""Less than the drills' request timeout of 15 s."""
_POLL_S = 0.01


class ProcessGroup:
    """An engine's API server, which leads a session, and all other processes in that session."""

    def __init__(self, pid: int) -> None:
        """Identify the processes. Raises FaultError when there is no process ``pid``."""
        try:
            self.server = psutil.Process(pid)
        except psutil.Error as error:
            raise FaultError(f"expected the engine's process {pid}, found none: {error}") from error
        self._known = {self.server}

    def members(self, part: str = "") -> list[psutil.Process]:
        """Return the living processes whose name contains ``part``."""
        found = set()
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                if os.getsid(process.pid) == self.server.pid:
                    found.add(process)
        # A session has its leader's pid, which is not reused while the leader exists.
        if self.server.is_running():
            self._known |= found
        return [p for p in self._known if lives(p) and part in _name(p)]

    def send(self, number: signal.Signals, to_model: bool = False) -> int:
        """Send a signal to all processes, or only to those that run the model: the workers, or the engine core if it
        has none. Wait for its effect, and return how many processes got it.

        Raises FaultError when there is no such process or no effect.
        """
        reached = self.members("Worker") or self.members("EngineCor") if to_model else self.members()
        for process in reached:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        if not reached:
            raise FaultError(f"expected a living process of the engine{' that runs the model' * to_model}, found none")
        _await_effect(number, reached)
        return len(reached)

    def kill_server(self) -> None:
        """KILL only the API server; its children have to be ended by somebody else. Raises FaultError if it is dead."""
        if not lives(self.server):
            raise FaultError("expected the engine to live until it is killed, found it gone")
        with contextlib.suppress(psutil.NoSuchProcess):
            self.server.send_signal(signal.SIGKILL)
        _await_effect(signal.SIGKILL, [self.server])

    def kill(self) -> None:
        """KILL every process, the workers first. Raises FaultError if the API server is dead."""
        if not lives(self.server):
            raise FaultError("expected the engine to live until it is killed, found it gone")
        # Workers first, so that the drill does not depend on the supervisor, which ends a tree without a server.
        for process in sorted(self.members(), key=lambda p: p == self.server):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        _await_effect(signal.SIGKILL, self.members())


def lives(process: psutil.Process) -> bool:
    """Return whether the process exists and is not a zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _name(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return process.name()
    return ""


def _stopped(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.status() == psutil.STATUS_STOPPED
    return False


_EFFECTS: dict[signal.Signals, Callable[[psutil.Process], bool]] = {
    signal.SIGKILL: lambda p: not lives(p),
    signal.SIGSTOP: lambda p: _stopped(p) or not lives(p),
    signal.SIGCONT: lambda p: not _stopped(p),
}


def _await_effect(number: signal.Signals, processes: Sequence[psutil.Process]) -> None:
    effect = _EFFECTS[number]
    deadline = time.monotonic() + _WAIT_S
    while not all(effect(p) for p in processes):
        if time.monotonic() > deadline:
            raise FaultError(f"expected {number.name} to take effect within {_WAIT_S:.0f} s, found none")
        time.sleep(_POLL_S)
