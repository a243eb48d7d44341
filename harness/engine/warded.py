"""An engine that cannot outlive the process that started it: started through ``warden``."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from harness.engine import warden
from harness.engine.command import ServerCommand
from harness.engine.process import EngineProcess
from harness.errors import EngineStartError

_START_S = 60.0
_POLL_S = 0.05


class Warded:
    """A process below a warden, used like ``subprocess.Popen``. Its whole tree is killed when this object is closed, or
    when the process that holds it ends in whatever way."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], log: IO[bytes]) -> None:
        """Raises EngineStartError when there is no such program."""
        # -I: what the environment makes of Python is for the engine, not for its warden.
        launcher = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(warden.__file__).resolve()), *argv],
            env=dict(env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            bufsize=0,
        )
        assert launcher.stdin is not None
        assert launcher.stdout is not None
        self._lifeline = launcher.stdin
        self._said = launcher.stdout
        os.set_blocking(self._said.fileno(), False)
        self._text = b""
        self.returncode: int | None = None
        launcher.wait()
        self.pid = self._first_words(argv)

    def _first_words(self, argv: Sequence[str]) -> int:
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            lines, over = self._listen()
            if lines and "pid" in lines[0]:
                self._take(lines[1:])
                return int(lines[0]["pid"])
            if lines or over:
                why = lines[0].get("failed") if lines else "its warden ended at once"
                self.close()
                raise EngineStartError(f"expected to start {argv[0]}, found that it cannot be: {why}")
            time.sleep(_POLL_S)
        self.close()
        raise EngineStartError(f"expected {argv[0]} to be started within {_START_S:.0f} s, found nothing; try again")

    def _listen(self) -> tuple[list[dict[str, int]], bool]:
        """What the warden said since the last time, and whether it has ended."""
        over = False
        with contextlib.suppress(BlockingIOError):
            while (read := self._said.read(4096)) is not None:
                self._text += read
                if not read:
                    over = True
                    break
        *lines, self._text = self._text.split(b"\n")
        return [json.loads(line) for line in lines], over

    def _take(self, lines: Sequence[dict[str, int]]) -> None:
        for line in lines:
            if "ended" in line:
                self.returncode = line["ended"]

    def poll(self) -> int | None:
        """The exit code when it has ended, negative for a signal."""
        if self.returncode is None and not self._said.closed:
            lines, over = self._listen()
            self._take(lines)
            if over and self.returncode is None:
                # Without its warden it could outlive us.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)
                self.returncode = -signal.SIGKILL
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Raises subprocess.TimeoutExpired."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired([str(self.pid)], timeout)
            time.sleep(_POLL_S)
        return code

    def terminate(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)

    def close(self) -> None:
        """End the warden, and with it whatever is left below it."""
        self._lifeline.close()
        self._said.close()


class WardedEngine(EngineProcess):
    """An engine process below a warden."""

    def __init__(self, command: ServerCommand, log_path: Path, env: Mapping[str, str]) -> None:
        """``env`` is the whole environment. Raises EngineStartError when there is no such program."""
        self._env = env
        super().__init__(command, log_path)

    def _spawn(self) -> Warded:
        self._warded = Warded(self.command.argv, self._env, self._log)
        return self._warded

    def stop(self, grace_s: float) -> None:
        super().stop(grace_s)
        self._warded.close()
