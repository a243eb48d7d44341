"""Jobs on devices, each in a thread of its own, and the engines that they run: one loop for runs and self-tests."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import NamedTuple

from harness.engines.inventory import Inventory, Memory
from harness.engines.session import EngineGroupSession
from harness.errors import EngineStartError
from harness.scheduling.model import Placement
from harness.scheduling.scheduler import Scheduler
from harness.util.signals import deferred, ignored


class RunningSessions:
    """The engines that run, in whatever thread, so that another thread can end them all."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._lock = threading.Lock()
        self._sessions: set[EngineGroupSession] = set()
        self._ending = False
        self._refusal = ""

    @property
    def ending(self) -> bool:
        """Whether all engines were ended: what they answer then is no answer."""
        return self._ending

    @property
    def refusal(self) -> str:
        """Why no further engines are started; empty while they are."""
        return self._refusal

    def refuse(self, reason: str) -> None:
        """Start no further engines; the first reason stands."""
        with self._lock:
            self._refusal = self._refusal or reason

    @contextmanager
    def started(self, session: EngineGroupSession) -> Iterator[EngineGroupSession]:
        """Start a session for the block. Raises EngineStartError when no further engines are started."""
        with self._lock:
            if self._refusal:
                raise EngineStartError(self._refusal)
            if self._ending:
                raise EngineStartError(f"{session.group.id}: not started, because the run is ending")
            self._sessions.add(session)
        try:
            with session:
                yield session
        finally:
            with self._lock:
                self._sessions.discard(session)

    def end(self) -> None:
        """End all engines now, side by side; the threads that use them will notice."""
        with self._lock:
            self._ending = True
            sessions = list(self._sessions)
        with ThreadPoolExecutor(max(1, len(sessions))) as pool:
            ends = [pool.submit(s.end_engines) for s in sessions]
        for trouble in filter(None, (e.exception() for e in ends)):
            self._say(f"while ending the engines: {type(trouble).__name__}: {trouble}")

    def give_up(self, what: str, reason: str) -> None:
        """End all engines because of a limit in time, unless they are being ended, and start no further ones."""
        with self._lock:
            if self._ending:
                return
            self._refusal = reason
            sessions = list(self._sessions)
        self._say(reason)
        with ThreadPoolExecutor(max(1, len(sessions))) as pool:
            for session in sessions:
                pool.submit(session.give_up, what, reason)


def _nothing(*_: object) -> None:
    pass


class JobEvents(NamedTuple):
    """What is called, in the thread that starts the jobs, as they go on."""

    started: Callable[[], object] = _nothing
    """All that fit were started, and some jobs run."""
    over: Callable[[Placement], object] = _nothing
    """A job is over; what it held is given to others afterwards."""
    refused: Callable[[Mapping[str, str]], object] = _nothing
    """Jobs no longer fit anywhere, with the reasons by id."""
    ending: Callable[[BaseException], object] = _nothing
    """All engines will be ended because of this."""
    ended: Callable[[float], object] = _nothing
    """They have ended, and all jobs have returned; that took so many seconds."""


_UNHEARD = JobEvents()


def run_jobs(
    scheduler: Scheduler,
    inventory: Inventory,
    run: Callable[[Placement], None],
    sessions: RunningSessions,
    say: Callable[[str], None],
    events: JobEvents = _UNHEARD,
) -> None:
    """Run the jobs of a scheduler, each in a thread, as many at a time as the devices allow.

    Whatever is raised meanwhile, KeyboardInterrupt included, ends all engines; it is raised when the jobs have
    returned.
    """
    devices = _Devices(inventory, sessions)
    running: dict[Future[dict[str, str]], Placement] = {}
    pool = ThreadPoolExecutor(max(1, len(scheduler.rule.order)))
    try:
        while True:
            # Of a thread that is interrupted while it starts, the pool would not know, nor wait for its end.
            with deferred():
                for placement in scheduler.start_next():
                    running[pool.submit(devices.run, run, placement)] = placement
            if not running:
                return
            events.started()
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                placement = running.pop(future)
                for device, reason in future.result().items():
                    say(f"{device} will not be used again: {reason}")
                    events.refused(scheduler.quarantine(device, reason))
                events.over(placement)
                scheduler.done(placement.job.id)
    except BaseException as error:
        # A second signal must not leave engines behind.
        with ignored():
            events.ending(error)
            stopping = time.monotonic()
            sessions.end()
            pool.shutdown()
            events.ended(time.monotonic() - stopping)
        raise
    finally:
        pool.shutdown()


class _Devices:
    """How many jobs are on each device, and whether those without one can be used again."""

    def __init__(self, inventory: Inventory, sessions: RunningSessions) -> None:
        self._memory = Memory(inventory)
        self._sessions = sessions
        self._lock = threading.Lock()
        self._jobs: Counter[str] = Counter()

    def run(self, run: Callable[[Placement], None], placement: Placement) -> dict[str, str]:
        """Run one job; return the devices that cannot be used again, with the reason."""
        with self._lock:
            self._jobs.update(placement.devices)
        try:
            run(placement)
        finally:
            with self._lock:
                self._jobs.subtract(placement.devices)
                empty = [d for d in placement.devices if not self._jobs[d]]
        return {d: reason for d in empty if not self._sessions.ending and (reason := self._memory.kept(d))}
