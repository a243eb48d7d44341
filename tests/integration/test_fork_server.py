"""Programs forked from a process that has their imports: they run as if started by their command, and end with their
holder."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from harness.supervision import fork_server, fork_servers, procfs
from harness.supervision.process import SupervisedProcess
from tests.support.supervised import gone, own_folder, state, wait_for

__all__ = ["own_folder"]

# As Intel's OpenMP does, which is preloaded into CPU engines: it leaves a forked child one core, and registers every
# process under its pid.
HEAVY = """
import ctypes, os
IMPORTED_BY = os.getpid()
own = ctypes.create_string_buffer(8)
def register():
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with open(f"/dev/shm/__KMP_REGISTERED_LIB_{os.getpid()}_{os.getuid()}", "w") as file:
        file.write(f"{ctypes.addressof(own):#x}-{__file__}")
cores = os.sched_getaffinity(0)
register()
os.sched_setaffinity(0, cores)
os.register_at_fork(after_in_child=register)
"""
PROGRAM = """
import importlib.metadata, json, os, signal, sys, time
import heavy
files = {}
for name in os.listdir("/proc/self/fd"):
    try:
        files[name] = os.readlink(f"/proc/self/fd/{name}")
    except OSError:
        pass
print(json.dumps({
    "pid": os.getpid(), "argv": sys.argv[1:], "imported_by": heavy.IMPORTED_BY, "session": os.getsid(0),
    "given": os.environ.get("VLLM_API_KEY"), "files": files, "name": __name__,
    "cores": len(os.sched_getaffinity(0)), "plugins": len(importlib.metadata.entry_points(name="some")),
    "signals": [str(signal.getsignal(n)) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)],
}), flush=True)
if sys.argv[1] == "fail":
    raise ValueError("on purpose")
if sys.argv[1] == "exit":
    sys.exit(7)
while sys.argv[1] == "stay":
    time.sleep(0.1)
"""


@pytest.fixture
def folder(tmp_path, own_folder):
    (tmp_path / "heavy.py").write_text(HEAVY)
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "log").touch()
    yield tmp_path
    # Not what OpenMP writes: a real engine that is given the pid of a process that is gone would end with an error.
    for name in registered(tmp_path):
        (procfs.SHM / name).unlink(missing_ok=True)


def environment(folder: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1", **more}


def start(folder: Path, what: str, preload=("heavy",), **more: str) -> SupervisedProcess:
    argv = [sys.executable, "-m", "program", what, "--flag", "two words"]
    with (folder / "log").open("ab") as log:
        return SupervisedProcess(argv, environment(folder, **more), log, preload=preload)


def registered(folder: Path) -> list[str]:
    """Return the registrations that the processes of a test have left."""
    found = []
    for path in procfs.SHM.glob("__KMP_REGISTERED_LIB_*"):
        with contextlib.suppress(OSError):
            if str(folder) in path.read_text(errors="replace"):
                found.append(path.name)
    return found


def printed(folder: Path) -> dict:
    """Return what the program that was started last has printed about itself."""
    return wait_for(lambda: (text := (folder / "log").read_text()).endswith("\n") and json.loads(text.splitlines()[-1]))


def test_forked_program_runs_as_if_started_by_its_command(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_API_KEY", "of the harness")
        process = start(folder, "stay", VLLM_API_KEY="of the engine")
    found = printed(folder)
    assert found["pid"] == process.pid == found["session"] and found["imported_by"] != process.pid
    assert found["argv"] == ["stay", "--flag", "two words"] and found["name"] == "__main__"
    assert found["cores"] == len(os.sched_getaffinity(0)) and found["given"] == "of the engine"
    assert found["signals"][0] == str(signal.SIG_DFL)
    assert found["signals"][1] == str(signal.default_int_handler)
    assert found["signals"][2:] == [str(signal.SIG_DFL)] * 2 and found["files"]["0"] == "/dev/null"
    assert found["files"]["1"] == found["files"]["2"] == str(folder / "log")
    # Neither the lifeline, nor a claim, nor the socket of the fork server: each would outlive whoever should close it.
    assert set(found["files"]) == {"0", "1", "2"}, found["files"]
    mark = process.ledger.stem.rpartition("-")[2]
    assert procfs.marked(process.pid, mark)
    assert process.close() == []
    assert gone([process.pid])
    assert state() == []
    # The fork server itself goes on.
    assert registered(folder) == [f"__KMP_REGISTERED_LIB_{found['imported_by']}_{os.getuid()}"]


@pytest.mark.parametrize(("what", "code"), [("end", 0), ("exit", 7), ("fail", 1)])
def test_exit_code_and_traceback_are_those_of_the_program(folder, what, code):
    process = start(folder, what)
    assert process.wait(20) == code and process.close() == []
    assert ("ValueError: on purpose" in (folder / "log").read_text()) == (what == "fail")


def test_second_program_is_forked_from_the_same_process_and_another_environment_is_not(folder):
    importers = []
    for more in ({}, {"VLLM_API_KEY": "x"}, {"OMP_NUM_THREADS": "1"}):
        process = start(folder, "end", **more)
        process.wait(20)
        process.close()
        importers.append(printed(folder)["imported_by"])
    assert importers[0] == importers[1] != importers[2]
    assert gone([importers[0]])


@pytest.mark.parametrize(
    ("group", "beside", "same"),
    [
        ("vllm.general_plugins", "", True),
        # Read while a module is imported, or a module itself: another fork server.
        ("triton.backends", "", False),
        ("vllm.general_plugins", "module.py", False),
    ],
)
def test_programs_differ_in_folders_that_only_declare_plugins(folder, group, beside, same):
    plugins = folder / "plugins"
    declared = plugins / "some-1.dist-info"
    declared.mkdir(parents=True)
    (declared / "METADATA").write_text("Metadata-Version: 2.1\nName: some\nVersion: 1\n")
    (declared / "entry_points.txt").write_text(f"[{group}]\nsome = json:loads\n")
    if beside:
        (plugins / beside).touch()
    found = []
    for path in (str(folder), f"{plugins}{os.pathsep}{folder}", str(folder)):
        process = start(folder, "end", PYTHONPATH=path)
        process.wait(20)
        process.close()
        found.append(printed(folder))
    assert [f["plugins"] for f in found] == [0, 1, 0]
    assert (len({f["imported_by"] for f in found}) == 1) == same


def test_fork_server_is_not_ended_before_it_has_forked_what_it_was_asked_for(folder):
    first = start(folder, "stay")
    server = printed(folder)["imported_by"]
    os.kill(server, signal.SIGSTOP)
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(start, folder, "stay")
        time.sleep(0.3)
        of_another_environment = pool.submit(start, folder, "stay", OTHER="1")
        time.sleep(0.3)
        os.kill(server, signal.SIGCONT)
        processes = [first, asked.result(), of_another_environment.result()]
    assert [process.poll() for process in processes] == [None, None, None]
    assert [process.close() for process in processes] == [[], [], []]


def test_killed_fork_server_is_replaced_and_its_programs_go_on(folder):
    first = start(folder, "stay")
    server = printed(folder)["imported_by"]
    os.kill(server, signal.SIGKILL)
    wait_for(lambda: gone([server]))
    second = start(folder, "end")
    assert second.wait(20) == 0
    assert printed(folder)["imported_by"] not in (server, second.pid)
    assert first.poll() is None
    assert first.close() == [] and second.close() == []
    assert len(registered(folder)) == 1


def test_killed_supervisor_leaves_nothing(folder):
    process = start(folder, "stay")
    pids = [printed(folder)["pid"], psutil.Process(process.pid).ppid()]
    os.kill(pids[1], signal.SIGKILL)
    wait_for(lambda: process.poll() is not None)
    assert process.close() == []
    assert gone(pids)
    assert len(registered(folder)) == 1


@pytest.mark.parametrize("module", ["import sys; sys.exit(3)", "import os; os._exit(3)"])
def test_program_whose_imports_end_the_fork_server_is_started_as_usual(folder, module):
    (folder / "wrong.py").write_text(module)
    process = start(folder, "end", preload=("heavy", "wrong"))
    assert process.wait(20) == 0
    assert printed(folder)["imported_by"] == process.pid
    assert process.close() == []


def test_module_that_is_missing_or_fails_is_left_to_the_program(folder):
    (folder / "wrong.py").write_text("raise RuntimeError")
    process = start(folder, "end", preload=("absent", "wrong", "heavy"))
    assert process.wait(20) == 0
    assert printed(folder)["imported_by"] != process.pid
    assert process.close() == []


HOLDER = """
import os, sys, time
from pathlib import Path
from harness.supervision.process import SupervisedProcess
folder = Path(sys.argv[1])
env = {**os.environ, "PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}
argv = [sys.executable, "-m", "program", "stay"]
process = SupervisedProcess(argv, env, (folder / "log").open("ab"), preload=("heavy", *sys.argv[2:]))
time.sleep(600)
"""


@pytest.mark.parametrize("when", ["importing", "running"])
def test_sigkill_of_the_holder_leaves_nothing(folder, when):
    (folder / "slow.py").write_text("import time; time.sleep(600)" if when == "importing" else "")
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder), "slow"], cwd=Path(fork_server.__file__).parents[2]
    )
    if when == "running":
        pids = [printed(folder)["pid"], printed(folder)["imported_by"]]
    else:
        pids = [wait_for(lambda: psutil.Process(holder.pid).children())[0].pid]
        time.sleep(1)
    holder.kill()
    holder.wait()
    wait_for(lambda: gone(pids), 30)
    wait_for(lambda: not state(), 30)
    if when == "running":
        wait_for(lambda: not registered(folder))


def test_start_that_cannot_be_asked_for_falls_back(folder, monkeypatch):
    def refuse(*_):
        raise OSError("no descriptors left")

    monkeypatch.setattr(fork_servers.socket, "send_fds", refuse)
    process = start(folder, "end")
    assert process.wait(20) == 0
    assert printed(folder)["imported_by"] == process.pid
    assert process.close() == []
