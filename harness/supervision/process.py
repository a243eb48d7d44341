"""Processes and engines that cannot outlive the process that started them, because a supervisor owns them."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from harness.errors import EngineStartError
from harness.supervision import fork_servers, orphans, ports, procfs, runtime_dir, supervisor
from harness.supervision.child import EngineProcess
from harness.supervision.cores import Cores
from harness.supervision.log import STARTED_AGAIN
from harness.supervision.server import LOOPBACK, ServerCommand
from harness.util.storage import writing

_LOG = logging.getLogger(__name__)
_START_S = 60.0
_END_S = 45.0
"""Longest that a supervisor may take to end its tree; it gives up on processes stuck in the kernel after 30 s."""
_POLL_S = 0.05


class TreeDetails(NamedTuple):
    """The description of a process tree in its ledger, the supervisor's record of it."""

    name: str = ""
    ports: tuple[int, ...] = ()
    """All ports that its processes may listen on."""
    host: str = LOOPBACK
    run: str = ""
    """Folder of the run."""


_NO_DETAILS = TreeDetails()


class SupervisedProcess:
    """A process below a supervisor, used like ``subprocess.Popen``. Its whole tree is killed when this object is
    closed, or when the process that holds it ends in whatever way."""

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        log: IO[bytes],
        details: TreeDetails = _NO_DETAILS,
        preload: Sequence[str] = (),
        claims: Sequence[int] = (),
    ) -> None:
        """Start the process, forked from one that has imported ``preload`` if that is not empty and can be done.

        ``claims`` are the descriptors of claims beside those of its ports; its supervisor holds them too.

        Raises EngineStartError when there is no such program, or no folder for the ledger.
        """
        handles = (*ports.handles(details.ports), *claims)
        self.notes: list[str] = []
        """Descriptions of what the supervisor removed, and of what differs from the usual."""
        request = self._request(argv, details, handles)
        self.ledger = Path(request["ledger"])
        self._known = self._expected_ledger(request)
        forked = fork_servers.start(preload, request, argv, env, log, handles) if preload else None
        self._lifeline, self._replies = forked or self._launch(request, argv, env, log, handles)
        os.set_blocking(self._replies.fileno(), False)
        self._text = b""
        self._lock = threading.RLock()
        self._left: list[str] | None = None
        """What is left according to the supervisor; None until it has reported."""
        self.returncode: int | None = None
        self.pid = self._wait_for_start(argv)

    @staticmethod
    def _launch(
        request: Mapping[str, Any], argv: Sequence[str], env: Mapping[str, str], log: IO[bytes], handles: Sequence[int]
    ) -> tuple[IO[bytes], IO[bytes]]:
        """Start a supervisor; return its lifeline and the pipe of its replies. Raises EngineStartError."""
        _LOG.debug("starting %s", shlex.join(argv))
        # -I: the environment's PYTHON… variables are for the engine, not for its supervisor.
        try:
            launcher = subprocess.Popen(
                [sys.executable, "-I", "-S", str(Path(supervisor.__file__).resolve()), json.dumps(request), *argv],
                env=dict(env),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
                pass_fds=handles,
            )
        except (OSError, ValueError) as error:
            raise EngineStartError(f"cannot start {argv[0]}: its supervisor cannot start: {error}") from error
        assert launcher.stdin is not None
        assert launcher.stdout is not None
        try:
            launcher.wait(_START_S)
        except subprocess.TimeoutExpired:
            launcher.kill()
            launcher.wait()
        return launcher.stdin, launcher.stdout

    def _request(self, argv: Sequence[str], details: TreeDetails, handles: Sequence[int]) -> dict[str, Any]:
        """Return the supervisor's first argument, ``ABOUT``."""
        mark = secrets.token_hex(8)
        try:
            state = procfs.state_folder()
        except OSError as error:
            raise EngineStartError(f"expected a folder for the ledgers of engines, found none: {error}") from error
        ledger = state / f"tree-{os.getpid()}-{mark}.json"
        sockets = ""
        try:
            sockets = str(runtime_dir.folder_for(state, mark))
        except runtime_dir.ScratchError as error:
            self.notes.append(str(error))
        return {
            "ledger": str(ledger),
            "mark": mark,
            "holder": procfs.process(os.getpid()),
            "claims": list(handles),
            "about": {
                **details._asdict(),
                "name": details.name or Path(argv[0]).name,
                "scratch": sockets,
                "started": time.time(),
            },
        }

    @staticmethod
    def _expected_ledger(request: Mapping[str, Any]) -> orphans.Ledger:
        """Return what is known without the supervisor's ledger, above all the mark."""
        return orphans.Ledger(
            format=supervisor.FORMAT,
            boot=procfs.boot(),
            namespace=procfs.namespace(),
            mark=request["mark"],
            holder=request["holder"],
            warden=None,
            engine=None,
            members=(),
            **request["about"],
        )

    def _wait_for_start(self, argv: Sequence[str]) -> int:
        """Wait until the supervisor has started the program and return its pid. Raises EngineStartError."""
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            lines, over = self._read_replies()
            if lines and "pid" in lines[0]:
                pid, start = int(lines[0]["pid"]), int(lines[0]["start"])
                # A start time of 0 means that it had ended before it could be examined.
                engine = procfs.Process(pid, start) if start else None
                running = lines[0]["warden"] and procfs.Process(*lines[0]["warden"])
                self._known = self._known.model_copy(update={"engine": engine, "warden": running})
                self._take(lines[1:])
                return pid
            if lines or over:
                why = lines[0].get("failed") if lines else "its supervisor ended at once"
                self._take(lines)
                self.close()
                raise EngineStartError(f"cannot start {argv[0]}: {why}")
            time.sleep(_POLL_S)
        self.close()
        raise EngineStartError(
            f"expected {argv[0]} to be started within {_START_S:.0f} s, found no answer of its supervisor; try again"
        )

    def _read_replies(self) -> tuple[list[dict[str, Any]], bool]:
        """Return the supervisor's new replies, and whether it has ended."""
        over = False
        with contextlib.suppress(BlockingIOError):
            while (read := self._replies.read(4096)) is not None:
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
                self.notes += [f"removed shared memory {procfs.SHM / name}" for name in line["removed"]]

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""
        with self._lock:
            if self.returncode is None and not self._replies.closed:
                lines, over = self._read_replies()
                self._take(lines)
                if over and self.returncode is None:
                    # Without its supervisor it could outlive us. Its pid may be another process's by now.
                    if self._left is None:
                        self._left = self._end_tree()
                    self.returncode = -signal.SIGKILL
            return self.returncode

    def wait(self, timeout: float) -> int:
        """Wait for the process and return its exit code. Raises subprocess.TimeoutExpired."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired([str(self.pid)], timeout)
            time.sleep(_POLL_S)
        return code

    def terminate(self) -> None:
        if self.poll() is None and self._known.engine is not None:
            procfs.send(self._known.engine, signal.SIGTERM)

    def close(self) -> list[str]:
        """End the supervisor and everything below it; return descriptions of what could not be ended or removed.

        When the supervisor was killed or does not end, the tree is ended from here by its ledger.
        """
        with self._lock:
            if self._replies.closed:
                return self._left or []
            self._lifeline.close()
            deadline = time.monotonic() + _END_S
            over = False
            while not over and time.monotonic() < deadline:
                lines, over = self._read_replies()
                self._take(lines)
                if not over:
                    time.sleep(_POLL_S)
            self._replies.close()
            if self._left is None or not over:
                self._left = self._end_tree()
            if self.returncode is None:
                self.returncode = -signal.SIGKILL
            return self._left

    def _end_tree(self) -> list[str]:
        """End the tree in place of its supervisor; return descriptions of what is left."""
        found = orphans.read_ledger(self.ledger)
        if isinstance(found, orphans.Ledger):
            return orphans.end_tree(self.ledger, found).left
        # Without a ledger only the processes that carry the mark, and their descendants, can be found.
        ended = orphans.end_tree(None, self._known)
        gone = "found none" if found is None else f"found it damaged ({found.why})"
        return [*ended.left, f"whatever {self._known.name} started and made: expected its ledger {self.ledger}, {gone}"]


class SupervisedEngine(EngineProcess):
    """An engine process below a supervisor."""

    def __init__(
        self,
        command: ServerCommand,
        log_path: Path,
        env: Mapping[str, str],
        claimed: Sequence[int] = (),
        cores: Cores | None = None,
    ) -> None:
        """Start the engine.

        ``env`` is the whole environment. ``claimed`` are the ports that were claimed for the engine, side channels
        included, and ``cores`` its cores; they are released when it is gone. Raises EngineStartError when it cannot be
        started, and StorageError when its log cannot be written.
        """
        self._env = env
        self._claimed = tuple(claimed)
        self._cores = cores or Cores()
        self._ending = threading.Lock()
        self._left: list[str] | None = None
        try:
            with writing(log_path):
                super().__init__(command, log_path)
        except BaseException:
            self._release()
            raise

    def _release(self) -> None:
        ports.release(self._claimed)
        self._cores.release()

    def _spawn(self) -> SupervisedProcess:
        folder = self.log_path.parent
        run = folder.parent if folder.name == "logs" else folder
        details = TreeDetails(self.log_path.stem, self._claimed, self.command.host, str(run.resolve()))
        try:
            self._process = SupervisedProcess(
                self.command.argv, self._env, self._log, details, self.command.preload, self._cores.handles
            )
        except BaseException:
            self._log.close()
            raise
        return self._process

    def stop(self, grace_s: float) -> list[str]:
        """Do as ``EngineProcess.stop``, and remove what its processes created; log what remains."""
        with self._ending:
            if self._left is None:
                _LOG.debug("ending %s, pid %d", self.command.name, self.pid)
                self._left = self._end(grace_s)
                _LOG.debug("ended %s; left: %s", self.command.name, "; ".join(self._left) or "nothing")
                self._log.close()
                self._release()
            return self._left

    def restart(self, grace_s: float) -> list[str]:
        """End the engine as ``stop`` does, and start it again on its ports and cores, with the same log.

        Return descriptions of what is left of the first one. Raises EngineStartError when it cannot be started, or was
        stopped before.
        """
        with self._ending:
            if self._left is not None:
                raise EngineStartError(f"{self.command.name} was stopped, so it cannot be restarted")
            left = self._end(grace_s)
            self._note(STARTED_AGAIN)
            self.started = time.monotonic()
            self._popen = self._spawn()
            return left

    def _end(self, grace_s: float) -> list[str]:
        self._ask_to_end(grace_s)
        left = [*self._process.close(), *self._ports_in_use()]
        self._note(*(f"harness: {words}" for words in self._process.notes))
        self._note(*(f"harness: left after the end: {words}" for words in left))
        return left

    def _note(self, *lines: str) -> None:
        """Add lines of the harness to the engine's log, if it can be written."""
        with contextlib.suppress(OSError), self.log_path.open("a", encoding="utf-8") as log:
            log.writelines(f"{line}\n" for line in lines)

    def _ports_in_use(self) -> list[str]:
        """Describe the ports of the engine that something listens on although its processes are gone."""
        host = self.command.host
        found = {p: ports.trouble(p, host) for p in ports.held(self._claimed)}
        return [f"port {p} on {host}, which is {why}" for p, why in found.items() if why]
