"""Whole soaks on a fake session that answers as the committed baselines say, with fake process trees and a clock
that goes by rounds: what they come to, and what is on disk when something ends them. They prove nothing about
engines."""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import typer

import harness.lab.soak.report
from harness.baselines.build import new_baselines, require_reference_run
from harness.cli.options import EngineOptions
from harness.cli.trust import soak_command
from harness.commands.merge.expected_run import MergeOptions as Parts
from harness.commands.merge.load import load_parts
from harness.commands.resume import prepare_resume
from harness.errors import EngineDiedError, StorageError, UsageError
from harness.history.folder import load_history
from harness.history.verdict import Verdict
from harness.lab.soak import growth, sampler
from harness.lab.soak import run as soak_run
from harness.lab.soak.model import HARNESS
from harness.lab.soak.rounds import RoundJudge
from harness.lab.soak.run import JudgedSoak, SoakOptions, prepare_soak, soak
from harness.reports.judge_run import check
from harness.reports.trend import load_trend
from harness.runner.run import prepared_recorder
from harness.util.signals import deferred, ended_by, ignored, raise_once
from harness.util.storage import FolderLock
from harness.workload.prepare import prepare
from tests.support.builders import engine, with_run
from tests.support.engines import ENVIRONMENT
from tests.support.fake_answers import perform
from tests.support.fake_soak import FLAT, FakeSession, FakeWatcher
from tests.support.reseal import reseal
from tests.support.run_files import all_lines

PROMPTS = 42


class FakeClock:
    """Ten seconds go by with each round: how many there are must not depend on the machine."""

    def __init__(self, session: type[FakeSession]) -> None:
        self.session, self.begun = session, time.monotonic()

    def monotonic(self) -> float:
        return self.begun + 10 * (self.session.newest.fake.count // PROMPTS)


INTERVAL_S = 0.005
_LOOKS = 4
"""How often the sampler looks at its clock for a sample."""


class SamplerClock:
    """A moment goes by with each look at it, so that samples are spread evenly however long Python was busy, and none
    is waited for longer than an interval."""

    def __init__(self, begun: float) -> None:
        self.now = begun

    def monotonic(self) -> float:
        self.now += INTERVAL_S / _LOOKS
        return self.now


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch):
    class Session(FakeSession):
        pass

    monkeypatch.setattr(soak_run, "EngineGroupSession", Session)
    monkeypatch.setattr(soak_run, "engines_for", lambda *_: ENVIRONMENT)
    return Session


@pytest.fixture
def session(fake: type[FakeSession], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(soak_run, "Watcher", lambda *_: FakeWatcher())
    # A busy machine must not decide what these come to.
    clock = FakeClock(fake)
    monkeypatch.setattr(soak_run, "time", clock)
    monkeypatch.setattr(sampler, "time", SamplerClock(clock.begun))
    monkeypatch.setattr(growth, "SHORTEST_S", 0)
    monkeypatch.setattr(growth, "PARTS", 2)
    monkeypatch.setattr(growth, "_ENDS", 1)
    monkeypatch.setattr(sampler, "_LATE", 1000)
    monkeypatch.setattr(sampler, "_SHARE", 0)
    # How it looks is tested elsewhere.
    monkeypatch.setattr(harness.lab.soak.report, "render_soak", lambda *_: "")
    return fake


def played(out: Path, rounds: int = 4, concurrency: int = 4) -> JudgedSoak:
    return soak(prepare_soak("cpu", "single-none"), SoakOptions(minutes(rounds), concurrency, INTERVAL_S), out, None)


def minutes(rounds: int) -> float:
    return (10 * rounds - 5) / 60


def written(folder: Path) -> dict:
    return json.loads((folder / "soak.json").read_text())


def recorded(folder: Path) -> list[dict]:
    return [json.loads(line) for line in all_lines(folder)]


# --- verdicts --------------------------------------------------------------------------------------------------------


def test_a_soak_sends_rounds_at_the_concurrency_and_records_them(tmp_path: Path, fake: type[FakeSession]):
    """With the clock and the process trees of this machine."""
    fake.takes_s = 0.05
    found, folder, _ = soak(prepare_soak("cpu", "single-none"), SoakOptions(0.01, 4, 0.05), tmp_path, None)
    assert found.rounds >= 1 and found.answered == found.rounds * PROMPTS
    assert fake.newest.most == 4 and fake.newest.ended
    assert found.verdict is Verdict.UNKNOWN, "too short"
    assert {g.verdict for g in found.growths} == {Verdict.UNKNOWN}
    kept = load_history(folder).observations
    assert len(kept) == found.answered and {o.concurrent for o in kept} == {4}
    assert (written(folder)["verdict"], written(folder)["exit_code"]) == ("UNKNOWN", 2)
    page = (folder / "soak.html").read_text()
    assert "too short to say" in page and "soak-rss_mib" in page


def test_a_soak_that_is_right_and_flat_passes_and_so_does_its_check(tmp_path: Path, session: type[FakeSession]):
    ended = played(tmp_path)
    assert (ended.result.verdict, ended.exit_code) == (Verdict.PASS, 0), ended.result
    assert ended.result.rounds == 4 and written(ended.folder)["verdict"] == "PASS"
    assert not (ended.folder / "round.jsonl").exists()
    run = load_history(ended.folder).run
    assert (run.kind, run.came_to, run.cells[0].state) == ("soak", Verdict.PASS, "complete")
    again = check(ended.folder).summary
    assert again.verdict is Verdict.PASS
    assert any("the soak as a whole ended with PASS" in n for n in again.judgement.notices)


def test_one_wrong_round_is_a_regression_even_if_later_rounds_are_right(tmp_path: Path, session: type[FakeSession]):
    session.wrong = range(PROMPTS + 1, 2 * PROMPTS + 1)
    ended = played(tmp_path)
    assert (ended.result.verdict, ended.exit_code) == (Verdict.REGRESSION, 1)
    assert ended.result.verdicts == {"PASS": 3, "REGRESSION": 1}
    assert written(ended.folder)["exit_code"] == 1
    assert load_history(ended.folder).run.came_to is Verdict.REGRESSION
    again = check(ended.folder).summary
    assert again.verdict is Verdict.REGRESSION
    assert {c.verdict for c in again.judgement.cells} == {Verdict.PASS}, "the last round was right"


def test_a_leak_is_a_regression_and_its_check_is_none_the_greener(
    tmp_path: Path, session: type[FakeSession], monkeypatch: pytest.MonkeyPatch
):
    class Leaking(FakeWatcher):
        def sample(self):
            super().sample()
            return {HARNESS: FLAT, "single": FLAT.model_copy(update={"descriptors": 30 + 5 * self.seen})}

    monkeypatch.setattr(soak_run, "Watcher", lambda *_: Leaking())
    ended = played(tmp_path)
    assert set(ended.result.verdicts) == {"PASS"}
    assert [g.name for g in ended.result.growths if g.verdict is Verdict.REGRESSION] == ["single descriptors"]
    assert ended.exit_code == 1 and check(ended.folder).summary.verdict is Verdict.REGRESSION


def test_a_soak_without_a_verdict_never_passes_a_check(tmp_path: Path, session: type[FakeSession]):
    folder = played(tmp_path).folder

    def forget(run):
        run["came_to"] = None

    reseal(folder, forget)
    summary = check(folder).summary
    assert summary.verdict is Verdict.UNKNOWN
    assert any("has no verdict" in n for n in summary.judgement.notices)


def test_baselines_outside_of_the_checkout_are_found(
    tmp_path: Path, session: type[FakeSession], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("harness.judging.references.recorded", lambda _: None)
    assert played(tmp_path).result.verdict is Verdict.PASS


# --- what ends a soak early ------------------------------------------------------------------------------------------


def test_an_engine_that_dies_keeps_what_was_seen(tmp_path: Path, session: type[FakeSession]):
    def die():
        raise EngineDiedError("the engine is gone")

    session.after, session.event = PROMPTS + 18, die
    ended = played(tmp_path, 99)
    assert ended.result.verdict is Verdict.UNKNOWN
    assert any("the engine is gone" in d for d in ended.result.doubts)
    assert PROMPTS + 8 <= len(load_history(ended.folder).observations) <= 2 * PROMPTS


def test_a_crash_of_the_harness_keeps_what_was_seen(
    tmp_path: Path, session: type[FakeSession], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(RoundJudge, "judge", lambda *_: 1 / 0)
    ended = played(tmp_path, 99)
    assert ended.result.verdict is Verdict.UNKNOWN
    assert any("ZeroDivisionError" in d for d in ended.result.doubts)
    assert load_history(ended.folder).observations


def test_what_could_not_be_ended_is_a_doubt(tmp_path: Path, session: type[FakeSession]):
    session.stays = ("process 17 of the single engine",)
    assert "could not be ended: process 17 of the single engine" in played(tmp_path, 1).result.doubts


def test_reports_that_cannot_be_written_do_not_cost_the_verdict(
    tmp_path: Path, session: type[FakeSession], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def full(_path, _value):
        raise StorageError("soak.json: expected to write it, found No space left on device")

    monkeypatch.setattr(harness.lab.soak.report, "write_json", full)
    right = played(tmp_path)
    assert (right.result.verdict, right.exit_code) == (Verdict.PASS, 2), "without its reports it is not green"
    session.wrong = range(1, 9)
    # The command has no option for the interval, whose samples the fake session awaits.
    monkeypatch.setattr(SoakOptions.__new__, "__defaults__", (INTERVAL_S,))
    with pytest.raises(typer.Exit) as left:
        soak_command(cell="single-none", minutes=minutes(4), concurrency=4, engines=EngineOptions(tmp_path))
    assert left.value.exit_code == 1
    said = capsys.readouterr().out
    assert "REGRESSION" in said and "no report: soak.json" in said


def test_a_full_disk_in_a_round_is_a_named_doubt(
    tmp_path: Path, session: type[FakeSession], monkeypatch: pytest.MonkeyPatch
):
    real, full = os.write, []

    def write(fd, data):
        if full and b'"kind":"round"' in bytes(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data)

    session.after, session.event = PROMPTS + 1, lambda: full.append(True)
    monkeypatch.setattr("harness.util.storage.os.write", write)
    ended = played(tmp_path)
    assert ended.result.verdict is Verdict.UNKNOWN
    assert any("soak.jsonl" in d and "the disk is full" in d for d in ended.result.doubts)
    assert written(ended.folder)["rounds"] == 1 and len(recorded(ended.folder)) == 2 * PROMPTS


def test_two_interrupts_leave_a_result(tmp_path: Path, session: type[FakeSession], monkeypatch: pytest.MonkeyPatch):
    def strike():
        os.kill(os.getpid(), signal.SIGINT)

    def ending(self):
        strike()
        time.sleep(0.05)
        self.ended = True

    def finishing(self):
        os.kill(os.getpid(), signal.SIGHUP)
        return real(self)

    real = soak_run.Recorder.finish
    monkeypatch.setattr(soak_run.Recorder, "finish", finishing)
    monkeypatch.setattr(session, "end_engines", ending)
    session.after, session.event = PROMPTS + 5, strike
    before = signal.getsignal(signal.SIGINT)
    ended = played(tmp_path, 99)
    assert signal.getsignal(signal.SIGINT) is before
    assert session.newest.ended and ended.result.doubts == (ended_by("INT"),)
    assert written(ended.folder)["verdict"] == "UNKNOWN"
    kept = load_history(ended.folder)
    assert kept.run.interrupted and kept.run.finished and kept.run.came_to is Verdict.UNKNOWN
    assert PROMPTS <= len(kept.observations) < 2 * PROMPTS


def test_an_interrupt_while_a_round_is_kept_records_each_answer_once(
    tmp_path: Path, session: type[FakeSession], monkeypatch: pytest.MonkeyPatch
):
    real, count = soak_run.Recorder.append, 0

    def append(self, observation):
        nonlocal count
        count += 1
        real(self, observation)
        if count == 10:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(soak_run.Recorder, "append", append)
    ended = played(tmp_path, 99)
    assert ended.result.doubts == (ended_by("INT"),)
    assert [o["sequence"] for o in recorded(ended.folder)] == list(range(PROMPTS))


def test_the_answers_of_the_round_under_way_are_on_disk(tmp_path: Path, session: type[FakeSession]):
    """What is there when the process is killed at this moment."""
    seen: list[int] = []

    def look():
        (folder,) = tmp_path.iterdir()
        seen.append(len(recorded(folder)) + len((folder / "round.jsonl").read_text().splitlines()))

    session.after, session.event = PROMPTS + 30, look
    played(tmp_path, concurrency=1)
    assert seen == [PROMPTS + 29]


def test_the_result_is_written_before_the_history_is_read(
    tmp_path: Path, session: type[FakeSession], monkeypatch: pytest.MonkeyPatch
):
    at_the_end: list[dict] = []

    def finish(self):
        at_the_end.append(written(self.folder))
        raise MemoryError

    monkeypatch.setattr(soak_run.Recorder, "finish", finish)
    ended = played(tmp_path)
    assert at_the_end[0]["verdict"] == "PASS"
    assert ended.result.verdict is Verdict.UNKNOWN and "MemoryError" in ended.result.doubts[0]
    assert written(ended.folder)["verdict"] == "UNKNOWN"
    assert check(ended.folder).summary.verdict is Verdict.UNKNOWN


def test_a_round_without_a_verdict_is_no_pass(tmp_path: Path, session: type[FakeSession]):
    result = played(tmp_path).result
    assert result.verdict is Verdict.PASS
    for verdicts in ({}, {"PASS": result.rounds - 1}):
        assert result.model_copy(update={"verdicts": verdicts}).verdict is Verdict.UNKNOWN
    assert result.model_copy(update={"rounds": 0, "verdicts": {}}).verdict is Verdict.UNKNOWN


def test_routers_are_watched_beside_the_engines(
    tmp_path: Path, session: type[FakeSession], monkeypatch: pytest.MonkeyPatch
):
    watched: dict[str, int] = {}
    session.engines = tuple(engine("g", r).model_copy(update={"pid": p}) for r, p in (("single", 11), ("router", 12)))
    monkeypatch.setattr(soak_run, "Watcher", lambda roots: watched.update(roots) or FakeWatcher())
    played(tmp_path, 1)
    assert watched == {HARNESS: os.getpid(), "single": 11, "router": 12}


# --- other commands --------------------------------------------------------------------------------------------------


def test_a_soak_holds_its_folder_and_no_other_command_takes_it_for_a_run(tmp_path: Path, session: type[FakeSession]):
    locked: list[bool] = []

    def look():
        (folder,) = tmp_path.iterdir()
        with pytest.raises(UsageError, match="is writing to this folder"):
            FolderLock(folder)
        with pytest.raises(UsageError, match="this is a run of `harness soak`"):
            prepare_resume(folder)
        locked.append(True)

    session.after, session.event = 5, look
    folder = played(tmp_path, 1).folder
    assert locked
    FolderLock(folder).release()
    parts, problems = load_parts([folder], Parts())
    assert not parts and "this is a run of `harness soak`" in problems[0]
    with pytest.raises(UsageError, match="this is a run of `harness soak`"):
        load_trend(tmp_path)


@pytest.mark.parametrize("kind", ["soak", "drill"])
def test_only_a_plain_run_is_a_reference(tmp_path: Path, kind: str):
    prepared = prepare("cpu", ["single-none"])
    recorder = prepared_recorder(prepared, ENVIRONMENT, tmp_path / kind, kind=kind)
    perform(recorder, prepared.works[0])
    history = recorder.finish()
    with pytest.raises(UsageError, match=f"this is a run of `harness {kind}`"):
        new_baselines(history, None, prepared.sets, tmp_path / "baselines")
    require_reference_run(with_run(history, kind="run"))
    assert not (tmp_path / "baselines").exists()


# --- signals ---------------------------------------------------------------------------------------------------------


def strike() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.01)


def test_signals_are_ignored_deferred_or_raised_once():
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    with ignored():
        strike()
    with pytest.raises(KeyboardInterrupt), raise_once():
        try:
            strike()
        finally:
            strike()
            done = True
    assert done
    order = []
    with pytest.raises(KeyboardInterrupt), raise_once():
        with deferred():
            strike()
            order.append("inside")
        order.append("after")
    assert order == ["inside"]
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


def test_threads_hear_no_signals_and_change_nothing():
    before = signal.getsignal(signal.SIGINT)
    found = []

    def inside():
        with ignored(), raise_once(), deferred():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert found == [before]
