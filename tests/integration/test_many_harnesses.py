"""Harnesses that run at the same time on one machine get different cores and ports."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from harness.engines.command import EngineCommand
from harness.engines.inventory import cpu_inventory
from harness.engines.places import LocalPlace
from harness.profiles.load import load_profile
from harness.supervision.cores import Cores
from harness.supervision.process import SupervisedEngine
from harness.util import allowance
from harness.util.paths import REPOSITORY
from tests.support.supervised import own_folder, state

__all__ = ["own_folder"]

# As one of several: it claims what a pair needs, says what that is, and keeps it until it is told to end.
HARNESS = """
import json, os, sys
os.sched_getaffinity = lambda _: set(range(64))
from harness.engines.places import LocalPlace
places = [LocalPlace(["0"], claim=True), LocalPlace(["1"], claim=True)]
print(json.dumps([[*place.devices, *place.ports(2)] for place in places]), flush=True)
sys.stdin.read()
"""


def test_ten_at_once_share_nothing(own_folder):
    harnesses = [
        subprocess.Popen(
            [sys.executable, "-c", HARNESS], cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(10)
    ]
    try:
        found = [json.loads(h.stdout.readline()) for h in harnesses if h.stdout is not None]
    finally:
        for harness in harnesses:
            harness.communicate()
    places = [place for of_one in found for place in of_one]
    assert len({core for core, *_ in places}) == 20
    assert len({port for _, *ports in places for port in ports}) == 40
    assert state() == []


@pytest.fixture
def cores(monkeypatch, own_folder):
    """Cores that this machine may not have."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(allowance, "memory_gib", lambda: 100.0)


def test_cores_of_another_harness_are_left_to_it(cores):
    profile = load_profile("cpu")
    other = Cores()
    assert other.claim(3) == ("0", "1", "2")
    found = cpu_inventory(profile)
    assert list(found.names.values()) == ["3", "4", "5", "6", "7"]
    assert found.notes == ("3 of 8 cores are in use by engines of another harness run",)
    other.claim(4)
    crowded = cpu_inventory(profile)
    assert list(crowded.names.values()) == ["7", "0"]
    assert crowded.notes == (
        "7 of 8 cores are in use by engines of another harness run; engines that share one are several times slower",
    )
    # Where there are too few, the planned ones are shared.
    assert LocalPlace(["7", "0"], claim=True).devices == ("7", "0")
    other.release()
    assert cpu_inventory(profile).notes == ()


def test_cores_of_an_engine_are_claimed_until_it_is_gone(cores, tmp_path):
    place = LocalPlace(["0"], claim=True)
    engine = place.start(EngineCommand("single", 1, None, ["sleep", "60"], {}), tmp_path / "engine.log")
    assert isinstance(engine, SupervisedEngine)
    place.give_back()
    another = LocalPlace(["0"], claim=True)
    assert another.devices == ("1",)
    another.give_back()
    engine.stop(1)
    assert Cores().claim(8) == tuple(map(str, range(8)))
