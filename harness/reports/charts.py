"""The charts of the pages, each with its statement as text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from markupsafe import Markup

from harness.profiles.cells import CellName
from harness.reports.chart_data import BASELINE, Figures, Position, StepMean
from harness.reports.plot import Axis, Plot, counts, linear, ordinal, shares, shares_around
from harness.util.text import moment

if TYPE_CHECKING:
    from harness.reports.trend_model import Trend, TrendRun

_EQUAL_RUNS = "two equal runs"
_PROMPTS = ("aligned", "unaligned")


class Chart(NamedTuple):
    """A chart, with a description for those who cannot see it."""

    id: str
    section: str
    method: str
    description: str
    svg: Markup


def charts_of(figures: Figures) -> list[Chart]:
    """Return the charts of acceptance per position, acceptance by step, and survival, one of each per method."""
    return [
        *(_acceptance(method, figures) for method in dict.fromkeys(p.method for p in figures.positions)),
        *(_by_step(method, figures) for method in dict.fromkeys(s.method for s in figures.steps)),
        *(_survival(method, figures) for method in dict.fromkeys(_method(s.cell) for s in figures.survival)),
    ]


def _method(cell: str) -> str:
    return CellName.of(cell).lineup


def _chart(section: str, method: str, words: str, plot: Plot) -> Chart:
    return Chart(f"{section}-{method}", section, method, words, plot.svg)


def _cells_first(names: Sequence[str]) -> list[str]:
    """Return the series in an order in which a cell looks the same in all charts of its method."""
    return sorted(dict.fromkeys(names), key=lambda n: n in (BASELINE, _EQUAL_RUNS))


def _acceptance(method: str, figures: Figures) -> Chart:
    mine = [p for p in figures.positions if p.method == method]
    recorded = {p.position: p.rate for p in mine if p.side == BASELINE}
    sides = list(dict.fromkeys(p.side for p in mine))
    places = sorted({p.position for p in mine})
    plot = Plot(ordinal("draft position", [str(p) for p in places]), shares("accepted"), _cells_first(sides))
    for band in figures.published:
        if band.method == method and band.position in places:
            plot.box("band", places.index(band.position), 0.95, band.low, band.high)
    apart = 0.8 / len(sides)
    for p in mine:
        x = places.index(p.position) + (sides.index(p.side) - (len(sides) - 1) / 2) * apart
        unseen = _undetectable(p, recorded)
        if unseen is not None:
            plot.box("unseen", x, min(0.2, apart), *unseen)
        if p.low is not None and p.high is not None:
            plot.interval(x, p.low, p.high, p.side)
        bounds = "" if p.low is None or p.high is None else f" ({100 * p.low:.2f} to {100 * p.high:.2f} %)"
        counts = "" if p.accepted is None else f", {p.accepted} of {p.steps} steps"
        plot.point(x, p.rate, p.side, f"{p.side}, position {p.position}: {100 * p.rate:.2f} %{bounds}{counts}")
    words = f"{method}: share of steps that accepted the draft at each position, with 99 % intervals, of " + ", ".join(
        f"{s} ({', '.join(f'{100 * p.rate:.1f} %' for p in mine if p.side == s)})" for s in sides
    )
    return _chart("acceptance", method, words, plot)


def _undetectable(p: Position, recorded: Mapping[int, float]) -> tuple[float, float] | None:
    """Return the range of rates that the test cannot tell from the baseline; a point outside is a detected change."""
    if p.detectable is None or p.side == BASELINE or p.position not in recorded:
        return None
    rate = recorded[p.position]
    return max(0.0, rate - p.detectable), min(1.0, rate + p.detectable)


def _by_step(method: str, figures: Figures) -> Chart:
    mine = sorted((s for s in figures.steps if s.method == method), key=lambda s: s.order)
    sides = _cells_first([s.side for s in figures.steps if s.method == method])
    steps = {s.order: s.step for s in mine}
    order = list(steps)
    across = ordinal("step since the hand-off", list(steps.values()))
    plot = Plot(across, _accepted_axis(mine, figures.draft_tokens[method]), sides, _PROMPTS)
    curves = {(side, g): [s for s in mine if (s.side, s.aligned) == (side, g)] for side in sides for g in _PROMPTS}
    # The baseline's line lies below those of the cells, and all points, which are filled, above the lines.
    for (side, group), found in reversed(curves.items()):
        plot.line([(order.index(s.order), s.accepted) for s in found], side, group)
    for (side, group), found in curves.items():
        for s in found:
            words = f"{side}, {group}, step {s.step}: {s.accepted:.3f} accepted, {s.requests} requests"
            plot.point(order.index(s.order), s.accepted, side, words, hollow=True)
    words = (
        f"{method}: mean accepted drafts, of {figures.draft_tokens[method]}, by step since the hand-off (or the "
        "prefill); padded first steps are excluded; "
    ) + "; ".join(
        f"{side}, {group}: {', '.join(f'{s.accepted:.2f}' for s in found)}"
        for (side, group), found in curves.items()
        if found
    )
    return _chart("steps", method, words, plot)


def _accepted_axis(steps: Sequence[StepMean], drafts: int) -> Axis:
    """Return the axis of accepted drafts. It ends at the number of drafts of a step, whatever was accepted: fitted to
    the values, drafts that are all rejected but for a few would be a curve that rises."""
    most = max(drafts, math.ceil(max(s.accepted for s in steps)))
    return counts(f"accepted drafts of {drafts}, mean", most)


def _survival(method: str, figures: Figures) -> Chart:
    mine = [s for s in figures.survival if _method(s.cell) == method]
    rows = [(s.cell, s.token, s.share) for s in mine]
    rows += [(_EQUAL_RUNS, s.token, s.share) for s in figures.equal_runs if s.cell == method]
    names = list(dict.fromkeys(name for name, _, _ in rows))
    plot = Plot(
        linear("output token", [token for _, token, _ in rows], zero=True), shares("still identical"), names, names
    )
    for name in names:
        plot.line([(token, share) for n, token, share in rows if n == name], name, name, step=True)
    last = {s.cell: s.share for s in mine}
    words = f"{method}: share of prompts whose output still equals the recorded one, by output token; at the end " + (
        ", ".join(f"{cell} {100 * share:.0f} %" for cell, share in last.items())
    )
    return _chart("survival", method, words, plot)


def acceptance_over_runs(method: str, trend: Trend, links: Mapping[int, str]) -> Chart:
    """Return the chart of acceptance per cell and position of a method; ``links`` are the runs' reports by index."""
    mine = [p for p in trend.points if _method(p.cell) == method]
    cells = list(dict.fromkeys(p.cell for p in mine))
    positions = [f"position {p}" for p in sorted({p.position for p in mine})]
    plot = Plot(
        _run_axis(trend.runs),
        shares_around("accepted", [p.rate for p in mine]),
        cells,
        positions,
    )
    for cell in cells:
        for name in positions:
            found = [p for p in mine if p.cell == cell and f"position {p.position}" == name]
            plot.line([(p.run, p.rate) for p in found], cell, name)
            for p in found:
                run = trend.runs[p.run]
                words = f"{run.run_id}, {moment(run.started)}: {cell}, {name}: {100 * p.rate:.2f} %"
                plot.point(p.run, p.rate, cell, words, links.get(p.run, ""), hollow=True)
    words = f"{method}: share of accepted drafts at each position over {len(trend.runs)} runs, of {', '.join(cells)}"
    return _chart("trend", method, words, plot)


def _run_axis(runs: Sequence[TrendRun]) -> Axis:
    """Return the axis of the runs by the days on which they were started, with the time where a day has several."""
    started = [moment(run.started) for run in runs]
    days = ordinal("run (by start time)", [text[5:10] for text in started], most=6)
    if len({label for _, label in days.ticks}) == len(days.ticks):
        return days
    # Four times of day, unlike six, have room beside one another.
    return ordinal("run (by start time, UTC)", [text[5:16] for text in started], most=4)


def curve(name: str, title: str, rows: Sequence[Mapping[str, Any]], mark: float) -> Chart:
    """Return a chart of series over time, with a vertical line at ``mark`` (minutes).

    Rows have the keys ``minute``, ``series`` and ``value``.
    """
    names = list(dict.fromkeys(str(r["series"]) for r in rows))
    minutes = linear("minutes", [float(r["minute"]) for r in rows], zero=True)
    plot = Plot(minutes, linear(title, [float(r["value"]) for r in rows]), names, names)
    plot.rule(min(mark, minutes.high))
    for series in names:
        points = [(float(r["minute"]), float(r["value"])) for r in rows if r["series"] == series]
        plot.line(points, series, series, step=True)
    return _chart("soak", name, title, plot)
