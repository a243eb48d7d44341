"""A clock that is set while a run goes on changes nothing that is judged."""

from __future__ import annotations

import time

import pytest

from harness.baselines.lookup import Limits, look_up
from harness.baselines.store import write_baseline
from harness.util import clock, machine
from tests.support.builders import identity, rows
from tests.support.builders import provenance as built


@pytest.mark.parametrize("jump", [-1e9, -3600.0, 3600.0, 1e9])
def test_jump_of_the_clock_is_not_seen(monkeypatch, jump):
    real = time.time
    before, label = clock.now(), machine.now()
    monkeypatch.setattr(time, "time", lambda: real() + jump)
    assert 0 <= clock.now() - before < 5
    assert label <= machine.now()


def test_epoch_is_that_of_the_machine():
    assert abs(clock.now() - time.time()) < 5
    assert abs(clock.utc().timestamp() - time.time()) < 5


def notices(folder, started: str, recorded: str) -> list[str]:
    path = folder / "none.json"
    write_baseline(path, identity(), built().model_copy(update={"recorded": recorded}), rows([40]))
    found = look_up(folder, identity(), "cpu", Limits(30, 2), started)
    assert found.baseline is not None
    return list(found.notices)


@pytest.mark.parametrize(
    ("started", "recorded", "word"),
    [
        ("2026-03-01T00:00:00+00:00", "2026-02-20T00:00:00+00:00", None),
        ("2026-03-01T00:00:00+00:00", "2026-02-20", None),
        ("2026-03-01T00:00:00+00:00", "2026-03-01T12:00:00+00:00", None),
        ("2026-03-01T00:00:00+00:00", "2025-12-01T00:00:00+00:00", "expired"),
        ("1970-01-01T00:00:00+00:00", "2026-02-20T00:00:00+00:00", "a clock was wrong"),
        ("2026-03-01T00:00:00+00:00", "2099-01-01T00:00:00+00:00", "a clock was wrong"),
        ("9999-12-31T23:59:59+00:00", "0001-01-01", "expired"),
        ("2026-03-01T00:00:00+00:00", "yesterday", None),
    ],
)
def test_age_of_a_baseline(tmp_path, started, recorded, word):
    found = notices(tmp_path, started, recorded)
    assert (word is None and not found) or (word is not None and word in found[0])
