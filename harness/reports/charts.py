"""The charts of the pages, each with its statement in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from markupsafe import Markup

from harness.profiles.cells import CellName
from harness.reports.chart_data import Figures, Position
from harness.reports.plot import Plot, linear, ordinal, shares

if TYPE_CHECKING:
    from harness.reports.trend_model import Trend

_EQUAL_RUNS = "two equal runs"
_BASELINE = "baseline"
_PROMPTS = ("aligned", "unaligned")


class Chart(NamedTuple):
    """A chart, with a description in words for those who cannot see it."""

    id: str
    section: str
    method: str
    description: str
    svg: Markup


def charts_of(figures: Figures) -> list[Chart]:
    """Return the charts of acceptance per position, acceptance by step, and survival, one of each per method."""
    return [
        *(_acceptance(method, figures) for method in dict.fromkeys(p.method for p in figures.positions)),
        *(_by_step(method, figures) for method in dict.fromkeys(_method(s.cell) for s in figures.steps)),
        *(_survival(method, figures) for method in dict.fromkeys(_method(s.cell) for s in figures.survival)),
    ]


def _method(cell: str) -> str:
    return CellName.of(cell).lineup


def _chart(section: str, method: str, words: str, plot: Plot) -> Chart:
    return Chart(f"{section}-{method}", section, method, words, plot.svg)


def _cells_first(names: Sequence[str]) -> list[str]:
    """Return the series in an order in which a cell looks the same in all charts of its method."""
    return sorted(dict.fromkeys(names), key=lambda n: n in (_BASELINE, _EQUAL_RUNS))


def _acceptance(method: str, figures: Figures) -> Chart:
    mine = [p for p in figures.positions if p.method == method]
    recorded = {p.position: p.rate for p in mine if p.side == _BASELINE}
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
    if p.detectable is None or p.side == _BASELINE or p.position not in recorded:
        return None
    rate = recorded[p.position]
    return max(0.0, rate - p.detectable), min(1.0, rate + p.detectable)


def _by_step(method: str, figures: Figures) -> Chart:
    mine = [s for s in figures.steps if _method(s.cell) == method]
    cells = list(dict.fromkeys(s.cell for s in mine))
    steps = {s.order: s.step for s in mine}
    order = sorted(steps)
    plot = Plot(
        ordinal("step since the hand-off", [steps[o] for o in order]),
        linear("accepted drafts, mean", [s.accepted for s in mine], zero=True),
        cells,
        _PROMPTS,
    )
    for cell in cells:
        for prompts in _PROMPTS:
            found = sorted((s for s in mine if (s.cell, s.aligned) == (cell, prompts)), key=lambda s: s.order)
            plot.line([(order.index(s.order), s.accepted) for s in found], cell, prompts)
            for s in found:
                words = f"{cell}, {prompts}, step {s.step}: {s.accepted:.3f} accepted, {s.requests} requests"
                plot.point(order.index(s.order), s.accepted, cell, words, hollow=True)
    words = (
        f"{method}: mean accepted drafts by step since the hand-off (or the prefill), for aligned and unaligned "
        f"prompts, of {', '.join(cells)}; padded first steps are excluded"
    )
    return _chart("steps", method, words, plot)


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
        ordinal("run (by start time)", [run.started[5:10] for run in trend.runs], most=6),
        linear("accepted", [p.rate for p in mine], ".1f", 100),
        cells,
        positions,
    )
    for cell in cells:
        for name in positions:
            found = [p for p in mine if p.cell == cell and f"position {p.position}" == name]
            plot.line([(p.run, p.rate) for p in found], cell, name)
            for p in found:
                run = trend.runs[p.run]
                words = f"{run.run_id}, {run.started}: {cell}, {name}: {100 * p.rate:.2f} %"
                plot.point(p.run, p.rate, cell, words, links.get(p.run, ""), hollow=True)
    words = f"{method}: share of accepted drafts at each position over {len(trend.runs)} runs, of {', '.join(cells)}"
    return _chart("trend", method, words, plot)


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
