"""However an exported file ends, it leaves no engine and nothing that its engines made."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.support.exported import FAKE, exported, exported_once, rewritten, run
from tests.support.supervised import gone, wait_for

__all__ = ["exported", "exported_once"]

# Stands for an engine that never becomes ready: a server and a worker, which ignores TERM. Both leave an OpenMP
# registration and a socket. Both have shared memory and a semaphore of Python's, a tensor of torch's, of which Python's
# resource tracker knows nothing, and somebody's data.
LINGERING = """
import mmap, os, signal, subprocess, sys, time
from multiprocessing import get_context, shared_memory
role, worker = sys.argv[1], len(sys.argv) == 2
if worker:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    subprocess.Popen([sys.executable, __file__, role])
with open(f"/dev/shm/__KMP_REGISTERED_LIB_{os.getpid()}_{os.getuid()}", "w") as file:
    file.write("0x1000-cafe-libtest.so")
sockets = os.environ["VLLM_RPC_BASE_PATH"]
with open(f"{sockets}/{os.getpid()}", "w"):
    pass
used, closed = (shared_memory.SharedMemory(create=True, size=4096) for _ in range(2))
closed.close()
semaphore = get_context("spawn").Semaphore()
held = []
for name in (f"torch_{os.getpid()}_1_1", f"dataset_test_{os.getpid()}"):
    with open(f"/dev/shm/{name}", "w+b") as file:
        file.truncate(4096)
        held.append(mmap.mmap(file.fileno(), 4096))
with open(os.path.join(os.path.dirname(__file__), "segments"), "a") as file:
    file.write(f"{used.name} {closed.name} sem.{semaphore._semlock.name[1:]} torch_{os.getpid()}_1_1\\n")
with open(os.path.join(os.path.dirname(__file__), "pids"), "a") as file:
    file.write(f"{os.getpid()} {role} {sockets}\\n")
time.sleep(600)
"""
SHM = Path("/dev/shm")


def registration(pid: int) -> Path:
    return Path(f"/dev/shm/__KMP_REGISTERED_LIB_{pid}_{os.getuid()}")


def running(*files: Path) -> list[int]:
    """Processes that have one of these in their command."""
    names = {str(f) for f in files}
    return [p.pid for p in psutil.process_iter(["cmdline"]) if names & set(p.info["cmdline"] or [])]


@pytest.fixture
def program(exported, tmp_path):
    """A file for a stand-in of an engine; what runs of it and of the exported file is ended with the test."""
    file = tmp_path / "stand-in.py"
    yield file
    for pid in running(file, exported):
        os.kill(pid, signal.SIGKILL)


def standing_in(exported: Path, program: Path, code: str) -> None:
    """Let the exported file start this program in the place of its engines."""
    program.write_text(code)
    rewritten(exported, {"prefill": {}, "decode": {}})
    exported.write_text(exported.read_text().replace(FAKE, str(program)))


CLOSED = ["sh", "-c", 'exec "$@" <&- >&-', "sh"]
"""Starts a program without input and output, so that its first pipes get their numbers."""


@pytest.mark.parametrize(
    ("numbers", "shell"),
    [(["KILL"], []), (["KILL"], CLOSED), (["TERM"], []), (["INT", "INT", "TERM"], [])],
    ids=["killed", "killed-closed", "terminated", "interrupted"],
)
def test_nothing_is_left_by_a_file_that_is_ended(exported, program, tmp_path, numbers, shell):
    standing_in(exported, program, LINGERING)
    process = subprocess.Popen(
        [*shell, sys.executable, "-I", "-S", str(exported)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    said = tmp_path / "pids"
    lines = wait_for(lambda: said.exists() and (found := said.read_text().splitlines())[3:] and found, 90)
    pids = [int(line.split()[0]) for line in lines]
    folders = {Path(line.split()[2]) for line in lines}
    segments = [SHM / name for name in (tmp_path / "segments").read_text().split()]
    data = [SHM / f"dataset_test_{p}" for p in pids]
    try:
        assert len(segments) == 16 and all(s.exists() for s in (*segments, *data))
        assert [f.name for f in sorted(folders)] == ["tmp-decode", "tmp-prefill"]
        assert all(f.parent.name.startswith("repro-") and f.is_dir() for f in folders)
        assert all(registration(p).exists() for p in pids)
        for name in numbers:
            process.send_signal(signal.Signals[f"SIG{name}"])
            time.sleep(0.05)
        output = process.communicate(timeout=90)[0]
        assert process.returncode == (-signal.SIGKILL if numbers == ["KILL"] else 2)
        assert numbers == ["KILL"] or "cannot tell: interrupted" in output
        wait_for(lambda: gone(pids) and not [f for f in folders if f.parent.exists()], 30)
        assert [p for p in pids if registration(p).exists()] == []
        assert [s for s in segments if s.exists()] == []
        assert all(s.exists() for s in data)
    finally:
        for path in (*map(registration, pids), *segments, *data):
            path.unlink(missing_ok=True)


def changed(file: Path, before: str, after: str) -> None:
    text = file.read_text()
    assert text.count(before) == 1, before
    file.write_text(text.replace(before, after))


NOTED = "RUNNING.append(self.process)\n"
BETWEEN = {
    "killed-before-anybody-tries": (
        "    if worker == 0:\n",
        "    if worker != 0:\n        os.kill(os.getpid(), signal.SIGKILL)\n    if worker == 0:\n",
    ),
    "killed-before-an-engine-is-noted": (NOTED, f"os.kill(os.getppid(), signal.SIGKILL); {NOTED}"),
    "terminated-before-an-engine-is-noted": (NOTED, f"os.kill(os.getppid(), signal.SIGTERM); time.sleep(2); {NOTED}"),
    "worker-killed": (NOTED, f"os.kill(os.getpid(), signal.SIGKILL); {NOTED}"),
}


@pytest.mark.parametrize("moment", BETWEEN)
def test_no_engine_is_left_by_a_file_that_is_ended_while_it_starts_one(
    exported, program, moment, tmp_path, monkeypatch
):
    # Where the folder of a try that is killed itself stays.
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    standing_in(exported, program, "import time\ntime.sleep(600)\n")
    changed(exported, *BETWEEN[moment])
    process = subprocess.Popen([sys.executable, "-I", "-S", str(exported)], start_new_session=True)
    assert process.wait(60) == (-signal.SIGKILL if moment.startswith("killed") else 2)
    # First whoever tries the case ends, which may just be starting an engine; then nothing may begin any more.
    wait_for(lambda: not running(exported, program), 30)
    time.sleep(1)
    assert running(exported, program) == []
    assert moment == "worker-killed" or not list(tmp_path.glob("repro-*"))


INTERRUPTED = """
import os
from concurrent import futures
from harness.commands.export import standalone
submit, calls = futures.ThreadPoolExecutor.submit, []
def interrupted(pool, *what):
    calls.append(what)
    if len(calls) > 1:
        raise KeyboardInterrupt
    return submit(pool, *what)
futures.ThreadPoolExecutor.submit = interrupted
class FakeEngine:
    asked = []
    def complete(self, *_):
        return {}
first, second = ({"part": p, "group": p} for p in "ab")
stage = {"sends": [{**first, "after": ["b"]}, second]}
standalone.attempt = lambda *_: standalone.play(stage, {"single": FakeEngine()})
standalone.tried(None, os.getppid())
"""


def test_interrupt_between_requests_that_are_sent_together_is_not_waited_out():
    """The first one waits for the second, which is never sent."""
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "cannot tell: interrupted\n"), done.stderr


REFUSED = "def refused(*_, **__):\n    raise BlockingIOError(11, 'Resource temporarily unavailable')\n"
NEVER_BEGUN = {
    "no temporary folder": ("tempfile.tempdir = '/nonexistent'\n", "/nonexistent"),
    "no process for the try": (f"{REFUSED}os.fork = refused\n", "a process that tries the case, found: [Errno 11]"),
    "no process for an engine": (f"{REFUSED}subprocess.Popen = refused\n", "the decode engine, found: [Errno 11]"),
    "no thread": (
        "def refused(*_):\n    raise RuntimeError('can\\'t start new thread')\nthreading.Thread.start = refused\n",
        "can't start new thread",
    ),
    "no memory": ("def refused(*_):\n    raise MemoryError\nzlib.decompress = refused\n", "MemoryError"),
}


@pytest.mark.parametrize("why", NEVER_BEGUN)
def test_what_keeps_a_file_from_beginning_is_said_and_is_no_defect(exported, why):
    """Python ends with 1 after a traceback, which would say that the defect is there."""
    code, words = NEVER_BEGUN[why]
    rewritten(exported, {"prefill": {}, "decode": {}})
    changed(exported, "\nRUNNING: ", f"\n{code}\nRUNNING: ")
    found, output = run(exported)
    assert (found, "Traceback" in output) == (2, False), output
    assert "cannot tell: " in output and words in output, output


@pytest.mark.parametrize("both", [False, True])
def test_output_that_cannot_be_written_is_no_defect(exported, both):
    rewritten(exported, {"prefill": {"die": True}, "decode": {"die": True}})
    with Path("/dev/full").open("w") as full:
        error = full if both else subprocess.PIPE
        done = subprocess.run([sys.executable, "-I", "-S", str(exported)], stdout=full, stderr=error, timeout=60)
    assert done.returncode == 2
    assert both or (b"cannot tell: " in done.stderr and b"Traceback" not in done.stderr)


def test_folder_that_is_too_long_for_sockets_is_not_taken(exported, program, tmp_path, monkeypatch):
    """Their names have 107 bytes at most."""
    code = "import os, sys\nsys.exit(f\"sockets: {os.environ.get('VLLM_RPC_BASE_PATH')}\")\n"
    standing_in(exported, program, code)
    monkeypatch.delenv("VLLM_RPC_BASE_PATH", raising=False)
    folder = tmp_path / ("x" * 70)
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    code, output = run(exported)
    assert (code, "sockets: None" in output) == (2, True), output
    assert list(folder.iterdir()) == []
