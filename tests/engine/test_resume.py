"""A real run that is killed with SIGKILL in the middle of a cell goes on where it stopped, and passes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.config import REPOSITORY
from harness.history import load_history
from tests.engine.conftest import harness, left_over

pytestmark = pytest.mark.engine


def _answers(out: Path, cell: str) -> int:
    return sum(p.read_text().count(f'"cell":"{cell}"') for p in out.glob("*/observations.jsonl"))


def test_killed_run_goes_on_to_its_end(tmp_path):
    command = [sys.executable, "-m", "harness", "run", "--cell", "single-none", "--cell", "single-eagle3"]
    running = subprocess.Popen(
        [*command, "--scenario", "cold", "--out", str(tmp_path)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=REPOSITORY,
        start_new_session=True,
    )
    deadline = time.monotonic() + 300
    while _answers(tmp_path, "single-none") < 7 and time.monotonic() < deadline and running.poll() is None:
        time.sleep(0.05)
    os.kill(running.pid, signal.SIGKILL)
    running.wait()
    (folder,) = (p for p in tmp_path.iterdir() if p.is_dir())
    deadline = time.monotonic() + 30
    while left_over(folder) and time.monotonic() < deadline:
        time.sleep(0.2)
    killed = load_history(folder)
    assert {c.cell: c.state for c in killed.run.cells} == {"single-none": "pending", "single-eagle3": "complete"}
    assert len(killed.in_order("single-none")) >= 7
    judged = harness("check", str(folder))
    assert judged.code == 2, judged.output
    assert "has no end" in judged.output

    went_on = harness("run", "--resume", str(folder))
    assert went_on.code == 0, went_on.output
    whole = load_history(folder)
    (entry,) = whole.run.resumed
    assert entry.cells == ("single-none",)
    assert entry.set_aside == len(killed.in_order("single-none"))
    assert whole.in_order("single-eagle3") == killed.in_order("single-eagle3")
    assert (folder / entry.files[0]).read_text().count("\n") == entry.set_aside
    assert harness("check", str(folder)).code == 0
    again = harness("run", "--resume", str(folder))
    assert again.code == 64, again.output
    assert "came to its end" in again.output
    assert left_over(folder) == []
