"""A clock that is set while a run goes on changes nothing that is judged."""

from __future__ import annotations

import time

import pytest

from harness import clock, provenance
from harness.baseline.lookup import Limits, look_up
from harness.baseline.store import write_baseline
from tests.unit.builders import identity, rows
from tests.unit.builders import provenance as built


@pytest.mark.parametrize("jump", [-1e9, -3600.0, 3600.0, 1e9])
def test_jump_of_the_clock_is_not_seen(monkeypatch, jump):
    real = time.time
    before, label = clock.now(), provenance.now()
    monkeypatch.setattr(time, "time", lambda: real() + jump)
    assert 0 <= clock.now() - before < 5
    assert label <= provenance.now()


def test_epoch_is_that_of_the_machine():
    assert abs(clock.now() - time.time()) < 5
    assert abs(clock.utc().timestamp() - time.time()) < 5


def test_times_of_requests_come_from_it():
    """What tells which request came first never reads the machine's clock itself."""
    from pathlib import Path

    package = Path(clock.__file__).parent
    recording = ["engine/topology.py", "engine/exchange.py", "engine/client.py", "scenarios/play.py", "rescore.py"]
    for name in (*recording, "recorder.py", "runner.py", "soak/load.py"):
        text = (package / name).read_text()
        assert "time.time(" not in text, name
        assert "datetime.now(" not in text, name


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
