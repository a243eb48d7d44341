"""Faults strike what they say, or the drill is lost: proxies, relays, signals, controls. The processes are real, and no
engine."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
import psutil
import pytest

from faults import context, handoff_drills, process_runner, request_runner
from faults import response_faults as rf
from faults.context import Context
from faults.leaks import Footprint
from faults.model import ControlRun, Ending
from faults.process_drills import PROCESSES, served
from faults.process_group import ProcessGroup, lives
from faults.process_runner import SoloDriller
from faults.proxy import Answer, Armed, Call, FaultError, Proxy, Request, anything, completions
from faults.request_runner import SharedDriller, require_prompts
from faults.response_drills import RESPONSES
from faults.results import Tried
from faults.tcp_relay import REFUSED_PORT, Relay, led_to
from faults.testbed import ProxiedEngine, Scene
from faults.verdict import strays
from harness.errors import EngineDiedError, HandoffError, UsageError
from harness.history.records import COLD, Leg
from harness.history.verdict import Verdict
from harness.judging.findings import Finding, Judgement
from harness.util.progress import Reporter
from harness.workload.prepare import prepare
from tests.faults.fake_server import ask
from tests.support import builders

DRILLS = {d.drill.id: d for d in PROCESSES}


class FakeCall(Call):
    """An exchange whose engine is a function."""

    def __init__(self, forward, body: bytes = b"{}") -> None:
        self._forward = forward
        request = Request("POST", "/v1/completions", (), body)
        super().__init__(request, None, None, Armed(lambda _: None, anything))  # type: ignore[arg-type]

    def forward(self, request=None, to=None) -> Answer:
        return self._forward(self)


@pytest.fixture
def engine():
    """A process that leads a session, with a child in it that is called Worker."""
    child = "import setproctitle, time; setproctitle.setproctitle('VLLM::Worker'); print(1, flush=True); time.sleep(60)"
    code = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(60)"
    popen = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    assert popen.stdout is not None
    popen.stdout.readline()
    family = ProcessGroup(popen.pid)
    members = family.members()
    assert len(members) == 2
    yield family
    for process in members:
        with contextlib.suppress(psutil.Error):
            process.kill()
    popen.wait(5)
    popen.stdout.close()


@pytest.fixture
def scene(engine):
    with Scene(()) as made:
        made.groups = {"prefill": engine, "decode": engine}
        yield made


def dead(call: Call) -> Answer:
    raise httpx.ReadError("gone")


# --- what is struck ------------------------------------------------------------------------------------------------


def test_between_the_legs_nothing_of_p_is_left_when_d_is_asked(scene, engine):
    everything = engine.members()

    def forward(call: Call) -> Answer:
        assert not any(lives(p) for p in everything)
        return Answer(200, (), b"{}")

    call = FakeCall(forward)
    assert DRILLS["p-killed-between"].make(scene)(call)
    assert call.struck


def test_after_prefill_nothing_of_p_is_left_when_the_harness_has_its_answer(scene, engine):
    everything = engine.members()

    def forward(call: Call) -> Answer:
        assert all(lives(p) for p in everything)
        return Answer(200, (), b"{}")

    assert DRILLS["p-killed-after"].make(scene)(FakeCall(forward)).status == 200
    assert not any(lives(p) for p in everything)


def test_d_is_killed_while_it_waits_for_the_side_channel(scene, engine):
    def forward(call: Call) -> Answer:
        port = call.request.json["kv_transfer_params"]["remote_port"]
        with socket.create_connection(("127.0.0.1", port)):
            psutil.wait_procs(engine.members(), timeout=5)
        raise httpx.ReadError("gone")

    call = FakeCall(forward, b'{"kv_transfer_params": {"remote_port": 1}}')
    with pytest.raises(httpx.ReadError):
        DRILLS["d-killed-pulling"].make(scene)(call)
    assert call.struck
    assert scene.failed == ""


def test_a_d_that_never_pulled_is_no_drill(scene, engine):
    call = FakeCall(lambda _: Answer(200, (), b"{}"), b'{"kv_transfer_params": {"remote_port": 1}}')
    with pytest.raises(FaultError, match="answered before the fault"):
        DRILLS["d-killed-pulling"].make(scene)(call)
    assert not call.struck
    assert "D never connected" in scene.failed
    assert lives(engine.server)


def leg(role: str, **counters: float) -> Leg:
    return Leg(role=role, request_id="r", status=200, counters=counters, seconds=0.1)  # type: ignore[arg-type]


def struck(*legs: Leg) -> list:
    found = {leg.role: leg for leg in legs}
    return [SimpleNamespace(leg=found.get)]


def test_engine_that_answers_after_its_kill_was_not_killed_in_time():
    for name in ("p-killed-before", "p-killed-during", "p-killed-after", "p-killed-between", "p-out-of-memory"):
        assert "D pulled" in served(DRILLS[name], struck(leg("prefill"), leg("decode", nixl_bytes=4096.0)))
        # D may prefill by itself; that it must not pass is another matter.
        assert served(DRILLS[name], struck(leg("prefill"), leg("decode", nixl_bytes=0.0))) == ""
    for name in ("d-killed-pulling", "d-killed-decoding", "d-frozen", "d-out-of-memory"):
        assert "D answered" in served(DRILLS[name], struck(leg("prefill"), leg("decode")))
        assert served(DRILLS[name], struck(leg("prefill"))) == ""


# --- a fault counts when it has acted --------------------------------------------------------------------------------


def broken(_: Call) -> Answer:
    raise KeyError("kv_transfer_params")


UNDONE = [
    (broken, "KeyError"),
    (lambda call: None, "without having acted"),
    (rf.edited(lambda b: None), "changed nothing"),
    (rf.altered_request(lambda b: None), "changed nothing"),
    (rf.spoiled_text(lambda b: b), "changed nothing"),
    (rf.elsewhere(lambda: "http://127.0.0.1:1"), "ConnectError"),
    (rf.edited(lambda b: b.pop("no such key")), "KeyError"),
]


@pytest.mark.parametrize(("fault", "why"), UNDONE)
def test_what_goes_wrong_in_a_fault_is_said_and_strikes_nothing(proxy, fault, why):
    with proxy.armed(fault, completions()) as armed, contextlib.suppress(HandoffError):
        ask(proxy)
    assert armed.struck == 0
    assert re.search(why, armed.failed)


def test_a_drip_that_never_dripped_is_no_drip(proxy, monkeypatch):
    """The engine is slow, and the harness gives up before there is anything to drip."""

    def slow(*_: object) -> Answer:
        armed.over.wait(10)
        return Answer(200, (), b"x" * 10)

    monkeypatch.setattr(proxy, "forward", slow)
    with proxy.armed(rf.dripping(2), completions()) as armed, pytest.raises(HandoffError, match="Timeout"):
        ask(proxy, timeout=1.0)
    assert armed.struck == 0
    assert "without having acted" in armed.failed


def test_an_answer_that_nobody_waits_for_any_more_strikes_nothing(proxy):
    def slow(call: Call) -> Answer:
        call.wait(10)
        return Answer(500, (), b"")

    with proxy.armed(slow, completions()) as armed, pytest.raises(HandoffError, match="Timeout"):
        ask(proxy, timeout=1.0)
    assert armed.struck == 0
    assert "had given up" in armed.failed


def test_a_proxy_that_cannot_forward_makes_a_drill_lost(proxy):
    made, good = proxy, proxy.target
    with made.armed(rf.closed, completions((9,))) as armed:
        # Not while the engine is starting.
        made.target = "http://127.0.0.1:1"
        with pytest.raises(HandoffError):
            ask(made)
        assert armed.failed == "no exchange was struck"
        made.target = good
        assert ask(made)
        made._target = "http://127.0.0.1:1"
        with pytest.raises(HandoffError):
            ask(made)
    assert "was not forwarded (ConnectError" in armed.failed
    with made.armed(rf.closed, completions((5, 6, 7)), fatal=True) as armed:
        for _ in range(2):
            with pytest.raises(HandoffError):
                ask(made)
        with contextlib.suppress(httpx.HTTPError):
            httpx.get(f"{made.url}/metrics")
    # An engine that the fault has ended answers nothing.
    assert armed.failed == ""


def test_what_waits_in_a_fault_ends_with_it(proxy):
    ended = threading.Event()

    def waiting(call: Call) -> None:
        call.acted()
        call.wait(60)
        ended.set()

    with proxy.armed(waiting, completions()) as armed, pytest.raises(HandoffError):
        ask(proxy, timeout=1.0)
    assert ended.is_set()
    assert armed.failed == ""


def test_a_pool_that_p_never_fills_is_no_fault():
    call = FakeCall(dead)
    with pytest.raises(FaultError, match="ReadError"):
        handoff_drills.exhaust_pool(2)(call)
    assert not call.struck


# --- relays -----------------------------------------------------------------------------------------------------------


def test_a_relay_that_d_never_came_to_says_so():
    with Relay(None) as relay:
        assert "never connected" in relay.failed
        with socket.create_connection(("127.0.0.1", relay.port)):
            deadline = time.monotonic() + 5
            while relay.failed and time.monotonic() < deadline:
                time.sleep(0.01)
        assert relay.failed == ""


def test_a_relay_whose_target_is_gone_says_so():
    with Relay(REFUSED_PORT) as relay, socket.create_connection(("127.0.0.1", relay.port), timeout=5) as near:
        assert near.recv(1) == b""
        assert "did not reach" in relay.failed


def test_d_cannot_be_led_anywhere_without_parameters():
    with pytest.raises(FaultError, match="found none"):
        led_to(1)(FakeCall(lambda _: Answer(200, (), b"{}")))


@pytest.mark.parametrize("name", ["side-silent", "side-slow"])
def test_drills_on_the_side_channel_ask_their_relay(name):
    drill = next(d for d in handoff_drills.HANDOFFS if d.drill.id == name)
    with Scene(()) as made:
        made.side_channels["prefill"] = REFUSED_PORT
        made.begin()
        drill.make(made)
        assert "D never connected" in made.failed


# --- threads, timers and processes ---------------------------------------------------------------------------------


def test_what_comes_too_late_is_called_off_and_said(scene):
    acted = threading.Event()
    scene.later(30, acted.set)
    begun = time.monotonic()
    scene.settle()
    assert time.monotonic() - begun < 5
    assert not acted.is_set()
    assert "found it over" in scene.failed


def test_engines_are_not_ended_before_faults_are_called_off(scene):
    order: list[str] = []
    scene.task(lambda over: over.wait(30) and order.append("fault"))
    inner = SimpleNamespace(stop=lambda _: order.append("engine") or [])
    with Proxy() as made:
        ProxiedEngine(inner, made, scene.settle).stop(1.0)  # type: ignore[arg-type]
    assert order == ["fault", "engine"]


class FakeMetrics:
    """An engine that says how many requests it runs."""

    def __init__(self, running: int) -> None:
        self.fault = rf.instead(200, f'vllm:num_requests_running{{e="0"}} {running}.0\n'.encode())

    @contextlib.contextmanager
    def at(self, scene: Scene):
        with Proxy() as made, made.armed(self.fault, anything):
            scene.engines["decode"] = SimpleNamespace(url=made.url, command=SimpleNamespace(env={"VLLM_API_KEY": "k"}))  # type: ignore[assignment]
            yield


def test_d_is_killed_once_it_decodes(scene, engine):
    def forward(call: Call) -> Answer:
        assert call.request.json["ignore_eos"] is True
        psutil.wait_procs(engine.members(), timeout=5)
        raise httpx.ReadError("gone")

    call = FakeCall(forward)
    with FakeMetrics(1).at(scene), pytest.raises(httpx.ReadError):
        DRILLS["d-killed-decoding"].make(scene)(call)
    assert call.struck
    assert scene.failed == ""


def test_a_d_that_was_never_seen_decoding_is_left_alone(scene, engine):
    call = FakeCall(lambda _: time.sleep(0.2) or Answer(200, (), b"{}"))
    with FakeMetrics(0).at(scene), pytest.raises(FaultError, match="answered before the fault"):
        DRILLS["d-killed-decoding"].make(scene)(call)
    assert not call.struck
    assert "num_requests_running" in scene.failed
    time.sleep(0.1)
    assert lives(engine.server)


def test_a_frozen_engine_that_was_not_continued_in_time_is_no_drill(scene, engine):
    call = FakeCall(lambda _: Answer(200, (), b"{}"))
    DRILLS["p-frozen"].make(scene)(call)
    assert engine.server.status() == psutil.STATUS_STOPPED
    scene.settle()
    assert "expected the run to last 20 s" in scene.failed


def test_a_pid_that_another_process_has_by_now_is_not_signalled(engine):
    live = engine.members()
    other = ProcessGroup(engine.server.pid)
    other.server._ident = (engine.server.pid, 1.0)
    assert not other.server.is_running()
    for act in (other.kill, other.kill_server):
        with pytest.raises(FaultError, match="found it gone"):
            act()
    assert all(lives(p) for p in live)


def test_there_must_be_what_runs_the_model_to_kill(scene):
    call = FakeCall(lambda _: Answer(200, (), b"{}"))
    DRILLS["p-out-of-memory"].make(scene)(call)
    assert call.struck
    again = FakeCall(lambda _: Answer(200, (), b"{}"))
    with pytest.raises(FaultError, match="that runs the model, found none"):
        DRILLS["p-out-of-memory"].make(scene)(again)
    assert not again.struck


# --- reasons -------------------------------------------------------------------------------------------------------

START = "expected the single engine to be ready within 600 s, found an exit; last lines of its log:\n"
TAIL = (
    "    | INFO [kv_cache_utils.py] GPU KV cache size: 256 tokens\n"
    "    | INFO kv_connector='NixlConnector' num_gpu_blocks_override=8\n    | OSError: Connection refused"
)
ENOUGH = (
    "ValueError: To serve at least one request with the model's max seq len (512), (0.02 GiB KV cache is needed, which "
    "is larger than the available KV cache memory (0.01 GiB). Based on the available memory, the estimated maximum "
    "model length is 224. Try increasing `gpu_memory_utilization`"
)


@pytest.mark.parametrize("drill", PROCESSES, ids=lambda d: d.drill.id)
def test_no_reason_is_matched_by_any_engine_that_does_not_start(drill):
    assert not re.search(drill.drill.reason, START + TAIL, re.DOTALL)


def test_reasons_are_vllms_own_and_ours():
    died = "the prefill engine (pid 7) ended by itself with signal SIGKILL; last lines of x.log:"
    cut = "the exchange broke: prefill engine: expected metrics, found RemoteProtocolError: Server disconnected without"
    for name in ("p-killed-before", "p-killed-during", "p-killed-after", "p-killed-between"):
        for said in (died, cut):
            assert re.search(DRILLS[name].drill.reason, said, re.DOTALL)
            other = re.search(DRILLS[name].drill.reason, said.replace("prefill", "decode"), re.DOTALL)
            # D may die of a P that it was to read from, and of no other.
            assert (other is not None) is (said is died and name in ("p-killed-after", "p-killed-between"))
    said = f"{START}the single engine (pid 7) ended by itself with exit status 1 (it logged: {ENOUGH[:300]})"
    assert re.search(DRILLS["pool-too-small"].drill.reason, said, re.DOTALL)


# --- findings beside what was struck ---------------------------------------------------------------------------------


def finding(prompt: str, check: str = "transfer", verdict: Verdict = Verdict.UNKNOWN) -> Finding:
    return builders.finding("pd-eagle3", prompt, check=check, verdict=verdict, damage="infrastructure")


def judged(*findings: Finding) -> Judgement:
    return SimpleNamespace(findings=findings)  # type: ignore[return-value]


def test_only_the_transfer_of_the_stated_neighbour_may_be_unknown():
    assert strays(judged(finding("b"), finding("c")), ["b"], ["c"]) == ()
    assert len(strays(judged(finding("a"), finding("c")), ["b"], ["c"])) == 1
    assert len(strays(judged(finding("c", verdict=Verdict.REGRESSION)), ["b"], ["c"])) == 1
    assert len(strays(judged(finding("c", check="tokens")), ["b"], ["c"])) == 1
    assert len(strays(judged(finding("c")), ["b"])) == 1


def test_drills_state_beforehand_that_a_neighbour_may_be_unknown():
    late = {d.drill.id for d in (*RESPONSES, *handoff_drills.HANDOFFS) if d.late}
    assert late == {"side-refused", "side-silent", "side-slow", "other-engine-id"}
    for drill in handoff_drills.HANDOFFS:
        assert ("next one may be UNKNOWN" in drill.drill.strikes) is drill.late


# --- sets ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prepared():
    return prepare("cpu", [f"{t}-{m}" for t in ("pd", "single") for m in ("eagle3", "none")], [COLD])


@pytest.fixture
def tried(monkeypatch):
    monkeypatch.setattr(Footprint, "left", lambda *_: ())
    return Tried()


def summary_of(said: str, *observations: object, folder: Path | None = None) -> SimpleNamespace:
    """As much as is looked at of a run that could not tell, for the reason ``said``."""
    return SimpleNamespace(
        verdict=Verdict.UNKNOWN,
        judgement=SimpleNamespace(findings=(), cells=(), notices=(said,)),
        history=SimpleNamespace(observations=observations, run=SimpleNamespace(cells=()), folder=folder),
    )


def driller(kind, prepared, tmp_path, tried):
    return kind(Context(prepared, None, None, tmp_path, Reporter(1.0), "mark", tried))


@pytest.mark.parametrize("kind", [SharedDriller, SoloDriller])
def test_too_few_prompts_are_said_before_anything_is_started(prepared, tmp_path, kind):
    bare = [p.model_copy(update={"expected": None}) for p in prepared.prompts.cold]
    lacking = SimpleNamespace(prompts=SimpleNamespace(cold=bare), profile=prepared.profile, _replace=lambda **_: None)
    with pytest.raises(UsageError, match=r"expected 3 cold prompts .* found 0"):
        driller(kind, lacking, tmp_path, Tried())
    assert len(require_prompts(prepared)) == 3


@pytest.mark.parametrize("error", [RuntimeError("no such thing"), HandoffError("no answer")])
def test_a_control_that_fails_costs_its_drills_and_not_the_set(prepared, tmp_path, tried, monkeypatch, error):
    def fail(*_: object) -> None:
        raise error

    made = driller(SharedDriller, prepared, tmp_path, tried)
    monkeypatch.setattr(made, "_on_one_pair", fail)
    made.run(RESPONSES[:2])
    assert [r.ending for r in tried.results] == [Ending.LOST] * 2
    assert str(error) in tried.results[0].problems[0]


def test_process_drills_have_a_control_for_each_topology_and_depend_on_their_own(
    prepared, tmp_path, tried, monkeypatch
):
    made = driller(SoloDriller, prepared, tmp_path, tried)
    controls = []

    def perform(scene, topology, profile, name):
        controls.append(name)
        if topology == "single":
            raise RuntimeError("no memory")
        return None, 1.0

    def control(name, summary, seconds, reporter):
        tried.controls.append(ControlRun(id=name, verdict=Verdict.PASS, requests=3, seconds=seconds))

    monkeypatch.setattr(made, "_perform", perform)
    monkeypatch.setattr(tried, "control", control)
    for place in (context, process_runner):
        monkeypatch.setattr(place, "sweep", lambda _: None)
    monkeypatch.setattr(made, "_drill", lambda drill, _: request_runner.lost(drill.drill, "tried"))
    made.run([DRILLS["p-frozen"], DRILLS["wrong-engine"], DRILLS["d-frozen"]])
    assert controls == ["control-process-pd", "control-process-single"]
    assert [c.id for c in tried.controls] == ["control-process-pd"]
    assert [r.problems[0][:40] for r in tried.results] == ["tried", "its control failed: RuntimeError: no mem", "tried"]


def test_engines_that_died_lose_nothing_of_what_was_recorded_before(prepared, tmp_path, tried, monkeypatch):
    """What must be there is known from the prompts, not from the file that is looked at."""
    made = driller(SharedDriller, prepared, tmp_path, tried)
    summary = summary_of("ended by itself", folder=tmp_path)
    drill = next(d for d in handoff_drills.HANDOFFS if d.drill.id == "no-groups")

    def perform(*_: object):
        for front in stage.proxies.values():
            for armed in front._armed:
                armed.acted()
        return summary, EngineDiedError("ended by itself")

    monkeypatch.setattr(made, "_perform", perform)
    with Scene(("prefill", "decode")) as stage:
        assert not made._drill(None, stage, drill)  # type: ignore[arg-type]
    (result,) = tried.results
    assert (result.planned, result.recorded, result.ending) == (1, 0, Ending.FAILED)


def test_a_fault_that_did_not_act_makes_its_drill_lost(prepared, tmp_path, tried, monkeypatch):
    made = driller(SharedDriller, prepared, tmp_path, tried)
    summary = summary_of("the exchange broke: RemoteProtocolError", 1, 2, 3, folder=tmp_path)
    drill = next(d for d in RESPONSES if d.drill.id == "cut")

    def perform(*_: object):
        with contextlib.suppress(httpx.HTTPError):
            httpx.post(f"{stage.proxies['decode'].url}/v1/completions", json={"prompt": list(made._prompts[1].ids)})
        return summary, None

    monkeypatch.setattr(made, "_perform", perform)
    monkeypatch.setattr(made, "_calm", lambda _: True)
    with Scene(("prefill", "decode")) as stage:
        for proxied in stage.proxies.values():
            proxied.target = "http://127.0.0.1:1"
        made._drill(None, stage, drill)  # type: ignore[arg-type]
    (result,) = tried.results
    assert result.ending is Ending.LOST
    assert "ConnectError" in result.problems[0]


@pytest.mark.parametrize(
    ("name", "pulled", "ending", "why"),
    [
        ("p-killed-between", 0.0, Ending.SURVIVED, ""),
        ("p-killed-between", 4096.0, Ending.LOST, "D pulled KV"),
        ("p-killed-during", 0.0, Ending.LOST, "no exchange was struck"),
        ("p-frozen", 0.0, Ending.LOST, "expected the run to last 20 s"),
    ],
)
def test_a_process_drill_is_lost_when_its_fault_did_not_take_place(
    prepared,
    tmp_path,
    tried,
    monkeypatch,
    proxy,
    engine,
    name,
    pulled,
    ending,
    why,
):
    """Its run is over at once; the engine behind the proxies is a fake that lives whatever is killed."""
    made = driller(SoloDriller, prepared, tmp_path, tried)
    (observation,) = struck(leg("prefill"), leg("decode", nixl_bytes=pulled))
    observation.prompt_id = made._prompts[1].id
    said = "the prefill engine (pid 7) ended by itself with signal SIGKILL: found ReadTimeout"
    summary = summary_of(said, observation)

    def perform(scene, *_: object):
        scene.groups = {"prefill": engine}
        scene.proxies["decode"].target = proxy.target
        body = {"prompt": list(made._prompts[1].ids), "model": "m"}
        httpx.post(f"{scene.proxies['decode'].url}/v1/completions", json=body)
        scene.settle()
        return summary, 1.0

    monkeypatch.setattr(made, "_perform", perform)
    result = made._drill(DRILLS[name], Footprint("mark"))
    assert result.ending is ending, result.problems
    assert ending is Ending.SURVIVED or why in result.problems[0]
