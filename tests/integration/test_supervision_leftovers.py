"""``harness ps`` and ``harness clean``: what an earlier crash left is shown and removed, and nothing else."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from harness.supervision import orphans, ports, procfs
from harness.util.storage import LOCK, FolderLock
from tests.support.supervised import (
    bystander,
    call,
    engine_program,
    gone,
    held,
    kill_supervisors,
    ledger_of,
    made_by,
    nothing_left,
    only_ledger,
    own_folder,
    own_machine,
    ps,
    started,
    wait_for,
    warden,
)

__all__ = ["bystander", "engine_program", "held", "own_folder", "own_machine", "started"]


def test_a_living_tree_is_shown_and_not_touched(started):
    engine, port, pids = started
    (tree,) = ps()["trees"]
    assert (tree["state"], tree["name"], tree["harness_pid"]) == ("running", "cell.single", os.getpid())
    assert (tree["engine_pid"], set(tree["processes"])) == (engine.pid, set(pids))
    assert port in tree["listening"] and tree["age_s"] < 60
    assert ps()["claimed_ports"] == [port, port + 1]
    code, text = call("ps")
    assert code == 0 and "running" in text and f"{port}*" in text
    assert call("clean") == (0, "nothing to clean\n")
    assert engine.alive() and not gone(pids)
    assert engine.stop(1.0) == []
    assert ps() == {"trees": [], "damaged": [], "claimed_ports": []}


@pytest.mark.parametrize("which", ["owner", "standby"])
def test_supervisor_and_harness_that_are_killed_together_leave_nothing(held, which):
    owner = warden().pid
    victims = [held.harness.pid, owner if which == "owner" else psutil.Process(owner).ppid()]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in victims:
            os.kill(pid, number)
    held.harness.wait()
    wait_for(lambda: nothing_left(held.pids))
    assert orphans.left_over() is None


def test_what_killed_supervisors_left_is_removed(held, bystander):
    kill_supervisors(warden().pid)
    held.kill()
    pids = held.pids
    assert not gone(pids)
    other = procfs.SHM / f"psm_test_other_{os.getpid()}"
    other.write_bytes(b"x")
    try:
        (tree,) = ps()["trees"]
        # The kernel has ended the engine's first process with its supervisor.
        assert tree["state"] == "left over" and set(tree["processes"]) < set(pids)
        # Tests beside this one leave some, too.
        assert len(made_by(pids)) == 2 and not {*made_by(pids)} & {*tree["shared_memory"]}
        notice = orphans.left_over()
        assert notice is not None
        assert f"1 process trees of earlier runs are left over, with {len(tree['processes'])} living" in notice
        code, text = call("clean")
        assert code == 0
        assert all(str(pid) in text for pid in tree["processes"])
        assert nothing_left(pids)
        assert orphans.left_over() is None
        assert other.exists() and bystander.poll() is None
        assert call("clean") == (0, "nothing to clean\n")
        assert not [p for p in procfs.state_folder().iterdir() if p.name != "ports.lock"]
    finally:
        other.unlink()


def test_a_warden_that_hangs_is_told_to_end(held, monkeypatch):
    monkeypatch.setattr(orphans, "_SUPERVISOR_S", 0.5)
    os.kill(warden().pid, signal.SIGSTOP)
    held.kill()
    code, text = call("clean")
    assert (code, "told supervisor" in text) == (0, True)
    assert nothing_left(held.pids)


def test_logs_of_killed_runs_lose_their_secrets(tmp_path):
    said = "Authorization: Bearer abcdefghijklmnop"
    for name in ("killed", "other", "in-use"):
        (tmp_path / name / "logs").mkdir(parents=True)
        (tmp_path / name / "logs" / "pd-none.decode.log").write_text(said)
    log = {p.parts[-3]: p for p in tmp_path.rglob("*.log")}
    ledger_of(tmp_path, run=str(tmp_path / "killed"))
    with FolderLock(tmp_path / "in-use"):
        code, text = call("clean")
        assert (code, "redacted secrets in 1 logs" in text) == (0, True), text
        assert "abcdefgh" not in log["killed"].read_text() and log["other"].read_text() == said
        code, text = call("clean", "--logs", str(tmp_path))
        assert (code, "is writing to this folder" in " ".join(text.split())) == (
            2,
            True,
        ), text
    assert "abcdefgh" not in log["other"].read_text() and log["in-use"].read_text() == said
    assert call("clean", "--logs", str(tmp_path))[0] == 0
    assert "abcdefgh" not in log["in-use"].read_text()


def test_clean_does_not_write_through_a_link_in_the_place_of_a_lock(tmp_path):
    run, precious = tmp_path / "run", tmp_path / "precious"
    precious.write_text("a file of the user")
    (run / "logs").mkdir(parents=True)
    (run / "logs" / "pd-none.decode.log").write_text("nothing")
    (run / LOCK).symlink_to(precious)
    code, text = call("clean", "--logs", str(run))
    assert (code, "the harness does not write through links; remove it" in " ".join(text.split())) == (2, True), text
    assert precious.read_text() == "a file of the user"


def test_hand_made_ledgers(tmp_path):
    path = ledger_of(tmp_path)
    (tree,) = ps()["trees"]
    assert tree["state"] == "left over" and 64 < tree["age_s"] < 120
    assert call("clean")[0] == 0 and not path.exists()
    # Of another container's processes nothing is known here.
    path = ledger_of(tmp_path, namespace="pid:[1]")
    assert ps()["trees"][0]["state"] == "elsewhere"
    assert call("clean") == (0, "nothing to clean\n") and path.exists()
    path = ledger_of(tmp_path, holder=list(procfs.process(os.getpid())), name="[red]x[/red]\x1b[2J")
    text = call("ps")[1]
    assert "[red]x[/red]" in text and "\x1b[2J" not in text
    assert call("clean") == (0, "nothing to clean\n") and path.exists()


def with_temporary_files(tmp_path: Path, **changes) -> tuple[Path, Path]:
    """A ledger and the folder of its tree, which are there."""
    folder = procfs.state_folder() / f"s-{'ab' * 8}"
    folder.mkdir(mode=0o700, exist_ok=True)
    (folder / "socket").touch()
    return ledger_of(tmp_path, scratch=str(folder), **changes), folder


def test_of_an_earlier_boot_of_this_machine_nothing_can_live(tmp_path, own_machine):
    before = procfs.booted_at() - 60
    assert 0 < before < time.time()
    path, folder = with_temporary_files(
        tmp_path, boot="earlier", started=before, members=[list(procfs.process(os.getpid()))]
    )
    assert ps()["trees"][0]["state"] == "left over"
    assert call("clean")[0] == 0 and not path.exists() and not folder.exists()


@pytest.mark.parametrize(
    "changes",
    [{"machine": "fedcba9876543210"}, {"machine": ""}, {"started": time.time()}, {"boot": ""}],
    ids=["other", "unknown", "younger than this boot", "no boot id"],
)
def test_a_tree_that_may_live_on_another_machine_keeps_its_files(tmp_path, own_machine, changes):
    """Two machines may have the same folder for temporary files."""
    earlier = {"boot": "earlier", "started": procfs.booted_at() - 60}
    path, folder = with_temporary_files(tmp_path, **earlier | changes)
    claims = [procfs.state_folder() / name for name in ("port-28500", "core-0")]
    for claim in claims:
        claim.touch()
    assert ps()["trees"][0]["state"] == "elsewhere"
    assert call("clean") == (0, "nothing to clean\n")
    assert path.exists() and (folder / "socket").exists() and all(c.exists() for c in claims)


@pytest.mark.parametrize("said", ["", "uninitialized", "\xff"])
def test_machine_that_has_no_id_is_not_taken_for_another_without_one(tmp_path, own_machine, said):
    own_machine.write_text(said, encoding="latin-1")
    assert procfs.machine() == ""
    path, folder = with_temporary_files(tmp_path, boot="earlier", machine="", started=procfs.booted_at() - 60)
    assert call("clean") == (0, "nothing to clean\n") and path.exists() and folder.exists()


def test_warden_says_which_machine_its_tree_is_of(started):
    ledger = orphans.read_ledger(only_ledger())
    assert (ledger.format, ledger.machine) == (4, procfs.machine())
    assert started.engine.stop(1.0) == []


def test_memory_that_nobody_uses_goes_with_the_first_tree_that_is_older(tmp_path, monkeypatch):
    monkeypatch.setattr(procfs, "SHM", tmp_path)
    path, other = tmp_path / "ucx_shm_posix_test", tmp_path / "psm_test"
    path.touch()
    other.touch()
    ledger_of(tmp_path, started=time.time() + 60)
    assert call("clean")[0] == 0 and path.exists()
    with path.open("rb"):
        ledger_of(tmp_path)
        assert call("clean")[0] == 0 and path.exists()
    ledger_of(tmp_path)
    assert ps()["trees"][0]["shared_memory"] == [path.name]
    assert call("clean")[0] == 0 and not path.exists() and other.exists()


def flipped(data: bytes, seed: int) -> bytes:
    rng = random.Random(seed)
    out = bytearray(data)
    for _ in range(rng.randint(1, 8)):
        out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


DAMAGED = [
    b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"format": 1}', b'{"format": 1e999}', b"\0" * 100,
]  # fmt: skip


@pytest.mark.parametrize("data", DAMAGED, ids=range(len(DAMAGED)))
def test_damaged_ledger_is_said_and_kept(data):
    path = procfs.state_folder() / "tree-1-ab.json"
    path.write_bytes(data)
    (damaged,) = ps()["damaged"]
    assert damaged["ledger"] == str(path)
    code, text = call("clean")
    assert (code, str(path) in text) == (2, True)
    assert path.read_bytes() == data
    assert "damaged" in call("ps")[1]


def test_corrupted_ledgers_never_cost_anything_that_is_not_theirs(tmp_path, monkeypatch, bystander):
    """Bit flips in the ledger of a running tree, and swapped fields: no traceback, and no signal to anything."""
    sent: list[procfs.Process] = []
    monkeypatch.setattr(procfs, "send", lambda one, _number: sent.append(one))
    me = list(procfs.process(os.getpid()))
    there = wait_for(lambda: procfs.process(bystander.pid))
    _corrupt_all(tmp_path, me, list(there))
    assert sent == []
    # The same would be acted on if it were whole and its harness gone.
    monkeypatch.setattr(orphans, "_KILL_S", 0.1)
    ledger_of(tmp_path, holder=[2**22 + 1, me[1]], members=[list(there)])
    assert orphans.clean().left and set(sent) == {there}


def _corrupt_all(tmp_path: Path, me: list[int], there: list[int]) -> None:
    whole = ledger_of(tmp_path, holder=me, members=[there])
    data = whole.read_bytes()
    for n in range(400):
        whole.write_bytes(flipped(data, n))
        found = orphans.survey()
        assert len(found.trees) + len(found.damaged) == 1
        assert found.damaged or found.trees[0].state == "running"
        orphans.clean()
        assert whole.exists()
    whole.unlink()
    swaps = [
        {"ports": [10**9]}, {"ports": [-1]}, {"host": "example.org"}, {"host": "\0"}, {"started": 1e308},
        {"members": [[1, 10**12]]}, {"members": [[-1, 10**12]]}, {"members": [[0, me[1]]]}, {"format": 3},
        {"members": [me, [me[0], me[1] - 10**6]]}, {"name": None}, {"extra": 1}, {"engine": [10**30, 10**30]},
        {"mark": ""}, {"mark": "ab"}, {"members": [[there[0], there[1] - 1]], "holder": [2**22 + 1, 0]},
        {"members": [[there[0], there[1] + 1]], "engine": [there[0], there[1] + 1]},
    ]  # fmt: skip
    for swap in swaps:
        path = ledger_of(tmp_path, **swap)
        found = orphans.survey()
        assert len(found.trees) + len(found.damaged) == 1
        ended = orphans.clean()
        assert found.trees or (ended.left and path.exists())
        path.unlink(missing_ok=True)


def test_ledger_under_another_name_is_not_believed(tmp_path):
    path = ledger_of(tmp_path)
    moved = path.rename(path.with_name("tree-1-abababababababab.json"))
    assert "found that of tree-4194305" in ps()["damaged"][0]["why"]
    assert call("clean")[0] == 2 and moved.exists()


def test_ledger_that_its_warden_removes_meanwhile_is_nothing(tmp_path, monkeypatch):
    path = procfs.state_folder() / "tree-1-ab.json"
    monkeypatch.setattr(procfs, "ledgers", lambda _: [path])
    assert orphans.read_ledger(path) is None
    assert ps()["damaged"] == []
    assert call("clean") == (0, "nothing to clean\n")


def test_half_a_ledger_is_removed_when_its_warden_is_gone(tmp_path):
    me = list(procfs.process(os.getpid()))
    living = ledger_of(tmp_path, holder=me, warden=me, mark="cd" * 8, run=str(tmp_path / "other")).with_suffix(".new")
    dead = ledger_of(tmp_path).with_suffix(".new")
    starting = procfs.state_folder() / f"tree-{os.getpid()}-{'ef' * 8}.new"
    for new in (living, dead, starting):
        new.write_text("{")
        os.utime(new, (0, 0))
    fresh = procfs.state_folder() / f"tree-4194305-{'01' * 8}.new"
    fresh.write_text("{")
    assert call("clean")[0] == 0
    assert [living.exists(), dead.exists(), starting.exists(), fresh.exists()] == [True, False, True, True]


def test_ledger_that_is_a_link_is_not_followed(tmp_path):
    target = ledger_of(tmp_path).rename(tmp_path / "real.json")
    link = procfs.state_folder() / "tree-1-ab.json"
    link.symlink_to(target)
    assert len(ps()["damaged"]) == 1
    assert call("clean")[0] == 2 and target.exists() and link.is_symlink()


def test_no_folder_and_somebody_elses_folder(own_folder):
    assert ps() == {"trees": [], "damaged": [], "claimed_ports": []}
    assert call("clean") == (0, "nothing to clean\n")
    assert list(own_folder.iterdir()) == []
    (own_folder / f"kv-harness-{os.getuid()}").mkdir(mode=0o755)
    done = subprocess.run([sys.executable, "-m", "harness", "clean"], capture_output=True, text=True, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert "this user alone" in done.stderr


def test_looking_does_not_take_claims():
    taken = ports.free_ports(2)
    path = procfs.state_folder() / "port-28600"
    path.touch()
    assert orphans.survey().claims == taken
    assert path.exists()
    ports.release(taken)


def test_two_names_of_one_inode_are_two_segments():
    first, second = procfs.Segment("psm_drill_a", 7), procfs.Segment("psm_drill_b", 7)
    assert procfs.users([first, second], [os.getpid()]) == {first: set(), second: set()}
