"""Keep running engines under load, a round at a time: every prompt once, each with its own cache salt."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import closing

from harness.engines.request import Ask, payload
from harness.engines.session import EngineGroupSession
from harness.history.records import Leg, Observation
from harness.profiles.cells import Cell
from harness.prompts.model import Prompt
from harness.runner.play import SharedCounters
from harness.runner.recorder import Recorder, cleaned
from harness.util import clock
from harness.util.signals import deferred, ignored
from harness.util.storage import LineFile, writing


class Load:
    """Plays rounds of one cell.

    Answers are appended to ``round.jsonl`` as they arrive, without the engines' counters, which exist only for the
    whole round. The file is left behind only by a soak that was killed during a round.
    """

    def __init__(
        self, session: EngineGroupSession, cell: Cell, prompts: Sequence[Prompt], concurrency: int, recorder: Recorder
    ) -> None:
        self._session = session
        self._cell = cell
        self._prompts = tuple(prompts)
        self._concurrency = concurrency
        self._recorder = recorder
        self._path = recorder.folder / "round.jsonl"
        self._lock = threading.Lock()
        self._answers: dict[int, Observation] = {}
        """Those that the history does not have yet, by sequence number."""
        self._counters: dict[str, dict[str, float]] = {}
        """Growth of each engine's counters during the round; empty until it is over."""

    def play(self, number: int) -> list[Observation]:
        """Play one round, which ends when every request is answered, so that the counters are those of the round.

        Raises StorageError, EngineDiedError when an engine died, and KeyboardInterrupt; the engines are ended then,
        because pending requests would keep their threads busy for minutes.
        """
        self._answers, self._counters = {}, {}
        counters = SharedCounters(self._session, self._cell.routed)
        with closing(LineFile(self._path)) as journal:
            self._send(number, journal)
            self._session.require_alive()
            self._counters = counters.grown(leg for o in self._answers.values() for leg in o.legs)
        return self._observations()

    def keep(self) -> None:
        """Move the answers into the history. Signals are deferred until each is there exactly once."""
        with deferred():
            for observation in self._observations():
                self._recorder.append(observation)
                del self._answers[observation.sequence]
            with writing(self._path):
                self._path.unlink(missing_ok=True)

    def _observations(self) -> list[Observation]:
        return [o.model_copy(update={"shared_counters": self._counters}) for _, o in sorted(self._answers.items())]

    def _send(self, number: int, journal: LineFile) -> None:
        stopped = threading.Event()
        with ThreadPoolExecutor(self._concurrency, thread_name_prefix="soak") as pool:
            pending = [pool.submit(self._one, number, at, journal, stopped) for at in range(len(self._prompts))]
            try:
                for future in wait(pending, return_when=FIRST_EXCEPTION).done:
                    future.result()
            except BaseException:
                # A second signal must not leave threads waiting for engines that were never ended.
                with ignored():
                    stopped.set()
                    pool.shutdown(wait=False, cancel_futures=True)
                    self._session.end_engines()
                    pool.shutdown()
                raise

    def _one(self, number: int, at: int, journal: LineFile, stopped: threading.Event) -> None:
        if stopped.is_set():
            return
        prompt, started = self._prompts[at], clock.now()
        legs: list[Leg] = []
        pair = self._cell.topology == "pd"
        ask = Ask(hand_off=pair, payload=payload(prompt, "ids"), counted=False, routed=self._cell.routed)
        error = self._session.ask(ask, legs)
        # Answers from engines that are being ended are not evidence.
        if stopped.is_set():
            return
        answer = Observation(
            cell=self._cell.id,
            prompt_id=prompt.id,
            form="ids",
            instance=number,
            max_tokens=self._session.profile.workload.max_tokens,
            concurrent=self._concurrency,
            sequence=(number - 1) * len(self._prompts) + at,
            sent_ids=prompt.ids,
            source=prompt.source,
            known_answer=prompt.expected,
            engine_roles=self._session.roles,
            legs=tuple(legs),
            error=error,
            started_at=started,
        )
        with self._lock:
            self._answers[answer.sequence] = answer
            journal.append(cleaned(answer).model_dump_json())
