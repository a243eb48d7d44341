"""However an exported file ends, it leaves no engine and nothing that its engines made."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.export import standalone
from tests.unit.test_export import FAKE, exported, rewritten
from tests.unit.test_warden import gone, wait_for

__all__ = ["exported"]

# Stands for an engine that never becomes ready: a server and a worker, which ignores TERM. Both leave an OpenMP
# registration and a socket; in the place of the prefill worker's registration is somebody else's.
LINGERING = """
import ctypes, os, signal, subprocess, sys, time
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
with open(os.path.join(os.path.dirname(__file__), "pids"), "a") as file:
    file.write(f"{os.getpid()} {role} {sockets}\\n")
time.sleep(600)
"""


def registration(pid: int) -> Path:
    return Path(f"/dev/shm/__KMP_REGISTERED_LIB_{pid}_{os.getuid()}")


@pytest.mark.parametrize("numbers", [["KILL"], ["TERM"], ["INT", "INT", "TERM"]])
def test_nothing_is_left_by_a_file_that_is_ended(exported, tmp_path, numbers):
    program = tmp_path / "lingering.py"
    program.write_text(LINGERING)
    rewritten(exported, {"prefill": {}, "decode": {}})
    exported.write_text(exported.read_text().replace(FAKE, str(program)))
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", str(exported)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    said = tmp_path / "pids"
    lines = wait_for(lambda: said.exists() and (found := said.read_text().splitlines())[3:] and found, 90)
    pids = [int(line.split()[0]) for line in lines]
    foreign = registration(
        next(int(p) for p, role, _ in map(str.split, lines) if role == "prefill" and "1000-" in _registered(p))
    )
    folders = {Path(line.split()[2]) for line in lines}
    try:
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
    finally:
        for pid in pids:
            registration(pid).unlink(missing_ok=True)


def _registered(pid: str) -> str:
    return registration(int(pid)).read_text()


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
