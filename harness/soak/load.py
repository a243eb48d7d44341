"""Keeps requests under way on running engines, a round at a time: every prompt once, each with a cache of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait

from harness import clock
from harness.engine.command import Role
from harness.engine.counters import LATE_COUNTERS, delta
from harness.engine.exchange import Ask, payload
from harness.engine.topology import EngineGroupSession
from harness.history import Leg, Observation
from harness.matrix import Cell
from harness.prompts import Prompt
from harness.signals import deaf

_LOOK_S = 0.5


class _Request:
    """One request of a round and what came of it."""

    def __init__(self, prompt: Prompt, sequence: int) -> None:
        self.prompt = prompt
        self.sequence = sequence
        self.legs: list[Leg] = []
        self.started = 0.0
        self.error: str | None = None
        self.done = False


class Load:
    """Plays rounds of one cell. ``observations`` holds what the last one gave, also when it broke off."""

    def __init__(
        self,
        session: EngineGroupSession,
        cell: Cell,
        prompts: Sequence[Prompt],
        concurrency: int,
        keep: Callable[[Observation], object] = lambda _: None,
    ) -> None:
        """``keep`` gets each answer as soon as it is there, from the thread that asked, without the engines' counters:
        those are of the whole round."""
        self._session = session
        self._keep = keep
        self._cell = cell
        self._prompts = tuple(prompts)
        self._concurrency = concurrency
        self._sequence = 0
        """Of the next round's first request."""
        self.observations: list[Observation] = []

    def play(self, number: int) -> list[Observation]:
        """One round; it ends when every request is answered, so that the counters are those of the round.

        Raises EngineDiedError when an engine is gone, and KeyboardInterrupt; the engines are ended then, because
        requests under way would keep their threads for minutes.
        """
        session = self._session
        self.observations = []
        requests = [_Request(p, self._sequence + i) for i, p in enumerate(self._prompts)]
        self._sequence += len(requests)
        last = {role: session.client(role).last_snapshot for role in session.roles}
        before = {role: session.client(role).snapshot() for role in session.roles}
        try:
            self._send(number, requests)
            session.require_alive()
            shared = {role: self._grown(role, before, last, requests) for role in session.roles}
            self.observations = self._observations(number, requests, shared)
        except BaseException:
            self.observations = self._observations(number, requests, {})
            raise
        return list(self.observations)

    def _send(self, number: int, requests: Sequence[_Request]) -> None:
        stopped = threading.Event()
        with ThreadPoolExecutor(self._concurrency, thread_name_prefix="soak") as pool:
            left: set[Future[None]] = {pool.submit(self._one, number, r, stopped) for r in requests}
            try:
                while left:
                    ended, left = wait(left, _LOOK_S, FIRST_EXCEPTION)
                    for future in ended:
                        future.result()
            except BaseException:
                # A second signal must not leave threads that wait for engines that nobody ended.
                with deaf():
                    stopped.set()
                    pool.shutdown(wait=False, cancel_futures=True)
                    self._session.end_engines()
                    pool.shutdown()
                raise

    def _one(self, number: int, request: _Request, stopped: threading.Event) -> None:
        if stopped.is_set():
            return
        request.started = clock.now()
        ask = Ask(
            hand_off=self._cell.topology == "pd",
            payload=payload(request.prompt, "ids"),
            counted=False,
            routed=self._cell.routed,
        )
        request.error = self._session.ask(ask, request.legs)
        # What engines answer that are being ended is no evidence.
        if not stopped.is_set():
            request.done = True
            self._keep(self._observation(number, request, {}))

    def _grown(
        self,
        role: Role,
        before: Mapping[Role, Mapping[str, float]],
        last: Mapping[Role, Mapping[str, float]],
        requests: Sequence[_Request],
    ) -> dict[str, float]:
        """Growth of an engine's counters over the round."""
        client = self._session.client(role)
        asked = sum(self._asked(role, leg.role) for r in requests for leg in r.legs)
        shared = client.counters_after(before[role], {"finished_requests": asked})
        # What an engine counts whenever it notices counts from the last look at it.
        late = delta(last[role], client.last_snapshot)
        return shared | {name: late[name] for name in LATE_COUNTERS if name in late}

    def _asked(self, role: Role, answered: str) -> bool:
        """Whether an engine was asked for a leg that ``answered`` gave: a router asks P before D."""
        if role == "prefill" and self._cell.routed:
            return answered == "decode"
        return answered == role or (answered == "single" and role == "decode")

    def _observations(
        self, number: int, requests: Sequence[_Request], shared: Mapping[Role, dict[str, float]]
    ) -> list[Observation]:
        return [self._observation(number, r, shared) for r in requests if r.done]

    def _observation(self, number: int, request: _Request, shared: Mapping[Role, dict[str, float]]) -> Observation:
        return Observation(
            cell=self._cell.id,
            prompt_id=request.prompt.id,
            form="ids",
            instance=number,
            max_tokens=self._session.profile.workload.max_tokens,
            concurrent=self._concurrency,
            shared_counters=dict(shared),
            sequence=request.sequence,
            sent_ids=request.prompt.ids,
            engine_roles=self._session.roles,
            legs=tuple(request.legs),
            error=request.error,
            started_at=request.started,
        )
