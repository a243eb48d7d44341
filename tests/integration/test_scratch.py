"""What engines and harnesses leave on disk: temporary files, claims of ports and cores, stacks."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import pytest

from harness.errors import EngineStartError
from harness.supervision import ports, procfs, runtime_dir
from harness.supervision.cores import Cores
from harness.supervision.process import SupervisedProcess
from tests.support.supervised import call, gone, kill_supervisors, ledger_of, own_folder, own_machine, ps, wait_for

__all__ = ["own_folder", "own_machine"]

# Stands for an engine: a socket called after a UUID and a file, as vLLM 0.32 makes them, and a link out of the folder.
ENGINE = """
import json, os, socket, sys, tempfile, time, uuid
folder = os.environ.get("VLLM_RPC_BASE_PATH") or tempfile.gettempdir()
held = socket.socket(socket.AF_UNIX)
held.bind(f"{folder}/{uuid.uuid4()}")
os.mkdir(f"{folder}/made")
open(f"{folder}/made/vllm_dist_{uuid.uuid4().hex}", "w").close()
os.symlink(sys.argv[2], f"{folder}/link")
said = {"sockets": folder, "TMPDIR": os.environ.get("TMPDIR")}
said |= {"mode": oct(os.stat(folder).st_mode & 0o777), "pid": os.getpid()}
with open(sys.argv[1] + ".new", "w") as file:
    json.dump(said, file)
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(float(sys.argv[3]))
"""

HOLDER = """
import os, sys, time
from harness.supervision.process import SupervisedProcess
warded = SupervisedProcess(sys.argv[1:], dict(os.environ), open(os.devnull, "wb"))
time.sleep(600)
"""


@pytest.fixture
def short(own_folder, monkeypatch):
    """A temporary folder whose path is as short as they are, for this test alone."""
    folder = Path(tempfile.mkdtemp(dir="/tmp", prefix="t"))
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.delenv("VLLM_RPC_BASE_PATH", raising=False)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def outside(tmp_path) -> Path:
    """What a link in the folder leads to."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "mine").write_text("stays")
    return folder


def argv(tmp_path: Path, outside: Path, lives_s: float = 600) -> list[str]:
    return [sys.executable, "-c", ENGINE, str(tmp_path / "said"), str(outside), str(lives_s)]


def said(tmp_path: Path) -> dict:
    wait_for((tmp_path / "said").exists, 60)
    return json.loads((tmp_path / "said").read_text())


def nothing(short: Path) -> bool:
    """Whether nothing is there but the lock of the claims and caches."""
    left = [p for p in short.rglob("*") if p.name not in {f"kv-harness-{os.getuid()}", "ports.lock"}]
    return left == []


@pytest.mark.parametrize("lives_s", [0, 600])
def test_temporary_files_of_an_engine_go_with_it(short, tmp_path, outside, lives_s):
    """However it ends: by itself, or with its whole tree."""
    with (tmp_path / "log").open("wb") as log:
        warded = SupervisedProcess(argv(tmp_path, outside, lives_s), dict(os.environ), log)
    found = said(tmp_path)
    folder = Path(found["sockets"])
    assert folder.parent == procfs.state_folder() and found["mode"] == "0o700"
    if lives_s:
        assert len(list(folder.iterdir())) == 3
        assert ps()["trees"][0]["temporary_files"] == str(folder)
    assert warded.close() == []
    assert nothing(short) and (outside / "mine").read_text() == "stays"
    # Torch's compiled kernels go by the temporary folder's path.
    assert found["TMPDIR"] == str(short)


def test_temporary_files_go_with_a_harness_that_is_killed(short, tmp_path, outside):
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, *argv(tmp_path, outside)])
    assert Path(said(tmp_path)["sockets"]).is_dir()
    holder.kill()
    holder.wait()
    wait_for(lambda: nothing(short))


def test_temporary_files_that_killed_supervisors_left_are_cleaned(short, tmp_path, outside):
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, *argv(tmp_path, outside)])
    found = said(tmp_path)
    (tree,) = ps()["trees"]
    assert call("clean") == (0, "nothing to clean\n")
    kill_supervisors(json.loads(Path(tree["ledger"]).read_text())["warden"][0])
    holder.kill()
    holder.wait()
    assert ps()["trees"][0]["temporary_files"] == found["sockets"]
    code, text = call("clean")
    assert code == 0 and f"removed {found['sockets']}" in text
    assert gone([found["pid"]]) and nothing(short)
    assert (outside / "mine").read_text() == "stays"


def test_a_path_that_is_too_long_for_sockets_is_said_and_costs_no_engine(short, tmp_path, monkeypatch, outside):
    """The engine has the temporary folder that it would have had."""
    longer = short / ("x" * 40)
    longer.mkdir()
    monkeypatch.setenv("TMPDIR", str(longer))
    monkeypatch.setattr("tempfile.tempdir", str(longer))
    with pytest.raises(runtime_dir.ScratchError, match="at most 70 bytes"):
        runtime_dir.folder_for(procfs.state_folder(), "ab" * 8)
    with (tmp_path / "log").open("wb") as log:
        warded = SupervisedProcess(argv(tmp_path, outside, 0), dict(os.environ), log)
    assert said(tmp_path)["sockets"] == str(longer)
    assert warded.close() == []
    assert any("set TMPDIR to a shorter path" in words for words in warded.notes)


def test_longest_path_holds_a_socket(short):
    """Of ``LONGEST`` bytes: its sockets can be bound; one more is too long."""
    base = short / ("y" * (runtime_dir.LONGEST - len(str(short)) - 1))
    base.mkdir()
    with socket.socket(socket.AF_UNIX) as held:
        held.bind(f"{base}/{uuid.uuid4()}")
    with socket.socket(socket.AF_UNIX) as held, pytest.raises(OSError, match="too long"):
        held.bind(f"{base}/{uuid.uuid4()}x")


def test_a_folder_that_cannot_be_made_starts_nothing(short, tmp_path, outside, monkeypatch):
    monkeypatch.setattr("secrets.token_hex", lambda _: "cd" * 8)
    (procfs.state_folder() / runtime_dir.name_of("cd" * 8)).symlink_to(outside)
    with (tmp_path / "log").open("wb") as log, pytest.raises(EngineStartError, match="folder for temporary files"):
        SupervisedProcess(argv(tmp_path, outside), dict(os.environ), log)
    assert not (tmp_path / "said").exists() and (outside / "mine").exists()


@pytest.mark.parametrize(
    "where", ["/home", "{state}/s-other", "{state}/../kv/s-{mark}", "{outside}/s-{mark}", "s-{mark}"]
)
def test_a_ledger_that_names_another_folder_is_not_believed(short, tmp_path, outside, where):
    state, mark = procfs.state_folder(), "ab" * 8
    folder = where.format(state=state, mark=mark, outside=outside)
    (outside / f"s-{mark}").mkdir()
    ledger_of(tmp_path, scratch=folder, mark=mark)
    code, text = call("clean")
    assert code == 2 and "not named after its mark" in text
    assert (outside / "mine").exists() and (outside / f"s-{mark}").exists()


def test_a_link_in_the_place_of_the_folder_is_not_followed(short, tmp_path, outside):
    folder = procfs.state_folder() / runtime_dir.name_of("ab" * 8)
    folder.symlink_to(outside)
    ledger_of(tmp_path, scratch=str(folder))
    code, text = call("clean")
    assert code == 2 and "not a folder of this user alone" in text
    assert (outside / "mine").exists()


def test_temporary_files_of_an_earlier_boot_are_removed(short, tmp_path, own_machine):
    folder = procfs.state_folder() / runtime_dir.name_of("ab" * 8)
    folder.mkdir()
    (folder / "file").touch()
    ledger_of(tmp_path, scratch=str(folder), boot="an earlier one", started=procfs.booted_at() - 60)
    assert call("clean")[0] == 0
    assert nothing(short)


# --- claims ----------------------------------------------------------------------------------------------------------

CLAIMS = """
import os, sys
from harness.supervision import ports
print(*ports.free_ports(3))
if sys.argv[1] == "fork" and os.fork() == 0:
    sys.exit()
os.wait() if sys.argv[1] == "fork" else None
assert all((ports.procfs.state_folder() / f"port-{p}").exists() for p in ports._HELD), "a child let go of them"
if sys.argv[1] == "raise":
    raise SystemExit(3)
"""


@pytest.mark.parametrize("how", ["end", "raise", "fork"])
def test_claims_go_with_a_process_that_ends_without_release(short, how):
    done = subprocess.run([sys.executable, "-c", CLAIMS, how], capture_output=True, text=True, check=False)
    assert done.returncode == (3 if how == "raise" else 0), done.stderr
    assert len(done.stdout.split()) == 3
    assert nothing(short)


def test_claims_of_others_stay_at_the_end_of_a_process(short):
    (mine,) = ports.free_ports(1)
    subprocess.run([sys.executable, "-c", CLAIMS, "end"], capture_output=True, check=True)
    assert [p.name for p in procfs.state_folder().glob("port-*")] == [f"port-{mine}"]
    ports.release([mine])
    assert nothing(short)


def test_cores_are_claimed_where_nobody_can_put_a_link(short, tmp_path):
    mine, other = Cores(), Cores()
    claimed = mine.claim(1)
    assert len(claimed) == 1
    assert [p.parent for p in short.rglob("core-*")] == [procfs.state_folder()]
    assert claimed[0] not in other.claim(1)
    mine.release()
    other.release()
    assert nothing(short)
    (procfs.state_folder() / "core-3").touch()
    assert call("clean")[0] == 0
    assert nothing(short)


def test_a_link_or_somebody_elses_folder_for_cores_is_refused(short, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    first = min(os.sched_getaffinity(0))
    link = procfs.state_folder() / f"core-{first}"
    link.symlink_to(victim)
    with pytest.raises(EngineStartError, match=f"core {first}"):
        Cores().claim(1)
    assert victim.read_text() == "precious"
    link.unlink()
    os.mkfifo(link)
    with pytest.raises(EngineStartError, match="a regular file with a single name"):
        Cores().claim(1)
    procfs.state_folder().chmod(0o755)
    with pytest.raises(EngineStartError, match="0700"):
        Cores().claim(1)
