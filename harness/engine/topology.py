"""Engines of one group: started together, made ready, asked, and ended.

A pair is asked by the harness's own strict client: prefill request, then decode request with the returned parameters.
There is no fallback: a hand-off that breaks is recorded as broken.
"""

from __future__ import annotations

import contextlib
import re
import socket
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import httpx

from harness.config import Profile
from harness.engine.client import REMOTE_DECODE, Client, Sampling
from harness.engine.command import LOOPBACK, MODEL_NAME, EngineCommand, Role, build_command
from harness.engine.environment import EngineEnvironment
from harness.engine.ports import allot
from harness.engine.process import EngineProcess
from harness.errors import EngineStartError, HandoffError
from harness.history import EngineRecord, Form, Leg, Observation
from harness.matrix import Cell, EngineGroup
from harness.prompts import Prompt

Progress = Callable[[str], None]
_POLL_S = 0.25
# "Model Runner V2 requires Triton; using the V1 model runner instead." names both: what is *used* counts.
_RUNNER = re.compile(r"[Uu]sing (?:the )?(?:(V[12]) [Mm]odel [Rr]unner|[Mm]odel [Rr]unner (V[12]))")
_BACKEND = re.compile(r"attention backend\(s\) \['(\w+)'|[Uu]sing (?:AttentionBackendEnum\.)?(\w+) backend")
# What a decode engine says when P's side channel did not answer in time (zmq EAGAIN after 5 s on busy machines).
_HANDSHAKE_PAUSE_S = 2.0


class EngineGroupSession:
    """The running engines of a group. Use as a context manager; leaving it ends every process that it started."""

    def __init__(
        self,
        group: EngineGroup,
        profile: Profile,
        environment: EngineEnvironment,
        log_folder: Path,
        base_port: int | None = None,
        progress: Progress = lambda _: None,
    ) -> None:
        self.group = group
        self.profile = profile
        self._environment = environment
        self._logs = log_folder
        self._base_port = base_port
        self._progress = progress
        self._processes: dict[Role, EngineProcess] = {}
        self._clients: dict[Role, Client] = {}
        self.ready_seconds: float = 0.0
        self._ready_by_role: dict[Role, float] = {}

    # --- life cycle ---------------------------------------------------------------------------------------------

    def __enter__(self) -> EngineGroupSession:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _commands(self) -> list[EngineCommand]:
        roles: list[Role] = ["decode", "prefill"] if self.group.topology == "pd" else ["single"]
        ports = allot(2 * len(roles), self._base_port)
        return [
            build_command(
                self.profile,
                self.group.method,
                role,
                self._environment,
                port=next(ports),
                side_channel_port=next(ports) if role != "single" else None,
                slot=slot,
            )
            for slot, role in enumerate(roles)
        ]

    def _start(self) -> None:
        begun = time.monotonic()
        for command in self._commands():
            log = self._logs / f"{self.group.id}.{command.role}.log"
            process = EngineProcess(command, log)
            self._processes[command.role] = process
            self._clients[command.role] = Client(command.role, process.url, self.profile.timeouts.request)
            self._progress(f"{self.group.id}: started {command.role} engine, pid {process.pid}, {process.url}")
        self._wait_ready(begun + self.profile.timeouts.start)
        self._first_requests()
        if self.profile.engine.device == "cpu" and self.group.topology == "pd":
            for process in self._processes.values():
                process.gather_threads()
        self._warm_up_hand_off()
        for client in self._clients.values():
            client.snapshot()
        self.ready_seconds = time.monotonic() - begun

    def _wait_ready(self, deadline: float) -> None:
        waiting = list(self._processes)
        while waiting:
            for process in self._processes.values():
                process.require_alive()
            for role in [r for r in waiting if self._is_ready(r)]:
                waiting.remove(role)
                self._ready_by_role[role] = time.monotonic() - self._processes[role].started
                self._progress(f"{self.group.id}: {role} engine ready after {self._ready_by_role[role]:.0f} s")
            if waiting and time.monotonic() > deadline:
                process = self._processes[waiting[0]]
                raise EngineStartError(
                    f"expected the {waiting[0]} engine of {self.group.id} to be ready within "
                    f"{self.profile.timeouts.start:.0f} s, found it still starting; raise timeouts.start or see "
                    f"{process.log_path}, which ends with:\n{process.log_tail()}"
                )
            if waiting:
                time.sleep(_POLL_S)

    def _is_ready(self, role: Role) -> bool:
        """Health, the right model behind the port, and the NIXL side channel."""
        client, process = self._clients[role], self._processes[role]
        try:
            if client.get("/health").status_code != 200:
                return False
            models = [m["id"] for m in client.get("/v1/models").json()["data"]]
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return False
        if models != [MODEL_NAME]:
            raise EngineStartError(
                f"expected the model {MODEL_NAME!r} behind {process.url}, found {models}; another server took the port"
            )
        side_channel = process.command.side_channel_port
        if side_channel is None:
            return True
        with contextlib.suppress(OSError), socket.create_connection((LOOPBACK, side_channel), timeout=1):
            return True
        return False

    def _warm_up_request(self) -> tuple[list[int], Sampling]:
        """A prompt of one block and one token."""
        ids = list(range(1, self.profile.engine.block_size + 2))
        return ids, Sampling(max_tokens=8, logprobs=self.profile.workload.logprobs)

    def _first_requests(self) -> None:
        """One plain request to every engine, all at the same time: the first compiles kernels, for 10 s and more."""
        ids, sampling = self._warm_up_request()
        with ThreadPoolExecutor(len(self._clients)) as pool:
            asked = [pool.submit(c.complete, ids, sampling, _new_id(), _new_id()) for c in self._clients.values()]
        for process in self._processes.values():
            process.require_alive()
        for answer in asked:
            try:
                answer.result()
            except HandoffError as error:
                raise EngineStartError(
                    f"expected an answer to the first request of {self.group.id}, {error}"
                ) from error

    def _warm_up_hand_off(self) -> None:
        """For a pair, one full hand-off before anything is judged, repeated while the NIXL handshake times out (D
        answered 500 to the first hand-off in 2 of 8 starts on two busy cores)."""
        if self.group.topology == "single":
            return
        ids, sampling = self._warm_up_request()
        attempts = self.profile.timeouts.handshake_attempts
        for attempt in range(1, attempts + 1):
            try:
                self._hand_off(ids, sampling, [])
                return
            except HandoffError as error:
                for process in self._processes.values():
                    process.require_alive()
                if attempt == attempts:
                    raise EngineStartError(
                        f"expected a P/D hand-off within {attempts} attempts on {self.group.id}, found: {error}; last "
                        f"lines of the decode engine's log:\n{self._processes['decode'].log_tail()}"
                    ) from error
                self._progress(f"{self.group.id}: NIXL handshake attempt {attempt} failed, trying again")
                time.sleep(_HANDSHAKE_PAUSE_S)

    def stop(self) -> None:
        """End the engines. They are told at the same time; one that ignores TERM is killed after the grace time."""
        for client in self._clients.values():
            client.close()
        if not self._processes:
            return
        with ThreadPoolExecutor(len(self._processes)) as pool:
            list(pool.map(lambda p: p.stop(self.profile.timeouts.stop), self._processes.values()))
        self._processes.clear()
        self._clients.clear()

    # --- what the record needs ----------------------------------------------------------------------------------

    def records(self) -> list[EngineRecord]:
        out = []
        for role, process in self._processes.items():
            log = process.log_path.read_text(encoding="utf-8", errors="replace")
            runner = _RUNNER.search(log)
            backend = _BACKEND.search(log)
            out.append(
                EngineRecord(
                    role=role,
                    group=self.group.id,
                    pid=process.pid,
                    argv=tuple(process.command.argv),
                    env=process.command.env,
                    log=process.log_path.name,
                    ready_seconds=round(self._ready_by_role.get(role, 0.0), 2),
                    # 0.32 names the runner in the log; engines that say nothing run V1.
                    model_runner=next(g for g in runner.groups() if g) if runner else "V1",
                    attention_backend=next(g for g in backend.groups() if g) if backend else None,
                )
            )
        return out

    # --- requests -----------------------------------------------------------------------------------------------

    def observe(self, cell: Cell, prompt: Prompt, form: Form, sequence: int) -> Observation:
        """Send one prompt the way the cell asks for; a broken exchange is part of the observation.

        Raises EngineDiedError when an engine of the group is gone.
        """
        started = time.time()
        sampling = Sampling(self.profile.workload.max_tokens, self.profile.workload.logprobs)
        legs: list[Leg] = []
        error: str | None = None
        payload = list(prompt.ids) if form == "ids" else prompt.text
        try:
            if cell.topology == "pd":
                self._hand_off(payload, sampling, legs)
            else:
                legs.append(self._ask_single(payload, sampling))
        except HandoffError as failure:
            for process in self._processes.values():
                process.require_alive()
            error = str(failure)
        return Observation(
            cell=cell.id,
            prompt_id=prompt.id,
            form=form,
            sequence=sequence,
            sent_ids=prompt.ids,
            engine_roles=tuple(self._processes),
            legs=tuple(legs),
            error=error,
            started_at=started,
        )

    def _ask_single(self, payload: list[int] | str, sampling: Sampling) -> Leg:
        """A request without hand-off, to the single engine or to the pair's decode engine."""
        client = self._clients["single" if self.group.topology == "single" else "decode"]
        return client.complete(
            payload, sampling, _new_id(), _new_id(), role="single", await_counters=("finished_requests",)
        )

    def _hand_off(self, payload: list[int] | str, sampling: Sampling, legs: list[Leg]) -> None:
        """Prefill on P, then decode on D with P's parameters, verbatim. Appends each leg as soon as it is there.

        Raises HandoffError when a leg fails or P returns no parameters.
        """
        request_id, salt = _new_id(), _new_id()
        prefill = self._clients["prefill"].complete(
            payload,
            Sampling(1, sampling.logprobs),
            request_id,
            salt,
            REMOTE_DECODE,
            await_counters=("finished_requests",),
        )
        legs.append(prefill)
        if not prefill.kv_transfer_params:
            raise HandoffError(
                f"prefill engine: expected kv_transfer_params in the answer to request {request_id}, found none: "
                "P keeps no blocks for D, so the decode request was not sent"
            )
        legs.append(
            self._clients["decode"].complete(
                payload,
                sampling,
                request_id,
                salt,
                prefill.kv_transfer_params,
                await_counters=("finished_requests", "nixl_bytes"),
            )
        )


def _new_id() -> str:
    return uuid.uuid4().hex
