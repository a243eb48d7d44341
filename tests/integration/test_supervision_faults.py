"""What goes wrong around trees of real processes: nothing of them is left all the same, and nothing else is touched."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.engines.command import EngineCommand
from harness.errors import EngineStartError, StorageError
from harness.history.records import CellRecord
from harness.supervision import orphans, ports, procfs
from harness.supervision.log import EngineLog
from harness.supervision.process import SupervisedEngine, SupervisedProcess, TreeDetails
from tests.support.engines import session_of
from tests.support.supervised import (
    bystander,
    engine_program,
    gone,
    held,
    kill_supervisors,
    made_by,
    nothing_left,
    only_ledger,
    own_folder,
    started,
    supervised_program,
    wait_for,
    warden,
)

__all__ = ["bystander", "engine_program", "held", "own_folder", "started"]


@pytest.fixture
def shm():
    """Names of files in ``/dev/shm`` that are removed after the test."""
    made: list[Path] = []

    def name(text: str) -> Path:
        made.append(procfs.SHM / text)
        return made[-1]

    yield name
    for path in made:
        path.unlink(missing_ok=True)


def test_segment_with_two_names(started, shm):
    """``sem_open`` links each semaphore; anybody of this user may do so too."""
    (used,) = [procfs.SHM / name for name in made_by(started.pids) if name.startswith("ucx_shm_posix_test_")]
    os.link(used, shm(f"{used.name}_two"))
    assert started.engine.stop(1.0) == []
    assert nothing_left(started.pids)


SCANS = """
import json, os, subprocess, sys
from harness.supervision import procfs, supervisor
supervisor._SCAN_S = 0
me = procfs.process(os.getpid())
tree = supervisor.Tree({"ledger": sys.argv[1], "mark": "0" * 16, "holder": me, "claims": [], "about": {"name": "x"}})
for _ in range(2):
    child = subprocess.Popen(["sleep", "600"])
    tree.scan()
    print([pid for pid, _ in json.load(open(sys.argv[1]))["members"]] == [child.pid])
    child.kill()
    child.wait()
"""


def test_processes_that_have_ended_are_not_kept_in_the_ledger(tmp_path):
    command = [sys.executable, "-c", SCANS, str(tmp_path / "tree-1-00.json")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() == ["True", "True"]


@pytest.mark.parametrize("delay", [0.0, 0.005, 0.02, 0.05])
def test_term_to_a_warden_that_ends_its_tree_already(held, delay):
    owner = warden()
    held.kill()
    time.sleep(delay)
    while procfs.lives(owner):
        procfs.send(owner, signal.SIGTERM)
        time.sleep(0.002)
    assert nothing_left(held.pids)


def test_term_to_a_warden_ends_its_tree(started):
    procfs.send(warden(), signal.SIGTERM)
    wait_for(lambda: not started.engine.alive())
    assert started.engine.stop(1.0) == []
    assert nothing_left(started.pids)


READER = """
import pathlib, sys, time
path = pathlib.Path(sys.argv[1])
while not path.exists():
    time.sleep(0.01)
with path.open("rb"):
    print("opened", flush=True)
    time.sleep(600)
"""


def test_file_of_somebody_that_the_engine_opened_stays(tmp_path, shm):
    data = shm(f"weights-{os.getpid()}.safetensors")
    engine = supervised_program(tmp_path, READER, data)
    data.write_bytes(b"x")
    wait_for(lambda: "opened" in engine.log_text())
    assert engine.stop(1.0) == []
    assert data.read_bytes() == b"x"


REGISTERS = """
import os, time
open(f"/dev/shm/__KMP_REGISTERED_LIB_{os.getpid()}_{os.getuid()}", "wb").write(b"x")
print("up", flush=True)
time.sleep(600)
"""


def says_what_it_removed(folder: Path) -> bool:
    folder.mkdir()
    engine = supervised_program(folder, REGISTERS)
    wait_for(lambda: "up" in engine.log_text())
    name = f"__KMP_REGISTERED_LIB_{engine.pid}_{os.getuid()}"
    assert (procfs.SHM / name).exists() and engine.stop(1.0) == [] and not (procfs.SHM / name).exists()
    return f"harness: removed shared memory /dev/shm/{name}\n" in engine.log_text()


def test_what_was_removed_is_in_the_log(tmp_path):
    """A tree that ends beside this test may remove it first, which does not happen every time."""
    assert any(says_what_it_removed(tmp_path / str(attempt)) for attempt in range(5))


# In a pid namespace of its own, as in a container: an engine with an OpenMP registration, and what another container
# that shares /dev/shm may have there, a tensor that is called after the same pid and memory that nobody here uses.
CONTAINER = """
import os, sys, time
from harness.supervision import procfs as traces
from harness.engines.command import EngineCommand
from harness.supervision.process import SupervisedEngine
from pathlib import Path
code = '''
import os, time
open(f"/dev/shm/__KMP_REGISTERED_LIB_{os.getpid()}_{os.getuid()}", "wb").close()
print("up", flush=True)
time.sleep(600)
'''
log = Path(sys.argv[1])
assert not traces.all_pids_seen()
engine = SupervisedEngine(EngineCommand("single", 1, None, [sys.executable, "-c", code], {}), log, dict(os.environ))
while "up" not in engine.log_text():
    time.sleep(0.01)
other = traces.SHM / f"torch_{engine.pid}_1_0"
other.write_bytes(b"x")
own = traces.SHM / f"__KMP_REGISTERED_LIB_{engine.pid}_{os.getuid()}"
foreign = traces.SHM / f"ucx_shm_posix_{os.urandom(8).hex()}"
foreign.write_bytes(b"x")
try:
    print(engine.stop(1.0), own.exists(), other.exists(), foreign.exists())
finally:
    for path in (own, other, foreign):
        path.unlink(missing_ok=True)
"""
UNSHARE = [
    "unshare",
    "--pid",
    "--mount",
    "--fork",
    "--mount-proc",
    "sh",
    "-c",
    'mount -t tmpfs none /dev/shm && exec "$@"',
    "sh",
]


def _can_unshare() -> bool:
    return shutil.which("unshare") is not None and not subprocess.run([*UNSHARE, "true"], check=False).returncode


def test_segments_of_another_container_stay(tmp_path):
    if not _can_unshare():
        pytest.skip("pid namespaces cannot be made here")
    done = subprocess.run(
        [*UNSHARE, sys.executable, "-c", CONTAINER, str(tmp_path / "log")], capture_output=True, text=True, check=False
    )
    assert done.stdout == "[] False True True\n", done.stderr


# Its first thread ends; the second one holds a segment.
HEADLESS = """
import ctypes, mmap, sys, threading, time
def hold():
    file = open(sys.argv[1], "w+b")
    file.write(b"x" * 4096)
    file.flush()
    mapped = mmap.mmap(file.fileno(), 4096)
    print("held", flush=True)
    time.sleep(600)
threading.Thread(target=hold).start()
time.sleep(0.5)
ctypes.CDLL(None).syscall(60, 0)
"""


def test_process_whose_first_thread_has_ended_lives(tmp_path, shm):
    segment_file = shm(f"ucx_shm_posix_headless_{os.getpid()}")
    engine = supervised_program(tmp_path, HEADLESS, segment_file)
    wait_for(lambda: Path(f"/proc/{engine.pid}/stat").read_text().split()[2] == "Z")
    wait_for(lambda: "held" in engine.log_text())
    segment = procfs.Segment(segment_file.name, segment_file.stat().st_ino)
    assert procfs.stat_of(engine.pid).state in "SR"
    assert procfs.users([segment], [engine.pid]) == {segment: {engine.pid}}
    known = orphans.read_ledger(only_ledger())
    assert procfs.marked(engine.pid, known.mark) and segment not in procfs.abandoned(0.0, [])
    assert engine.alive() and engine.stop(0.5) == []
    assert not segment_file.exists()
    assert procfs.stat_of(engine.pid) is None


def test_without_a_ledger_nothing_is_started(tmp_path, monkeypatch):
    mark = "ab" * 8
    monkeypatch.setattr(secrets, "token_hex", lambda _: mark)
    # Stands for a disk that is full.
    (procfs.state_folder() / f"tree-{os.getpid()}-{mark}.new").mkdir()
    made = tmp_path / "made"
    with (tmp_path / "log").open("wb") as log, pytest.raises(EngineStartError, match=r"ledger.*cannot be written"):
        SupervisedProcess([sys.executable, "-c", f"open({str(made)!r}, 'w')"], os.environ, log, TreeDetails("x"))
    time.sleep(0.3)
    assert not made.exists()


def test_lost_ledger_and_killed_supervisors_are_no_good_end(started):
    engine, _, pids = started
    try:
        owner = warden()
        only_ledger().unlink()
        kill_supervisors(owner.pid)
        wait_for(lambda: not engine.alive())
        assert [words for words in engine.stop(1.0) if "expected its ledger" in words]
        assert gone(pids)
    finally:
        for name in made_by(pids):
            (procfs.SHM / name).unlink(missing_ok=True)


def test_another_process_with_the_pid_of_the_engine_is_not_signalled(started, bystander):
    engine, ledger, owner = started.engine, only_ledger(), warden().pid
    engine._process.pid = bystander.pid
    engine._process.terminate()
    os.kill(owner, signal.SIGSTOP)
    # As of a warden that is killed while it writes.
    procfs.partial_ledger(ledger).write_text('{"format": ')
    os.kill(owner, signal.SIGKILL)
    wait_for(lambda: not engine.alive())
    engine.stop(1.0)
    assert bystander.poll() is None
    assert nothing_left(started.pids)


def test_what_cannot_be_started_lets_go_of_its_claims(tmp_path):
    """A NUL in the command, and a folder in the place of the log."""
    (tmp_path / "folder.log").mkdir()
    for argv, log, kind in (
        (["/bin/true", "a\0b"], "engine.log", EngineStartError),
        (["/bin/true"], "folder.log", StorageError),
    ):
        claimed = ports.free_ports(1)
        with pytest.raises(kind):
            SupervisedEngine(EngineCommand("single", 1, None, argv, {}), tmp_path / log, dict(os.environ), claimed)
        assert ports.held(claimed) == ()


def test_only_what_listens_is_in_use(monkeypatch):
    (port,) = ports.free_ports(1)
    ports.release([port])
    with socket.create_server(("127.0.0.1", port)):
        assert ports.in_use(port) and ports.trouble(port) == "in use"
    # An address of no machine.
    assert not ports.in_use(port, "192.0.2.1")
    assert ports.trouble(port, "192.0.2.1").startswith("not known to be free (")
    assert ports.trouble(port) == ""


def test_ports_do_not_run_out(monkeypatch):
    monkeypatch.setattr(ports, "_LOWEST", 29000)
    monkeypatch.setattr(ports, "_HIGHEST", 29040)
    monkeypatch.setattr(ports, "_TRIES", 38)
    monkeypatch.setattr(ports, "_GIVEN", set())
    for _ in range(100):
        ports.release(ports.free_ports(2))


def test_another_folder_is_not_taken_when_the_disk_is_full(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "nowhere"))
    monkeypatch.setattr("tempfile.tempdir", None)
    assert procfs.folder_path().parent == tmp_path / "nowhere"
    with pytest.raises(EngineStartError, match="nowhere"):
        ports.free_ports(1)


def test_obituary_of_a_real_time_signal(tmp_path):
    assert "signal 35;" in EngineLog(tmp_path / "log").obituary("engine", -35)
    (tmp_path / "refused").write_text("usage: api_server.py [--x]\napi_server.py: error: unrecognized arguments: --y\n")
    refused = EngineLog(tmp_path / "refused").root_error()
    assert refused == " (it logged: api_server.py: error: unrecognized arguments: --y)"
    assert "signal SIGKILL;" in EngineLog(tmp_path / "log").obituary("engine", -9)


@pytest.mark.parametrize("prefix", ["", "(EngineCore pid=7) ERROR 11-28 16:24:53 [core.py:1510] "])
@pytest.mark.parametrize("marks", [[], ["           ^^^^^^^^~~~^^^^"]])
def test_an_exception_without_a_message_is_told_with_the_code_that_raised_it(tmp_path, prefix, marks):
    trace = [
        "Traceback (most recent call last):",
        '  File "x.py", line 5, in f',
        "    assert rows == self.size",
        *marks,
    ]
    (tmp_path / "log").write_text(
        "".join(f"{prefix}{line}\n" for line in [*trace, "AssertionError", "RuntimeError: x"])
    )
    assert EngineLog(tmp_path / "log").exception() == "AssertionError: assert rows == self.size"
    (tmp_path / "log").write_text(f"{prefix}INFO something else\n{prefix}AssertionError\n")
    assert EngineLog(tmp_path / "log").exception() == "AssertionError"


class FakeHandle:
    """Stands for an engine and for a router."""

    def __init__(self, folder: Path, error: Exception | None = None) -> None:
        self.log_path = folder / "fake.log"
        self.error = error
        self.ended = False

    def stop(self, _grace_s: float = 0.0) -> list[str]:
        self.ended = True
        if self.error is not None:
            raise self.error
        return []

    end = stop


def test_one_that_cannot_be_ended_does_not_keep_the_others_running(tmp_path):
    session = session_of("pd-none", tmp_path)
    router, decode = FakeHandle(tmp_path, KeyError("x")), FakeHandle(tmp_path, OSError("y"))
    prefill = FakeHandle(tmp_path)
    session._routers.running = [router]
    session._launcher.processes = {"decode": decode, "prefill": prefill}
    session.stop()
    assert router.ended and decode.ended and prefill.ended
    assert session.left == [
        "processes of the router, which could not be ended (KeyError: 'x')",
        "processes of the decode engine, which could not be ended (OSError: y)",
    ]


def test_a_run_whose_processes_may_still_be_there_cannot_pass():
    cell = CellRecord(cell="pd-none", group="pd-none", block_size=16, lookahead=0, draft_tokens=0, planned=1)

    def left_running(*words: str) -> bool:
        return cell.model_copy(update={"left_over": words}).left_running

    assert not left_running()
    assert not left_running("shared memory /dev/shm/psm_1, used by pid 7", "port 5 on 127.0.0.1, which is in use")
    assert left_running("port 5 on 127.0.0.1, which is in use", "process 7 of pd-none.decode, which cannot be killed")
    assert left_running("whatever pd-none.decode started and made: expected its ledger x, found none")
