"""The running engines of one group: asked, counted, recorded, and ended."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import httpx

from harness import redact
from harness.engines.api_key import ApiKey
from harness.engines.attached import AttachedEngine
from harness.engines.client import Client
from harness.engines.counters import KvPool
from harness.engines.environment import EngineEnvironment
from harness.engines.launcher import Launcher, Progress
from harness.engines.log_facts import facts_in
from harness.engines.mutation import Mutation
from harness.engines.places import EngineHandle, Places
from harness.engines.readiness import Readiness
from harness.engines.request import Ask, payload
from harness.engines.routers import Routers
from harness.errors import EngineDiedError, FailedAnswerError, HandoffError
from harness.history.layout import WITNESS
from harness.history.records import (
    EngineRecord,
    Failure,
    Form,
    Leg,
    Observation,
    leg_role,
    unverified_tokens,
)
from harness.profiles.cells import SECOND_P, Cell, EngineGroup, Role
from harness.profiles.kv_layout import modules_in
from harness.profiles.model import Profile
from harness.prompts.model import Prompt
from harness.util import clock
from harness.workload.own_text import decoder_of, own_text

_POLL_S = 0.25
_RESET_S = 5.0
_SETTLED_S = 0.1
"""Seconds without growth after which counters are taken to be final: longer than a step on a busy machine."""
_END_S = 15.0
"""Seconds within which a server ends whose engine has ended: it answers what is under way before."""
_MOST_REVIVED = 12
"""Twice for a request that ends an engine each time, and once for each parameter of a hand-off that gets lost."""
_MOST_AT_ONCE = 10_000
"""Far above what is ever sent at once: each request of a stage needs a thread, or the others would wait for it."""


class Broken(NamedTuple):
    """A request without an answer."""

    error: str
    failure: Failure | None = None
    """What came of an engine in place of the answer."""
    gone: EngineDiedError | None = None
    """Why the engines cannot be asked any more; None while all of them are alive."""


class EngineGroupSession:
    """The running engines of a group. A context manager; leaving it ends every process that it started."""

    def __init__(
        self,
        group: EngineGroup,
        profile: Profile,
        environment: EngineEnvironment,
        log_folder: Path,
        progress: Progress = lambda _: None,
        mutation: Mutation | None = None,
        places: Places | None = None,
        kv_folder: Path | None = None,
    ) -> None:
        """``places`` maps each role to where its engine runs; None means this machine, on loopback. In ``kv_folder``,
        by default that of the logs' folder, engines note what their KV caches hold."""
        self.group = group
        self.profile = profile
        self.kv_folder = kv_folder or log_folder.parent / WITNESS
        """Where the engines note what their KV caches hold."""
        self.key = ApiKey()
        """The key that the engines and routers of the group require."""
        self.ready_seconds: float = 0.0
        self.restarts: list[tuple[float, float]] = []
        """When engines were started, or started again, after the first request, in seconds of ``clock``."""
        self.left: list[str] = []
        """Descriptions of what could not be ended or removed."""
        self.senders = ThreadPoolExecutor(_MOST_AT_ONCE, thread_name_prefix=f"send-{group.id}")
        """For requests at the same time. Kept, because beside engines that spin a thread takes 15 to 40 ms to start."""
        self._environment = environment
        self._progress = progress
        self._mutation = mutation or Mutation()
        self._places = places
        self._launcher = Launcher(group, profile, log_folder, self.kv_folder, self.key, progress)
        self._readiness = Readiness(group, profile, self._launcher, self._mutation, progress)
        self._routers = Routers(group, log_folder, self.key, profile.timeouts.request, progress)
        self._unverified = unverified_tokens(group.method.draft_tokens, modules_in(profile, group.method))
        self._decode = decoder_of(profile.tokenizer_folder)
        self._revived = 0
        """How often an engine was started again that had ended by itself."""
        self._failed_before = 0.0
        """Failed transfers when the pools were last empty."""
        self._exchange = self._mutation.exchange(self._launcher.clients, profile, self._routers.clients)

    # --- life cycle ---------------------------------------------------------------------------------------------

    @property
    def notes(self) -> Path | None:
        """The folder in which servers that run already note what their KV caches hold, if that is to be judged."""
        attached = (p.server.notes for p in self._launcher.processes.values() if isinstance(p, AttachedEngine))
        return next((folder for folder in attached if folder is not None), None)

    def __enter__(self) -> EngineGroupSession:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._launcher.dump_stacks_on_timeout(error, "request")
        self.stop()

    def _start(self) -> None:
        begun = time.monotonic()
        deadline = begun + self.profile.timeouts.start
        self._launcher.start(self._environment, self._mutation, self._places)
        self._readiness.wait(deadline, self._settle_threads, self.roles)
        self._readiness.send_first_requests(deadline)
        self._settle_threads(*self.roles)
        self._readiness.warm_up_hand_off(self._exchange)
        # Again, because the threads that poll may not have been able to do so before.
        self._settle_threads(*self._launcher.processes)
        self._start_routers()
        self._mutation.require_installed(self.group.id, {r: p.log_text() for r, p in self._launcher.processes.items()})
        self.refresh_counters()
        self.ready_seconds = time.monotonic() - begun

    def _settle_threads(self, *roles: Role) -> None:
        # Engines of one machine that are alone, too: Intel's OpenMP leaves each forked one the same core.
        if self.profile.engine.device == "cpu":
            for role in roles:
                self._launcher.processes[role].settle_threads()

    def _start_routers(self) -> None:
        """Start a router in front of the engines for each topology whose cells need one."""
        routed = {c.topology == "pd" for c in self.group.cells if c.routed}
        urls = {role: process.url for role, process in self._launcher.processes.items()}
        self._routers.start(urls, self._mutation.routers(routed), self._launcher.attached_router if routed else None)

    def restart(self, role: Role) -> None:
        """End an engine and start it again with the same command, while the others go on. Raises HandoffError when it
        cannot be restarted from here, EngineStartError when it does not get ready."""
        begun = time.monotonic()
        self._report_left_over(self._launcher.restart(role))
        self._take_in(role, begun)
        if role == "prefill":
            self._exchange.kept_by_p = 0

    def restart_d(self) -> None:
        """End D and start it again, as ``restart`` does, and do a hand-off to it."""
        self.restart("decode")
        self._warm_up_again()

    def restart_ended(self) -> None:
        """Start the engines again that have ended. Raises as ``restart`` does, HandoffError also for too many ends, and
        EngineDiedError when all are being ended."""
        ended = False
        while (gone := self._launcher.first_gone()) is not None:
            self._revived += 1
            if self._revived > _MOST_REVIVED:
                raise HandoffError(f"{self.group.id}: its engines ended more than {_MOST_REVIVED} times")
            self.restart(gone[0])
            ended = True
        if ended and "decode" in self._launcher.processes:
            self._warm_up_again()
        self.require_alive()

    def _warm_up_again(self) -> None:
        begun = clock.now()
        self._readiness.warm_up_hand_off(self._exchange)
        self.refresh_counters()
        self.restarts.append((begun, clock.now()))

    def second_p(self) -> None:
        """Start another P beside the pair, if there is none yet, and do a hand-off from it. Raises HandoffError when it
        cannot be started from here, EngineStartError when it does not get ready."""
        if SECOND_P in self._launcher.processes:
            return
        begun = time.monotonic()
        self._launcher.start_second_p()
        self._take_in(SECOND_P, begun)
        self._readiness.warm_up_hand_off(self._exchange, by_second_p=True)
        self.refresh_counters()

    def _take_in(self, role: Role, begun: float) -> None:
        """Wait until an engine that was started after the others is ready, too."""
        deadline = begun + self.profile.timeouts.start
        # The threads of the others were settled when they had used little time, by which those that poll are told.
        self._readiness.wait(deadline, self._settle_threads, (role,))
        self._readiness.send_first_requests(deadline)
        self._settle_threads(role)
        self.refresh_counters()
        now = clock.now()
        self.restarts.append((now - (time.monotonic() - begun), now))

    @property
    def restart_seconds(self) -> float:
        """Time that such starts have taken in all."""
        return sum(end - begin for begin, end in self.restarts)

    def give_up(self, cause: str, reason: str) -> None:
        """Write the engines' stacks and end the engines from another thread, because something takes too long.

        The thread that uses them gets EngineDiedError with ``reason``.
        """
        try:
            self._launcher.dump_stacks(cause)
        finally:
            self.end_engines(reason)

    def end_engines(self, reason: str = "") -> None:
        """End the engines from another thread. The thread that uses them gets EngineDiedError and leaves the context,
        which also ends an engine that was about to start."""
        self._launcher.mark_ended(reason)
        self._report_left_over(self._launcher.end())

    @property
    def ended(self) -> bool:
        """Whether the engines were ended from another thread: their answers are no longer evidence."""
        return self._launcher.ended

    def stop(self) -> None:
        """End all routers, then all engines at the same time; one that ignores TERM is killed after the grace
        period."""
        self._launcher.disconnect()
        self._report_left_over(self._routers.end())
        self._report_left_over(self._launcher.end())
        self._launcher.release()
        self.senders.shutdown(wait=False)

    def _report_left_over(self, left: Sequence[str]) -> None:
        for words in left:
            if words not in self.left:
                self.left.append(words)
                self._progress(f"{self.group.id}: LEFT OVER: {words}; see `harness ps` and `harness clean`")

    # --- provenance ---------------------------------------------------------------------------------------------

    def records(self) -> list[EngineRecord]:
        """Return how the engines and routers were started, for the provenance of a run."""
        engines = [self._record(role, process) for role, process in self._launcher.processes.items()]
        return [*engines, *self._routers.records()]

    def second_p_records(self) -> list[EngineRecord]:
        """Return how the second P was started, or nothing if there is none."""
        return [self._record(r, p) for r, p in self._launcher.processes.items() if r == SECOND_P]

    def _record(self, role: Role, process: EngineHandle) -> EngineRecord:
        facts = process.server.info.facts if isinstance(process, AttachedEngine) else facts_in(process.log_text())
        pool = self._kv_pool(role)
        return EngineRecord(
            role=role,
            group=self.group.id,
            node=self._launcher.places[role].node,
            pid=process.pid,
            argv=redact.words(process.command.argv),
            env=redact.environment(process.command.env),
            log=process.log_path.name,
            ready_seconds=round(self._readiness.seconds.get(role, 0.0), 2),
            **facts._asdict(),
            kv_blocks=pool.blocks,
            block_size=pool.block_size,
            kept_blocks=self._exchange.kept_by_p if role == "prefill" else 0,
            counters=tuple(sorted(self._launcher.clients[role].last_snapshot)),
            mutants=self._mutation.installed(role),
        )

    def _kv_pool(self, role: Role) -> KvPool:
        with contextlib.suppress(HandoffError):
            return self._launcher.clients[role].kv_pool()
        return KvPool()

    # --- requests -----------------------------------------------------------------------------------------------

    def observe(self, cell: Cell, prompt: Prompt, form: Form, sequence: int) -> Observation:
        """Send one cold prompt the way the cell requires; a failed exchange is part of the observation.

        A hand-off that reached D too late is repeated once. The second observation replaces the first only if both have
        the same outcome, so that any deviation of the late one stays on record. Raises EngineDiedError when an engine
        of the group is gone.
        """
        first = self._observe_once(cell, prompt, form, sequence)
        if not first.came_late(self.profile.engine.kv_lease_s):
            return first
        self._progress(f"{cell.id}: {prompt.id} reached D after P's lease had expired; sending it again")
        again = self._observe_once(cell, prompt, form, sequence)
        if again.error or first.error or not _same_outcome(first.final, again.final):
            return first
        return again.after_late(first)

    def _observe_once(self, cell: Cell, prompt: Prompt, form: Form, sequence: int) -> Observation:
        legs: list[Leg] = []
        started = clock.now()
        ask = Ask(cell.topology == "pd", payload(prompt, form), routed=cell.routed)
        broken, shared = self.ask_counted(ask, legs)
        return Observation(
            cell=cell.id,
            prompt_id=prompt.id,
            form=form,
            sequence=sequence,
            sent_ids=prompt.ids,
            source=prompt.source,
            known_answer=prompt.expected,
            engine_roles=self.roles,
            legs=tuple(legs),
            max_tokens=self.profile.workload.max_tokens,
            shared_counters=shared,
            error=broken.error if broken is not None else None,
            failure=broken.failure if broken is not None else None,
            started_at=started,
        )

    def ask_counted(self, ask: Ask, legs: list[Leg]) -> tuple[Broken | None, dict[str, dict[str, float]]]:
        """Send a request that has the engines to itself, as ``attempt`` does.

        Also return the growth of P's counters if a router hands off, because P's leg is not visible then.
        """
        if not (ask.routed and ask.hand_off):
            return self.attempt(ask, legs), {}
        prefill = self._launcher.clients["prefill"]
        before = prefill.last_snapshot
        broken = self.attempt(ask, legs)
        if broken is not None and broken.gone is not None:
            return broken, {}
        try:
            return broken, {"prefill": prefill.counters_after(before, {"finished_requests": 1})}
        except HandoffError as failure:
            return broken or self._broken(failure), {}

    def ask(self, ask: Ask, legs: list[Leg]) -> str | None:
        """Send a request as ``attempt`` does; return why there is no answer, or None. Raises EngineDiedError when an
        engine of the group is gone."""
        broken = self.attempt(ask, legs)
        if broken is None:
            return None
        if broken.gone is not None:
            raise broken.gone
        return broken.error

    def attempt(self, ask: Ask, legs: list[Leg]) -> Broken | None:
        """Send a request, appending each leg as soon as it is answered; return what came in place of an answer, or
        None."""
        try:
            self._exchange.send(ask, legs)
        except HandoffError as failure:
            return self._broken(failure)
        finally:
            legs[:] = map(self._described, legs)
        return None

    def _broken(self, error: HandoffError) -> Broken:
        """Return what is known of a request without an answer, once it is known whether the engines are alive."""
        self._launcher.dump_stacks_on_timeout(error, "request")
        said = None
        if isinstance(error, FailedAnswerError):
            said = Failure(role=error.role, status=error.status, words=error.words)
            if said.by_itself:
                self._await_end()
        try:
            self.require_alive()
        except EngineDiedError as gone:
            end = self._launcher.first_gone()
            if end is not None and end[1].code is not None:
                role, died = end
                status = said.status if said is not None else None
                said = Failure(role=leg_role(role), status=status, words=died.words, ended=died.code)
            return Broken(f"{error}; {gone}", said, gone)
        return Broken(str(error), said)

    def end_of(self, seconds: float) -> Broken | None:
        """Return the end of an engine that comes within some seconds; None if none does."""
        until = time.monotonic() + seconds
        while all(map(self._is_well, self._launcher.clients.values())):
            if time.monotonic() > until:
                return None
            time.sleep(_POLL_S)
        self._await_end()
        broken = self._broken(HandoffError("no answer"))
        return broken if broken.gone is not None else None

    def _await_end(self) -> None:
        """Wait until a server whose engine has ended, which it tells with its health, has ended, too."""
        until = time.monotonic() + _END_S
        while not all(map(self._is_well, self._launcher.clients.values())) and time.monotonic() < until:
            if self._launcher.first_gone() is not None or self.ended:
                return
            time.sleep(_POLL_S)

    @staticmethod
    def _is_well(client: Client) -> bool:
        try:
            return client.get("/health").status_code == 200
        except httpx.HTTPError:
            return False

    def _described(self, leg: Leg) -> Leg:
        """Return an answer with the text of its tokens, that says which of its steps may have fewer than k drafts."""
        if leg.text is not None and self._decode is not None:
            leg = leg.model_copy(update={"own_text": own_text(self._decode, leg)})
        if leg.speculation is None:
            return leg
        length = (leg.usage_prompt_tokens or 0) + len(leg.output_ids or ())
        told = {
            "up_to": self.group.method.traits.up_to,
            "at_limit": length >= self.profile.engine.max_model_len - self._without_drafts,
            "may_pad": self._unverified <= 1 and self.group.method.traits.pads,
        }
        return leg.model_copy(update={"speculation": leg.speculation.model_copy(update=told)})

    @property
    def _without_drafts(self) -> int:
        """How many tokens before the end of the context a step may have no room for drafts. Where steps overlap, as on
        GPUs, one is scheduled as if all drafts of the one before it were accepted, with its own behind them."""
        return max(0, 2 * self.group.method.draft_tokens - 1) if self.profile.engine.device == "gpu" else 0

    def require_alive(self) -> None:
        """Raise EngineDiedError when an engine or a router of the group is gone or is being ended, even if it is still
        alive."""
        self._launcher.require_alive()
        self._routers.require_alive()

    @property
    def roles(self) -> tuple[Role, ...]:
        """The engines of the topology."""
        return tuple(role for role in self._launcher.processes if role != SECOND_P)

    def url(self, role: Role) -> str:
        """Return the URL of an engine of the group."""
        return self._launcher.processes[role].url

    def router_url(self, cell: Cell) -> str:
        """Return the URL of the router that a routed cell is sent through."""
        return self._routers.clients[cell.topology == "pd"].url

    def client(self, role: Role) -> Client:
        """Return the client of an engine; in a pair, ``single`` means the decode engine."""
        return self._exchange.client(role)

    def refresh_counters(self) -> None:
        """Read the counters, so that requests sent uncounted before are not charged to the next one. Raises
        HandoffError."""
        for client in self._launcher.clients.values():
            client.snapshot()

    def load_adapter(self, name: str, folder: str) -> None:
        """Load a LoRA adapter into every engine under a name. Raises HandoffError when one does not take it."""
        for client in self._launcher.clients.values():
            client.load_adapter(name, folder)

    def settle(self) -> None:
        """Wait until the engines count nothing more, so that what they did for requests that were given up is not
        charged to the next one. Raises HandoffError when the counters cannot be read."""
        until = time.monotonic() + _RESET_S
        clients = list(self._launcher.clients.values())
        before = [c.last_snapshot for c in clients]
        while before != (now := [c.snapshot() for c in clients]) and time.monotonic() < until:
            before = now
            time.sleep(_SETTLED_S)

    def reset_caches(self) -> None:
        """Reset all prefix caches. Raises HandoffError when an engine does not reset its cache in time."""
        for role, after in self.emptied().items():
            if after is None:
                raise HandoffError(
                    f"{role} engine: POST /reset_prefix_cache was refused for {self._patience_s:.0f} s, because a "
                    "request or a hand-off still holds blocks"
                )

    @property
    def _patience_s(self) -> float:
        """Seconds within which every block must be free: P holds those of a hand-off that D never finished until the
        lease ends, and D those that P may read back."""
        kept = self._exchange.kept_by_p or self._failed_transfers > self._failed_before
        engine = self.profile.engine
        return _RESET_S + max(engine.kv_lease_s if kept else 0, engine.read_back_s)

    @property
    def _failed_transfers(self) -> float:
        """How many transfers D has counted as failed. Where it then computes the prompt by itself, P is not told."""
        decode = self._launcher.clients.get("decode")
        return decode.last_snapshot.get("nixl_failed_transfers", 0) if decode is not None else 0

    def emptied(self) -> dict[str, float | None]:
        """Reset all prefix caches, which succeeds once no block of the KV pool is in use.

        Return after how many seconds each engine was empty, by role; None for one that never was in its time. Raises
        HandoffError when an engine does not answer.
        """
        begun = time.monotonic()
        until = begun + self._patience_s
        emptied: dict[str, float | None] = {r: self._emptied(r, begun, until) for r in self._launcher.clients}
        if self._exchange.kept_by_p or (emptied.get("prefill") or 0) > _POLL_S:
            self._count_expired()
        self._failed_before = self._failed_transfers
        return emptied

    def _count_expired(self) -> None:
        """Let P count the leases that have ended, which it does while it serves a request, so that they are not charged
        to the next cell. Raises HandoffError."""
        self._exchange.kept_by_p = 0
        ids = list(range(1, self.profile.engine.largest_block + 2))
        self._exchange.send(Ask(False, ids, max_tokens=1, alone="prefill", counted=False), [])
        self.settle()

    def _emptied(self, role: Role, begun: float, until: float) -> float | None:
        while not self._reset(role):
            if time.monotonic() > until:
                return None
            time.sleep(_POLL_S)
        return round(time.monotonic() - begun, 3)

    def _reset(self, role: Role) -> bool:
        response = self._launcher.clients[role].post("/reset_prefix_cache")
        try:
            return response.status_code == 200 and (not response.content or bool(response.json().get("success", True)))
        except (ValueError, AttributeError):
            return False

    def switch(self, *mutants: str) -> None:
        """Turn these mutants on, and all others off."""
        self._mutation.switch(mutants)


def _same_outcome(one: Leg | None, other: Leg | None) -> bool:
    """Whether two answers to the same request have the same tokens and accepted drafts."""
    return (
        one is not None
        and other is not None
        and (one.output_ids, one.speculation) == (other.output_ids, other.speculation)
    )
