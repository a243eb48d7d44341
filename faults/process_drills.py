"""Drills on engine processes, each with its own engines: killed, frozen, out of memory, wrong from the start."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import httpx

from faults.background import Task
from faults.metrics import RUNNING, above_zero
from faults.model import Drill, Group
from faults.process_group import ProcessGroup
from faults.proxy import Answer, Call, Fault, FaultError
from faults.request_drill import Make, Topology, U
from faults.tcp_relay import Relay, lead
from faults.testbed import Scene
from harness.engines.api_key import ApiKey
from harness.history.records import Observation
from harness.profiles.cells import Role

FROZEN_S = 20.0
"""Longer than the lease of 8 s and the request limit of 15 s."""
_WORK_S = 0.7
"""Seconds after which an engine whose worker is stopped has scheduled the request, which it cannot finish."""
_STATE_S = 10.0
_POLL_S = 0.01
_METRICS_S = 2.0
_POOL = 8
"""KV blocks: fewer than one sequence of the profile needs."""


def _died(role: Role) -> str:
    """Return a pattern for what the harness says about an engine that was killed."""
    return rf"{role} engine[^;]*(ended by itself with signal SIGKILL|found RemoteProtocolError: Server disconnected)"


def _failed(role: Role) -> str:
    """Return a pattern for an engine that lost its worker: vLLM answers with an error, or ends."""
    return rf"{role} engine[^;]*(ended by itself with|found RemoteProtocolError: Server disconnected|found 50[03]:)"


_SLOW = "found ReadTimeout"


_WITH_P = rf"{_died('prefill')}|decode engine[^;]*ended by itself with"
"""P is dead, and D may die from reading from it."""


class ProcessDrill(NamedTuple):
    """A fault that engines need not survive."""

    drill: Drill
    topology: Topology
    proxy: Role | None
    """The engine whose exchange for the second of three prompts triggers the fault; None: present from the start."""
    make: Make | None
    engine: Mapping[str, Any] = {}
    """Changes to the profile's engine settings."""
    kills: Role | None = None
    """The engine that must not serve the struck request, because it was killed or stopped for good before."""


def served(drill: ProcessDrill, struck: Sequence[Observation]) -> str:
    """Return how an engine that should have been dead still served the struck request; empty if it did not."""
    for leg in (leg for o in struck if (leg := o.leg("decode"))):
        if drill.kills == "decode":
            return "D answered the struck request, although it should have been dead before"
        if drill.kills == "prefill" and leg.counters.get("nixl_bytes"):
            return "D pulled KV for the struck request from P, which should have been dead before"
    return ""


def _first(act: Callable[[ProcessGroup], object], role: Role = "prefill") -> Make:
    """Act on an engine's processes before the request reaches the engine that is asked."""

    def make(scene: Scene) -> Fault:
        def fault(call: Call) -> Answer:
            act(scene.process_group(role))
            call.acted()
            return call.forward()

        return fault

    return make


def _during(scene: Scene) -> Fault:
    """Kill P while it works on the request; what runs its model is stopped first, so that it cannot finish."""

    def fault(call: Call) -> Answer:
        def act() -> None:
            scene.process_group("prefill").kill_server()
            call.acted()

        scene.process_group("prefill").send(signal.SIGSTOP, to_model=True)
        return _with_task(call, scene.later(_WORK_S, act))

    return fault


def _after(scene: Scene) -> Fault:
    """Kill all of P after it has answered, but before the harness has the answer."""

    def fault(call: Call) -> Answer:
        answer = call.forward()
        scene.process_group("prefill").kill()
        call.acted()
        return answer

    return fault


def _frozen_p(scene: Scene) -> Fault:
    """Stop all of P's processes, and continue them later."""

    def fault(call: Call) -> Answer:
        group = scene.process_group("prefill")
        group.send(signal.SIGSTOP)
        call.acted()
        scene.later(FROZEN_S, partial(group.send, signal.SIGCONT))
        return call.forward()

    return fault


def _with_task(call: Call, task: Task) -> Answer:
    """Forward the request while a task acts. Raises FaultError when the engine answered before the task had acted."""
    try:
        answer = call.forward()
    finally:
        task.end()
    if not call.struck:
        raise FaultError("the engine answered before the fault took place")
    return answer


def _once(scene: Scene, role: Role, state: str, act: Callable[[], object], over: threading.Event) -> None:
    """Act as soon as the engine reports a request in a state (a gauge of /metrics above zero).

    Raises FaultError when it does not do so in time, or when the task is cancelled before.
    """
    deadline = time.monotonic() + _STATE_S
    engine = scene.engines[role]
    headers = ApiKey.of(engine.command.env).headers
    with httpx.Client(base_url=engine.url, headers=headers, timeout=_METRICS_S) as http:
        while not over.wait(_POLL_S) and time.monotonic() < deadline:
            if _is_in(http, state) and not over.is_set():
                act()
                return
    raise FaultError(f"expected the {role} engine to have a request in the state {state} in time, found none")


def _is_in(http: httpx.Client, state: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return above_zero(http.get("/metrics").text, state)
    return False


def _pulling(scene: Scene) -> Fault:
    """Lead D to a side channel that accepts its connection and stays silent, and kill D while it waits there.

    A real pull takes only milliseconds, and may succeed without P, which need not run for its memory to be read.
    """
    relay = scene.resources.enter_context(Relay(None))
    scene.require(lambda: relay.failed)

    def fault(call: Call) -> Answer:
        def act(over: threading.Event) -> None:
            deadline = time.monotonic() + _STATE_S
            while not relay.connections:
                if over.wait(_POLL_S) or time.monotonic() > deadline:
                    raise FaultError(relay.failed)
            scene.process_group("decode").kill()
            call.acted()

        body = call.request.json
        lead(body, relay.port)
        call.request = call.request.with_json(body)
        return _with_task(call, scene.task(act))

    return fault


def _decoding(act: Callable[[Scene], object]) -> Make:
    """Act once D decodes the request, which runs to its full length here to allow time for that."""

    def make(scene: Scene) -> Fault:
        def fault(call: Call) -> Answer:
            def deed() -> None:
                act(scene)
                call.acted()

            call.request = call.request.with_json({**call.request.json, "ignore_eos": True})
            return _with_task(call, scene.task(partial(_once, scene, "decode", RUNNING, deed)))

        return fault

    return make


def _process(
    name: str,
    title: str,
    strikes: str,
    proxy: Role | None,
    make: Make | None,
    reason: str,
    bound_s: float = 90.0,
    topology: Topology = "pd",
    engine: Mapping[str, Any] | None = None,
    group: Group = "process",
    kills: Role | None = None,
) -> ProcessDrill:
    return ProcessDrill(
        Drill(name, group, title, strikes, U, reason, bound_s), topology, proxy, make, engine or {}, kills
    )


_p_killed = partial(_process, reason=_died("prefill"), kills="prefill")
_d_killed = partial(_process, proxy="decode", reason=_died("decode"), kills="decode")
_out_of = partial(_process, group="resource")

PROCESSES: tuple[ProcessDrill, ...] = (
    _p_killed(
        "p-killed-before",
        "P's API server killed before prefill",
        "P, before it gets the request",
        "prefill",
        _first(ProcessGroup.kill_server),
    ),
    _p_killed(
        "p-killed-during", "P's API server killed during prefill", "P, with the request scheduled", "prefill", _during
    ),
    _p_killed(
        "p-killed-after",
        "all of P killed after prefill",
        "P, before its answer arrives",
        "prefill",
        _after,
        reason=_WITH_P,
    ),
    _p_killed(
        "p-killed-between",
        "all of P killed between the legs",
        "P, when D gets the request",
        "decode",
        _first(ProcessGroup.kill),
        reason=_WITH_P,
    ),
    _d_killed(
        "d-killed-pulling",
        "all of D killed while pulling",
        "D, while it waits for P's side channel, which is silent",
        make=_pulling,
    ),
    _d_killed(
        "d-killed-decoding",
        "all of D killed while decoding",
        "D, while it runs the request",
        make=_decoding(lambda scene: scene.process_group("decode").kill()),
    ),
    _process(
        "p-frozen",
        f"P frozen for {FROZEN_S:.0f} s, past the lease of 8 s, then continued",
        "P, between the legs",
        "decode",
        _frozen_p,
        _SLOW,
        bound_s=180.0,
    ),
    _process(
        "d-frozen",
        "D frozen past the request limit, and never continued",
        "D, when it gets the request",
        "decode",
        _first(lambda d: d.send(signal.SIGSTOP), "decode"),
        _SLOW,
        bound_s=240.0,
        kills="decode",
    ),
    _out_of(
        "d-out-of-memory",
        "what runs D's model killed as by the OOM killer",
        "D's engine core, while it runs the request",
        "decode",
        _decoding(lambda scene: scene.process_group("decode").send(signal.SIGKILL, to_model=True)),
        _failed("decode"),
        kills="decode",
    ),
    _out_of(
        "p-out-of-memory",
        "what runs P's model killed as by the OOM killer",
        "P's engine core, before prefill",
        "prefill",
        _first(lambda p: p.send(signal.SIGKILL, to_model=True)),
        _failed("prefill"),
        kills="prefill",
    ),
    _process(
        "wrong-engine",
        "another engine behind the port: a vLLM that serves another model's name",
        "single engine, from the start",
        None,
        None,
        r"expected the model 'target' behind .*another-model",
        bound_s=240.0,
        topology="single",
        engine={"extra_args": ("--served-model-name", "another-model")},
    ),
    _out_of(
        "pool-too-small",
        "a KV pool that cannot hold one sequence",
        "single engine, from the start",
        None,
        None,
        # vLLM 0.32.0, v1/core/kv_cache_utils.py, _check_enough_kv_cache_memory.
        r"To serve at least one request with the model's max seq len .* larger than the available KV cache memory",
        bound_s=240.0,
        topology="single",
        engine={"kv_blocks": _POOL},
    ),
)
