"""Programs that stand for an engine and for a harness, for tests of supervision: real processes, no vLLM."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from typer.testing import CliRunner

from harness.cli.app import app
from harness.engines.command import EngineCommand
from harness.supervision import orphans, ports, procfs
from harness.supervision.process import SupervisedEngine

# Stands for an engine: a server on a port; a child; and a grandchild whose parent has ended, which ignores TERM, has a
# session of its own, holds a segment of shared memory, and leaves one that is called after its pid.
ENGINE = """
import json, mmap, os, signal, socket, subprocess, sys, time
role, port, pids = sys.argv[1], int(sys.argv[2]), sys.argv[3]
if role == "middle":
    subprocess.Popen([sys.executable, __file__, "last", str(port), pids], start_new_session=True)
    sys.exit()
if role == "last":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    name = f"/dev/shm/__KMP_REGISTERED_LIB_{os.getpid()}_{os.getuid()}"
    open(name, "wb").write(b"x" * 1024)
    held = open(f"/dev/shm/ucx_shm_posix_test_{os.getpid()}", "w+b")
    held.write(b"x" * 4096)
    held.flush()
    mapped = mmap.mmap(held.fileno(), 4096)
    held.close()
if role == "first":
    child = subprocess.Popen([sys.executable, __file__, "middle", str(port), pids])
    child.wait()
    server = socket.create_server(("127.0.0.1", port))
with open(pids, "a") as file:
    file.write(f"{os.getpid()}\\n")
time.sleep(600)
"""

# Stands for a harness: claims a port and starts one engine on it.
HARNESS = """
import os, sys, time
from pathlib import Path
from harness.engines.command import EngineCommand
from harness.supervision.server import full_environment
from harness.engines.places import LocalPlace
program, folder = sys.argv[1], Path(sys.argv[2])
place = LocalPlace()
port, _ = place.ports(2)
(folder / "port").write_text(str(port))
argv = [sys.executable, program, "first", str(port), str(folder / "pids")]
engine = place.start(EngineCommand("single", port, None, argv, {}), folder / "logs" / "cell.single.log")
(folder / "up").write_text(str(engine.pid))
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def own_folder(tmp_path_factory, monkeypatch):
    """Ledgers and claims of a test, and of the processes that it starts, are its own."""
    folder = tmp_path_factory.mktemp("state")
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


@pytest.fixture
def engine_program(tmp_path) -> Path:
    path = tmp_path / "engine.py"
    path.write_text(ENGINE)
    return path


def noted_pids(folder: Path) -> list[int]:
    """The processes of the program that have noted themselves so far."""
    path = folder / "pids"
    return list(map(int, path.read_text().split())) if path.exists() else []


def read_pids(folder: Path) -> list[int]:
    """Both processes of the program, once they have noted themselves."""
    return wait_for(lambda: found if len(found := noted_pids(folder)) >= 2 else [], 60)


def made_by(pids: list[int]) -> list[str]:
    """Names of the shared memory whose name has one of these process ids in it, not as a part of a random word."""
    wanted = {str(pid) for pid in pids}
    return [p.name for p in procfs.SHM.iterdir() if wanted & set(re.findall(r"(?<![^\W_])\d+(?![^\W_])", p.name))]


def made_by_program(name: str) -> bool:
    """Whether this is an OpenMP registration as the program writes it."""
    try:
        return "KMP" in name and (procfs.SHM / name).read_bytes().startswith(b"xx")
    except FileNotFoundError:
        return False


def start_harness(engine_program: Path, folder: Path) -> subprocess.Popen:
    folder.mkdir()
    command = [sys.executable, "-c", HARNESS, str(engine_program), str(folder)]
    return subprocess.Popen(command, start_new_session=True)


class Held(NamedTuple):
    """A program that stands for a harness, and the processes of its engine."""

    harness: subprocess.Popen
    folder: Path
    pids: list[int]

    def kill(self) -> None:
        self.harness.kill()
        self.harness.wait()


@pytest.fixture
def held(engine_program, tmp_path) -> Held:
    harness = start_harness(engine_program, tmp_path / "run")
    return Held(harness, tmp_path / "run", read_pids(tmp_path / "run"))


def state() -> list[str]:
    """Names of ledgers, and of claims that are held."""
    folder = procfs.state_folder()
    claims = [p for p in folder.glob("port-*") if not ports.sweep(p)]
    return sorted(p.name for p in (*folder.glob("tree-*"), *claims))


def marks(log: Path) -> list[int]:
    """Processes that were started for an engine that writes to this log."""
    found = []
    for process in psutil.process_iter():
        try:
            if str(log.parent.parent) in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


class Started(NamedTuple):
    """An engine that this process started: its first process, and the one that left its session."""

    engine: SupervisedEngine
    port: int
    pids: list[int]


@pytest.fixture
def started(engine_program, tmp_path) -> Started:
    claimed = ports.free_ports(2)
    argv = [sys.executable, str(engine_program), "first", str(claimed[0]), str(tmp_path / "pids")]
    command = EngineCommand("single", claimed[0], None, argv, {})
    engine = SupervisedEngine(command, tmp_path / "logs" / "cell.single.log", dict(os.environ), claimed)
    return Started(engine, claimed[0], read_pids(tmp_path))


def supervised_program(
    folder: Path, code: str, *arguments: object, role: str = "single", **env: str
) -> SupervisedEngine:
    """An engine that runs this code."""
    argv = [sys.executable, "-c", code, *map(str, arguments)]
    return SupervisedEngine(EngineCommand(role, 1, None, argv, env), folder / "engine.log", dict(os.environ))


@pytest.fixture
def bystander():
    """A process of this user that belongs to no tree."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


def only_ledger() -> Path:
    (path,) = procfs.ledgers(procfs.state_folder())
    return path


def warden() -> procfs.Process:
    """The owner of the only tree that there is."""
    return orphans.read_ledger(only_ledger()).warden


def wait_for(what, seconds: float = 20.0):
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
    return found


def gone(pids: list[int]) -> bool:
    return not any(map(_runs, pids))


def nothing_left(pids: list[int]) -> bool:
    """Whether neither these processes nor what they made nor any ledger or claim is there."""
    return gone(pids) and made_by(pids) == [] and state() == []


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill_supervisors(owner: int) -> None:
    """Kill the owner of a tree and the process that stands by it, before either notices the other's end."""
    both = [psutil.Process(owner).ppid(), owner]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in both:
            os.kill(pid, number)
    wait_for(lambda: gone(both))


def call(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, arguments)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


def ps() -> dict:
    code, text = call("ps", "--json")
    assert code == 0
    return json.loads(text)


def ledger_of(tmp_path: Path, **changes) -> Path:
    """A ledger of a tree of which nothing is left."""
    dead = [2**22 + 1, procfs.process(os.getpid()).start]
    known = {
        "format": 4,
        "boot": procfs.boot(),
        "machine": procfs.machine(),
        "namespace": procfs.namespace(),
        "mark": "ab" * 8,
        "holder": dead,
        "warden": dead,
        "engine": dead,
        "members": [dead],
        "name": "pd-none.decode",
        "ports": [28500],
        "host": "127.0.0.1",
        "run": str(tmp_path),
        "started": time.time() - 65,
    }
    known |= changes
    path = procfs.state_folder() / f"tree-{known['holder'][0]}-{known['mark']}.json"
    path.write_text(json.dumps({**known, "checksum": procfs.checksum(known)}))
    return path


@pytest.fixture
def own_machine(tmp_path, monkeypatch):
    """This one, with an id wherever the tests run."""
    known = tmp_path / "machine-id"
    known.write_text(f"{'0123456789abcdef' * 2}\n")
    monkeypatch.setattr(procfs, "_MACHINE_ID", known)
    return known
