"""The runner on slots, with fake engines: what runs at the same time, what waits, and what a failure costs."""

from __future__ import annotations

import contextlib
import io
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

import harness.runner.groups
import harness.runner.record_cells
from harness.engines.attached import AttachedExecutor
from harness.engines.executor import local_places
from harness.engines.flags import parse_flags
from harness.engines.inventory import Inventory, Memory, cpu_inventory, jobs_of
from harness.engines.request import Ask
from harness.engines.session import Broken
from harness.errors import EngineDiedError, HandoffError, ModelUnavailableError
from harness.history.folder import History, load_history, read_so_far
from harness.history.records import Failure, Leg
from harness.history.verdict import Verdict
from harness.judging.checks.registry import judge
from harness.judging.references import baselines_for
from harness.profiles.engine_config import TensorParallel
from harness.profiles.load import load_profile
from harness.prompts.probe_task import WEIGHTS
from harness.runner.groups import Runner
from harness.runner.options import RunOptions
from harness.runner.play import Player
from harness.runner.run import new_folder, prepared_recorder, record_into
from harness.scheduling.model import Device, Placement
from harness.util import allowance, clock
from harness.util.progress import Reporter
from harness.util.signals import interrupt
from harness.workload.prepare import Prepared, prepare
from tests.support.builders import extending, observation
from tests.support.engines import ENVIRONMENT, session_of
from tests.support.fake_session import FakeSession, stand_in

RUN_CELL = harness.runner.record_cells.run_cell


def fake_cell(session, work, recorder, _reporter):
    """Stands for sending a cell's requests."""
    if session.gone.wait(session.seconds):
        raise EngineDiedError("the engine is gone")
    recorder.set_cell(work.cell.id, state="complete")


def test_requests_that_cannot_be_held_together_are_not_sent():
    """The server lacks /pause, as those without VLLM_SERVER_DEV_MODE=1 do; nobody answers a request."""
    (work,) = prepare("cpu", ["single-none"], ["concurrent"]).works
    client = SimpleNamespace(last_snapshot={}, snapshot=dict, post=lambda *_: SimpleNamespace(status_code=404))
    session = SimpleNamespace(profile=load_profile("cpu"), roles=("single",), client=lambda _: client)
    script = work.scripts[0]
    held = next(stage for stage in script.stages if stage.hold)
    played = Player(session, work.cell).play(script._replace(stages=(held,)), 0)
    errors = {o.error for o in played}
    assert len(held.sends) > 1 and errors == {
        "not sent: single engine: expected POST /pause?mode=keep to answer 200, found 404; start the server with "
        "VLLM_SERVER_DEV_MODE=1"
    }


def test_an_engine_that_ends_when_a_client_gives_up_is_the_answer_to_the_mistake():
    """Its counters cannot be read then, which broke the whole cell: 0.33.0 on CPUs ends so."""
    (work,) = prepare("cpu-full", ["pd-none"], ["lost-source"]).works
    end = Broken("it ended", Failure(role="decode", words="KeyError: 'remote_engine_id'", ended=1), EngineDiedError(""))
    client = SimpleNamespace(last_snapshot={}, snapshot=dict, counters_after=lambda before, awaited: {})
    given = dict.fromkeys(("remote_engine_id", "remote_request_id", "remote_host", "remote_port"), 1)
    gone: list[bool] = []
    started: list[str] = []

    def attempt(ask, legs):
        if ask.former is not None:
            gone.append(True)
        elif ask.hand_off:
            legs.append(Leg(role="prefill", request_id="r", kv_transfer_params={**given, "remote_block_ids": [[1]]}))

    def settle():
        if gone:
            raise HandoffError("decode engine: expected metrics, found ReadError: [Errno 104] Connection reset by peer")

    def restart_ended():
        gone.clear()
        started.append("again")

    with ThreadPoolExecutor(2) as senders:
        session = SimpleNamespace(
            profile=load_profile("cpu-full"),
            roles=("prefill", "decode"),
            client=lambda _: client,
            senders=senders,
            ask_counted=lambda ask, legs: (None, {}),
            attempt=attempt,
            settle=settle,
            end_of=lambda seconds: end if gone else None,
            restart_ended=restart_ended,
        )
        played = list(Player(session, work.cell).play(work.scripts[0], 0))
    mistaken = [o for o in played if o.mistake]
    assert [o.mistake for o in mistaken] == [f"lost {name}" for name in (*given, "remote_block_ids")]
    assert {o.failure for o in mistaken} == {end.failure} and len(started) == len(mistaken)


def test_an_adapter_is_loaded_under_a_name_that_is_a_salt():
    """The plain engine notes what it is asked, and refuses everything."""
    (work,) = prepare("cpu-lora", ["single-none"], ["adapters"]).works
    loaded: list[tuple[str, str]] = []
    asked: list[Ask] = []

    def ask_counted(ask, legs):
        asked.append(ask)
        return Broken("refused"), {}

    session = SimpleNamespace(
        profile=load_profile("cpu-lora"),
        roles=("single",),
        load_adapter=lambda name, folder: loaded.append((name, Path(folder).name)),
        ask_counted=ask_counted,
    )
    played = list(Player(session, work.cell).play(work.scripts[0], 0))
    by_part = dict(zip((o.part for o in played), asked, strict=True))
    models = {part: ask.fields.get("model") for part, ask in by_part.items()}
    assert [models[p] for p in ("target", "first-adapter", "again-second-adapter")] == [None, "odd-words", "even-words"]
    (one, first), (other, second), (salt, third) = loaded
    assert one == other
    assert [first, second, third] == ["adapter-odd-words", "adapter-even-words", "adapter-odd-words"]
    assert models["loaded"] == models["loaded-over"] == one == by_part["loaded"].salt
    # The name of the last is the salt of the request before, and it has none.
    assert models["named-as-salt"] == salt == by_part["salted"].salt
    assert by_part["named-as-salt"].fields["cache_salt"] is None and "cache_salt" not in by_part["salted"].fields
    assert {o.feature for o in played} == {None, "first-adapter", "second-adapter"}


class FakeExecutor:
    """Cores that this machine may not have."""

    at_once = None
    rule = "any"

    def __init__(self, cores: int) -> None:
        self.cores = cores

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def lost(self):
        return {}

    def inventory(self, _profile):
        devices = tuple(Device(f"core-{n}", "localhost", 4.0, n) for n in range(self.cores))
        self.found = Inventory(devices, {d.id: str(d.index) for d in devices}, shared=False)
        return self.found

    @contextlib.contextmanager
    def places(self, _group, _profile, _environment, placement: Placement) -> Iterator[dict]:
        yield local_places(self.found, placement, None)


@pytest.fixture(autouse=True)
def no_engines(monkeypatch):
    stand_in(monkeypatch)
    monkeypatch.setattr(harness.runner.record_cells, "run_cell", fake_cell)
    monkeypatch.setattr(harness.runner.record_cells, "rescore", lambda *_: None)
    FakeSession.reset()


def axes(tmp_path: Path, **changes: object) -> str:
    values = {f"v{n}": {"engine": {"kv_lease_s": 10 + n}} for n in range(3)}
    return extending(tmp_path, **{"axes": {"lease": values}, **changes})


def run(prepared: Prepared, folder: Path, executor: FakeExecutor) -> History:
    recorder = prepared_recorder(prepared, ENVIRONMENT, folder)
    return Runner(prepared, ENVIRONMENT, recorder, Reporter(1.0), RunOptions(executor=executor)).run()


def run_twice(prepared: Prepared, folder: Path) -> tuple[History, ...]:
    first, again = (prepared_recorder(prepared, ENVIRONMENT, folder / name) for name in ("a", "b"))
    options = RunOptions(executor=FakeExecutor(2))
    return Runner(prepared, ENVIRONMENT, first, Reporter(1.0), options, again=(again,)).run_all()


def states(history: History) -> Counter[str]:
    return Counter(c.state for c in history.run.cells)


def test_two_cores_run_one_pair_at_a_time(tmp_path):
    assert states(run(prepare("cpu", []), tmp_path / "run", FakeExecutor(2))) == {"complete": 12}
    assert FakeSession.most == 2 and FakeSession.order[-1] == "pd-none"


def test_many_cores_run_many_pairs_and_the_plain_ones_after_the_others(tmp_path):
    FakeSession.reset(seconds=0.2)
    assert states(run(prepare(axes(tmp_path), []), tmp_path / "run", FakeExecutor(12))) == {"complete": 36}
    assert FakeSession.most > 2
    for variant in ("v0", "v1", "v2"):
        mine = [g for g in FakeSession.order if g.endswith(f"+{variant}")]
        assert mine[-1] == f"pd-none+{variant}" and len(mine) == 4


def test_where_all_fit_the_plain_ones_start_with_the_others_and_wait_for_their_outputs(tmp_path, monkeypatch):
    seen: list[tuple[str, frozenset[str]]] = []

    def rescore(session, recorder, _reporter):
        complete = {c.cell for c in recorder.record.cells if c.state == "complete"}
        seen.append((session.group.id, frozenset(complete)))

    monkeypatch.setattr(harness.runner.record_cells, "rescore", rescore)
    FakeSession.reset(seconds=0.3)
    assert states(run(prepare("cpu", []), tmp_path / "run", FakeExecutor(8))) == {"complete": 12}
    assert FakeSession.most == 8
    ((group, complete),) = seen
    assert group == "pd-none" and len(complete) == 12


def test_the_plain_ones_do_not_wait_for_engines_that_failed(tmp_path):
    FakeSession.reset(broken=frozenset({"pd-mtp"}))
    assert states(run(prepare("cpu", []), tmp_path / "run", FakeExecutor(8))) == {"complete": 9, "failed": 3}


ONE_GROUP = "--disable-hybrid-kv-cache-manager"


@pytest.mark.parametrize(
    ("own", "flags", "windows"), [([], [], (None, 48)), ([ONE_GROUP], [], (None,)), ([], [ONE_GROUP], (None,))]
)
def test_windows_are_recorded_as_the_arguments_of_engines_leave_them(tmp_path, own, flags, windows):
    source = extending(tmp_path, "cpu-layouts", engine={"extra_args": own})
    environment = ENVIRONMENT.model_copy(update={"flags": parse_flags(flags, [])})
    recorder = prepared_recorder(prepare(source, ["*-none"]), environment, tmp_path / "run")
    assert {c.windows for c in recorder.record.cells} == {windows}


def test_repetitions_are_asked_of_the_same_engines_and_side_by_side(tmp_path):
    FakeSession.reset(seconds=0.5)
    histories = run_twice(prepare("cpu", ["single-*"]), tmp_path)
    assert [h.folder.name for h in histories] == ["a", "b"]
    assert [states(h) for h in histories] == 2 * [{"complete": 4}]
    assert FakeSession.most == 2 and len(FakeSession.order) == 4


def test_engines_that_fail_fail_every_repetition(tmp_path, monkeypatch):
    def fails(*_):
        raise EngineDiedError("it died")

    monkeypatch.setattr(harness.runner.record_cells, "run_cell", fails)
    histories = run_twice(prepare("cpu", ["single-none"]), tmp_path)
    assert [(c.state, c.reason) for h in histories for c in h.run.cells] == 2 * [("failed", "it died")]


def test_single_engines_of_different_methods_run_side_by_side(tmp_path):
    # Long enough for the others to start on a busy machine.
    FakeSession.reset(seconds=0.5)
    assert states(run(prepare("cpu", ["single-*"]), tmp_path / "run", FakeExecutor(2))) == {"complete": 4}
    assert FakeSession.most == 2


def test_a_group_that_fails_costs_its_own_cells_only(tmp_path):
    FakeSession.reset(broken=frozenset({"pd-mtp"}))
    history = run(prepare("cpu", []), tmp_path / "run", FakeExecutor(4))
    assert states(history) == {"complete": 9, "failed": 3}
    record = history.cell("pd-mtp")
    assert record is not None and record.reason == "pd-mtp broke on purpose"


def test_what_fits_nowhere_is_said_before_anything_starts_and_the_rest_runs(tmp_path):
    wide = {
        "few": {"engine": {"tensor_parallel": {"prefill": 1}}},
        "wide": {"engine": {"tensor_parallel": {"prefill": 4}}},
    }
    prepared = prepare(axes(tmp_path, axes={"tp": wide}), ["*-none", "*-eagle3"])
    history = run(prepared, tmp_path / "run", FakeExecutor(2))
    assert set(FakeSession.order) == {"pd-none+few", "pd-eagle3+few"}
    record = history.cell("pd-eagle3+wide")
    assert record is not None and record.state == "failed"
    assert "expected" in str(record.reason)
    assert states(history)["complete"] == 4


@pytest.fixture
def hears_sigint() -> Iterator[None]:
    """What is started in the background may have been told to ignore it."""
    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, old)


def interrupt_main_thread() -> None:
    """As Ctrl-C does: unlike ``_thread.interrupt_main``, a signal wakes a thread that waits."""
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGINT)


@pytest.mark.usefixtures("hears_sigint")
def test_interrupt_ends_engines_of_all_threads_and_keeps_what_is_complete(tmp_path, monkeypatch):
    FakeSession.reset(seconds=20.0)
    monkeypatch.setattr(FakeSession, "third", staticmethod(interrupt_main_thread))
    history = run(prepare(axes(tmp_path), []), tmp_path / "run", FakeExecutor(6))
    assert history.run.interrupted and states(history) == {"interrupted": 36}
    assert not +FakeSession.up


def test_a_run_says_which_signal_ended_it(tmp_path, monkeypatch):
    """A time limit sends TERM: "interrupted by the user" was said of it, too."""
    FakeSession.reset(seconds=20.0)
    main = threading.main_thread().ident
    assert main is not None
    monkeypatch.setattr(FakeSession, "third", staticmethod(lambda: signal.pthread_kill(main, signal.SIGTERM)))
    old = signal.signal(signal.SIGTERM, interrupt)
    try:
        history = run(prepare("cpu", []), tmp_path / "run", FakeExecutor(6))
    finally:
        signal.signal(signal.SIGTERM, old)
    assert history.run.interrupted and history.run.ended_by == "TERM"
    words = "ended by a TERM signal (a time limit or job control)"
    assert {c.reason for c in history.run.cells} == {words}
    assert load_history(history.folder).run.ended_by == "TERM"


@pytest.mark.usefixtures("hears_sigint")
@pytest.mark.parametrize("fails", [False, True])
def test_what_was_recorded_is_shown_before_engines_are_ended_which_may_take_long(tmp_path, monkeypatch, fails):
    FakeSession.reset(seconds=20.0)
    monkeypatch.setattr(FakeSession, "third", staticmethod(interrupt_main_thread))
    seen: list[tuple[int, int]] = []

    def save(histories: tuple[History, ...]) -> None:
        seen.append((sum(FakeSession.up.values()), len(histories[0].run.cells)))
        if fails:
            raise ValueError("it cannot be read")

    prepared, said = prepare("cpu", []), io.StringIO()
    recorder = prepared_recorder(prepared, ENVIRONMENT, tmp_path / "run")
    options = RunOptions(executor=FakeExecutor(6), before_ending=save)
    history = Runner(prepared, ENVIRONMENT, recorder, Reporter(1.0, Console(file=said)), options).run()
    assert seen == [(6, 12)]
    assert history.run.interrupted and not +FakeSession.up
    assert ("before the engines were ended: ValueError: it cannot be read" in said.getvalue()) is fails


def test_a_recording_asks_the_plain_engine_first_by_whose_answers_the_others_are_verified(tmp_path):
    """Two complete cells with drafters were lost when a limit ended the recording before the plain engine's was."""
    prepared = prepare("cpu", ["single-*"], record=True)
    orders = []
    for name, save in (("recording", lambda _: None), ("run", None)):
        FakeSession.reset()
        options = RunOptions(executor=FakeExecutor(1), before_ending=save)
        recorder = prepared_recorder(prepared, ENVIRONMENT, tmp_path / name)
        Runner(prepared, ENVIRONMENT, recorder, Reporter(1.0), options).run()
        orders.append(FakeSession.order)
    assert [len(order) for order in orders] == [4, 4]
    assert orders[0][0] == "single-none" != orders[1][0]


@pytest.mark.usefixtures("hears_sigint")
def test_what_is_shown_then_does_not_change_while_engines_still_answer(tmp_path, monkeypatch):
    """Lines grew while they were read: complete cells had no baseline until the engines had ended."""
    FakeSession.reset(seconds=20.0)
    prepared, over = prepare("cpu", ["single-*"]), threading.Event()
    recorder = prepared_recorder(prepared, ENVIRONMENT, tmp_path / "run")

    def answer() -> None:
        while not over.wait(0.001):
            recorder.append(observation("single-none", 40))

    def strike() -> None:
        time.sleep(0.2)
        interrupt_main_thread()

    seen: list[int] = []

    def save(histories: tuple[History, ...]) -> None:
        for _ in range(3):
            time.sleep(0.05)
            seen.append(len(histories[0].in_order("single-none")))
            assert len(read_so_far(recorder.folder, recorder.record).in_order("single-none")) == seen[0]

    answering = threading.Thread(target=answer)
    monkeypatch.setattr(FakeSession, "third", staticmethod(strike))
    answering.start()
    said = io.StringIO()
    options = RunOptions(executor=FakeExecutor(6), before_ending=save)
    runner = Runner(prepared, ENVIRONMENT, recorder, Reporter(1.0, Console(file=said)), options)
    try:
        # The answers go on until the end: the record is closed below.
        monkeypatch.setattr(recorder, "finish", lambda: recorder.so_far([]))
        runner.run()
    finally:
        over.set()
        answering.join()
    assert "before the engines were ended" not in said.getvalue() and seen[0] > 0 and len(set(seen)) == 1


class FakeServers(FakeExecutor, AttachedExecutor):
    """The same in place of servers that run already."""


@pytest.mark.usefixtures("hears_sigint")
@pytest.mark.parametrize(
    ("executor", "words"), [(FakeExecutor, "the engines were ended"), (FakeServers, "the servers run on")]
)
def test_only_engines_that_were_started_are_said_to_be_ended(tmp_path, monkeypatch, executor, words):
    FakeSession.reset(seconds=20.0)
    monkeypatch.setattr(FakeSession, "third", staticmethod(interrupt_main_thread))
    prepared, said = prepare("cpu", []), io.StringIO()
    reporter = Reporter(1.0, Console(file=said))
    recorder = prepared_recorder(prepared, ENVIRONMENT, tmp_path / "run")
    Runner(prepared, ENVIRONMENT, recorder, reporter, RunOptions(executor=executor(6))).run()
    assert f"interrupted by the user (Ctrl-C): {words}; recorded observations are kept" in said.getvalue()


@pytest.mark.usefixtures("hears_sigint")
def test_one_that_cannot_be_ended_and_a_second_signal_keep_no_other_alive(tmp_path, monkeypatch):
    FakeSession.reset(seconds=20.0)
    # All signals come while engines are being ended.
    FakeSession.linger = 1.0
    FakeSession.stuck = frozenset(f"pd-{m}+v{n}" for m in ("eagle3", "dflash") for n in range(3))

    def twice() -> None:
        for pause in (0.0, 0.05, 0.1):
            threading.Timer(pause, interrupt_main_thread).start()

    monkeypatch.setattr(FakeSession, "third", staticmethod(twice))
    history = run(prepare(axes(tmp_path), []), tmp_path / "run", FakeExecutor(6))
    assert history.run.interrupted and states(history) == {"interrupted": 36}
    assert not +FakeSession.up
    # That time is theirs, not the harness's own.
    seconds = history.run.seconds
    assert seconds["engine_stop"] >= 1 and seconds["own"] <= seconds["total"] - 1


@pytest.mark.parametrize(("must_start", "tried"), [(True, 1), (False, 4)])
def test_engines_that_must_start_are_tried_once(tmp_path, must_start, tried):
    FakeSession.reset(broken=frozenset({"pd-none", "pd-eagle3", "pd-dflash", "pd-mtp"}))
    prepared = prepare("cpu", [])
    recorder = prepared_recorder(prepared, ENVIRONMENT, tmp_path / "run")
    options = RunOptions(executor=FakeExecutor(2), must_start=must_start)
    history = Runner(prepared, ENVIRONMENT, recorder, Reporter(1.0), options).run()
    assert len(FakeSession.order) == tried and states(history) == {"failed": 12}
    reasons = {str(c.reason) for c in history.run.cells}
    assert any("not started, since the first engines did not" in reason for reason in reasons) is must_start


def test_what_nobody_thought_of_costs_its_own_group_and_is_no_traceback(tmp_path):
    FakeSession.reset()
    FakeSession.odd = frozenset({"pd-mtp"})
    history = run(prepare("cpu", []), tmp_path / "run", FakeExecutor(4))
    assert states(history) == {"complete": 9, "failed": 3}
    assert "ZeroDivisionError: of all things" in str(history.cell("pd-mtp").reason)
    assert "Traceback" in (tmp_path / "run" / "logs" / "pd-mtp.harness.log").read_text()


def test_a_device_that_keeps_its_memory_is_not_used_again(tmp_path, monkeypatch):
    monkeypatch.setattr(Memory, "kept", lambda _self, device: "12 GiB are still held" if device == "core-0" else "")
    history = run(prepare("cpu", []), tmp_path / "run", FakeExecutor(2))
    assert len(FakeSession.order) == 1
    assert states(history) == {"complete": 3, "failed": 9}
    assert any("12 GiB are still held" in str(c.reason) for c in history.run.cells)


def test_jobs_say_what_engines_need():
    prepared = prepare("cpu", [])
    inventory = cpu_inventory(prepared.profile)
    assert len(inventory.devices) >= 2
    jobs = {j.id: j for j in jobs_of(prepared.plan, prepared.works, prepared.profile, inventory, rescore=True)}
    assert [e.role for e in jobs["pd-eagle3"].engines] == ["decode", "prefill"]
    assert set(jobs["pd-none"].after) == {"pd-eagle3", "pd-dflash", "pd-mtp"}
    assert jobs["pd-eagle3"].after == () and not jobs["pd-eagle3"].share
    alone = jobs_of(prepared.plan, prepared.works, prepared.profile, inventory, rescore=False)
    assert all(j.after == () for j in alone)


def test_a_pair_has_a_device_for_each_of_its_ranks(monkeypatch):
    profile = prepare("cpu", []).profile
    monkeypatch.setattr(allowance, "cores", lambda: [4, 7])
    monkeypatch.setattr("harness.engines.inventory.claimed", lambda _cores: [])
    ranks = {"tensor_parallel": TensorParallel(prefill=1, decode=2)}
    found = cpu_inventory(profile.model_copy(update={"engine": profile.engine.model_copy(update=ranks)}))
    assert [found.names[d.id] for d in found.devices] == ["4", "7", "4"]
    assert any("a pair has 3 ranks for 2 cores" in note for note in found.notes)
    assert not any("ranks" in note for note in cpu_inventory(profile).notes)


def test_a_variant_whose_model_is_not_here_is_unknown_and_the_others_run(tmp_path):
    models = {
        "here": {"target": str(WEIGHTS / "target"), "tokenizer": str(WEIGHTS / "tokenizer")},
        "gone": {name: {"repo": "fake/gone", "revision": "e" * 40} for name in ("target", "tokenizer")},
    }
    prepared = prepare(axes(tmp_path, axes={"model": models}), ["*-none", "*-eagle3"])
    assert set(prepared.lacking) == {c for c in prepared.lacking if c.endswith("+gone")}
    assert len(prepared.lacking) == 4
    history = record_prepared(prepared, tmp_path)
    assert set(FakeSession.order) == {"pd-none+here", "pd-eagle3+here"}
    record = history.cell("pd-eagle3+gone")
    assert record is not None
    assert (record.state, "fake/gone@" in str(record.reason)) == ("failed", True)
    judged = {c.cell: c.verdict for c in judge(history, baselines_for(history)).cells}
    assert judged["pd-eagle3+gone"] is Verdict.UNKNOWN
    assert states(history) == {"complete": 4, "failed": 4}


def record_prepared(prepared: Prepared, out: Path) -> History:
    """As ``harness run`` records, on fake engines."""
    options = RunOptions(executor=FakeExecutor(2))
    return record_into(new_folder(out, prepared.profile), prepared, Reporter(1.0), options)


def test_nothing_that_can_run_is_an_error_with_every_reason(tmp_path):
    gone = {n: {name: {"repo": f"fake/{n}", "revision": "e" * 40} for name in ("target", "tokenizer")} for n in "ab"}
    with pytest.raises(ModelUnavailableError, match="found none") as caught:
        prepare(axes(tmp_path, axes={"model": gone}), [])
    assert "fake/a@" in str(caught.value) and "fake/b@" in str(caught.value)


def test_what_cannot_be_ended_is_a_notice_of_its_cell(tmp_path):
    FakeSession.left = ["process 7 of pd-none.decode, which cannot be killed"]
    history = run(prepare("cpu", ["pd-none", "single-none"]), tmp_path / "run", FakeExecutor(2))
    assert [(c.cell, len(c.left_over)) for c in history.run.cells] == [("pd-none", 1), ("single-none", 0)]
    assert history.run.cannot_pass and not history.run.model_copy(update={"cells": ()}).cannot_pass
    (notice,) = [n for n in judge(history, baselines_for(history)).notices if "left over" in n]
    assert notice.startswith("pd-none: left over when its engines ended: process 7 of") and "harness clean" in notice


def test_engines_that_were_told_to_end_complete_no_cell(tmp_path):
    """They may still live when the last answer is there: a cell was complete with 14 of 48 requests after TERM."""
    session = session_of("single-none", tmp_path)
    session.require_alive()
    session.end_engines()
    with pytest.raises(EngineDiedError, match="ended from outside"):
        session.require_alive()


def test_waiting_for_engines_that_hang_is_not_the_harness_own_time(tmp_path, monkeypatch):
    prepared = prepare("cpu", ["single-none"], ["cold"])
    (work,) = prepared.works
    recorder = prepared_recorder(prepared, ENVIRONMENT, tmp_path)
    session = session_of("single-none", tmp_path)

    def stuck(*_):
        time.sleep(0.3)
        raise EngineDiedError("it was ended")

    monkeypatch.setattr(harness.runner.record_cells, "_send_all", stuck)
    with pytest.raises(EngineDiedError):
        RUN_CELL(session, work, recorder, Reporter(0.0))
    recorder.fail_pending([work.cell.id], "failed", "it was ended")
    seconds = recorder.finish().run.seconds
    assert seconds["requests"] >= 0.3 and seconds["own"] <= seconds["total"] - 0.3


def test_own_time_is_what_no_engine_took_also_where_cells_overlap(tmp_path):
    """It was 0 s wherever two cells together took longer than the run."""
    prepared = prepare("cpu", ["single-none", "pd-none"], ["cold"])
    recorder = prepared_recorder(prepared, ENVIRONMENT, tmp_path)
    begun = clock.now()
    time.sleep(0.3)
    for cell in ("single-none", "pd-none"):
        # Answers of both at the same time.
        recorder.append(observation(cell, 40).model_copy(update={"started_at": begun}))
        recorder.set_cell(cell, start_seconds=5.0, request_seconds=5.0)
    time.sleep(0.2)
    for _ in range(2):
        recorder.stopped(0.1)
    seconds = recorder.finish().run.seconds
    asked = max(sum(leg.seconds for leg in observation(c, 40).legs) for c in ("single-none", "pd-none"))
    assert seconds["engine_start"] + seconds["requests"] > seconds["total"]
    # The ends came at once, too.
    assert seconds["own"] == pytest.approx(seconds["total"] - asked - 0.1, abs=0.05)


def test_a_watch_sees_each_group_when_it_is_recorded_and_can_end_the_run(tmp_path):
    seen: list[tuple[str, ...]] = []

    def watch(history: History) -> str | None:
        assert all(c.state == "complete" for c in history.run.cells)
        seen.append(tuple(c.cell for c in history.run.cells))
        return "not asked: enough is known" if len(seen) == 2 else None

    prepared = prepare("cpu-quick", [])
    recorder = prepared_recorder(prepared, ENVIRONMENT, tmp_path / "run")
    options = RunOptions(executor=FakeExecutor(2), watch=watch, decides=True)
    history = Runner(prepared, ENVIRONMENT, recorder, Reporter(1.0), options).run()
    assert len(seen) == 2 and set(seen) < {g.cell_ids for g in prepared.plan.groups}
    assert states(history) == {"complete": 4, "failed": 4}
    assert {c.reason for c in history.run.cells if c.state == "failed"} == {"not asked: enough is known"}


def test_a_watch_that_decides_nothing_sees_a_group_while_the_next_one_is_asked(tmp_path):
    seen: list[tuple[str, ...]] = []
    prepared = prepare("cpu-quick", [])
    recorder = prepared_recorder(prepared, ENVIRONMENT, tmp_path / "run")
    options = RunOptions(executor=FakeExecutor(2), watch=lambda h: seen.append(tuple(c.cell for c in h.run.cells)))
    assert states(Runner(prepared, ENVIRONMENT, recorder, Reporter(1.0), options).run()) == {"complete": 8}
    # Of the last group, the run's verdict says as much.
    groups = [g.cell_ids for g in prepared.plan.groups]
    assert len(seen) == len(groups) - 1 and set(seen) < set(groups)


def test_the_record_says_what_p_leaves_to_d(tmp_path):
    found = {}
    for profile in ("cpu-mtp3", "cpu-hybrid-mtp", "cpu"):
        cells = prepared_recorder(prepare(profile, ["pd-*"]), ENVIRONMENT, tmp_path / profile).record.cells
        found |= {(profile, c.cell): (c.modules, c.held_back) for c in cells if c.route == "client"}
    assert found == {
        ("cpu-mtp3", "pd-none"): (1, 0),
        ("cpu-mtp3", "pd-mtp3"): (3, 2),
        ("cpu-hybrid-mtp", "pd-none"): (1, 1),
        ("cpu-hybrid-mtp", "pd-hybrid-mtp"): (1, 1),
        **{("cpu", f"pd-{method}"): (1, 0) for method in ("none", "eagle3", "dflash", "mtp")},
    }
