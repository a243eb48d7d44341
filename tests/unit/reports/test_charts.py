"""What the charts of a run make of its figures: a collapse looks like one, whatever else the run has."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

from harness.history.acceptance import RequestCounts
from harness.history.folder import load_history
from harness.history.verdict import Verdict
from harness.judging.references import References
from harness.reports.charts import Chart, acceptance_over_runs, charts_of
from harness.reports.judge_run import assess
from harness.reports.plot import HEIGHT
from harness.reports.summary import RunSummary
from harness.reports.trend import trend_of
from harness.reports.trend_model import Trend, TrendRun
from tests.golden.oracle import BASELINES, RUNS
from tests.support.builders import CELLS, LENGTHS, flawless, history, observation, summarised

_PLACE = re.compile(r"translate\(([\d.]+) ([\d.]+)\)")


def chart(summary: RunSummary, name: str) -> Chart:
    return next(c for c in charts_of(summary.figures) if c.id == name)


def ticks(drawn: Chart, axis: str) -> list[str]:
    """Labels of an axis, without its title."""
    marks = ET.fromstring(f"<div>{drawn.svg}</div>").iter("text")
    return [e.text or "" for e in marks if e.get("class") == axis and not e.get("transform")][
        : -1 if axis == "x" else None
    ]


def heights(drawn: Chart) -> dict[str, list[float]]:
    """The height of each point above the lower edge, as a share of the chart, by the first word of its tooltip."""
    found: dict[str, list[float]] = defaultdict(list)
    for mark in ET.fromstring(f"<div>{drawn.svg}</div>").iter("path"):
        place, words = _PLACE.match(mark.get("transform") or ""), mark.findtext("title")
        if place and words:
            found[words.partition(",")[0]].append(1 - float(place[2]) / HEIGHT)
    return found


def collapsed(cells: Iterable[str] = ("pd-eagle3",)) -> RunSummary:
    """P/D cells none of whose drafts are accepted, but for one at the end of the longest answer."""

    def steps(tokens: int) -> tuple[int, ...]:
        return (*(0,) * 20, int(tokens == max(LENGTHS)))

    made = [
        observation(cell, n, steps(n)) if cell.startswith("pd-") else observation(cell, n)
        for cell in cells
        for n in LENGTHS
    ]
    return summarised(history(made, list(cells)))


def test_collapse_is_not_a_curve_that_rises():
    """The axis of the P/D cell alone would end at its highest mean, 0.08, which the last step would reach."""
    drawn = chart(collapsed(), "steps-eagle3")
    assert ticks(drawn, "y") == ["0", "1", "2", "3"]
    places = heights(drawn)
    bottom = min(places["pd-eagle3"])
    assert max(places["pd-eagle3"]) < bottom + 0.03
    assert max(places["baseline"]) > bottom + 0.2


def test_recorded_collapse_lies_below_its_baseline():
    summary = assess(load_history(RUNS / "M4"), References(baselines=BASELINES))
    places = heights(chart(summary, "steps-eagle3"))
    assert set(places) == {"pd-eagle3", "single-eagle3", "baseline"}
    assert places["baseline"] == places["single-eagle3"]
    assert max(places["pd-eagle3"]) < sum(places["baseline"]) / len(places["baseline"]) - 0.4


@pytest.mark.parametrize("section", ["acceptance", "steps"])
def test_reference_is_drawn_and_named(section):
    drawn = chart(collapsed(("pd-eagle3", "single-eagle3")), f"{section}-eagle3")
    assert len(heights(drawn)["baseline"]) > 2
    legend = drawn.svg[drawn.svg.index('class="legend"') :]
    assert all(f"<bdi>{side}</bdi>" in legend for side in ("pd-eagle3", "single-eagle3", "baseline"))
    assert "baseline" in drawn.description


def test_single_engine_is_the_reference_where_there_is_no_baseline():
    made = [observation("pd-eagle3", n, (0,) * 20) for n in LENGTHS] + [
        observation("single-eagle3", n) for n in LENGTHS
    ]
    drawn = chart(summarised(history(made), {}), "steps-eagle3")
    assert set(heights(drawn)) == {"pd-eagle3", "single-eagle3"}
    assert ticks(drawn, "y")[-1] == "3"


def test_every_axis_of_acceptance_is_that_of_the_unit():
    for drawn in charts_of(summarised(history(flawless(), CELLS)).figures):
        wanted = ["0", "1", "2", "3"] if drawn.section == "steps" else ["0 %", "25 %", "50 %", "75 %", "100 %"]
        assert ticks(drawn, "y") == wanted, drawn.id


def test_baseline_by_step_is_of_what_the_cells_were_asked():
    """Requests for fewer tokens have fewer steps, and the baseline's rows of other prompts count nothing."""
    short = [observation("pd-eagle3", 32, max_tokens=8), observation("pd-eagle3", 40, max_tokens=8)]
    found = [s for s in summarised(history(short)).figures.steps if s.side == "baseline"]
    assert {(s.aligned, s.step) for s in found} == {(g, str(n)) for g in ("aligned", "unaligned") for n in range(4)}
    assert {s.requests for s in found} == {1}


def test_words_say_what_the_curves_show():
    words = chart(collapsed(), "steps-eagle3").description
    assert "pd-eagle3, unaligned: 0.00, 0.00" in words and "baseline, unaligned: 1.00, 1.00" in words


# --- many runs -------------------------------------------------------------------------------------------------------


def nights(*started: str, rates: tuple[float, ...] = (0.9,)) -> Trend:
    """Runs of a cell that accept these shares of 1,000 drafts, the last share from then on."""
    shares = [*rates, *rates[-1:] * len(started)]
    runs = [
        TrendRun(
            f"n{i}", when, Path("n"), Verdict.PASS, {}, {"pd-eagle3": {"p": counted(share)}}, {"pd-eagle3": 1}, "0"
        )
        for i, (when, share) in enumerate(zip(started, shares, strict=False))
    ]
    return trend_of(runs, 365)


def counted(share: float) -> RequestCounts:
    return RequestCounts(1000, (round(1000 * share),), "per-request")


def over_runs(trend: Trend) -> Chart:
    return acceptance_over_runs("eagle3", trend, {})


DAYS = [f"2026-11-{day}T02:42:10+00:00" for day in (26, 27, 28)]


def test_days_of_runs_and_per_cent_are_on_the_axes():
    drawn = over_runs(nights(*DAYS))
    assert ticks(drawn, "x") == ["11-26", "11-27", "11-28"]
    assert all(label.endswith(" %") for label in ticks(drawn, "y"))
    assert "n0, 2026-11-26 02:42 UTC: pd-eagle3" in drawn.svg


def test_runs_of_one_day_have_their_time():
    drawn = over_runs(nights(DAYS[0], "2026-11-26T15:05:00+02:00"))
    assert ticks(drawn, "x") == ["11-26 02:42", "11-26 13:05"]


def test_runs_in_which_nothing_is_accepted_lie_at_the_bottom():
    drawn = over_runs(nights(*DAYS, rates=(0.0, 0.001, 0.002)))
    assert ticks(drawn, "y")[0] == "0 %" and ticks(drawn, "y")[-1] == "10 %"
    places = [place for found in heights(drawn).values() for place in found]
    assert len(places) == len(DAYS) and max(places) - min(places) < 0.03
