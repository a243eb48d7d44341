"""Progress elsewhere than on a terminal: lines, and never a long silence."""

from __future__ import annotations

import io
import threading
import time

from rich.console import Console

from harness.util.progress import Reporter, saying


def printed(silence_s: float, expected_s: float, work: float) -> list[str]:
    out = io.StringIO()
    with Reporter(expected_s, Console(file=out, width=200), silence_s) as reporter:
        reporter.line("pd-none: starting 2 engines")
        reporter.step("pd-none cold 1/90", expected_s / 2)
        time.sleep(work)
    return out.getvalue().splitlines()


def test_silence_is_broken_by_what_is_under_way_and_the_time_left():
    lines = printed(0.5, 10.0, 1.8)
    assert lines[0].endswith("pd-none: starting 2 engines") and len(lines) >= 2
    assert all("… pd-none cold 1/90, for " in line and line.endswith(" s left") for line in lines[1:])
    waited = [float(line.split("for ")[1].split()[0]) for line in lines[1:]]
    assert waited == sorted(waited) and waited[-1] >= 1, "a request that hangs is told from one that is just sent"
    assert float(lines[1].split("about ")[1].split()[0]) < 3, "half of the expected time has passed in a moment"


def test_what_judging_waits_for_is_said_and_nothing_of_what_is_short(capsys):
    with saying("judging reports/x", silence_s=0.2):
        time.sleep(0.7)
    assert capsys.readouterr().err.splitlines()[0] == "harness: … judging reports/x, for 0 s"
    with saying("judging reports/x", silence_s=0.2):
        pass
    time.sleep(0.4)
    assert capsys.readouterr().err == ""


def test_what_lasts_as_long_as_its_user_wants_is_not_waited_for():
    out = io.StringIO()
    with Reporter(10.0, Console(file=out, width=200), 0.1) as reporter:
        reporter.rest()
        reporter.line("ready")
        time.sleep(0.4)
    assert len(out.getvalue().splitlines()) == 1


def test_nothing_is_added_while_lines_come():
    assert len(printed(60.0, 10.0, 0.1)) == 1


def test_it_ends_with_the_run():
    printed(0.5, 10.0, 0.1)
    for thread in [t for t in threading.enumerate() if t.name == "progress"]:
        thread.join(5)
    assert not [t for t in threading.enumerate() if t.name == "progress"]


def left(reporter: Reporter) -> float:
    return reporter._left_s()


def test_the_time_left_follows_what_requests_took_and_not_what_starts_did(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    reporter = Reporter(240.0, Console(file=io.StringIO()), starts_s=40.0)
    assert left(reporter) == 240
    clock[0] = 40.0
    reporter.step("pd-none", 40.0, start=True)
    assert left(reporter) == 200, "no request has been answered yet"
    for _ in range(4):
        clock[0] += 2.0
        reporter.step("pd-none cold", 10.0)
    assert left(reporter) == 32, "16 requests of 2 s each, where the profile guessed 10"
    clock[0] += 1.0
    assert left(reporter) == 31


def test_a_second_stage_is_added_to_what_is_left(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    reporter = Reporter(10.0, Console(file=io.StringIO()))
    clock[0] = 20.0
    reporter.step("pd-none cold 1/1", 10.0)
    assert left(reporter) == 0
    reporter.more(30.0, starts_s=5.0)
    assert left(reporter) == 5 + 2 * 25
