"""A full disk, a read-only one, and two writers of one folder: a clear end, and nothing recorded before is lost."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import harness.engines.environment
import harness.reports.judge_run
import harness.runner.groups
import harness.runner.record_cells
import harness.runner.run
from harness.cli.app import app
from harness.commands.merge import merge
from harness.commands.run import execute
from harness.errors import EXIT_UNKNOWN, InfrastructureError, StorageError, UsageError
from harness.history.folder import HistoryWriter, load_history
from harness.history.verdict import Verdict
from harness.reports.judge_run import check
from harness.runner.recorder import Recorder
from harness.runner.run import new_folder, prepared_recorder
from harness.util import file_lock, json_io
from harness.util.files import write_atomic
from harness.util.progress import Reporter
from harness.util.storage import LOCK, FolderLock, LineFile
from harness.workload.prepare import prepare
from tests.support.builders import history, observation, written_run
from tests.support.engines import ENVIRONMENT
from tests.support.fake_session import FakeSession, stand_in
from tests.support.run_files import answers


def mounted(folder: Path, options: str) -> bool:
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True)
    return done.returncode == 0


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 256 KiB."""
    folder = tmp_path / "tiny"
    if not mounted(folder, "size=256k"):
        pytest.skip("mounting a file system is not allowed here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A recorded run on a read-only file system."""
    folder = tmp_path / "fixed"
    if not mounted(folder, "size=4m"):
        pytest.skip("mounting a file system is not allowed here")
    recorded(folder / "run")
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    yield folder / "run"
    subprocess.run(["umount", "-l", str(folder)], check=True)


def recorded(folder: Path) -> None:
    written_run(folder, history([observation("single-none", n) for n in (31, 32, 33)]))


def test_full_disk_keeps_every_whole_line(tiny: Path):
    lines = LineFile(tiny / "lines")
    line = "x" * 9_999
    with pytest.raises(StorageError, match=r"lines cannot be written \(No space left .*\): the disk is full"):
        for _ in range(100):
            lines.append(line)
    with pytest.raises(StorageError, match="the disk is full"):
        lines.append("y")
    lines.close()
    kept = (tiny / "lines").read_text()
    assert len(kept) > 100_000 and set(kept.split("\n")) == {line, ""}
    assert kept.endswith("\n")


def test_full_device_is_a_storage_error(tmp_path):
    path = answers(tmp_path, "single-none")
    path.parent.mkdir(parents=True)
    path.symlink_to("/dev/full")
    with HistoryWriter(tmp_path) as writer, pytest.raises(StorageError, match=r"observations\.jsonl.*disk is full"):
        writer.append(observation("single-none"))


def test_limit_on_the_size_of_files_is_a_storage_error(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    lines = LineFile(tmp_path / "lines")
    resource.setrlimit(resource.RLIMIT_FSIZE, (25, hard))
    try:
        lines.append("0123456789")
        lines.append("0123456789")
        with pytest.raises(StorageError, match="ulimit -f"):
            lines.append("0123456789")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    lines.close()
    assert (tmp_path / "lines").read_text() == "0123456789\n" * 2


def test_file_is_replaced_whole_or_stays(tiny: Path):
    write_atomic(tiny / "run.json", "old")
    with pytest.raises(StorageError, match="No space left"):
        write_atomic(tiny / "run.json", "n" * 2**20)
    assert (tiny / "run.json").read_text() == "old"
    assert [p.name for p in tiny.iterdir()] == ["run.json"]


@pytest.mark.parametrize("code", [errno.EIO, errno.EROFS, errno.EDQUOT, errno.EACCES, errno.ENOSPC])
def test_each_refusal_has_its_sentence(tmp_path, monkeypatch, code):
    def refuse(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    lines = LineFile(tmp_path / "lines")
    lines.append("kept")
    monkeypatch.setattr(os, "write", refuse)
    with pytest.raises(StorageError, match=os.strerror(code)) as caught:
        lines.append("lost")
    assert str(tmp_path / "lines") in str(caught.value)
    assert isinstance(caught.value, InfrastructureError) and caught.value.exit_code == EXIT_UNKNOWN
    assert (tmp_path / "lines").read_text() == "kept\n"


def test_judging_a_read_only_run_gives_its_verdict_without_reports(read_only: Path):
    outcome = check(read_only, into=read_only)
    assert outcome.summary.verdict is Verdict.UNKNOWN and "read-only" in outcome.summary.unwritten
    done = CliRunner().invoke(app, ["check", str(read_only), "--write"])
    assert done.exit_code == EXIT_UNKNOWN and "UNKNOWN" in done.output
    assert "no report" in done.output
    assert isinstance(CliRunner().invoke(app, ["report", str(read_only)]).exception, StorageError)


@pytest.mark.parametrize(("verdict", "code"), [(Verdict.PASS, 2), (Verdict.REGRESSION, 1), (Verdict.UNKNOWN, 2)])
def test_missing_reports_are_never_green(tmp_path, monkeypatch, verdict, code):
    recorded(tmp_path)
    whole = check(tmp_path).summary
    judged = whole._replace(judgement=whole.judgement.model_copy(update={"verdict": verdict}))
    assert judged.exit_code == verdict.exit_code
    assert judged._replace(unwritten="disk full").exit_code == code


# --- runs ------------------------------------------------------------------------------------------------------------


def fill(session: FakeSession, work, recorder: Recorder, _reporter) -> None:
    """Stands for sending a cell's requests: answers until the disk is full."""
    for number in range(100_000):
        recorder.append(observation(work.cell.id, 40, sequence=number))
        if session.gone.is_set():
            return


@pytest.fixture
def faked(monkeypatch) -> None:
    FakeSession.reset()
    stand_in(monkeypatch)
    monkeypatch.setattr(harness.engines.environment, "inspect_environment", lambda _: ENVIRONMENT)
    monkeypatch.setattr(harness.engines.environment, "need_build", lambda *_: None)


def test_full_disk_ends_a_run_and_keeps_what_it_recorded(tiny: Path, faked, monkeypatch):
    monkeypatch.setattr(harness.runner.record_cells, "run_cell", fill)
    prepared = prepare("cpu", ["single-*"])
    with Reporter(0) as reporter, pytest.raises(StorageError, match=r"(observations\.jsonl|run\.json).*full"):
        execute(prepared, tiny, reporter)
    assert not +FakeSession.up
    (folder,) = (p for p in tiny.iterdir() if p.is_dir())
    kept = load_history(folder)
    assert len(kept.observations) > 20 and not kept.torn_line
    assert {c.state for c in kept.run.cells} == {"pending"}
    summary = check(folder).summary
    assert summary.verdict is Verdict.UNKNOWN and summary.exit_code == EXIT_UNKNOWN


def test_folder_in_use_is_refused(tmp_path, faked):
    with FolderLock(tmp_path), pytest.raises(UsageError, match=f"process {os.getpid()} is writing to this folder"):
        FolderLock(tmp_path)
    FolderLock(tmp_path).release()


def test_lock_dies_with_its_process(tmp_path):
    script = "import sys, time; from pathlib import Path; from harness.util.storage import FolderLock; "
    script += "lock = FolderLock(Path(sys.argv[1])); print('held', flush=True); time.sleep(60)"
    holder = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    with pytest.raises(UsageError, match=f"process {holder.pid} is writing to this folder"):
        FolderLock(tmp_path)
    holder.kill()
    holder.wait()
    FolderLock(tmp_path).release()


@pytest.mark.parametrize("link", [Path.symlink_to, Path.hardlink_to])
def test_lock_that_is_a_link_is_refused_and_never_written_through(tmp_path, link):
    precious = tmp_path / "precious"
    precious.write_text("a file of the user")
    (tmp_path / "run").mkdir()
    link(tmp_path / "run" / LOCK, precious)
    with pytest.raises(StorageError, match=r"\.lock cannot be written \(.*; remove it"):
        FolderLock(tmp_path / "run")
    assert precious.read_text() == "a file of the user"


def test_merge_into_a_folder_in_use_is_refused(tmp_path):
    recorded(tmp_path / "part")
    (tmp_path / "out").mkdir()
    with FolderLock(tmp_path / "out"), pytest.raises(UsageError, match=r"is writing to this folder|profile"):
        merge([tmp_path / "part"], tmp_path / "out")
    assert [p.name for p in (tmp_path / "out").iterdir()] == []


def test_two_runs_into_one_folder_have_folders_of_their_own(tmp_path):
    profile = prepare("cpu", ["single-none"]).profile
    assert len({new_folder(tmp_path, profile) for _ in range(20)}) == 20


def test_a_run_in_progress_holds_its_folder(tmp_path, faked, monkeypatch):
    seen = []

    def look(_session, work, recorder, _reporter) -> None:
        with pytest.raises(UsageError, match="is writing to this folder"):
            FolderLock(recorder.folder)
        seen.append(work.cell.id)
        recorder.set_cell(work.cell.id, state="complete")

    monkeypatch.setattr(harness.runner.record_cells, "run_cell", look)
    with Reporter(0) as reporter:
        made = execute(prepare("cpu", ["single-none"]), tmp_path, reporter)
    assert seen == ["single-none"]
    FolderLock(made.folder).release()


def test_recorder_says_what_it_could_not_write(tiny: Path):
    recorder = prepared_recorder(prepare("cpu", ["single-none"]), ENVIRONMENT, tiny / "run")
    (tiny / "filler").write_bytes(b"x" * (os.statvfs(tiny).f_bavail * os.statvfs(tiny).f_frsize))
    with pytest.raises(StorageError, match=r"run\.json.*No space left"):
        recorder.set_cell("single-none", state="complete")
    assert load_history(tiny / "run").run.cells[0].state == "pending"


@pytest.mark.parametrize("number", [2**64, 99999999999999999999, -(2**63) - 1, -9999999999999999999])
def test_json_numbers_beyond_64_bits_are_refused(number):
    with pytest.raises(ValueError, match="64-bit"):
        json_io.loads(f'{{"a": {number}}}')
    assert json_io.loads(f"[{2**64 - 1}, {-(2**63)}]") == [2**64 - 1, -(2**63)]


def test_lock_leaves_nothing_behind_and_is_never_held_twice(tmp_path, monkeypatch):
    """Its file is removed by the holder, possibly after another process has opened it and before that locks it."""
    first = FolderLock(tmp_path)
    opened = file_lock.open_lock

    def late(path, mode):
        handle = opened(path, mode)
        first.release()
        return handle

    monkeypatch.setattr(file_lock, "open_lock", late)
    second = FolderLock(tmp_path)
    monkeypatch.undo()
    assert (tmp_path / LOCK).is_file()
    with pytest.raises(UsageError, match="is writing to this folder"):
        FolderLock(tmp_path)
    second.release()
    assert list(tmp_path.iterdir()) == []
