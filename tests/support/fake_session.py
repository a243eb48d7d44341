"""A session that stands for the engines of a group of cells, for tests of the runner."""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path
from typing import ClassVar

import pytest

import harness.engines.inventory
import harness.runner.groups
from harness.errors import EngineDiedError
from tests.support.builders import engine


class FakeSession:
    """Stands for running engines: it answers nothing and notes when it was up."""

    odd: frozenset[str] = frozenset()
    """Groups that fail in a way that nobody thought of."""
    linger: float = 0.0
    """Seconds that ending takes."""
    left: ClassVar[list[str]] = []
    """What cannot be ended."""
    stuck: frozenset[str] = frozenset()
    """Groups that cannot be told to end."""
    up: ClassVar[Counter[str]] = Counter()
    most: int = 0
    order: ClassVar[list[str]] = []
    broken: frozenset[str] = frozenset()
    seconds: float = 0.05
    ready_seconds = 1.0
    lock = threading.Lock()
    kv_folder = Path("no-engines")
    notes = None
    third = staticmethod(lambda: None)
    """Called when three groups are up."""

    def __init__(self, group, profile, *_args, places, **_kwargs):
        self.group, self.profile, self.places = group, profile, places
        self.gone = threading.Event()

    @classmethod
    def reset(cls, broken: frozenset[str] = frozenset(), seconds: float = 0.05) -> None:
        cls.up, cls.most, cls.order, cls.broken, cls.seconds = Counter(), 0, [], broken, seconds
        cls.odd = cls.stuck = frozenset()
        cls.linger = 0.0
        cls.left = []

    def __enter__(self):
        with self.lock:
            for place in self.places.values():
                for device in place.devices:
                    self.up[device] += 1
                    assert self.up[device] == 1, f"two engines on core {device}"
            FakeSession.order.append(self.group.id)
            FakeSession.most = max(FakeSession.most, sum(self.up.values()))
            if len(FakeSession.order) == 3:
                self.third()
        if self.group.id in self.odd:
            self.__exit__()
            raise ZeroDivisionError("of all things")
        if self.group.id in self.broken:
            self.__exit__()
            raise EngineDiedError(f"{self.group.id} broke on purpose")
        return self

    def __exit__(self, *_):
        with self.lock:
            for place in self.places.values():
                self.up.subtract(place.devices)

    def end_engines(self):
        time.sleep(self.linger)
        self.gone.set()
        if self.group.id in self.stuck:
            raise OSError("it does not want to")

    @property
    def ended(self):
        return self.gone.is_set()

    def switch(self, *_):
        pass

    def records(self):
        return [engine(self.group.id, role) for role in self.group.roles]


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the fake stand for sessions, on cores of which no test beside this one has any."""
    monkeypatch.setattr(harness.runner.groups, "EngineGroupSession", FakeSession)
    monkeypatch.setattr(harness.engines.inventory, "claimed", lambda _: [])
