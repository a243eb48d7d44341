"""The fork servers of this process: one per environment of engines, started when the first of them is."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from harness.supervision import fork_server, procfs
from harness.supervision.fork_server import NO_MARK, SEPARATE, declares_plugins_alone, path_of
from harness.util import clock

_IMPORT_S = 120.0
"""Longest wait for the imports; an engine that is then started as usual has its own limit."""
_LAST_FORK_S = 10.0
"""Longest wait for engines that a server was asked for before it is ended."""
Pipes = tuple[IO[bytes], IO[bytes]]


class _ForkServer:
    """A process that has imported the modules of an engine's program and forks engines."""

    def __init__(self, python: str, modules: Sequence[str], env: Mapping[str, str]) -> None:
        """Start it; ``ready`` waits for the imports. Raises OSError."""
        self._socket, theirs = socket.socketpair()
        self._began = clock.now()
        with theirs:
            self._process: subprocess.Popen[bytes] = subprocess.Popen(
                [python, str(Path(fork_server.__file__).resolve()), *modules],
                env={**env, procfs.MARK: NO_MARK},
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )

    def ready(self) -> bool:
        """Wait for the imports and return whether they succeeded."""
        self._socket.settimeout(_IMPORT_S)
        with contextlib.suppress(OSError):
            return self._socket.recv(1) == b"."
        return False

    def alive(self) -> bool:
        return self._process.poll() is None

    def start(
        self,
        request: Mapping[str, Any],
        argv: Sequence[str],
        env: Mapping[str, str],
        log: IO[bytes],
        handles: Sequence[int],
    ) -> Pipes:
        """Ask for an engine below a supervisor; return its lifeline and the pipe of its replies. Raises OSError."""
        theirs, lifeline = os.pipe()
        replies, answers = os.pipe()
        asked = os.memfd_create("engine")
        try:
            text = json.dumps({"about": request, "argv": list(argv), "env": dict(env)})
            with open(asked, "w", encoding="utf-8", closefd=False) as file:
                file.write(text)
            socket.send_fds(self._socket, [b"."], [asked, theirs, answers, log.fileno(), *handles])
        except BaseException:
            os.close(lifeline)
            os.close(replies)
            raise
        finally:
            for file_number in (asked, theirs, answers):
                os.close(file_number)
        return os.fdopen(lifeline, "wb", buffering=0), os.fdopen(replies, "rb", buffering=0)

    def close(self) -> None:
        """End it when it has forked what it was asked for; that does not depend on it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        try:
            self._process.wait(_LAST_FORK_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._socket.close()
        procfs.remove_abandoned(self._began, [self._process.pid])


class _Current(NamedTuple):
    """The fork server in use."""

    key: object
    server: _ForkServer | None
    """None if the modules cannot be imported."""

    def end(self) -> None:
        if self.server is not None:
            self.server.close()


_lock = threading.Lock()
_current = _Current(None, None)


def start(
    modules: Sequence[str],
    request: Mapping[str, Any],
    argv: Sequence[str],
    env: Mapping[str, str],
    log: IO[bytes],
    handles: Sequence[int],
) -> Pipes | None:
    """Fork a supervised engine; return its lifeline and the pipe of its supervisor's replies, or None if it has to be
    started in the usual way.

    ``argv`` is ``[PYTHON, "-m", MODULE, ARGUMENT …]`` and ``request`` the supervisor's first argument.
    """
    shared = _shared(env)
    with _lock, contextlib.suppress(OSError):
        server = _obtain(argv[0], modules, shared)
        if server is not None:
            return server.start(request, argv, env, log, handles)
    return None


def _shared(env: Mapping[str, str]) -> dict[str, str]:
    """Return what the engines of one fork server have in common."""
    path = [folder for folder in path_of(env) if not declares_plugins_alone(folder)]
    kept = {k: v for k, v in env.items() if k not in SEPARATE and not k.startswith("KV_HARNESS_")}
    return kept | ({"PYTHONPATH": os.pathsep.join(path)} if "PYTHONPATH" in env else {})


def _obtain(python: str, modules: Sequence[str], env: Mapping[str, str]) -> _ForkServer | None:
    """Return the fork server for this environment, started now unless it runs; None if it cannot import the modules.

    Another environment's is ended: its memory is worth more than a later import. Raises OSError.
    """
    global _current
    # A forked child of this process must not write to its socket.
    key = (os.getpid(), python, tuple(modules), frozenset(env.items()))
    if key != _current.key or (_current.server is not None and not _current.server.alive()):
        _current.end()
        _current = _Current(None, None)
        server = _ForkServer(python, modules, env)
        if server.ready():
            _current = _Current(key, server)
        else:
            server.close()
            _current = _Current(key, None)
    return _current.server
