"""A session, its client and its process trees, which stand for those of a soak."""

from __future__ import annotations

import threading
import time

from harness.history.records import EngineRecord
from harness.lab.soak.model import HARNESS, TreeUsage
from harness.lab.soak.run import prepare_soak
from tests.support.builders import engine
from tests.support.fake_answers import answer

FLAT = TreeUsage(processes=1, threads=8, descriptors=30, rss_mib=200, pss_mib=180, shm_files=2, shm_mib=16)


class FakeWatcher:
    """Stands for process trees."""

    newest: FakeWatcher | None = None

    def __init__(self, took_s: float = 0.0, dies_after: int | None = None, trees: dict[str, TreeUsage] | None = None):
        self.took_s, self.dies_after, self.seen = took_s, dies_after, 0
        self.trees = trees or {HARNESS: FLAT, "single": FLAT}
        FakeWatcher.newest = self

    @classmethod
    def await_sample(cls, least_s: float, most_s: float = 0.2) -> None:
        """Wait until the newest watcher is asked again: a busy machine may give a sampler no core for a whole round."""
        begun, seen = time.monotonic(), cls.newest.seen if cls.newest is not None else 0
        time.sleep(least_s)
        while cls.newest is not None and cls.newest.seen == seen and time.monotonic() < begun + most_s:
            time.sleep(0.001)

    def sample(self) -> dict[str, TreeUsage]:
        time.sleep(self.took_s)
        self.seen += 1
        if self.dies_after is not None and self.seen > self.dies_after:
            raise OSError("no more descriptors")
        return self.trees


class FakeClient:
    """Counts what the fake session answered."""

    def __init__(self) -> None:
        self.count = 0.0
        self.last_snapshot: dict[str, float] = {}

    def snapshot(self) -> dict[str, float]:
        self.last_snapshot = {"finished_requests": self.count}
        return self.last_snapshot

    def counters_after(self, before: dict[str, float], awaited: dict[str, int]) -> dict[str, float]:
        grown = {"finished_requests": self.snapshot()["finished_requests"] - before["finished_requests"]}
        assert grown["finished_requests"] >= awaited["finished_requests"]
        return grown


class FakeSession:
    """One engine that answers every prompt as the committed baseline says, but for the answers whose number is in
    ``wrong``; no engine is behind it."""

    roles = ("single",)
    stays: tuple[str, ...] = ()
    """What cannot be ended."""
    wrong = range(0)
    after: int | None = None
    """Answers after which ``event`` is called, once."""
    event = staticmethod(lambda: None)
    engines: tuple[EngineRecord, ...] = ()
    takes_s = 0.005

    def __init__(self, group, profile, *_args, **_kwargs):
        self.group, self.profile, self.fake = group, profile, FakeClient()
        self.work = prepare_soak("cpu", "single-none").works[0]
        self.items = {i.prompt.ids: i for i in self.work.items}
        self.under_way = self.most = 0
        self.lock = threading.Lock()
        self.ended = False
        self.left: list[str] = []
        type(self).newest = self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.ended = True
        self.left = list(self.stays)

    def end_engines(self):
        self.ended = True

    def records(self):
        return list(self.engines) or [engine(self.group.id, "single")]

    def require_alive(self):
        pass

    def emptied(self):
        return {"single": 0.0}

    def client(self, _role):
        return self.fake

    def ask(self, ask, legs):
        with self.lock:
            self.under_way += 1
            self.most = max(self.most, self.under_way)
        FakeWatcher.await_sample(self.takes_s)
        with self.lock:
            self.under_way -= 1
            self.fake.count += 1
            count = int(self.fake.count)
        if count == self.after:
            type(self).event()
        (leg,) = answer(self.work, self.items[tuple(ask.payload)], 0).legs
        if count in self.wrong:
            leg = leg.model_copy(update={"output_ids": (*leg.output_ids[:-1], leg.output_ids[-1] ^ 1)})
        legs.append(leg)
