"""Static charts: ticks, places on the page, and text that stays text."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from harness.reports.plot import HEIGHT, WIDTH, Plot, counts, linear, ordinal, shares, shares_around


def parsed(plot: Plot) -> ET.Element:
    return ET.fromstring(f"<div>{plot.svg}</div>")


@pytest.mark.parametrize(
    ("values", "low", "high", "labels"),
    [
        ([0.0, 3.0], 0, 3, ["0", "1", "2", "3"]),
        ([212.0, 790.0], 200, 800, ["200", "400", "600", "800"]),
        ([0.914, 0.927], 0.91, 0.93, ["0.91", "0.915", "0.92", "0.925", "0.93"]),
        ([5.0, 5.0], 2, 8, ["2", "4", "6", "8"]),
        ([], 0, 1, ["0", "0.5", "1"]),
    ],
)
def test_ticks_are_round_and_hold_all_values(values, low, high, labels):
    axis = linear("x", values)
    assert (axis.low, axis.high) == pytest.approx((low, high))
    assert [label for _, label in axis.ticks] == labels
    assert all(axis.low <= v <= axis.high for v in values)


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([0.914, 0.927], ["85 %", "90 %", "95 %", "100 %"]),
        ([0.0, 0.0004], ["0 %", "5 %", "10 %"]),
        ([1.0, 1.0], ["90 %", "95 %", "100 %"]),
        ([0.0, 0.9], ["0 %", "25 %", "50 %", "75 %", "100 %"]),
        ([], ["0 %", "25 %", "50 %", "75 %", "100 %"]),
    ],
)
def test_shares_are_never_drawn_closer_than_ten_points(values, labels):
    axis = shares_around("x", values)
    assert [label for _, label in axis.ticks] == labels
    assert axis.low >= 0 and axis.high <= 1 and axis.high - axis.low >= 0.1 - 1e-9
    assert all(axis.low <= v <= axis.high for v in values)


@pytest.mark.parametrize(
    ("most", "labels"),
    [(1, ["0", "1"]), (3, ["0", "1", "2", "3"]), (7, ["0", "2", "4", "6"]), (40, ["0", "10", "20", "30", "40"])],
)
def test_counts_have_whole_ticks_up_to_their_most(most, labels):
    axis = counts("x", most)
    assert (axis.low, axis.high, [label for _, label in axis.ticks]) == (0, most, labels)


def test_last_label_ends_on_the_chart():
    plot = Plot(linear("output token", [0, 200]), shares("y"), ["a"])
    last = next(e for e in parsed(plot).iter("text") if e.text == "200")
    # Seven of the units that the chart is drawn in are the width of a digit of most fonts.
    assert float(last.get("x") or 0) + 7 * len("200") / 2 <= WIDTH


def test_long_ordinal_axes_write_some_of_their_labels():
    assert 5 <= len(ordinal("run", [str(i) for i in range(100)], most=6).ticks) <= 7
    assert ordinal("run", []).high > ordinal("run", []).low


def test_marks_lie_on_the_page_and_differ_in_colour_symbol_and_dashes():
    plot = Plot(linear("t", [0, 10]), shares("share"), ["a", "b"], ["solid", "dashed"])
    plot.line([(0, 0.0), (5, 0.5), (10, 1.0)], "a", "solid")
    plot.line([(0, 1.0), (10, 0.0)], "b", "dashed", step=True)
    plot.point(0, 0.0, "a", "first")
    plot.point(10, 1.0, "b", "last", "./run/report.html", hollow=True)
    root = parsed(plot)
    svg = root.find("svg")
    assert svg is not None
    lines = [e for e in svg if (e.get("class") or "").startswith("line")]
    assert [e.get("stroke-dasharray") for e in lines] == ["none", "5 4"]
    assert "H" in (lines[1].get("d") or "")
    dots = [e for e in svg.iter() if (e.get("class") or "").startswith("dot")]
    assert len({e.get("d") for e in dots}) == len({(e.get("class") or "").split()[1] for e in dots}) == 2
    for dot in dots:
        x, y = (float(v) for v in (dot.get("transform") or "").partition("(")[2].partition(")")[0].split())
        assert 0 <= x <= WIDTH
        assert 0 <= y <= HEIGHT
    link = svg.find("a")
    assert link is not None and link.get("href") == "./run/report.html"
    assert [e.text for e in root.iter("bdi")] == ["a", "b", "solid", "dashed"]


def test_text_stays_text():
    hostile = "<script>\"'&\u202e"
    plot = Plot(ordinal("x", [hostile]), shares("y"), [hostile])
    plot.point(0, 0.5, hostile, hostile)
    text = str(plot.svg)
    assert "<script>" not in text and "\u202e" not in text
    assert "&lt;script&gt;" in text
