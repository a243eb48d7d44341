"""A vLLM plugin for engines that are started with ``VLLM_WORKER_MULTIPROC_METHOD=fork``.

A spawned process imports torch and vLLM anew, which takes most of an engine's start; a forked one has them already.
vLLM spawns by itself where CUDA was initialised before. Its CPU platform (0.32.0, ``platforms/cpu.py``) sets ``spawn``
whatever the environment says; vLLM reads the variable again for each process that it creates, so it is set back after
the platform's check. vLLM also imports a model that it has not seen before in a new process first, to learn what the
model can do, because CUDA must not be initialised before a fork. A forked process does as well, and without CUDA this
one does.

The folder of this module is on the engines' Python path, and the ``dist-info`` beside it declares ``register`` to vLLM.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import multiprocessing
import os
import socket
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_SWITCH_S = 0.0005
"""Seconds after which a Python thread hands over; the default is ten times as long, which the thread that answers waits
for at each step of a request, beside the one that computes."""
METHOD_VARIABLE = "VLLM_WORKER_MULTIPROC_METHOD"
CPU_VARIABLE = "VLLM_CPU_OMP_THREADS_BIND"
"""Set for every CPU engine, and for no other."""


def register() -> None:
    """Make forked processes do if the environment asks for them. vLLM calls this in every process of an engine."""
    if os.environ.get(METHOD_VARIABLE) != "fork":
        return
    on_cpu = CPU_VARIABLE in os.environ
    if on_cpu:
        sys.setswitchinterval(_SWITCH_S)
        _keep_fork()
    with contextlib.suppress(ImportError):
        registry: Any = importlib.import_module("vllm.model_executor.models.registry")
        registry._run_in_subprocess = in_this_process if on_cpu else in_forked_process
    os.register_at_fork(after_in_child=drop_listening_sockets)


def _keep_fork() -> None:
    """Undo what vLLM's CPU platform sets."""
    try:
        platform: Any = importlib.import_module("vllm.platforms.cpu").CpuPlatform
    except (ImportError, AttributeError):
        # A version that keeps its platforms elsewhere: its processes are spawned, as it decides.
        return
    check = platform.check_and_update_config.__func__

    @functools.wraps(check)
    def check_and_fork(cls: type, vllm_config: Any) -> None:
        check(cls, vllm_config)
        os.environ[METHOD_VARIABLE] = "fork"

    platform.check_and_update_config = classmethod(check_and_fork)


def in_this_process(inspect: Callable[[], Any]) -> Any:
    return inspect()


def in_forked_process(inspect: Callable[[], Any]) -> Any:
    """Return what a forked process finds out. Raises RuntimeError with its words when it fails."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def answer() -> None:
        try:
            theirs.send((inspect(), None))
        except Exception as error:
            theirs.send((None, f"{type(error).__name__}: {error}"))

    child = context.Process(target=answer)
    child.start()
    theirs.close()
    try:
        found, reason = ours.recv()
    except EOFError:
        found, reason = None, "its process ended"
    child.join()
    if reason is not None:
        raise RuntimeError(f"a model could not be inspected: {reason}")
    return found


def drop_listening_sockets() -> None:
    """Replace inherited listening sockets with /dev/null.

    Otherwise the port of an API server that has died would still accept connections, which nobody answers. The
    descriptors stay open, because Python objects that are never used again still own them.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for entry in Path("/proc/self/fd").iterdir():
        descriptor = int(entry.name)
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode) and _listens(descriptor):
                os.dup2(null, descriptor, inheritable=False)
    os.close(null)


def _listens(descriptor: int) -> bool:
    listener = socket.socket(fileno=descriptor)
    try:
        return bool(listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    finally:
        listener.detach()
