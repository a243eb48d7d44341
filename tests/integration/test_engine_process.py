"""Engines as processes: how they end, what they leave, and interpreters that cannot run vLLM."""

from __future__ import annotations

import os
import signal
import sys
import time

import psutil
import pytest

from harness.engines.command import EngineCommand
from harness.engines.environment import inspect_environment
from harness.errors import EngineDiedError, EnvironmentFault
from harness.supervision.process import SupervisedEngine


def test_engine_python_without_vllm(tmp_path):
    with pytest.raises(EnvironmentFault, match="could not be run"):
        inspect_environment(str(tmp_path / "nothing"))
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n')
    bare.chmod(0o755)
    with pytest.raises(EnvironmentFault, match=r"expected vllm to be installed there, .*; install vllm and nixl there"):
        inspect_environment(str(bare))
    no_python = tmp_path / "cat"
    no_python.write_text("#!/bin/sh\necho hello\n")
    no_python.chmod(0o755)
    with pytest.raises(EnvironmentFault, match="expected a Python interpreter"):
        inspect_environment(str(no_python))


def process(tmp_path, code: str) -> SupervisedEngine:
    command = EngineCommand("single", 1, None, [sys.executable, "-c", code], {})
    return SupervisedEngine(command, tmp_path / "engine.log", dict(os.environ))


def test_died_engine_is_quoted(tmp_path):
    started = process(tmp_path, "print('about to fail'); raise SystemExit(3)")
    while started.alive():
        time.sleep(0.01)
    with pytest.raises(EngineDiedError, match="exit status 3") as caught:
        started.require_alive()
    assert "about to fail" in str(caught.value)
    started.stop(1)


def test_stop_ends_the_whole_family_even_when_it_ignores_term(tmp_path):
    code = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "subprocess.Popen([sys.executable, '-c', 'import signal, time; "
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)'])\n"
        "print('up', flush=True)\n"
        "time.sleep(600)\n"
    )
    started = process(tmp_path, code)
    while "up" not in started.log_tail() or len(started.family()) < 2:
        time.sleep(0.02)
    pids = [p.pid for p in started.family()]
    started.stop(0.2)
    assert [p for p in pids if psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE] == []


def test_orphans_of_a_killed_engine_are_ended(tmp_path):
    code = (
        "import subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print('up', flush=True)\n"
        "time.sleep(600)\n"
    )
    started = process(tmp_path, code)
    while "up" not in started.log_tail() or len(started.family()) < 2:
        time.sleep(0.02)
    orphan = next(p for p in started.family() if p.pid != started.pid)
    os.kill(started.pid, signal.SIGKILL)
    while started.alive():
        time.sleep(0.01)
    started.stop(0.2)
    assert not psutil.pid_exists(orphan.pid) or orphan.status() == psutil.STATUS_ZOMBIE


def test_threads_that_poll_leave_the_core_to_the_model(tmp_path):
    """A stand-in for an engine core: a thread that polls like NIXL's, and one that waits."""
    code = """
import threading, time
open("/proc/self/comm", "w").write("VLLM::EngineCor")
def poll():
    while True: pass
threading.Thread(target=poll, daemon=True).start()
waiting = threading.Thread(target=threading.Event().wait, daemon=True)
waiting.start()
time.sleep(1)
print("up", waiting.native_id, flush=True)
time.sleep(600)
"""
    core = min(os.sched_getaffinity(0))
    command = EngineCommand("decode", 1, None, [sys.executable, "-c", code], {"VLLM_CPU_OMP_THREADS_BIND": str(core)})
    started = SupervisedEngine(command, tmp_path / "engine.log", dict(os.environ))
    try:
        while not started.log_text().endswith("\n"):
            started.require_alive()
            time.sleep(0.02)
        waiting = int(started.log_tail().split()[-1])
        assert started.settle_threads() == 3
        (process,) = [p for p in started.family() if p.name() == "VLLM::EngineCor"]
        priorities = {t.id: os.getpriority(os.PRIO_PROCESS, t.id) for t in process.threads()}
        own = os.getpriority(os.PRIO_PROCESS, 0)
        assert priorities.pop(process.pid) == own and priorities.pop(waiting) == own
        assert list(priorities.values()) == [10]
        assert all(os.sched_getaffinity(t.id) == {core} for t in process.threads())
    finally:
        started.stop(1)
