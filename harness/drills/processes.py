"""Drills on the engines' processes: killed, frozen, out of memory, wrong from the start; each with its own engines."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import httpx
import psutil

from harness.drills.exchange import Make, Topology, U
from harness.drills.model import Drill, Group
from harness.drills.proxy import Answer, Call, Fault
from harness.drills.scene import Scene
from harness.engine.command import Role
from harness.engine.key import ApiKey
from harness.findings import Verdict

FROZEN_S = 20.0
"""Longer than the lease of 8 s and the request limit of 15 s."""
_WORK_S = 0.7
"""After this long with its worker stopped, an engine has a request scheduled and cannot finish it."""
_STATE_S = 10.0
_DIED = r"ended by itself|Disconnected|disconnected|Connect"


class ProcessDrill(NamedTuple):
    """A fault that engines need not survive."""

    drill: Drill
    topology: Topology
    proxy: Role | None
    """Whose exchange with the second of three prompts triggers the fault; None: it is there from the start."""
    make: Make | None
    engine: Mapping[str, Any] = {}
    """Changes of the profile's engine settings."""


def session_of(scene: Scene, role: Role) -> list[psutil.Process]:
    """The engine's processes, by their session."""
    pid = scene.engines[role].pid
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):
            if os.getsid(process.pid) == pid:
                found.append(process)
    return found


def kill_server(scene: Scene, role: Role) -> None:
    """KILL to the API server; its children have to be ended by somebody else."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(scene.engines[role].pid, signal.SIGKILL)


def signal_to(scene: Scene, role: Role, number: signal.Signals, part: str = "") -> int:
    """Send a signal to the engine's processes whose name contains ``part``; returns how many got it."""
    count = 0
    for process in session_of(scene, role):
        with contextlib.suppress(psutil.Error):
            if part in process.name():
                process.send_signal(number)
                count += 1
    return count


def _before(role: Role) -> Make:
    """Killed when the request has been sent, and before the engine has it."""

    def make(scene: Scene) -> Fault:
        def fault(call: Call) -> Answer:
            kill_server(scene, role)
            return call.forward()

        return fault

    return make


def _during(role: Role) -> Make:
    """Killed while the engine works on the request: its worker is stopped first, so that it cannot be done."""

    def make(scene: Scene) -> Fault:
        def fault(call: Call) -> Answer:
            if not signal_to(scene, role, signal.SIGSTOP, "Worker"):
                scene.failed = "no worker process was found"
            threading.Timer(_WORK_S, kill_server, (scene, role)).start()
            return call.forward()

        return fault

    return make


def _after(role: Role) -> Make:
    """Killed when it has answered, before the harness has the answer."""

    def make(scene: Scene) -> Fault:
        def fault(call: Call) -> Answer:
            answer = call.forward()
            kill_server(scene, role)
            return answer

        return fault

    return make


def _then(scene: Scene, role: Role, state: str, act: Callable[[], object]) -> None:
    """Once the engine says that a request is in a state (a gauge of /metrics above zero), act."""
    deadline = time.monotonic() + _STATE_S
    engine = scene.engines[role]
    url, headers = f"{engine.url}/metrics", ApiKey.of(engine.command.env).headers
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.HTTPError):
            text = httpx.get(url, headers=headers, timeout=2).text
            if any(_above_zero(line) for line in text.splitlines() if line.startswith(state)):
                act()
                return
        time.sleep(0.01)
    scene.failed = f"the {role} engine had no request in the state {state} within {_STATE_S:.0f} s"
    act()


def _above_zero(line: str) -> bool:
    with contextlib.suppress(ValueError):
        return float(line.rpartition(" ")[2]) > 0
    return False


def _in_thread(function: Callable[..., object], *arguments: object) -> None:
    threading.Thread(target=function, args=arguments, daemon=True).start()


def _pulling(scene: Scene) -> Fault:
    """P is frozen, so that D's pull cannot end; D is killed once it has the request waiting for KV. P goes on then."""

    def act() -> None:
        kill_server(scene, "decode")
        signal_to(scene, "prefill", signal.SIGCONT)

    def fault(call: Call) -> Answer:
        signal_to(scene, "prefill", signal.SIGSTOP)
        _in_thread(_then, scene, "decode", "vllm:num_requests_waiting{", act)
        return call.forward()

    return fault


def _decoding(act: Callable[[Scene], object]) -> Make:
    """Once D decodes the request."""

    def make(scene: Scene) -> Fault:
        def fault(call: Call) -> Answer:
            _in_thread(_then, scene, "decode", "vllm:num_requests_running{", partial(act, scene))
            return call.forward()

        return fault

    return make


def _frozen(role: Role, seconds: float | None) -> Make:
    """All processes stopped, for so long or for good."""

    def make(scene: Scene) -> Fault:
        def fault(call: Call) -> Answer:
            signal_to(scene, role, signal.SIGSTOP)
            if seconds is not None:
                threading.Timer(seconds, signal_to, (scene, role, signal.SIGCONT)).start()
            return call.forward()

        return fault

    return make


def _out_of_memory(role: Role, part: str) -> Make:
    """What the kernel's OOM killer does: KILL to the process with the most memory, while the API server lives."""

    def make(scene: Scene) -> Fault:
        def fault(call: Call) -> Answer:
            if not signal_to(scene, role, signal.SIGKILL, part):
                scene.failed = f"no process called {part} was found"
            return call.forward()

        return fault

    return make


def _process(
    name: str,
    title: str,
    strikes: str,
    proxy: Role | None,
    make: Make | None,
    reason: str = _DIED,
    verdicts: tuple[Verdict, ...] = U,
    bound_s: float = 90.0,
    topology: Topology = "pd",
    engine: Mapping[str, Any] | None = None,
    group: Group = "process",
) -> ProcessDrill:
    return ProcessDrill(
        Drill(name, group, title, strikes, verdicts, reason, bound_s), topology, proxy, make, engine or {}
    )


PROCESSES: tuple[ProcessDrill, ...] = (
    _process(
        "p-killed-before", "P killed before prefill", "P, before it has the request", "prefill", _before("prefill")
    ),
    _process(
        "p-killed-during", "P killed during prefill", "P, with the request scheduled", "prefill", _during("prefill")
    ),
    _process("p-killed-after", "P killed after prefill", "P, before its answer arrives", "prefill", _after("prefill")),
    _process("p-killed-between", "P killed between the legs", "P, when D is asked", "decode", _before("prefill")),
    _process("d-killed-pulling", "D killed while pulling", "D, while it waits for KV", "decode", _pulling),
    _process(
        "d-killed-decoding",
        "D killed while decoding",
        "D, while it runs the request",
        "decode",
        _decoding(lambda scene: kill_server(scene, "decode")),
    ),
    _process(
        "p-frozen",
        f"P frozen for {FROZEN_S:.0f} s, past the lease of 8 s, then continued",
        "P, between the legs",
        "decode",
        _frozen("prefill", FROZEN_S),
        "Timeout|within .* s|lease",
        bound_s=180.0,
    ),
    _process(
        "d-frozen",
        "D frozen past the request limit, and never continued",
        "D, when it is asked",
        "decode",
        _frozen("decode", None),
        "Timeout|within .* s",
        bound_s=240.0,
    ),
    _process(
        "d-out-of-memory",
        "D's worker killed as by the OOM killer",
        "D's worker, while it runs the request",
        "decode",
        _decoding(lambda scene: signal_to(scene, "decode", signal.SIGKILL, "Worker")),
        group="resource",
        reason=f"{_DIED}|found 500",
    ),
    _process(
        "p-out-of-memory",
        "P's worker killed as by the OOM killer",
        "P's worker, before prefill",
        "prefill",
        _out_of_memory("prefill", "Worker"),
        group="resource",
        reason=f"{_DIED}|found 500",
    ),
    _process(
        "wrong-engine",
        "another engine behind the port: a vLLM that serves another model's name",
        "single engine, from the start",
        None,
        None,
        "expected the model 'target' behind",
        bound_s=150.0,
        topology="single",
        engine={"extra_args": ("--served-model-name", "another-model")},
    ),
    _process(
        "pool-too-small",
        "a KV pool that cannot hold one sequence",
        "single engine, from the start",
        None,
        None,
        "KV cache|kv cache|blocks",
        bound_s=150.0,
        topology="single",
        group="resource",
        engine={"kv_blocks": 8},
    ),
)
