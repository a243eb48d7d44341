"""Engines of one group: started together, made ready, asked, and ended."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType

import httpx

from harness import clock, redact
from harness.config import Profile
from harness.engine import stacks
from harness.engine.arming import Arming, Marks, plugin_folder, unbound
from harness.engine.client import Client, Sampling
from harness.engine.command import MODEL_NAME, EngineCommand, Role, build_command
from harness.engine.environment import EngineEnvironment
from harness.engine.exchange import Ask, Exchange, new_id, payload
from harness.engine.key import ApiKey, require_guarded
from harness.engine.place import EngineHandle, Places, default_places, ended, roles_of
from harness.engine.ports import free_ports
from harness.engine.router import Router, program
from harness.errors import EngineDiedError, EngineStartError, HandoffError, MutantRefusedError, RequestTimeoutError
from harness.history import EngineRecord, Form, Leg, Observation
from harness.matrix import Cell, EngineGroup
from harness.prompts import Prompt

Progress = Callable[[str], None]
_POLL_S = 0.25
# "Model Runner V2 requires Triton; using the V1 model runner instead." names both: what is *used* counts.
_RUNNER = re.compile(r"[Uu]sing (?:the )?(?:(V[12]) [Mm]odel [Rr]unner|[Mm]odel [Rr]unner (V[12]))")
_BACKEND = re.compile(r"attention backend\(s\) \['(\w+)'|[Uu]sing (?:AttentionBackendEnum\.)?(\w+) backend")
_STEP_TOKENS = re.compile(
    r"Chunked prefill is enabled with max_num_batched_tokens=(\d+)|max_num_scheduled_tokens is set to (\d+)"
)
# What a decode engine says when P's side channel did not answer in time (zmq EAGAIN after 5 s on busy machines).
_HANDSHAKE_PAUSE_S = 2.0
_RESET_S = 5.0


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
        arming: Arming | None = None,
        places: Places | None = None,
    ) -> None:
        """``places`` says where each engine runs; None: on this machine, on loopback, from ``base_port`` on."""
        self.group = group
        self.arming = arming
        self.key = ApiKey()
        """What the engines and routers of the group answer to."""
        self.mutants: frozenset[str] = frozenset()
        """The mutants that are switched on."""
        self.profile = profile
        self._environment = environment
        self._logs = log_folder
        self._base_port = base_port
        self._progress = progress
        self._wanted_places = places
        self._places: Places = {}
        self._processes: dict[Role, EngineHandle] = {}
        self._clients: dict[Role, Client] = {}
        self._side_channels: dict[Role, int | None] = {}
        self._exchange = Exchange(self._clients, profile)
        self._routers: list[Router] = []
        self.ready_seconds: float = 0.0
        self._ready_by_role: dict[Role, float] = {}
        self._given_up = ""
        """Why its engines were ended before its work was done."""
        self._dumped: set[tuple[Role, str]] = set()
        self._dumping = threading.Lock()
        self.left: list[str] = []
        """What could not be ended or removed, in words."""
        self.ended = False
        """The engines were ended from another thread: what they answer from then on is no evidence."""

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
        self._look_why(error, "request")
        self.stop()

    def _commands(self) -> list[EngineCommand]:
        """Command lines by role; ports are picked where the engines will run."""
        plugin = plugin_folder(self._environment.prefix, self._logs / "plugin") if self.arming else None
        commands = []
        for role, place in self._places.items():
            # Today's engines listen on the first alone; earlier ones on one for each rank, from the first on.
            ranks = self.profile.engine.tensor_parallel.of(role)
            port, *side_channel = place.ports(1 if role == "single" else 1 + ranks)
            commands.append(
                build_command(
                    self.profile,
                    self.group.method_of(role),
                    role,
                    self._environment,
                    port=port,
                    side_channel_port=side_channel[0] if side_channel else None,
                    devices=place.devices,
                    host=place.host,
                    arming=self.arming.environment(role, plugin) if self.arming else None,
                    key=self.key,
                )
            )
        return commands

    def _start(self) -> None:
        begun = time.monotonic()
        self._places = self._wanted_places or default_places(roles_of(self.group), self.profile.engine, self._base_port)
        for command in self._commands():
            self._require_wanted()
            log = self._logs / f"{self.group.id}.{command.role}.log"
            process = self._places[command.role].start(command, log)
            self._processes[command.role] = process
            self._side_channels[command.role] = command.side_channel_port
            self._clients[command.role] = Client(command.role, process.url, self.profile.timeouts.request, self.key)
            self._progress(f"{self.group.id}: started {command.role} engine, pid {process.pid}, {process.url}")
        self._require_wanted()
        deadline = begun + self.profile.timeouts.start
        self._wait_ready(deadline)
        for role, process in self._processes.items():
            require_guarded(process.url, f"the {role} engine of {self.group.id}")
        self._first_requests(deadline)
        if self.profile.engine.device == "cpu" and self.group.topology == "pd":
            for process in self._processes.values():
                process.gather_threads()
        self._warm_up_hand_off()
        self._start_routers()
        self._require_armed()
        self.refresh_counters()
        self.ready_seconds = time.monotonic() - begun

    def _start_routers(self) -> None:
        """A router in front of the engines for each topology that a cell asks one for."""
        routed = [c.topology == "pd" for c in self.group.cells if c.routed]
        if True in routed and self.arming is not None and self.arming.forgets_prefill:
            routed.append(False)
        for pair in sorted(set(routed), reverse=True):
            answering = "decode" if "decode" in self._processes else "single"
            roles = ("prefill", answering) if pair else (answering,)
            urls = {role: p.url for role, p in self._processes.items() if role in roles}
            name = f"{self.group.id}.router" + ("" if pair else "-single")
            program()
            port, metrics = free_ports(2)
            router = Router(urls, port, metrics, self._logs / f"{name}.log", self.key)
            self._routers.append(router)
            router.__enter__()
            self._exchange.routers[pair] = Client(
                "decode" if pair else "single", router.url, self.profile.timeouts.request, self.key
            )
            self._progress(f"{self.group.id}: started router, pid {router.pid}, {router.url}")

    def _wait_ready(self, deadline: float) -> None:
        waiting = list(self._processes)
        while waiting:
            self._require_willing()
            for role in [r for r in waiting if self._is_ready(r)]:
                waiting.remove(role)
                self._ready_by_role[role] = time.monotonic() - self._processes[role].started
                self._progress(f"{self.group.id}: {role} engine ready after {self._ready_by_role[role]:.0f} s")
            if waiting and time.monotonic() > deadline:
                self.dump_stacks("start")
                process = self._processes[waiting[0]]
                raise EngineStartError(
                    f"expected the {waiting[0]} engine of {self.group.id} to be ready within "
                    f"{self.profile.timeouts.start:.0f} s, found it still starting; raise timeouts.start or see "
                    f"{process.log_path}, which ends with:\n{process.log_tail()}"
                )
            if waiting:
                time.sleep(_POLL_S)

    def _require_willing(self) -> None:
        """Raise when an engine is gone; a mutant that refused its target says so itself."""
        self._require_wanted()
        for role, process in self._processes.items():
            if process.alive():
                continue
            refused = Marks(process.log_text()).refused
            if refused:
                carried = self.arming.by_role.get(role, ()) if self.arming else ()
                ids = tuple(m for m in carried if any(line.startswith(f"{m}:") for line in refused))
                raise MutantRefusedError(
                    f"a mutant refused the {role} engine of {self.group.id}: {refused[0]}", ids or carried
                )
            process.require_alive()

    def _require_armed(self) -> None:
        """Raise EngineStartError when an armed mutant found nothing to patch: it could only survive."""
        if self.arming is None:
            return
        missing = unbound(self.arming, {r: p.log_text() for r, p in self._processes.items()})
        if missing:
            words = ", ".join(f"{m.mutant} ({m.target}) in the {m.role} engine" for m in missing)
            raise MutantRefusedError(
                f"expected every armed mutant of {self.group.id} to be bound to all of its targets, found none for "
                f"{words}: this engine does not import the module that the mutant changes",
                tuple(dict.fromkeys(m.mutant for m in missing)),
            )

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
        side_channel = self._side_channels.get(role)
        if side_channel is None:
            return True
        address = (process.command.host, side_channel)
        with contextlib.suppress(OSError), socket.create_connection(address, timeout=1):
            return True
        return False

    def _warm_up_request(self) -> tuple[list[int], Sampling]:
        """A prompt of one block and one token."""
        ids = list(range(1, self.profile.engine.block_size + 2))
        return ids, Sampling(max_tokens=8, logprobs=self.profile.workload.logprobs)

    def _first_requests(self, deadline: float) -> None:
        """One plain request to every engine, all at the same time: the first compiles kernels, for 10 s and more (for
        over 90 s on two cores with a load of 7), so that it has what is left of the time for the start."""
        limit = max(self.profile.timeouts.request, deadline - time.monotonic())
        ids, sampling = self._warm_up_request()
        with ThreadPoolExecutor(len(self._clients)) as pool:
            asked = [
                pool.submit(c.complete, ids, sampling, new_id(), new_id(), count=False, timeout_s=limit)
                for c in self._clients.values()
            ]
        for answer in asked:
            self._look_why(answer.exception(), "first request")
        self.require_alive()
        for process, answer in zip(self._processes.values(), asked, strict=True):
            try:
                answer.result()
            except HandoffError as error:
                raise EngineStartError(
                    f"expected an answer to the first request of {self.group.id}, {error}{process.root_error()}"
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
                self._exchange.send(Ask(True, ids, max_tokens=sampling.max_tokens), [])
                return
            except HandoffError as error:
                self._look_why(error, "warm-up")
                self.require_alive()
                if attempt == attempts:
                    decode = self._processes["decode"]
                    raise EngineStartError(
                        f"expected a P/D hand-off within {attempts} attempts on {self.group.id}, found: {error}"
                        f"{decode.root_error()}; last lines of the decode engine's log:\n{decode.log_tail()}"
                    ) from error
                self._progress(f"{self.group.id}: NIXL handshake attempt {attempt} failed, trying again")
                time.sleep(_HANDSHAKE_PAUSE_S)

    def end_engines(self) -> None:
        """End the engines from another thread; the one that uses them finds them gone, and leaves the context. One that
        is about to be started is ended by that thread."""
        self.ended = True
        self._end_processes()

    def _end_processes(self) -> None:
        grace_s = self.profile.timeouts.stop
        ends = [(f"the {role} engine", partial(p.stop, grace_s)) for role, p in self._processes.items()]
        with ThreadPoolExecutor(max(1, len(ends))) as pool:
            for left in [pool.submit(ended, *end) for end in ends]:
                self._say_left(left.result())

    def _say_left(self, left: Sequence[str]) -> None:
        for words in left:
            if words not in self.left:
                self.left.append(words)
                self._progress(f"{self.group.id}: LEFT OVER: {words}; see `harness ps` and `harness clean`")

    def give_up(self, cause: str, reason: str) -> None:
        """End the engines from another thread because something takes too long, once it is written where they are. The
        thread that uses them finds ``reason``."""
        try:
            self.dump_stacks(cause)
        finally:
            self._given_up = reason
            self.end_engines()

    def dump_stacks(self, cause: str) -> None:
        """Write the stacks of the engines' Python processes beside their logs, once per engine and cause."""
        with self._dumping:
            # In one step: ``stop`` clears the engines in another thread.
            wanted = {r: p for r, p in tuple(self._processes.items()) if (r, cause) not in self._dumped}
            self._dumped |= {(r, cause) for r in wanted}
        if not wanted:
            return
        with ThreadPoolExecutor(len(wanted)) as pool:
            asked = {
                role: pool.submit(
                    stacks.dump_of, process.python_processes, self._logs / f"{self.group.id}.{role}.stacks.txt", cause
                )
                for role, process in wanted.items()
            }
        found = {role: answer.result() for role, answer in asked.items()}
        said = [f"stacks of {role} are in the logs" for role, one in found.items() if one.stacks]
        said += [f"no stacks of {role}: {one.trouble}" for role, one in found.items() if not one.stacks]
        self._progress(f"{self.group.id}: no answer in time ({cause}): {'; '.join(said)}")

    def _look_why(self, error: BaseException | None, cause: str) -> None:
        if isinstance(error, RequestTimeoutError) and not self.ended:
            self.dump_stacks(cause)

    def _require_wanted(self) -> None:
        if self._given_up:
            raise EngineDiedError(self._given_up)
        if self.ended:
            raise EngineDiedError(f"{self.group.id}: its engines were ended from outside")

    def stop(self) -> None:
        """End the engines. They are told at the same time; one that ignores TERM is killed after the grace time."""
        for client in (*self._clients.values(), *self._exchange.routers.values()):
            client.close()
        logs = [p.log_path for p in self._processes.values()]
        for router in self._routers:
            self._say_left(ended("the router", router.end))
        self._routers.clear()
        self._end_processes()
        for place in self._places.values():
            place.give_back()
        # Nobody writes to them any more. A disk that does not take it must not hide why the engines ended.
        for log in logs:
            with contextlib.suppress(OSError):
                redact.file(log)
        self._processes.clear()
        self._clients.clear()

    # --- what the record needs ----------------------------------------------------------------------------------

    def records(self) -> list[EngineRecord]:
        out = []
        for role, process in self._processes.items():
            log = process.log_text()
            mutants = self.arming.by_role.get(role, ()) if self.arming else ()
            runner = _RUNNER.search(log)
            backend = _BACKEND.search(log)
            out.append(
                EngineRecord(
                    role=role,
                    group=self.group.id,
                    node=self._places[role].node,
                    pid=process.pid,
                    argv=redact.words(process.command.argv),
                    env=redact.environment(process.command.env),
                    log=process.log_path.name,
                    ready_seconds=round(self._ready_by_role.get(role, 0.0), 2),
                    # 0.32 names the runner in the log; engines that say nothing run V1.
                    model_runner=next(g for g in runner.groups() if g) if runner else "V1",
                    attention_backend=next(g for g in backend.groups() if g) if backend else None,
                    kv_blocks=self._kv_blocks(role),
                    step_tokens=_step_tokens(log),
                    kept_blocks=self._exchange.kept_by_p if role == "prefill" else 0,
                    mutants=mutants,
                )
            )
        return [*out, *(r.record(self.group.id) for r in self._routers)]

    def _kv_blocks(self, role: Role) -> int | None:
        with contextlib.suppress(HandoffError):
            return self._clients[role].kv_blocks()
        return None

    # --- requests -----------------------------------------------------------------------------------------------

    def observe(self, cell: Cell, prompt: Prompt, form: Form, sequence: int) -> Observation:
        """Send one cold prompt the way the cell asks for; a broken exchange is part of the observation.

        A hand-off that came to D too late is repeated once. Only when both gave the same, the second one stands for
        it: whatever a late one did otherwise stays on record. Raises EngineDiedError when an engine of the group is
        gone.
        """
        first = self._observe_once(cell, prompt, form, sequence)
        if not first.came_late(self.profile.engine.kv_lease_s):
            return first
        self._progress(f"{cell.id}: {prompt.id} came to D after P's lease; asked again")
        again = self._observe_once(cell, prompt, form, sequence)
        if again.error or first.error or not _same_outcome(first.final, again.final):
            return first
        return again.after_late(first)

    def _observe_once(self, cell: Cell, prompt: Prompt, form: Form, sequence: int) -> Observation:
        legs: list[Leg] = []
        started = clock.now()
        error, shared = self.ask_counted(Ask(cell.topology == "pd", payload(prompt, form), routed=cell.routed), legs)
        return Observation(
            cell=cell.id,
            prompt_id=prompt.id,
            form=form,
            sequence=sequence,
            sent_ids=prompt.ids,
            engine_roles=tuple(self._processes),
            legs=tuple(legs),
            max_tokens=self.profile.workload.max_tokens,
            shared_counters=shared,
            error=error,
            started_at=started,
        )

    def ask_counted(self, ask: Ask, legs: list[Leg]) -> tuple[str | None, dict[str, dict[str, float]]]:
        """Send a request that has the engines for itself; also returns what P counted, where its leg is not seen."""
        if not (ask.routed and ask.hand_off):
            return self.ask(ask, legs), {}
        prefill = self._clients["prefill"]
        before = prefill.last_snapshot
        error = self.ask(ask, legs)
        try:
            return error, {"prefill": prefill.counters_after(before, {"finished_requests": 1})}
        except HandoffError as failure:
            self._look_why(failure, "request")
            self.require_alive()
            return error or str(failure), {}

    def ask(self, ask: Ask, legs: list[Leg]) -> str | None:
        """Send a request; each leg is appended as soon as it is answered. Returns what broke, if anything did.

        Raises EngineDiedError when an engine of the group is gone.
        """
        try:
            self._exchange.send(ask, legs)
        except HandoffError as failure:
            self._look_why(failure, "request")
            self.require_alive()
            return str(failure)
        return None

    def require_alive(self) -> None:
        """Raise EngineDiedError when an engine or a router of the group is gone or is being ended: one that was told to
        end may still live."""
        self._require_wanted()
        for process in self._processes.values():
            process.require_alive()
        for router in self._routers:
            router.require_alive()

    @property
    def roles(self) -> tuple[Role, ...]:
        return tuple(self._processes)

    def url(self, role: Role) -> str:
        """Where an engine of the group listens."""
        return self._processes[role].url

    def router_url(self, cell: Cell) -> str:
        """Where the router listens that a routed cell is sent through."""
        return self._exchange.routers[cell.topology == "pd"].url

    def client(self, role: Role) -> Client:
        """The client of an engine; asking for ``single`` in a pair gives the decode engine."""
        return self._exchange.client(role)

    def refresh_counters(self) -> None:
        """Count from now on: what was sent uncounted before belongs to no request. Raises HandoffError."""
        for client in self._clients.values():
            client.snapshot()

    def reset_caches(self) -> None:
        """Forget all cached prefixes. P refuses while it still holds blocks for D, so this asks again for a while.

        Raises HandoffError when an engine does not do it.
        """
        # What D never took over keeps P's blocks until the lease ends.
        patience = _RESET_S + (self.profile.engine.kv_lease_s if self._exchange.kept_by_p else 0)
        for role in self._clients:
            deadline = time.monotonic() + patience
            while not self._reset(role):
                if time.monotonic() > deadline:
                    raise HandoffError(
                        f"{role} engine: expected POST /reset_prefix_cache to succeed within {patience:.0f} s, found "
                        "it refused; a request or a hand-off is still holding blocks"
                    )
                time.sleep(_POLL_S)

    def _reset(self, role: Role) -> bool:
        response = self._clients[role].post("/reset_prefix_cache")
        try:
            return response.status_code == 200 and (not response.content or bool(response.json().get("success", True)))
        except (ValueError, AttributeError):
            return False

    def switch(self, *mutants: str) -> None:
        """Turn armed mutants on, and all others off."""
        if self.arming is not None:
            self.arming.switch(mutants)
        self.mutants = frozenset(mutants)
        self._exchange.drops_parameters = "M9" in self.mutants
        self._exchange.forgets_prefill = "N6" in self.mutants


def _step_tokens(log: str) -> int | None:
    """The scheduler's token budget of one step, as the engine logs it (its /server_info takes 5 s and more)."""
    found = [int(a or b) for a, b in _STEP_TOKENS.findall(log)]
    return min(found) if found else None


def _same_outcome(one: Leg | None, other: Leg | None) -> bool:
    """Whether two answers to the same request have the same tokens and accepted drafts."""
    return (
        one is not None
        and other is not None
        and (one.output_ids, one.speculation) == (other.output_ids, other.speculation)
    )
