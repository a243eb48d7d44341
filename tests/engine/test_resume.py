"""A real run that is killed with SIGKILL in the middle of a cell leaves nothing of its engine, goes on where it
stopped, and passes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.history.folder import load_history
from harness.supervision import orphans, ports, procfs
from harness.util.paths import REPOSITORY
from tests.support.real_engines import harness, left_over
from tests.support.run_files import all_lines

pytestmark = pytest.mark.engine


def _answers(out: Path, cell: str) -> int:
    return sum(p.read_text().count("\n") for p in out.glob(f"*/cells/{cell}/observations.jsonl"))


def nothing_is_left(tree: orphans.Found, within_s: float = 30.0) -> None:
    """Of an engine whose harness was killed: processes, segments, ports, claims and the ledger."""
    deadline = time.monotonic() + within_s
    while tree.path.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not tree.path.exists()
    assert not [p for p in tree.processes if procfs.lives(p)]
    assert not procfs.segments() & set(tree.segments)
    assert not [p for p in tree.ledger.ports if ports.in_use(p)]
    assert not set(tree.ledger.ports) & set(orphans.survey().claims)


@pytest.mark.exhaustive
def test_killed_run_goes_on_to_its_end(small_profile, tmp_path):
    command = [sys.executable, "-m", "harness", "run", "--cell", "single-none", "--cell", "single-eagle3"]
    running = subprocess.Popen(
        [*command, "--profile", small_profile, "--scenario", "cold", "--out", str(tmp_path)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=REPOSITORY,
        start_new_session=True,
    )
    deadline = time.monotonic() + 300
    while _answers(tmp_path, "single-none") < 7 and time.monotonic() < deadline and running.poll() is None:
        time.sleep(0.05)
    (tree,) = [t for t in orphans.survey().trees if t.ledger.run.startswith(str(tmp_path))]
    assert len(tree.processes) >= 2 and tree.listening
    os.kill(running.pid, signal.SIGKILL)
    running.wait()
    nothing_is_left(tree)
    (folder,) = (p for p in tmp_path.iterdir() if p.is_dir())
    assert left_over(folder) == []
    killed = load_history(folder)
    assert {c.cell: c.state for c in killed.run.cells} == {"single-none": "pending", "single-eagle3": "complete"}
    assert len(killed.in_order("single-none")) >= 7
    judged = harness("check", str(folder))
    assert judged.code == 2, judged.output
    assert "never finished" in judged.output

    went_on = harness("run", "--resume", str(folder))
    assert went_on.code == 0, went_on.output
    whole = load_history(folder)
    (entry,) = whole.run.resumed
    assert entry.cells == ("single-none",) and entry.set_aside == len(killed.in_order("single-none"))
    assert whole.in_order("single-eagle3") == killed.in_order("single-eagle3")
    assert len(all_lines(folder / entry.files[0])) == entry.set_aside
    assert harness("check", str(folder)).code == 0
    again = harness("run", "--resume", str(folder))
    assert again.code == 64, again.output
    assert "this run finished at" in again.output
    assert left_over(folder) == []
