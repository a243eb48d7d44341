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

from harness.engine import traces
from harness.export import standalone
from tests.unit.test_export import FAKE, exported, rewritten, run
from tests.unit.test_warden import gone, wait_for

__all__ = ["exported"]

# Stands for an engine that never becomes ready: a server and a worker, which ignores TERM. Both leave an OpenMP
# registration and a socket; in the place of the prefill worker's registration is somebody else's. Both have shared
# memory and a semaphore of Python's, segments of which Python's resource tracker knows nothing, and somebody's data.
LINGERING = """
import ctypes, mmap, os, signal, subprocess, sys, time
from multiprocessing import get_context, shared_memory
role, worker = sys.argv[1], len(sys.argv) == 2
if worker:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    subprocess.Popen([sys.executable, __file__, role])
held = ctypes.create_string_buffer(8)
address = 4096 if worker and role == "prefill" else ctypes.addressof(held)
with open(f"/dev/shm/__KMP_REGISTERED_LIB_{os.getpid()}_{os.getuid()}", "w") as file:
    file.write(f"0x{address:x}-cafe-libtest.so")
sockets = os.environ["VLLM_RPC_BASE_PATH"]
with open(f"{sockets}/{os.getpid()}", "w"):
    pass
used, closed = (shared_memory.SharedMemory(create=True, size=4096) for _ in range(2))
closed.close()
semaphore = get_context("spawn").Semaphore()
held = []
for name in (f"torch_{os.getpid()}_1_1", f"torch_{os.getpid()}_2_2", f"dataset_test_{os.getpid()}"):
    with open(f"/dev/shm/{name}", "w+b") as file:
        file.truncate(4096)
        held.append(mmap.mmap(file.fileno(), 4096))
with open(os.path.join(os.path.dirname(__file__), "segments"), "a") as file:
    file.write(f"{used.name} {closed.name} sem.{semaphore._semlock.name[1:]} torch_{os.getpid()}_1_1\\n")
with open(os.path.join(os.path.dirname(__file__), "pids"), "a") as file:
    file.write(f"{os.getpid()} {role} {sockets}\\n")
time.sleep(600)
"""


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


CLOSED = ["sh", "-c", 'exec "$@" <&- >&-', "sh"]
"""Starts a program without input and output, so that its first pipes get their numbers."""


@pytest.mark.parametrize(
    ("numbers", "shell"),
    [(["KILL"], []), (["KILL"], CLOSED), (["TERM"], []), (["INT", "INT", "TERM"], [])],
    ids=["killed", "killed-closed", "terminated", "interrupted"],
)
def test_nothing_is_left_by_a_file_that_is_ended(exported, program, tmp_path, numbers, shell):
    program.write_text(LINGERING)
    rewritten(exported, {"prefill": {}, "decode": {}})
    exported.write_text(exported.read_text().replace(FAKE, str(program)))
    process = subprocess.Popen(
        [*shell, sys.executable, "-I", "-S", str(exported)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    said = tmp_path / "pids"
    lines = wait_for(lambda: said.exists() and (found := said.read_text().splitlines())[3:] and found, 90)
    pids = [int(line.split()[0]) for line in lines]
    foreign = registration(
        next(int(p) for p, role, _ in map(str.split, lines) if role == "prefill" and "1000-" in _registered(p))
    )
    folders = {Path(line.split()[2]) for line in lines}
    segments = [traces.SHM / name for name in (tmp_path / "segments").read_text().split()]
    data = [traces.SHM / f"dataset_test_{p}" for p in pids]
    in_use = [traces.SHM / f"torch_{p}_2_2" for p in pids]
    users = [path.open("rb") for path in in_use]
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
        assert [p for p in pids if registration(p).exists() and registration(p) != foreign] == []
        assert foreign.exists()
        assert [s for s in segments if s.exists()] == []
        assert all(s.exists() for s in (*data, *in_use))
    finally:
        for user in users:
            user.close()
        for path in (*map(registration, pids), *segments, *data, *in_use):
            path.unlink(missing_ok=True)


def _registered(pid: str) -> str:
    return registration(int(pid)).read_text()


def test_segments_are_those_that_the_harness_takes_for_an_engines():
    assert standalone.LIBRARIES.pattern == traces._RUNTIME.pattern


def changed(file: Path, before: str, after: str) -> None:
    text = file.read_text()
    assert text.count(before) == 1, before
    file.write_text(text.replace(before, after))


BETWEEN = {
    "killed-before-the-keeper-knows": (
        "    def tell(self, kind: str, *what: object) -> None:\n",
        "    def tell(self, kind: str, *what: object) -> None:\n"
        "        if kind == 'engine':\n            os.kill(os.getpid(), signal.SIGKILL)\n",
    ),
    "terminated-before-it-is-noted": (
        "        RUNNING.append(self)\n",
        "        os.kill(os.getpid(), signal.SIGTERM)\n        RUNNING.append(self)\n",
    ),
}


@pytest.mark.parametrize("moment", BETWEEN)
def test_no_engine_is_left_by_a_file_that_is_ended_while_it_starts_one(exported, program, moment):
    program.write_text("import time\ntime.sleep(600)\n")
    rewritten(exported, {"prefill": {}, "decode": {}})
    changed(exported, *BETWEEN[moment])
    exported.write_text(exported.read_text().replace(FAKE, str(program)))
    process = subprocess.Popen([sys.executable, "-I", "-S", str(exported)], start_new_session=True)
    assert process.wait(60) == (-signal.SIGKILL if "killed" in moment else 2)
    # One that begins does so at once.
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline and not (found := running(program)):
        time.sleep(0.1)
    assert found == []


INTERRUPTED = """
from concurrent import futures
from harness.export import standalone
submit, calls = futures.ThreadPoolExecutor.submit, []
def interrupted(pool, *what):
    calls.append(what)
    if len(calls) > 1:
        raise KeyboardInterrupt
    return submit(pool, *what)
futures.ThreadPoolExecutor.submit = interrupted
class FakeEngine:
    def complete(self, *_):
        return {}
first, second = ({"part": p, "group": p, "route": "local", "last": False, "after_s": 0} for p in "ab")
try:
    standalone.Player({"single": FakeEngine()}).together(
        {"hold": None, "sends": [{**first, "after": ["b"]}, {**second, "after": []}]}
    )
except KeyboardInterrupt:
    print("interrupted")
"""


def test_interrupt_between_requests_that_are_sent_together_is_not_waited_out():
    """The first one waits for the second, which is never sent."""
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=30, check=False)
    assert done.stdout == "interrupted\n", done.stderr


REFUSED = "def refused(*_, **__):\n    raise BlockingIOError(11, 'Resource temporarily unavailable')\n"
NEVER_BEGUN = {
    "no temporary folder": ("tempfile.tempdir = '/nonexistent'\n", "/nonexistent"),
    "no process for the keeper": (f"{REFUSED}os.fork = refused\n", "when this one is killed, found: [Errno 11]"),
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
    rewritten(exported, {"prefill": {"die": True}, "decode": {"die": True}})
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


def test_folder_that_is_too_long_for_sockets_is_not_taken(tmp_path, capsys):
    folder = tmp_path / ("x" * 70)
    assert standalone.own_temporary(folder) == {}
    assert "too long for sockets" in capsys.readouterr().out and not folder.exists()


def test_keeper_spares_a_process_that_has_the_pid_by_now():
    """Its start time is another than that of the engine."""
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    try:
        code = (
            "from harness.export.standalone import Keeper\n"
            f"keeper = Keeper(); keeper.tell('engine', {bystander.pid}, '1'); keeper.end()"
        )
        subprocess.run([sys.executable, "-c", code], check=True)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()
