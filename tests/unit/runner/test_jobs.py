"""Jobs in threads, and the engines that they run: what a signal, a failure or a slow release of memory costs."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from harness.engines.inventory import Inventory, Memory
from harness.errors import EngineStartError
from harness.runner.jobs import JobEvents, RunningSessions, run_jobs
from harness.scheduling.model import Device, EngineNeed, Job
from harness.scheduling.planning import planned
from harness.util.signals import interrupt

JOBS = tuple(Job(f"job-{n}", (EngineNeed("single", 1, 4.0),), 1.0, 1.0) for n in range(3))


def inventory(count: int) -> Inventory:
    return Inventory(tuple(Device(f"gpu-{n}", "node", 4.0, n) for n in range(count)), {}, shared=False)


class Engines:
    """Engines whose end takes until all of them are being ended."""

    def __init__(self, name: str, all_end: threading.Barrier) -> None:
        self.group = SimpleNamespace(id=name)
        self.all_end = all_end
        self.gone = threading.Event()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def end_engines(self):
        self.all_end.wait(20)
        self.gone.set()

    def give_up(self, _what, _reason):
        self.end_engines()


@pytest.fixture
def hears_term() -> Iterator[None]:
    old = signal.signal(signal.SIGTERM, interrupt)
    yield
    signal.signal(signal.SIGTERM, old)


@pytest.mark.usefixtures("hears_term")
def test_a_signal_while_jobs_are_started_ends_the_engines_of_all_side_by_side():
    all_end, up = threading.Barrier(3), threading.Barrier(4)
    said: list[str] = []
    sessions = RunningSessions(said.append)
    scheduler = planned(JOBS, inventory(3).devices)
    start_next = scheduler.start_next

    def strikes():
        found = start_next()
        if found:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)
        return found

    scheduler.start_next = strikes
    returned, told = [], []

    def run(placement):
        with sessions.started(Engines(placement.job.id, all_end)) as session:
            up.wait(20)
            assert session.gone.wait(20)
        returned.append(placement.job.id)

    # The signal comes before any thread has been started, and is heard after all of them were.
    events = JobEvents(ending=lambda error: (up.wait(20), told.append(type(error).__name__)), ended=told.append)
    with pytest.raises(KeyboardInterrupt):
        run_jobs(scheduler, inventory(3), run, sessions, said.append, events)
    assert sorted(returned) == [job.id for job in JOBS] and not said
    assert told[0] == "Signalled" and told[1] >= 0 and sessions.ending
    late = sessions.started(Engines("late", all_end))
    with pytest.raises(EngineStartError, match="late: not started, because the run is ending"), late:
        pass


def test_a_device_whose_memory_is_kept_holds_nobody_else_up_and_is_used_no_more(monkeypatch):
    released = threading.Event()

    def kept(_self, device):
        if device != "gpu-0":
            return ""
        assert released.wait(20)
        return "4.0 GiB are still used"

    monkeypatch.setattr(Memory, "kept", kept)
    ran, refused, said = [], {}, []

    def run(placement):
        ran.append((placement.job.id, *placement.devices))
        if len(ran) == len(JOBS):
            released.set()

    scheduler = planned(JOBS, inventory(2).devices)
    events = JobEvents(refused=refused.update)
    run_jobs(scheduler, inventory(2), run, RunningSessions(said.append), said.append, events)
    # The third one ran on the other device while the memory of the first was waited for.
    assert len(ran) == 3 and [device for _, device in ran].count("gpu-0") == 1
    assert said == ["gpu-0 will not be used again: 4.0 GiB are still used"] and not refused


def test_after_a_limit_in_time_nothing_is_started_and_the_reason_is_said_once():
    said: list[str] = []
    sessions = RunningSessions(said.append)
    with sessions.started(Engines("slow", threading.Barrier(1))) as session:
        sessions.give_up("run", "the run took too long")
        assert session.gone.is_set()
    sessions.refuse("another reason")
    assert said == ["the run took too long"] and sessions.refusal == said[0] and not sessions.ending
    with pytest.raises(EngineStartError, match="too long"), sessions.started(Engines("next", threading.Barrier(1))):
        pass
