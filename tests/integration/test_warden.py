"""The warden with real processes: nothing of a tree outlives whoever asked for it, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from harness.engines.command import EngineCommand
from harness.errors import EngineDiedError, EngineStartError
from harness.supervision.process import SupervisedEngine, SupervisedProcess
from tests.support.supervised import gone, wait_for

# Three generations; the middle one ends, and the last is deaf and has a session of its own: neither its parent nor its
# session leads to it.
TREE = """
import os, signal, subprocess, sys, time
if sys.argv[1:] == ["middle"]:
    subprocess.Popen([sys.executable, __file__, "last"], start_new_session=True)
    sys.exit()
if sys.argv[1:] == ["last"]:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    subprocess.run([sys.executable, __file__, "middle"])
with open(os.environ["PIDS"], "a") as file:
    file.write(f"{os.getpid()}\\n")
time.sleep(600)
"""


class Tree:
    """The program, its environment and the processes that it started."""

    def __init__(self, folder: Path) -> None:
        self.program = folder / "tree.py"
        self.program.write_text(TREE)
        self.file = folder / "pids"
        self.env = {**os.environ, "PIDS": str(self.file)}
        self.argv = [sys.executable, str(self.program)]

    def pids(self, count: int = 2) -> list[int]:
        """Of the first and the last generation, once they are there."""

        def read() -> list[int]:
            found = [int(p) for p in self.file.read_text().split()] if self.file.exists() else []
            return found if len(found) == count else []

        return wait_for(read)


@pytest.fixture
def tree(tmp_path) -> Tree:
    return Tree(tmp_path)


def test_tree_ends_when_the_pipe_is_closed(tree, tmp_path):
    with (tmp_path / "log").open("wb") as log:
        warded = SupervisedProcess(tree.argv, tree.env, log)
    pids = tree.pids()
    assert warded.pid in pids
    assert os.getsid(warded.pid) == warded.pid
    assert not gone(pids)
    warded.close()
    wait_for(lambda: gone(pids))


HOLDER = """
import os, sys, time
from harness.supervision.process import SupervisedProcess
warded = SupervisedProcess(sys.argv[1:], dict(os.environ), open(os.devnull, "wb"))
print(warded.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_tree_ends_with_a_holder_that_is_killed(tree, number):
    """The holder's children are killed too, as Ray does with those of its workers: the warden is none of them."""
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, *tree.argv], env=tree.env, stdout=subprocess.PIPE)
    pids = tree.pids()
    assert psutil.Process(holder.pid).children() == []
    holder.send_signal(number)
    holder.wait(10)
    wait_for(lambda: gone(pids))


def test_tree_ends_when_its_first_process_is_killed(tree, tmp_path):
    with (tmp_path / "log").open("wb") as log:
        warded = SupervisedProcess(tree.argv, tree.env, log)
    pids = tree.pids()
    os.kill(warded.pid, signal.SIGKILL)
    assert warded.wait(20) == -signal.SIGKILL
    assert gone(pids)
    warded.close()


def test_killed_warden_is_noticed_and_stood_in_for(tree, tmp_path):
    with (tmp_path / "log").open("wb") as log:
        warded = SupervisedProcess(tree.argv, tree.env, log)
    _, last = tree.pids()
    (warden,) = psutil.Process(warded.pid).parents()[:1]
    assert "supervisor.py" in " ".join(warden.cmdline())
    warden.kill()
    assert warded.wait(20) == -signal.SIGKILL
    # What left the session before is below the supervisor that is left.
    assert gone([warded.pid, last])
    assert warded.close() == []


def test_exit_status_and_output_are_those_of_the_command(tmp_path):
    code = "import sys; print('out'); print('err', file=sys.stderr); print(sys.stdin.read()); raise SystemExit(7)"
    log = tmp_path / "engine.log"
    engine = SupervisedEngine(EngineCommand("single", 1, None, [sys.executable, "-c", code], {}), log, os.environ)
    wait_for(lambda: not engine.alive())
    with pytest.raises(EngineDiedError, match="exit status 7"):
        engine.require_alive()
    assert {"out", "err"} <= set(log.read_text().split())
    engine.stop(1)


def test_ignored_signals_are_not_handed_down(tmp_path):
    """An engine must still be interruptible: what the warden ignores is its own affair."""
    code = (
        "import signal; print([s.name for s in (signal.SIGINT, signal.SIGHUP)"
        " if signal.getsignal(s) is signal.SIG_IGN])"
    )
    with (tmp_path / "log").open("wb") as log:
        warded = SupervisedProcess([sys.executable, "-c", code], os.environ, log)
    assert warded.wait(20) == 0
    assert (tmp_path / "log").read_text().strip() == "[]"
    warded.close()


def test_missing_program_is_named(tmp_path):
    with (tmp_path / "log").open("wb") as log, pytest.raises(EngineStartError, match=r"/nowhere/python.*No such file"):
        SupervisedProcess(["/nowhere/python"], os.environ, log)


def test_engine_is_stopped_with_all_its_processes(tree, tmp_path):
    engine = SupervisedEngine(EngineCommand("single", 1, None, tree.argv, {}), tmp_path / "engine.log", tree.env)
    pids = tree.pids()
    engine.stop(0.5)
    wait_for(lambda: gone(pids))
    assert engine.exit_code() == -signal.SIGTERM
