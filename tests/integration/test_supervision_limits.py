"""Limits in time: of a request, of a cell, of a run."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from harness.engines import http
from harness.engines.answers import Sampling
from harness.engines.client import Client
from harness.engines.command import EngineCommand
from harness.engines.executor import LocalExecutor
from harness.engines.places import LocalPlace
from harness.errors import AbandonedError, EngineDiedError, HandoffError, RequestTimeoutError
from harness.history.folder import History, load_history
from harness.history.records import COLD, RESCORE
from harness.history.verdict import Verdict
from harness.judging.checks.registry import judge
from harness.judging.references import baselines_for
from harness.profiles.model import Expected, Timeouts
from harness.profiles.scenarios import Abandon
from harness.runner import record_cells
from harness.runner.groups import Runner
from harness.runner.options import RunOptions
from harness.runner.run import prepared_recorder
from harness.runner.timeouts import requests_limit_s, run_limit_s
from harness.supervision import stacks
from harness.supervision.process import SupervisedEngine
from harness.util.paths import REPOSITORY
from harness.util.progress import Reporter
from harness.util.signals import ended_by
from harness.workload.prepare import prepare
from tests.support import stand_in_engine
from tests.support.engines import ENVIRONMENT, session_of
from tests.support.program import script
from tests.support.supervised import own_folder, state

__all__ = ["own_folder"]


@contextlib.contextmanager
def server(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """A real server on loopback that answers each connection with raw bytes."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(20)

        def one(connection: socket.socket) -> None:
            with connection, contextlib.suppress(OSError):
                connection.recv(65536)
                answer(connection)

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=one, args=(listening.accept()[0],), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def dripping(text: bytes, at_once: int = 0) -> Callable[[socket.socket], None]:
    """Sends ``at_once`` bytes, and then one every 50 ms, which is far below the limit of a read."""

    def answer(connection: socket.socket) -> None:
        connection.sendall(text[:at_once])
        for byte in text[at_once:] * 1000:
            time.sleep(0.05)
            connection.sendall(bytes([byte]))

    return answer


HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n"
DRIPS = {
    "status line": dripping(HEAD),
    "headers": dripping(HEAD[:17] + b"X: " + b"y" * 500, 17),
    "body": dripping(HEAD + b"x" * 200, len(HEAD)),
    "nothing": lambda _connection: time.sleep(30),
}


@pytest.mark.parametrize("where", DRIPS)
@pytest.mark.parametrize("call", ["complete", "post", "get", "metrics"])
def test_whole_exchange_has_a_limit(where, call):
    limit = 0.3
    with server(DRIPS[where]) as url:
        client = Client("single", url, limit)
        begun = time.monotonic()
        if call == "get":
            with pytest.raises(httpx.TimeoutException):
                client.get("/health", timeout_s=limit)
        else:
            with pytest.raises(RequestTimeoutError):
                {
                    "complete": lambda: client.complete([1, 2], Sampling(2, 2), "r", "s"),
                    "post": lambda: client.post("/pause", timeout_s=limit),
                    "metrics": client.snapshot,
                }[call]()
        assert limit * 0.9 < time.monotonic() - begun < limit + 1.5
        client.close()


def test_limit_of_one_request_does_not_touch_those_beside_it():
    """Threads share a client: a slow answer in one must not cut the other's."""

    def slow_then_whole(connection: socket.socket) -> None:
        time.sleep(0.8)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")

    with server(slow_then_whole) as url, http.LimitedClient(base_url=url, timeout=5.0) as client:
        outcomes: dict[float, str] = {}

        def ask(limit: float) -> None:
            try:
                outcomes[limit] = client.get("/", timeout=limit).text
            except httpx.TimeoutException:
                outcomes[limit] = "late"

        threads = [threading.Thread(target=ask, args=(limit,)) for limit in (0.3, 5.0, 0.4, 4.0)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert outcomes == {0.3: "late", 0.4: "late", 5.0: "ok", 4.0: "ok"}
        assert client.get("/").text == "ok"


def test_connection_that_the_server_may_be_closing_is_not_used_again(monkeypatch: pytest.MonkeyPatch):
    assert http._IDLE_S < 5, "vLLM's servers close an idle connection after 5 s"
    monkeypatch.setattr(http, "_IDLE_S", 0.3)
    connections = []

    def keep(connection: socket.socket) -> None:
        connections.append(connection)
        answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
        connection.sendall(answer)
        while connection.recv(65536):
            connection.sendall(answer)

    with server(keep) as url, http.LimitedClient(base_url=url, timeout=5.0) as client:
        found = []
        for idle in (0, 0, 0.6):
            time.sleep(idle)
            assert client.get("/").text == "ok"
            found.append(len(connections))
    assert found == [1, 1, 2]


_EVENTS = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n" + b"data: {}\n\n" * 3


def test_a_streamed_answer_is_left_after_so_many_events():
    left = threading.Event()

    def stream(connection: socket.socket) -> None:
        connection.sendall(_EVENTS)
        connection.settimeout(10)
        while connection.recv(65536):
            pass
        left.set()

    with server(stream) as url:
        client = Client("single", url, 5.0)
        with pytest.raises(AbandonedError):
            client.complete([1, 2], Sampling(9, 2), "r", "s", abandon=Abandon(after_steps=3))
        assert left.wait(5), "the connection was kept open"
        client.close()


@pytest.mark.parametrize("answer", [_EVENTS, _EVENTS + b"data: {}\n\ndata: [DONE]\n\n", b"HTTP/1.1 404 No\r\n\r\n"])
def test_a_streamed_answer_that_is_over_was_not_given_up(answer):
    def say(connection: socket.socket) -> None:
        connection.sendall(answer)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(65536):
            pass

    with server(say) as url:
        client = Client("single", url, 5.0)
        with pytest.raises(HandoffError, match="expected to give up request r after the tokens of 5 steps") as caught:
            client.complete([1, 2], Sampling(9, 2), "r", "s", abandon=Abandon(after_steps=5))
        assert not isinstance(caught.value, AbandonedError)
        client.close()


def test_an_answer_that_takes_too_long_is_given_up():
    with server(DRIPS["nothing"]) as url:
        client = Client("single", url, 60.0)
        with pytest.raises(AbandonedError):
            client.complete([1, 2], Sampling(9, 2), "r", "s", abandon=Abandon(after_s=0.1))
        client.close()


def test_answer_without_end_is_cut(monkeypatch):
    monkeypatch.setattr(http, "LARGEST", 2**20)

    def flood(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n")
        while True:
            connection.sendall(b"x" * 65536)

    with server(flood) as url:
        client = Client("single", url, 20.0)
        begun = time.monotonic()
        with pytest.raises(HandoffError, match="more than 1 MiB") as caught:
            client.complete([1, 2], Sampling(2, 2), "r", "s")
        assert not isinstance(caught.value, RequestTimeoutError)
        assert time.monotonic() - begun < 10


def test_refused_connection_is_no_timeout():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    with pytest.raises(HandoffError) as caught:
        Client("single", f"http://127.0.0.1:{port}", 1.0).complete([1], Sampling(2, 2), "r", "s")
    assert not isinstance(caught.value, RequestTimeoutError)


# --- cells and runs: real processes that stand for engines -----------------------------------------------------------


class StandInPlace(LocalPlace):
    """This machine, with a stand-in for the engine."""

    def __init__(self, start_s: float, answers: int) -> None:
        super().__init__()
        self._how = (str(start_s), str(answers))

    def start(self, command: EngineCommand, log_path: Path) -> SupervisedEngine:
        argv = [sys.executable, stand_in_engine.__file__, str(command.port), *self._how]
        return super().start(command._replace(argv=argv), log_path)


class StandInExecutor(LocalExecutor):
    """Gives each group a stand-in: seconds that its start takes, and completions that it answers, by method."""

    def __init__(self, **how: tuple[float, int]) -> None:
        super().__init__()
        self.how = how

    def places(self, group, _profile, _environment, _placement):
        return contextlib.nullcontext({role: StandInPlace(*self.how[group.method.kind]) for role in group.roles})


def run(tmp_path: Path, timeouts: dict[str, float], **how: tuple[float, int]) -> History:
    """Single cells of these methods on stand-ins; 42 prompts each."""
    prepared = prepare("cpu", [f"single-{m}" for m in how], [COLD])
    profile = prepared.profile.model_copy(update={"timeouts": Timeouts(stop=1.0, **timeouts)})
    prepared = prepared._replace(profile=profile)
    recorder = prepared_recorder(prepared, ENVIRONMENT, tmp_path)
    options = RunOptions(executor=StandInExecutor(**how))
    return Runner(prepared, ENVIRONMENT, recorder, Reporter(1.0), options).run()


def nothing_left() -> None:
    assert state() == []
    assert [p for p in psutil.process_iter(["cmdline"]) if stand_in_engine.__file__ in (p.info["cmdline"] or [])] == []


def stacks_of(folder: Path, group: str) -> str:
    return (folder / "logs" / f"{group}.single.stacks.txt").read_text()


def test_a_cell_past_its_limit_is_unknown_and_the_others_go_on(tmp_path):
    history = run(tmp_path, {"cell": 6.0, "request": 60.0}, none=(0, 1), eagle3=(0, 1000))
    slow, fine = history.cell("single-none"), history.cell("single-eagle3")
    assert (slow.state, fine.state) == ("failed", "complete")
    assert "after 6 s (timeouts.cell)" in slow.reason
    assert "stuck_in_forward" in stacks_of(tmp_path, "single-none")
    assert stacks_of(tmp_path, "single-none").count(": cell") == 1
    judged = {c.cell: c.verdict for c in judge(history, baselines_for(history)).cells}
    assert judged["single-none"] is Verdict.UNKNOWN
    nothing_left()


def test_a_run_past_its_limit_ends_and_what_has_not_started_is_unknown(tmp_path, monkeypatch):
    monkeypatch.setattr(LocalExecutor, "at_once", 1)
    begun = time.monotonic()
    history = run(tmp_path, {"run": 8.0, "request": 60.0}, none=(0, 10), eagle3=(0, 10), mtp=(0, 10))
    assert time.monotonic() - begun < 40
    assert [c.state for c in history.run.cells] == ["failed"] * 3
    # One of the ten answered the first request; what was answered in time is kept.
    assert len(history.observations) == 9
    assert all("after 8 s (timeouts.run)" in c.reason for c in history.run.cells)
    assert history.run.finished is not None and not history.run.interrupted
    assert len(list((tmp_path / "logs").glob("*.stacks.txt"))) == 1
    nothing_left()


PROGRAM = """
import sys
from harness.cli.app import main
from harness.engines import environment, executor
from tests.integration.test_supervision_limits import StandInExecutor
from tests.support.engines import ENVIRONMENT

environment.engines_for = lambda *_: ENVIRONMENT
executor.make_executor = lambda *_: StandInExecutor(none=(0, 10))
sys.argv = ["harness", "run", "--cell", "single-none", "--scenario", "cold", "--out", sys.argv[1]]
main()
"""


def test_a_program_that_is_interrupted_in_a_request_ends_with_its_engines(tmp_path):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    running = subprocess.Popen(command, cwd=REPOSITORY, start_new_session=True, **pipes)
    deadline = time.monotonic() + 120
    while running.poll() is None and time.monotonic() < deadline:
        # One of the ten answered the first request.
        if sum(len(p.read_text().splitlines()) for p in tmp_path.glob("*/cells/*/observations.jsonl")) == 9:
            break
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    output, _ = running.communicate(timeout=60)
    # What a stand-in answers is wrong.
    assert running.returncode == 1, output
    assert "Traceback" not in output and "interrupted by the user (Ctrl-C)" in output
    (folder,) = tmp_path.glob("*-cpu-*")
    history = load_history(folder)
    assert history.run.interrupted and len(history.observations) == 9
    nothing_left()


def test_an_engine_that_does_not_start_leaves_its_stacks(tmp_path):
    history = run(tmp_path, {"start": 3.0}, none=(300, 10))
    assert "was not ready within 3 s" in history.cell("single-none").reason
    assert "stand_in_engine.py" in stacks_of(tmp_path, "single-none")
    nothing_left()


def test_a_first_request_that_hangs_leaves_its_stacks(tmp_path):
    history = run(tmp_path, {"start": 5.0, "request": 1.0}, none=(0, 0))
    assert "first request" in history.cell("single-none").reason
    assert "stuck_in_forward" in stacks_of(tmp_path, "single-none")
    nothing_left()


def test_requests_that_hang_are_broken_and_the_stacks_are_taken_once(tmp_path):
    history = run(tmp_path, {"request": 0.1, "start": 60.0, "cell": 60.0}, none=(0, 1))
    assert history.cell("single-none").state == "complete"
    broken = [o for o in history.observations if o.error]
    assert len(broken) == len(history.observations) == 48
    assert all("Timeout" in o.error for o in broken)
    assert stacks_of(tmp_path, "single-none").count(": request") == 1
    assert judge(history, baselines_for(history)).cells[0].verdict is Verdict.UNKNOWN


def test_default_limits_follow_what_is_expected():
    (group,) = prepare("cpu", ["pd-none"]).plan.groups
    usual = group.expected.pair_start_s
    assert requests_limit_s(Timeouts(), group, "pd", 10, usual / 3) == 600
    assert requests_limit_s(Timeouts(), group, "pd", 1000, usual) == 10 * 0.25 * 1000
    assert requests_limit_s(Timeouts(), group, "single", 1000, usual) == 10 * 0.25 * 1000
    assert requests_limit_s(Timeouts(cell=5), group, "pd", 1000, 3 * usual) == 5
    # A machine on which engines start three times more slowly answers more slowly, too.
    assert requests_limit_s(Timeouts(), group, "pd", 1000, 3 * usual) == 3 * 10 * 0.25 * 1000
    assert requests_limit_s(Timeouts(), group, "pd", 10, 100 * usual) == 6 * 600
    assert (run_limit_s(Timeouts(), 60), run_limit_s(Timeouts(), 1000), run_limit_s(Timeouts(run=9), 1)) == (
        3600,
        10_000,
        9,
    )
    for bad in (0, -1, float("inf"), float("nan"), 1e12):
        with pytest.raises(ValueError, match="cell"):
            Timeouts(cell=bad)
    for name in ("start", "request", "stop", "run"):
        with pytest.raises(ValueError, match=name):
            Timeouts(**{name: 1e10})
    with pytest.raises(ValueError, match="pd_request_s"):
        Expected(pd_request_s=1e9)


# --- stacks ----------------------------------------------------------------------------------------------------------


def test_stacks_that_cannot_be_taken_are_said_and_no_error(tmp_path, monkeypatch):
    target = tmp_path / "logs" / "x.stacks.txt"
    stacks.dump([], target, "cell")
    monkeypatch.setattr(stacks, "program", lambda: tmp_path / "missing")
    stacks.dump([os.getpid()], target, "cell")
    refusing = script(tmp_path / "py-spy", "#!/bin/sh\necho Permission Denied >&2\nexit 1\n")
    monkeypatch.setattr(stacks, "program", lambda: refusing)
    stacks.dump([os.getpid()], target, "run")
    hanging = script(tmp_path / "hanging", "#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(stacks, "program", lambda: hanging)
    monkeypatch.setattr(stacks, "_LIMIT_S", 0.3)
    begun = time.monotonic()
    stacks.dump([os.getpid()] * 4, target, "start")
    assert time.monotonic() - begun < 5
    text = target.read_text()
    assert "no Python process" in text and "pip install py-spy" in text and "Permission Denied" in text
    assert text.count("did not answer within") == 4
    (tmp_path / "file").touch()
    stacks.dump([os.getpid()], tmp_path / "file" / "x", "no folder")


def test_stacks_hold_no_secrets(tmp_path, monkeypatch):
    """The first line of a dump is the whole command line of the process."""
    text = "#!/bin/sh\necho 'Process 1: python server.py --hf-token hf_abcdefghijklmnopqrst'\n"
    program = script(tmp_path / "py-spy", text)
    monkeypatch.setattr(stacks, "program", lambda: program)
    assert stacks.dump([os.getpid()], tmp_path / "x.stacks.txt", "cell") == stacks.Dumped(1)
    text = (tmp_path / "x.stacks.txt").read_text()
    assert "server.py" in text and "hf_abc" not in text


class Elusive:
    """Stands for an engine whose processes may not be looked at."""

    def __init__(self, found: Callable[[], list[int]]) -> None:
        self.python_processes = found


def refused() -> list[int]:
    raise psutil.AccessDenied(4)


def test_only_stacks_that_were_taken_are_announced(tmp_path, monkeypatch):
    """Also when the engines are ended meanwhile, by the thread that uses them."""
    said: list[str] = []
    session = session_of("pd-none", tmp_path, progress=said.append)

    def ending() -> list[int]:
        session._launcher.processes.clear()
        return []

    session._launcher.processes = {"decode": Elusive(ending), "prefill": Elusive(refused)}
    session._launcher.dump_stacks("cell")
    (line,) = said
    assert "are in the logs" not in line
    assert "no stacks of decode: no Python process" in line and "no stacks of prefill: its processes" in line
    assert "AccessDenied" in (tmp_path / "pd-none.prefill.stacks.txt").read_text()
    program = script(tmp_path / "py-spy", "#!/bin/sh\necho 'Thread 1'\n")
    monkeypatch.setattr(stacks, "program", lambda: program)
    session._launcher.processes = {"decode": Elusive(lambda: [1]), "prefill": Elusive(refused)}
    session._launcher.dump_stacks("run")
    assert "stacks of decode are in the logs" in said[1] and "no stacks of prefill" in said[1]


def test_engines_are_given_up_whatever_comes_of_their_stacks(tmp_path, monkeypatch):
    session = session_of("single-none", tmp_path)
    monkeypatch.setattr(session._launcher, "dump_stacks", lambda _: refused())
    with pytest.raises(psutil.AccessDenied):
        session.give_up("cell", "it took too long")
    with pytest.raises(EngineDiedError, match="it took too long"):
        session.require_alive()


def test_re_scoring_past_its_limit_is_ended_and_says_why(tmp_path, monkeypatch):
    """The 48 requests of the cell and the first one are answered, the first of the re-scoring is not."""
    limits = iter((60.0, 3.0))
    monkeypatch.setattr(record_cells, "_limit_s", lambda *_: next(limits))
    begun = time.monotonic()
    history = run(tmp_path, {"cell": 60.0, "request": 300.0}, none=(0, 49))
    assert time.monotonic() - begun < 120
    assert history.cell("single-none").state == "complete"
    scores = list(history.of_scenario(RESCORE))
    assert scores and all("not re-scored after 3 s (timeouts.cell)" in o.error for o in scores)
    assert stacks_of(tmp_path, "single-none").count(": re-scoring") == 1
    (found,) = [r for r in judge(history, baselines_for(history)).cells[0].results if r.check == "rescored"]
    assert found.verdict is Verdict.UNKNOWN and "not re-scored after 3 s" in found.findings[0].message
    nothing_left()


# --- the command line ------------------------------------------------------------------------------------------------

ENDLESS = """
import sys, time, harness.cli.app as cli
@cli.app.command("endless")
def endless() -> None:
    print("up", flush=True)
    try:
        time.sleep(60)
    finally:
        time.sleep(0.5)
sys.argv = ["harness", "endless"]
cli.main()
"""


@pytest.mark.parametrize("numbers", [["INT"], ["TERM"], ["HUP"], ["INT", "INT"], ["TERM", "INT", "TERM"]])
def test_signals_outside_of_a_run_are_a_sentence_that_names_the_first(numbers):
    started = subprocess.Popen(
        [sys.executable, "-c", ENDLESS],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert started.stdout.readline() == "up\n"
    for name in numbers:
        started.send_signal(getattr(signal, f"SIG{name}"))
        time.sleep(0.1)
    _, said = started.communicate(timeout=30)
    assert started.returncode == 2
    assert said.strip().endswith(f"harness: {ended_by(numbers[0])}; verdict UNKNOWN") and "Traceback" not in said
