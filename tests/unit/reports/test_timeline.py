"""The timeline: starts before requests, waits between cells, requests that broke, and pauses cut short."""

from __future__ import annotations

import pytest

from harness.history.folder import History
from harness.history.verdict import Verdict
from harness.reports.timeline import timeline_of
from tests.support.builders import history, observation, with_cells

CELLS = ("pd-none", "single-none")


def run(at: dict[str, list[float]], error: str = "", **cells) -> History:
    rows = [
        observation(cell, 32 + i, sequence=i, started_at=t, error=error or None)
        for cell, times in at.items()
        for i, t in enumerate(times)
    ]
    made = with_cells(history(rows, list(CELLS)), group="g", start_seconds=0.0, **cells)
    return with_cells(made, "pd-none", start_seconds=5.0)


def test_engines_start_before_their_first_request_and_wait_between_cells():
    h = run({"pd-none": [100.0, 101.0], "single-none": [104.0, 110.0]})
    timeline = timeline_of(h, {"pd-none": Verdict.PASS, "single-none": Verdict.REGRESSION})
    (lane,) = timeline.lanes
    assert [(b.kind, b.cell, b.begin) for b in lane.bars] == [
        ("start", "", 95.0),
        ("cell", "pd-none", 100.0),
        ("wait", "", pytest.approx(101.2)),
        ("cell", "single-none", 104.0),
    ]
    assert lane.bars[3].verdict is Verdict.REGRESSION
    assert timeline.total_s == pytest.approx(15.1) and timeline.left(lane.bars[0]) == 0
    assert timeline.left(lane.bars[3]) + timeline.width(lane.bars[3]) == pytest.approx(100, abs=0.02)


def test_requests_that_broke_are_marked():
    timeline = timeline_of(run({"pd-none": [100.0], "single-none": [103.0]}, error="answered 500"), {})
    marks = [b for lane in timeline.lanes for b in lane.bars if b.kind == "mark"]
    assert len(marks) == 2 and "answered 500" in marks[0].words


def test_engines_that_never_answered_are_shown_with_their_reason():
    (lane,) = timeline_of(run({}, state="failed", reason="no hand-off"), {}).lanes
    assert [(b.kind, b.end - b.begin) for b in lane.bars] == [("start", 5.0)]
    assert "no hand-off" in lane.bars[0].words


def test_pause_of_the_whole_run_is_cut_short():
    """A run that was resumed the next day is still readable."""
    timeline = timeline_of(run({"pd-none": [100.0], "single-none": [90_000.0]}), {})
    assert timeline.total_s < 60
    (lane,) = timeline.lanes
    assert all(0 <= timeline.left(b) <= 100 for b in lane.bars)


def test_run_without_requests_has_no_lanes():
    empty = timeline_of(with_cells(run({}), start_seconds=0.0), {})
    assert (empty.lanes, empty.total_s) == ((), 0.0)
