"""Keep running engines under load, a round at a time: every prompt once, each with its own cache salt."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait

from harness.engines.request import Ask, payload
from harness.engines.session import EngineGroupSession
from harness.history.records import Leg, Observation
from harness.profiles.cells import Cell
from harness.prompts.model import Prompt
from harness.runner.play import SharedCounters
from harness.util import clock
from harness.util.signals import ignored

_LOOK_S = 0.5


class _Request:
    """One request of a round and its result."""

    def __init__(self, prompt: Prompt, sequence: int) -> None:
        self.prompt = prompt
        self.sequence = sequence
        self.legs: list[Leg] = []
        self.started = 0.0
        self.error: str | None = None
        self.done = False


class Load:
    """Plays rounds of one cell. ``observations`` holds the results of the last one, even if it was aborted."""

    def __init__(
        self,
        session: EngineGroupSession,
        cell: Cell,
        prompts: Sequence[Prompt],
        concurrency: int,
        keep: Callable[[Observation], object] = lambda _: None,
    ) -> None:
        """Prepare to play rounds.

        ``keep`` is called with each answer as it arrives, in the requesting thread, and without the engines' counters,
        which exist only for the whole round.
        """
        self._session = session
        self._keep = keep
        self._cell = cell
        self._prompts = tuple(prompts)
        self._concurrency = concurrency
        self._sequence = 0
        """Number of the next round's first request."""
        self.observations: list[Observation] = []

    def play(self, number: int) -> list[Observation]:
        """Play one round, which ends when every request is answered, so that the counters are those of the round.

        Raises EngineDiedError when an engine died, and KeyboardInterrupt; the engines are ended then, because pending
        requests would keep their threads busy for minutes.
        """
        session = self._session
        self.observations = []
        requests = [_Request(p, self._sequence + i) for i, p in enumerate(self._prompts)]
        self._sequence += len(requests)
        counters = SharedCounters(session, self._cell.routed)
        try:
            self._send(number, requests)
            session.require_alive()
            shared = counters.grown(leg for r in requests for leg in r.legs)
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
                # A second signal must not leave threads waiting for engines that were never ended.
                with ignored():
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
        # Answers from engines that are being ended are not evidence.
        if not stopped.is_set():
            request.done = True
            self._keep(self._observation(number, request, {}))

    def _observations(
        self, number: int, requests: Sequence[_Request], shared: Mapping[str, dict[str, float]]
    ) -> list[Observation]:
        return [self._observation(number, r, shared) for r in requests if r.done]

    def _observation(self, number: int, request: _Request, shared: Mapping[str, dict[str, float]]) -> Observation:
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
