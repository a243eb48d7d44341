"""A command in a child process: its verdict counts, not how the child ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from harness.util.paths import REPOSITORY
from tests.support.supervised import gone, wait_for

CHILD = """
import os, signal, sys, time
from harness.supervision.run_in_child import continue_in_child
def interrupted(*_):
    print("asked to end", flush=True)
    sys.exit(2)
signal.signal(signal.SIGTERM, interrupted)
tell = continue_in_child("the run")
print(os.getpid(), flush=True)
"""


def started(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD + code], cwd=REPOSITORY, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def child_of(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    return int(process.stdout.readline())


@pytest.mark.parametrize("verdict", [0, 1, 2])
@pytest.mark.parametrize("end", ["os._exit(1)", "os.kill(os.getpid(), signal.SIGKILL)", "sys.exit(0)"])
def test_a_verdict_that_was_told_stands(verdict, end):
    process = started(f"tell({verdict}); {end}")
    out, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (verdict, ""), out


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ("os._exit(1)", "ended with exit code 1"),
        ("os._exit(0)", "ended with exit code 0"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed by signal 9"),
    ],
)
def test_a_process_that_ends_without_a_verdict_is_unknown(end, words):
    process = started(end)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 2
    assert f"{words} before it had a verdict; verdict UNKNOWN" in err


@pytest.mark.parametrize("code", [2, 64])
def test_a_failure_that_was_reported_keeps_its_code(code):
    process = started(f"print('why', file=sys.stderr); sys.exit({code})")
    assert process.communicate(timeout=20)[1] == "why\n" and process.returncode == code


def test_a_signal_is_passed_on():
    process = started("time.sleep(60)")
    child = child_of(process)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=20)
    assert (process.returncode, out) == (2, "asked to end\n")
    assert gone([child])


def test_the_child_is_asked_to_end_when_its_parent_is_killed():
    process = started("time.sleep(60)")
    child = child_of(process)
    time.sleep(0.1)
    process.kill()
    process.wait()
    wait_for(lambda: gone([child]))
    assert process.communicate()[0] == "asked to end\n"
