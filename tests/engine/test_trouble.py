"""Real engines in trouble: interrupted, dying, refused. Never a traceback, never green, nothing lost."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time

import pytest

from harness.history.folder import load_history
from harness.util.paths import REPOSITORY
from tests.support.builders import changed_profile
from tests.support.real_engines import harness, left_over, newest

pytestmark = pytest.mark.engine


def test_engine_that_dies_while_starting_is_unknown_and_quoted(tmp_path):
    bad = ["--scheduling-policy", "no-such-policy"]
    profile = changed_profile(tmp_path, lambda r: r["engine"].update(extra_args=bad))
    done = harness("run", "--profile", profile, "--cell", "single-none", out=tmp_path / "out")
    assert done.code == 2, done.output
    assert "no-such-policy" in done.output and "Traceback" not in done.output
    assert done.history.run.cells[0].state == "failed"
    assert "UNKNOWN" in (done.folder / "summary.md").read_text()


def test_port_in_use_is_unknown_and_named(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = harness("run", "--cell", "single-none", "--base-port", str(port), out=tmp_path)
    assert done.code == 2, done.output
    assert f"port {port}" in done.output and "Traceback" not in done.output


def test_interrupt_keeps_what_was_recorded_and_leaves_no_process(tmp_path):
    command = [sys.executable, "-m", "harness", "run", "--cell", "single-none", "--out", str(tmp_path)]
    running = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=REPOSITORY, start_new_session=True
    )
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and running.poll() is None:
        if [p for p in tmp_path.glob("*/cells/*/observations.jsonl") if len(p.read_text().splitlines()) >= 5]:
            break
        time.sleep(0.1)
    running.send_signal(signal.SIGINT)
    output, _ = running.communicate(timeout=120)
    assert running.returncode == 2, output
    assert "Traceback" not in output
    folder = newest(tmp_path)
    assert folder is not None
    history = load_history(folder)
    assert len(history.observations) >= 5 and history.run.interrupted
    assert json.loads((folder / "judgement.json").read_text())["verdict"] == "UNKNOWN"
    assert (folder / "report.html").is_file()
    assert left_over(folder) == []
