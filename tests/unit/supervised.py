"""Programs that stand for an engine and for a harness, for tests of supervision: real processes, no vLLM."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from harness.engine import ports, traces
from harness.engine.command import EngineCommand
from harness.engine.warded import WardedEngine
from tests.unit.test_warden import wait_for

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
    held = open(f"/dev/shm/psm_test_{os.getpid()}", "w+b")
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
from harness.engine.command import EngineCommand, full_environment
from harness.engine.place import LocalPlace
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


def read_pids(folder: Path, count: int = 2) -> list[int]:
    def read() -> list[int]:
        found = (folder / "pids").read_text().split() if (folder / "pids").exists() else []
        return list(map(int, found)) if len(found) >= count else []

    return wait_for(read, 60)


def made_by(pids: list[int]) -> list[str]:
    return [p.name for p in traces.SHM.iterdir() if any(str(pid) in p.name for pid in pids)]


def made_by_program(name: str) -> bool:
    """Whether this is an OpenMP registration as the program writes it."""
    try:
        return "KMP" in name and (traces.SHM / name).read_bytes().startswith(b"xx")
    except FileNotFoundError:
        return False


def start_harness(engine_program: Path, folder: Path) -> subprocess.Popen:
    folder.mkdir()
    command = [sys.executable, "-c", HARNESS, str(engine_program), str(folder)]
    return subprocess.Popen(command, start_new_session=True)


def state() -> list[str]:
    """Names of ledgers, and of claims that are held."""
    folder = traces.state_folder()
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


def start_engine(engine_program: Path, folder: Path) -> tuple[WardedEngine, int]:
    claimed = ports.free_ports(2)
    argv = [sys.executable, str(engine_program), "first", str(claimed[0]), str(folder / "pids")]
    command = EngineCommand("single", claimed[0], None, argv, {})
    return WardedEngine(command, folder / "logs" / "cell.single.log", dict(os.environ), claimed), claimed[0]
