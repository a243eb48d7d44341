"""Trees of real processes: nothing of them is left, whichever end is killed and when."""

from __future__ import annotations

import json
import os
import random
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from harness.errors import EngineStartError
from harness.supervision import orphans, ports, procfs
from harness.supervision.process import SupervisedProcess, TreeDetails
from tests.support.supervised import (
    bystander,
    engine_program,
    gone,
    held,
    kill_supervisors,
    made_by,
    made_by_program,
    marks,
    noted_pids,
    nothing_left,
    only_ledger,
    own_folder,
    read_pids,
    start_harness,
    started,
    state,
    wait_for,
    warden,
)

__all__ = ["bystander", "engine_program", "held", "own_folder", "started"]


@pytest.mark.parametrize("seed", range(6))
def test_sigkill_of_the_harness_at_any_moment_leaves_nothing(engine_program, tmp_path, seed):
    folder = tmp_path / "run"
    before = procfs.segments()
    harness = start_harness(engine_program, folder)
    if seed == 0:
        read_pids(folder)
    else:
        time.sleep(random.Random(seed).uniform(0.1, 1.5))
    harness.kill()
    harness.wait()
    wait_for(lambda: not marks(folder / "logs" / "x"), 30)
    wait_for(lambda: not state(), 30)
    pids = noted_pids(folder)
    assert gone(pids) and not made_by(pids)
    # Segments of other engines come and go, those of tests that run beside this one too; a segment left over stays.
    new = {s for s in procfs.segments() - before if "ucx_shm_posix_test_" in s.name or made_by_program(s.name)}
    wait_for(lambda: not new & procfs.segments(), 60)
    if (folder / "port").exists():
        assert not ports.in_use(int((folder / "port").read_text()))


def test_stop_ends_everything_and_says_that_nothing_is_left(started, tmp_path):
    engine, port, pids = started
    assert len(made_by(pids)) == 2 and os.getsid(engine.pid) == engine.pid in pids
    found = orphans.read_ledger(only_ledger())
    assert (found.name, found.ports[0], found.run) == ("cell.single", port, str(tmp_path))
    assert found.holder_lives
    assert {p.pid for p in found.living()} == set(pids)
    assert engine.stop(2.0) == [] and engine.stop(2.0) == []
    assert engine.exit_code() == -signal.SIGTERM and nothing_left(pids)
    assert not ports.in_use(port) and ports.held([port]) == ()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_harness_whose_children_are_killed_with_it_takes_its_tree_along(held, number):
    """As Ray does with the children of its workers: the supervisor is none of them."""
    assert psutil.Process(held.harness.pid).children() == []
    held.harness.send_signal(number)
    held.harness.wait(10)
    wait_for(lambda: nothing_left(held.pids))


def test_tree_ends_when_its_first_process_is_killed(started):
    os.kill(started.engine.pid, signal.SIGKILL)
    wait_for(lambda: not started.engine.alive())
    assert started.engine.exit_code() == -signal.SIGKILL and gone(started.pids)
    assert started.engine.stop(1.0) == []


def test_shared_memory_that_others_use_stays(started):
    (used,) = [procfs.SHM / name for name in made_by(started.pids) if name.startswith("ucx_shm_posix_test_")]
    with used.open("rb"):
        assert started.engine.stop(1.0) == []
        assert used.exists()
    used.unlink(missing_ok=True)


TRACKED = """
import multiprocessing.shared_memory as shm, sys, time
held = shm.SharedMemory(create=True, size=4096)
print(held.name, flush=True)
time.sleep(600)
"""


def test_shared_memory_of_python_goes_with_the_killed_process_that_made_it(tmp_path):
    log = tmp_path / "log"
    with log.open("wb") as out:
        process = SupervisedProcess([sys.executable, "-c", TRACKED], dict(os.environ), out)
    segment = procfs.SHM / wait_for(log.read_text).strip()
    assert segment.exists()
    begun = time.monotonic()
    assert process.close() == []
    assert not segment.exists() and time.monotonic() - begun < 1.5


def test_registration_of_a_zombie_is_removed(bystander, tmp_path, monkeypatch):
    """A killed process stays in the table until its parent asks for it, and holds nothing any more."""
    # In /dev/shm, a tree that ends beside this test may remove it first.
    monkeypatch.setattr(procfs, "SHM", tmp_path)
    path = procfs.SHM / f"__KMP_REGISTERED_LIB_{bystander.pid}_{os.getuid()}"
    path.write_bytes(b"x")
    began = time.time()
    assert path.name not in [s.name for s in procfs.abandoned(began, [bystander.pid])]
    bystander.kill()
    wait_for(lambda: psutil.Process(bystander.pid).status() == psutil.STATUS_ZOMBIE)
    assert path.name in procfs.remove_abandoned(began, [bystander.pid]) and not path.exists()


@pytest.mark.parametrize("which", ["owner", "standby", "both"])
def test_killed_supervisors_are_stood_in_for(started, which):
    """The grandchild has left the session, and its mark tells whose it is."""
    owner = warden().pid
    assert "supervisor.py" in " ".join(psutil.Process(owner).cmdline())
    if which == "both":
        kill_supervisors(owner)
    else:
        os.kill(owner if which == "owner" else psutil.Process(owner).ppid(), signal.SIGKILL)
    wait_for(lambda: not started.engine.alive())
    assert started.engine.stop(1.0) == []
    assert started.engine.exit_code() == -signal.SIGKILL and nothing_left(started.pids)


def test_reused_pids_are_never_killed(bystander):
    """Another process that has the pid of a listed one now has another start time."""
    real = wait_for(lambda: procfs.process(bystander.pid))
    other = real._replace(start=real.start - 1)
    later = real._replace(start=real.start + 1)
    ledger = orphans.Ledger(
        format=1, boot=procfs.boot(), namespace=procfs.namespace(), mark="0" * 16, holder=other, warden=later,
        engine=other, members=(other, later), name="x", ports=(), host="127.0.0.1", run="",
        started=0.0,
    )  # fmt: skip
    assert ledger.living() == []
    procfs.send(other, signal.SIGKILL)
    assert bystander.poll() is None
    assert not ledger.holder_lives
    assert ledger.model_copy(update={"members": (real,)}).living() == [real]
    assert ledger.model_copy(update={"members": (real,), "boot": "another"}).living() == []


def test_folder_of_somebody_else_is_refused(own_folder, tmp_path):
    path = own_folder / f"kv-harness-{os.getuid()}"
    path.symlink_to(tmp_path)
    with pytest.raises(EngineStartError, match="this user alone"):
        ports.free_ports(1)
    path.unlink()
    path.mkdir(mode=0o777)
    path.chmod(0o777)
    with (tmp_path / "log").open("wb") as log, pytest.raises(EngineStartError, match="mode 0700"):
        SupervisedProcess([sys.executable, "-c", ""], os.environ, log, TreeDetails("x"))
    path.rmdir()
    assert stat.S_IMODE(procfs.state_folder().stat().st_mode) == 0o700


# --- ports -----------------------------------------------------------------------------------------------------------

# Stands for a harness: takes its ports, listens on them late, as engines do, and holds them.
CLAIMER = """
import json, socket, sys, time
from pathlib import Path
from harness.supervision.ports import free_ports
wanted, folder = int(sys.argv[1]), Path(sys.argv[2])
while not (folder / "go").exists():
    time.sleep(0.001)
taken = [free_ports(3) for _ in range(wanted)]
time.sleep(0.3)
servers = [socket.create_server(("127.0.0.1", port)) for some in taken for port in some]
print(json.dumps(taken), flush=True)
sys.stdin.read()
"""


def test_ten_harnesses_started_at_once_never_take_the_same_port(tmp_path):
    """In a range so small that chance alone would make them collide: 90 ports of 150."""
    code = f"import harness.supervision.ports as p\np._LOWEST, p._HIGHEST, p._TRIES = 28000, 28150, 140\n{CLAIMER}"
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code, "3", str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(10)
    ]
    time.sleep(1)
    (tmp_path / "go").touch()
    try:
        taken = [some for r in running for some in json.loads(r.stdout.readline() or "[]")]
    finally:
        for r in running:
            r.communicate()
    assert [r.returncode for r in running] == [0] * 10
    flat = [port for some in taken for port in some]
    assert len(flat) == len(set(flat)) == 90
    assert all(some == list(range(some[0], some[0] + 3)) for some in taken)


def test_claims_of_a_base_port_are_exclusive_and_end_with_their_process(tmp_path):
    code = "import sys\nfrom harness.supervision.ports import claim\nclaim([28200, 28201])\n"
    code += "print(1, flush=True)\nsys.stdin.read()"
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    other.stdout.readline()
    with pytest.raises(EngineStartError, match=r"port 28201: claimed by another harness.*--base-port"):
        ports.claim([28201, 28202])
    other.kill()
    other.communicate()
    ports.claim([28201, 28202])
    with pytest.raises(EngineStartError, match="another engine of this run"):
        ports.claim([28202])
    ports.release([28201, 28202])
    ports.claim([28202])
    ports.release([28202])
    assert [p.name for p in procfs.state_folder().glob("port-*")] == ["port-28200"]


def test_claims_outlive_the_harness_as_long_as_its_engines(held):
    """The warden holds them too; it is stopped here, so that it cannot end the tree at once."""
    owner = warden().pid
    os.kill(owner, signal.SIGSTOP)
    held.kill()
    port = int((held.folder / "port").read_text())
    with pytest.raises(EngineStartError, match="claimed by another harness"):
        ports.claim([port + 1])
    os.kill(owner, signal.SIGCONT)
    wait_for(lambda: not state(), 30)
    ports.claim([port, port + 1])
    ports.release([port, port + 1])


def test_a_stopped_harness_does_not_hold_the_others_for_ever(monkeypatch):
    code = "import time\nfrom harness.supervision.ports import locked\nwith locked():\n print(1, flush=True)"
    code += "\n time.sleep(60)"
    other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    other.stdout.readline()
    monkeypatch.setattr(ports, "_LOCK_S", 0.3)
    with pytest.raises(EngineStartError, match="another harness holds it"):
        ports.free_ports(1)
    ports.release([1])
    other.kill()
    other.communicate()
    ports.release(ports.free_ports(1))


def test_shared_memory_that_cannot_be_examined_does_not_stop_the_end(tmp_path):
    broken = tmp_path / "harness" / "supervision"
    broken.mkdir(parents=True)
    for path in Path(procfs.__file__).parent.glob("*.py"):
        (broken / path.name).write_text(path.read_text())
    (broken.parent / "__init__.py").touch()
    with (broken / "procfs.py").open("a") as file:
        file.write("\n\ndef segments():\n    raise KeyError(7)\n")
    program = f"""
import os
from harness.supervision import process, supervisor
supervisor.__file__ = {str(broken / "supervisor.py")!r}
one = process.SupervisedProcess(["sleep", "60"], dict(os.environ), open({str(tmp_path / "log")!r}, "wb"))
print(one.poll(), *one.close(), one.returncode, sep="|")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "None|shared memory that cannot be examined (KeyError: 7)|-9"
    ledger = only_ledger()
    assert orphans.clean().left == [] and not ledger.exists()
