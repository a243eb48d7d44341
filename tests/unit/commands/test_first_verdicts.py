"""Verdicts of cells while the run goes on, and ``--fail-fast``."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

import harness.commands.run
from harness.commands.run import first_verdicts
from harness.errors import DataError
from harness.history.folder import History
from harness.judging.checks.registry import judge
from harness.util.progress import Reporter
from tests.support.builders import garbled, history, lookups, observation


@pytest.fixture
def printed(monkeypatch) -> io.StringIO:
    monkeypatch.setattr(harness.commands.run, "judged", lambda found: judge(found, lookups([40])))
    return io.StringIO()


def reporter(printed: io.StringIO) -> Reporter:
    return Reporter(1.0, Console(file=printed, width=200))


def wrong(cell: str) -> History:
    return history([garbled(observation(cell))])


def test_each_cell_is_named_with_its_verdict(printed):
    watch = first_verdicts(reporter(printed), fail_fast=True)
    assert watch(history([observation("pd-eagle3"), observation("single-eagle3")])) is None
    assert "pd-eagle3: PASS so far" in printed.getvalue()
    assert "single-eagle3: PASS so far" in printed.getvalue()


@pytest.mark.parametrize("fail_fast", [False, True])
def test_a_regression_ends_the_run_only_if_asked_to(printed, fail_fast):
    reason = first_verdicts(reporter(printed), fail_fast)(wrong("pd-eagle3"))
    assert "pd-eagle3: REGRESSION so far" in printed.getvalue()
    assert (reason is not None) is fail_fast
    assert not fail_fast or "in pd-eagle3 (--fail-fast)" in str(reason)


def test_what_cannot_be_judged_yet_does_not_end_the_run(printed, monkeypatch):
    def damaged(_: History) -> None:
        raise DataError("expected a baseline, found none")

    monkeypatch.setattr(harness.commands.run, "judged", damaged)
    assert first_verdicts(reporter(printed), fail_fast=True)(wrong("pd-eagle3")) is None
    assert "not judged yet: DataError: expected a baseline" in printed.getvalue()
