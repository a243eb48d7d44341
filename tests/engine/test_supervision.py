"""An engine that hangs leaves its stacks, and costs its own cell alone. What SIGKILL of the harness leaves:
test_resume.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.history.folder import load_history
from harness.supervision import orphans, procfs
from harness.util.paths import REPOSITORY
from tests.support.builders import changed_profile

pytestmark = pytest.mark.engine


def wait_for(what, seconds: float = 300.0):
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)
    return found


def start(out: Path, *arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "harness", "run", *arguments, "--cell", "single-none", "--out", str(out)]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, cwd=REPOSITORY, start_new_session=True, **pipes)


def recorded(out: Path) -> int:
    return sum(len(p.read_bytes().splitlines()) for p in out.glob("*/cells/*/observations.jsonl"))


@pytest.mark.exhaustive
def test_engine_that_hangs_leaves_its_stacks_and_the_cell_is_unknown(tmp_path):
    """Its engine core is stopped, so that requests hang; the limit of the cell ends that."""
    profile = changed_profile(tmp_path, lambda r: r.update(timeouts={"cell": 8.0}))
    out = tmp_path / "out"
    running = start(out, "--profile", profile, "--scenario", "cold")
    wait_for(lambda: recorded(out) >= 3)
    (tree,) = [t for t in orphans.survey().trees if t.ledger.run.startswith(str(out))]
    for core in [p for p in tree.processes if "EngineCore" in Path(f"/proc/{p.pid}/cmdline").read_text()]:
        os.kill(core.pid, signal.SIGSTOP)
    assert running.wait(180) == 2
    (folder,) = [p for p in out.iterdir() if p.is_dir() and not p.is_symlink()]
    cell = load_history(folder).run.cells[0]
    assert cell.state == "failed" and "(timeouts.cell)" in str(cell.reason)
    stacks = (folder / "logs" / "single-none.single.stacks.txt").read_text()
    assert stacks.count(": cell") == 1 and "MainThread" in stacks
    assert not tree.path.exists() and not [p for p in tree.processes if procfs.lives(p)]
