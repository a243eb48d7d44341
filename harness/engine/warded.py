"""An engine that cannot outlive the process that started it: started through ``warden``."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from harness.engine import leftovers, ports, scratch, traces, warden
from harness.engine.command import LOOPBACK, ServerCommand
from harness.engine.process import EngineProcess
from harness.errors import EngineStartError
from harness.storage import writing

_START_S = 60.0
_END_S = 45.0
"""Longest that a warden may take to end its tree; it gives up on processes in the kernel after 30 s."""
_POLL_S = 0.05


class About(NamedTuple):
    """What the ledger of a tree says about it."""

    name: str = ""
    ports: tuple[int, ...] = ()
    """All that its processes may listen on."""
    host: str = LOOPBACK
    run: str = ""
    """Folder of the run."""


NOTHING = About()


class Warded:
    """A process below a warden, used like ``subprocess.Popen``. Its whole tree is killed when this object is closed, or
    when the process that holds it ends in whatever way."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], log: IO[bytes], about: About = NOTHING) -> None:
        """Raises EngineStartError when there is no such program, or no folder for the ledger."""
        handles = ports.handles(about.ports)
        self.notes: list[str] = []
        """What the warden removed, and what it left because it may be somebody else's, in words."""
        said = self._said_of(argv, about, handles)
        self.ledger = Path(said["ledger"])
        self._known = self._ledger_of(said)
        # -I: what the environment makes of Python is for the engine, not for its warden.
        try:
            launcher = subprocess.Popen(
                [sys.executable, "-I", "-S", str(Path(warden.__file__).resolve()), json.dumps(said), *argv],
                env=dict(env),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
                pass_fds=handles,
            )
        except (OSError, ValueError) as error:
            raise EngineStartError(f"expected to start {argv[0]}, found that its warden cannot be: {error}") from error
        assert launcher.stdin is not None
        assert launcher.stdout is not None
        self._lifeline = launcher.stdin
        self._said = launcher.stdout
        os.set_blocking(self._said.fileno(), False)
        self._text = b""
        self._lock = threading.RLock()
        self._left: list[str] | None = None
        """What the warden said is left; None as long as it has not."""
        self.returncode: int | None = None
        try:
            launcher.wait(_START_S)
        except subprocess.TimeoutExpired:
            launcher.kill()
            launcher.wait()
        self.pid = self._first_words(argv)

    def _said_of(self, argv: Sequence[str], about: About, handles: Sequence[int]) -> dict[str, Any]:
        mark = secrets.token_hex(8)
        try:
            state = traces.state_folder()
        except OSError as error:
            raise EngineStartError(f"expected a folder for the ledger of engines, found none: {error}") from error
        ledger = state / f"tree-{os.getpid()}-{mark}.json"
        name, own = about.name or Path(argv[0]).name, ""
        try:
            own = str(scratch.folder_for(state, mark))
        except scratch.ScratchError as error:
            self.notes.append(str(error))
        return {
            "ledger": str(ledger),
            "mark": mark,
            "holder": traces.process(os.getpid()),
            "claims": list(handles),
            "about": {**about._asdict(), "name": name, "scratch": own, "started": time.time()},
        }

    @staticmethod
    def _ledger_of(said: Mapping[str, Any]) -> leftovers.Ledger:
        """What is known here without the warden: the mark, and what was there before."""
        return leftovers.Ledger(
            format=warden.FORMAT,
            boot=traces.boot(),
            namespace=traces.namespace(),
            mark=said["mark"],
            holder=said["holder"],
            warden=None,
            engine=None,
            members=(),
            made=(),
            before=tuple(sorted(traces.segments())),
            **said["about"],
        )

    def _first_words(self, argv: Sequence[str]) -> int:
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            lines, over = self._listen()
            if lines and "pid" in lines[0]:
                pid, start = int(lines[0]["pid"]), int(lines[0]["start"])
                # Without a start time it had ended before it could be looked at.
                engine = traces.Process(pid, start) if start else None
                running = lines[0]["warden"] and traces.Process(*lines[0]["warden"])
                self._known = self._known.model_copy(update={"engine": engine, "warden": running})
                self._take(lines[1:])
                return pid
            if lines or over:
                why = lines[0].get("failed") if lines else "its warden ended at once"
                self._take(lines)
                self.close()
                raise EngineStartError(f"expected to start {argv[0]}, found that it cannot be: {why}")
            time.sleep(_POLL_S)
        self.close()
        raise EngineStartError(f"expected {argv[0]} to be started within {_START_S:.0f} s, found nothing; try again")

    def _listen(self) -> tuple[list[dict[str, Any]], bool]:
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

    def _take(self, lines: Iterable[dict[str, Any]]) -> None:
        for line in lines:
            if "ended" in line:
                self.returncode = line["ended"]
            if "left" in line:
                self._left = line["left"]
                self.notes += [f"removed shared memory {traces.SHM / name}" for name in line["removed"]]
                self.notes += [f"not removed, because it may be somebody's: {words}" for words in line["kept"]]

    def poll(self) -> int | None:
        """The exit code when it has ended, negative for a signal."""
        with self._lock:
            if self.returncode is None and not self._said.closed:
                lines, over = self._listen()
                self._take(lines)
                if over and self.returncode is None:
                    # Without its warden it could outlive us. Its pid may be another's by now.
                    if self._left is None:
                        self._left = self._stand_in()
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
        if self.poll() is None and self._known.engine is not None:
            traces.send(self._known.engine, signal.SIGTERM)

    def close(self) -> list[str]:
        """End the warden, and with it whatever is left below it; returns what could not be ended or removed, in words.

        A warden that was killed, or does not end, is stood in for: the ledger says what was its own.
        """
        with self._lock:
            if self._said.closed:
                return self._left or []
            self._lifeline.close()
            deadline = time.monotonic() + _END_S
            over = False
            while not over and time.monotonic() < deadline:
                lines, over = self._listen()
                self._take(lines)
                if not over:
                    time.sleep(_POLL_S)
            self._said.close()
            if self._left is None or not over:
                self._left = self._stand_in()
            if self.returncode is None:
                self.returncode = -signal.SIGKILL
            return self._left

    def _stand_in(self) -> list[str]:
        found = leftovers.read_ledger(self.ledger)
        if isinstance(found, leftovers.Ledger):
            return leftovers.end_tree(self.ledger, found).left
        # What carries the mark, and what is below it, is found without a ledger; the rest is not.
        ended = leftovers.end_tree(None, self._known)
        gone = "found none" if found is None else f"found it damaged ({found.why})"
        return [*ended.left, f"whatever {self._known.name} started and made: expected its ledger {self.ledger}, {gone}"]


class WardedEngine(EngineProcess):
    """An engine process below a warden."""

    def __init__(
        self, command: ServerCommand, log_path: Path, env: Mapping[str, str], claimed: Sequence[int] = ()
    ) -> None:
        """``env`` is the whole environment; ``claimed`` are the ports that were claimed for it, side channels included,
        and are let go of when it is gone. Raises EngineStartError when it cannot be started, and StorageError when its
        log cannot be written."""
        self._env = env
        self._claimed = tuple(claimed)
        self._ending = threading.Lock()
        self._left: list[str] | None = None
        try:
            with writing(log_path):
                super().__init__(command, log_path)
        except BaseException:
            ports.release(self._claimed)
            raise

    def _spawn(self) -> Warded:
        folder = self.log_path.parent
        run = folder.parent if folder.name == "logs" else folder
        about = About(self.log_path.stem, self._claimed, self.command.host, str(run.resolve()))
        try:
            self._warded = Warded(self.command.argv, self._env, self._log, about)
        except BaseException:
            self._log.close()
            raise
        return self._warded

    def stop(self, grace_s: float) -> list[str]:
        """As ``EngineProcess.stop``, and remove what its processes made; what remains is written to the log too."""
        with self._ending:
            if self._left is None:
                self._ask_to_end(grace_s)
                # What is left is stopped, looked at and killed by the warden, in this order.
                self._log.close()
                self._left = [*self._warded.close(), *self._still_used()]
                ports.release(self._claimed)
                self._write_left(self._left)
            return self._left

    def _write_left(self, left: Sequence[str]) -> None:
        with contextlib.suppress(OSError), self.log_path.open("a", encoding="utf-8") as log:
            log.writelines(f"harness: {words}\n" for words in self._warded.notes)
            log.writelines(f"harness: left after the end: {words}\n" for words in left)

    def _still_used(self) -> list[str]:
        """Ports of the engine that something listens on though its processes are gone."""
        host = self.command.host
        found = {p: ports.trouble(p, host) for p in ports.held(self._claimed)}
        return [f"port {p} on {host}, which is {why}" for p, why in found.items() if why]
