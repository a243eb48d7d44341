"""Real engines in trouble: interrupted, dying, refused. Never a traceback, never green, nothing lost."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from harness.history.folder import load_history
from tests.support.builders import changed_profile
from tests.support.real_engines import harness, left_over

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


@contextlib.contextmanager
def interrupted(when: Callable[[], bool]) -> Iterator[None]:
    """Send this process, which runs the harness, an INT signal as soon as something is so."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.1):
            if when():
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
                return

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_interrupt_keeps_what_was_recorded_and_leaves_no_process(tmp_path):
    """That the harness's own process ends, too, needs no real engine: test_supervision_limits.py."""

    def some() -> bool:
        recorded = tmp_path.glob("*/cells/*/observations.jsonl")
        return any(len(p.read_text().splitlines()) >= 5 for p in recorded)

    with interrupted(some):
        code, output, folder = harness("run", "--cell", "single-none", out=tmp_path)
    assert code == 2, output
    assert "Traceback" not in output
    assert folder is not None
    history = load_history(folder)
    assert len(history.observations) >= 5 and history.run.interrupted
    assert json.loads((folder / "judgement.json").read_text())["verdict"] == "UNKNOWN"
    assert (folder / "report.html").is_file()
    assert left_over(folder) == []
