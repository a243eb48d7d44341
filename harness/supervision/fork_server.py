"""Forks engines from a process that has already imported what they import. Run as a program, by the engines' Python:

    fork_server.py MODULE …

It imports the modules, those that exist, and writes one byte to its standard input, a socket whose other end the holder
has. Then it forks a supervisor for each message there: a byte with the descriptors of a file of JSON (``about``, see
``supervisor``; ``argv``; ``env``, the whole environment), the lifeline, the pipe for replies, the log, and the claims.
That supervisor forks the engine, which runs ``argv`` (``python -m MODULE ARGUMENT …``) as if that command had started
it. It ends when the holder's end of the socket is closed; the supervisors and engines do not depend on it.

Importing torch and vLLM takes most of an engine's start, and the engines of a run all import the same. Only what no
module reads while it is imported may differ between engines: ``SEPARATE``, and folders of the Python path that only
declare plugins. Not for GPUs: CUDA does not survive a fork.
Standard library only. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if not __package__:
    # This file's own folder would hide modules of the engine, and the project's is needed here only.
    sys.path[:] = [p for p in sys.path if p != str(Path(__file__).resolve().parent)]
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness.supervision import procfs, supervisor

if not __package__:
    del sys.path[0]

SEPARATE = (
    "VLLM_API_KEY",
    "VLLM_CPU_OMP_THREADS_BIND",
    "VLLM_NIXL_SIDE_CHANNEL_PORT",
    "VLLM_NIXL_SIDE_CHANNEL_HOST",
    "UCX_TLS",
    "UCX_NET_DEVICES",
)
"""Variables, beside the harness's own, in which the engines of one fork server may differ. UCX reads its own when NIXL
makes an agent, which only engines of pairs do."""
PLUGINS = "[vllm.general_plugins]"
"""The entry points that vLLM looks for when an engine starts, not while it is imported."""
NO_MARK = "0" * 16
_FILES = 64


def _import(modules: Sequence[str]) -> None:
    """Import the modules. One that another vLLM lacks, or that fails, is left to the engine, which says why."""
    for module in modules:
        with contextlib.suppress(Exception):
            importlib.import_module(module)


def declares_plugins_alone(folder: str) -> bool:
    """Return whether nothing can be imported from a folder of the Python path, which declares plugins of vLLM."""
    try:
        inside = list(Path(folder).iterdir())
        declared = [p.joinpath("entry_points.txt").read_text(encoding="utf-8", errors="replace") for p in inside]
    except OSError:
        return False
    sections = {line for text in declared for line in text.splitlines() if line.startswith("[")}
    return sections == {PLUGINS} and {p.suffix for p in inside} == {".dist-info"}


def path_of(environment: Mapping[str, str]) -> list[str]:
    """Return the folders that an environment puts on the Python path."""
    return [folder for folder in environment.get("PYTHONPATH", "").split(os.pathsep) if folder]


def _open_files() -> set[int]:
    # Without the descriptor by which the folder was read.
    return {int(path.name) for path in list(Path("/proc/self/fd").iterdir()) if path.exists()}


_VARIABLE = f"{procfs.MARK}=".encode()


def _find_mark() -> int:
    """Return the address of the variable of marks that this process was started with, where ``/proc/PID/environ`` reads
    it; 0 if it has none. The C library forgets the address when the variable is set anew."""
    c = ctypes.CDLL(None)
    c.getenv.restype = ctypes.c_void_p
    value = c.getenv(procfs.MARK.encode())
    return value - len(_VARIABLE) if value and ctypes.string_at(value) == NO_MARK.encode() else 0


def _prepare_titles() -> None:
    """Let the package by which vLLM renames its processes find their command line, which it looks for beside the
    environment that this process was started with."""
    with contextlib.suppress(Exception):
        importlib.import_module("setproctitle").getproctitle()


class _Engine:
    """Forks an engine that looks like a program started by its command.

    ``kept`` are the descriptors that belong to the imported modules, ``mark`` the address of the mark.
    """

    def __init__(self, kept: set[int], mark: int) -> None:
        self._kept = kept
        self._mark = mark
        self._cores = os.sched_getaffinity(0)

    def start(self, environment: dict[str, str], command: list[str], more: dict[str, str]) -> int:
        """Fork the engine with its environment and more variables, and return its pid. Raises OSError."""
        mine = os.getpid()
        pid = os.fork()
        # Intel's OpenMP, preloaded into CPU engines, leaves a forked child one core.
        os.sched_setaffinity(0, self._cores)
        if pid:
            return pid
        code = 1
        try:
            supervisor.end_with(mine)
            self._become_program({**environment, **more})
            code = _run(command)
        except BaseException:
            traceback.print_exc()
        finally:
            _exit(code)
        return 0

    def _become_program(self, environment: dict[str, str]) -> None:
        """Undo what the supervisor set up for itself."""
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (*supervisor.HANDLED, signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        # As Python sets them up when it starts.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        for file in _open_files() - self._kept - {0, 1, 2}:
            with contextlib.suppress(OSError):
                os.close(file)
        mark = environment[procfs.MARK].encode()
        if self._mark and len(mark) == len(NO_MARK):
            # With the name, because the package for titles overwrites what this process was started with.
            ctypes.memmove(self._mark, _VARIABLE + mark, len(_VARIABLE) + len(mark))
        sys.path[:0] = [folder for folder in path_of(environment) if folder not in path_of(os.environ)]
        os.environ.clear()
        os.environ.update(environment)


def _run(command: list[str]) -> int:
    """Run ``python -m MODULE ARGUMENT …`` in this process and return its exit code."""
    sys.argv = command[2:]
    sys.orig_argv = list(command)
    # The module may have been imported by one of those that were asked for; it is executed once more, as a program.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")
    try:
        runpy.run_module(command[2], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    return 0


def _exit(code: int) -> None:
    """End this process as Python ends, but for the destruction of what the imported modules hold."""
    import atexit
    import threading

    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    # An engine that ends before its supervisor has looked at it would leave its registration behind.
    procfs.exit_now(code)


def _supervise(files: list[int], engine: _Engine) -> None:
    """Become the supervisor of the engine that a message describes."""
    asked, lifeline, replies, log, *claims = files
    with os.fdopen(asked, encoding="utf-8") as text:
        text.seek(0)
        request: dict[str, Any] = json.load(text)
    for number, file in enumerate((lifeline, replies, log)):
        os.dup2(file, number)
        os.close(file)
    start = functools.partial(engine.start, request["env"])
    supervisor.supervise({**request["about"], "claims": claims}, request["argv"], start)


def _serve(holder: socket.socket, mark: int) -> None:
    """Fork a supervisor for each message until the holder is gone."""
    engine = _Engine(_open_files() - {holder.fileno()}, mark)
    while True:
        message, files, _, _ = socket.recv_fds(holder, 1, _FILES)
        if not message:
            return
        pid = os.fork()
        if pid == 0:
            try:
                holder.close()
                _supervise(files, engine)
            except BaseException:
                traceback.print_exc()
            finally:
                procfs.exit_now()
        for file in files:
            os.close(file)
        os.waitpid(pid, 0)


def main() -> None:
    holder = socket.socket(fileno=os.dup(0))
    # Until the modules are imported, the end of the holder ends this process.
    signal.signal(signal.SIGIO, lambda *_: procfs.exit_now())
    fcntl.fcntl(holder, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(holder, fcntl.F_SETFL, fcntl.fcntl(holder, fcntl.F_GETFL) | os.O_ASYNC)
    mark = _find_mark()
    _prepare_titles()
    _import(sys.argv[1:])
    fcntl.fcntl(holder, fcntl.F_SETFL, fcntl.fcntl(holder, fcntl.F_GETFL) & ~os.O_ASYNC)
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    gc.collect()
    gc.freeze()
    holder.sendall(b".")
    _serve(holder, mark)
    procfs.exit_now()


if __name__ == "__main__":
    main()
