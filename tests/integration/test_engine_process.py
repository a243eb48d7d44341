"""Engines as processes: how they end, what they leave, and interpreters that cannot run vLLM."""

from __future__ import annotations

import os
import sys
import time

import pytest

from harness.engines.environment import inspect_environment
from harness.errors import EngineDiedError, EngineStartError, EnvironmentFault
from harness.supervision.process import SupervisedProcess
from tests.support.program import script
from tests.support.supervised import gone, supervised_program, wait_for


def test_engine_python_without_vllm(tmp_path):
    with pytest.raises(EnvironmentFault, match="could not be run"):
        inspect_environment(str(tmp_path / "nothing"))
    bare = script(tmp_path / "python", f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n')
    with pytest.raises(EnvironmentFault, match=r"expected vllm to be installed there, .*; install vllm and nixl there"):
        inspect_environment(str(bare))
    no_python = script(tmp_path / "cat", "#!/bin/sh\necho hello\n")
    with pytest.raises(EnvironmentFault, match="expected a Python interpreter"):
        inspect_environment(str(no_python))


def test_exit_status_and_output_are_those_of_the_command(tmp_path):
    code = "import sys; print('out'); print('err', file=sys.stderr); print(sys.stdin.read()); raise SystemExit(7)"
    started = supervised_program(tmp_path, code)
    wait_for(lambda: not started.alive())
    with pytest.raises(EngineDiedError, match=r"exit status 7(.|\n)*out"):
        started.require_alive()
    assert {"out", "err"} <= set(started.log_text().split())
    started.stop(1)


def test_ignored_signals_are_not_handed_down(tmp_path):
    """An engine must still be interruptible: what the warden ignores is its own affair."""
    code = "import signal; print([n for n in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(n) is signal.SIG_IGN])"
    started = supervised_program(tmp_path, code)
    wait_for(lambda: not started.alive())
    assert started.log_text().strip() == "[]"
    started.stop(1)


def test_missing_program_is_named(tmp_path):
    with (tmp_path / "log").open("wb") as log, pytest.raises(EngineStartError, match=r"/nowhere/python.*No such file"):
        SupervisedProcess(["/nowhere/python"], os.environ, log)


def test_stop_ends_the_whole_family_even_when_it_ignores_term(tmp_path):
    deaf = "import signal, subprocess, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    child = f"{deaf}time.sleep(600)"
    started = supervised_program(
        tmp_path, f"{deaf}subprocess.Popen([sys.executable, '-c', {child!r}])\nprint('up', flush=True)\ntime.sleep(600)"
    )
    wait_for(lambda: "up" in started.log_tail() and len(started.family()) == 2)
    pids = [p.pid for p in started.family()]
    started.stop(0.2)
    assert gone(pids)


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
    started = supervised_program(tmp_path, code, role="decode", VLLM_CPU_OMP_THREADS_BIND=str(core))
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


def test_the_workers_of_several_ranks_have_a_core_each(tmp_path):
    code = """
import os, time
from setproctitle import setproctitle
rank = 1 if os.fork() else 0
setproctitle(f"VLLM::Worker_TP{rank}")
print("up", flush=True)
time.sleep(600)
"""
    cores = sorted(os.sched_getaffinity(0))[:2]
    started = supervised_program(tmp_path, code, role="decode", VLLM_CPU_OMP_THREADS_BIND=f"{cores[0]}|{cores[-1]}")
    try:
        while started.log_text().count("up") < 2:
            started.require_alive()
            time.sleep(0.02)
        assert started.settle_threads() == 2
        bound = {p.name(): os.sched_getaffinity(p.pid) for p in started.family() if "Worker" in p.name()}
        assert bound == {"VLLM::Worker_TP0": {cores[0]}, "VLLM::Worker_TP1": {cores[-1]}}
    finally:
        started.stop(1)
