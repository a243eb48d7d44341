"""Vega-Lite charts with their data embedded: https://vega.github.io/vega-lite/docs/ (version 6).

Symbols and dashes repeat what colours say, so that a chart can be read without colour. The library is embedded in the
report; nothing is fetched.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from harness.profiles.cells import CellName
from harness.reports.chart_data import Figures, Position

if TYPE_CHECKING:
    from harness.reports.trend_model import Trend

Spec = dict[str, Any]
_SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
_EQUAL_RUNS = "two equal runs"
_BASELINE = "baseline"
# Cells that agree are drawn on top of each other: symbols shrink from cell to cell, so that all stay visible.
_SIZE: Spec = {"field": "size", "type": "quantitative", "scale": None, "legend": None}


class Chart(NamedTuple):
    """A chart, with a description in words for those who cannot see it."""

    id: str
    section: str
    method: str
    description: str
    spec: Spec


@cache
def library() -> str:
    """Return the charting library as one script that defines ``vegaEmbed`` and cannot end its script element.

    Cached, because bundling takes more than a second.
    """
    import vl_convert

    script = str(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;"))
    return script.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def charts_of(figures: Figures) -> list[Chart]:
    """Return the charts of acceptance per position, acceptance by step, and survival, one of each per method."""
    out: list[Chart] = []
    for method in dict.fromkeys(p.method for p in figures.positions):
        out.append(_acceptance(method, figures))
    for method in dict.fromkeys(_method(s.cell) for s in figures.steps):
        out.append(_by_step(method, figures))
    for method in dict.fromkeys(_method(s.cell) for s in figures.survival):
        out.append(_survival(method, figures))
    return out


def _method(cell: str) -> str:
    return CellName.of(cell).lineup


def _chart(section: str, method: str, words: str, rows: Iterable[Spec], parts: Spec) -> Chart:
    spec = {
        "$schema": _SCHEMA,
        "description": words,
        "data": {"values": list(rows)},
        "width": "container",
        "height": 220,
        **parts,
    }
    return Chart(f"{section}-{method}", section, method, words, spec)


def _series(names: Sequence[str], title: str) -> Spec:
    """Return the encoding of series by colour and symbol. Cells come first, so that a cell looks the same in all charts
    of its method."""
    scale = {"domain": sorted(names, key=lambda n: n in (_BASELINE, _EQUAL_RUNS))}
    return {
        "color": {"field": "series", "type": "nominal", "title": title, "scale": scale},
        "shape": {"field": "series", "type": "nominal", "title": title, "scale": scale},
    }


def _dashes(field: str, title: str, scale: Spec | None = None) -> Spec:
    """Return the encoding of a field by dashes, with a legend in the colour of the text."""
    legend = {"symbolType": "stroke", "symbolStrokeColor": "var(--ink)", "symbolSize": 400}
    return {"field": field, "type": "nominal", "title": title, "legend": legend, **({"scale": scale} if scale else {})}


def _acceptance(method: str, figures: Figures) -> Chart:
    mine = [p for p in figures.positions if p.method == method]
    recorded = {p.position: p.rate for p in mine if p.side == _BASELINE}
    rows: list[Spec] = [
        {
            "position": p.position,
            "series": p.side,
            "rate": p.rate,
            "low": p.low,
            "high": p.high,
            "counts": "" if p.accepted is None else f"{p.accepted} of {p.steps} steps",
            **_undetectable(p, recorded),
        }
        for p in mine
    ]
    sides = list(dict.fromkeys(p.side for p in mine))
    bands = [{"position": b.position, "from": b.low, "to": b.high} for b in figures.published if b.method == method]
    x = {"field": "position", "type": "ordinal", "title": "draft position", "axis": {"labelAngle": 0}}
    offset = {"field": "series", "scale": {"domain": sides}}
    y = {"type": "quantitative", "title": "accepted", "axis": {"format": ".0%"}, "scale": {"domain": [0, 1]}}
    words = f"{method}: share of steps that accepted the draft at each position, with 99 % intervals, of " + ", ".join(
        f"{s} ({', '.join(f'{100 * p.rate:.1f} %' for p in mine if p.side == s)})" for s in sides
    )
    tooltip = [
        {"field": "series", "title": "side"},
        {"field": "position"},
        {"field": "rate", "format": ".2%"},
        {"field": "low", "format": ".2%"},
        {"field": "high", "format": ".2%"},
        {"field": "counts"},
    ]
    mine_at = {"x": x, "xOffset": offset, **_series(sides, "side"), "tooltip": tooltip}
    # A rule mark has no shape.
    ranged = {**mine_at, "shape": None, "y": {**y, "field": "low"}, "y2": {"field": "high"}}
    interval = {
        "mark": {"type": "rule", "strokeWidth": 2},
        "encoding": ranged,
        "transform": [{"filter": "isValid(datum.low) && isValid(datum.high)"}],
    }
    points = {
        "mark": {"type": "point", "filled": True, "size": 70, "opacity": 1},
        "encoding": {**mine_at, "y": {**y, "field": "rate"}},
    }
    undetectable = {
        "mark": {"type": "bar", "size": 16, "fillOpacity": 0, "stroke": "var(--soft)", "strokeDash": [3, 2]},
        "encoding": {"x": x, "xOffset": offset, "y": {**y, "field": "from"}, "y2": {"field": "to"}},
        "transform": [{"filter": "isValid(datum.from)"}],
    }
    band = {
        "data": {"values": bands},
        "mark": {"type": "bar", "width": {"band": 0.95}, "color": "var(--band)", "fillOpacity": 0.35},
        "encoding": {"x": x, "y": {**y, "field": "from"}, "y2": {"field": "to"}},
    }
    return _chart(
        "acceptance", method, words, rows, {"layer": [*([band] if bands else []), undetectable, interval, points]}
    )


def _undetectable(p: Position, recorded: Mapping[int, float]) -> Spec:
    """Return the range of rates that the test cannot tell from the baseline; a point outside is a detected change."""
    if p.detectable is None or p.side == _BASELINE or p.position not in recorded:
        return {}
    rate = recorded[p.position]
    return {"from": max(0.0, rate - p.detectable), "to": min(1.0, rate + p.detectable)}


def _by_step(method: str, figures: Figures) -> Chart:
    mine = [s for s in figures.steps if _method(s.cell) == method]
    cells = list(dict.fromkeys(s.cell for s in mine))
    rows = [
        {
            "step": s.step,
            "order": s.order,
            "series": s.cell,
            "prompts": s.aligned,
            "accepted": s.accepted,
            "of": s.requests,
            "size": _size(cells.index(s.cell)),
        }
        for s in mine
    ]
    words = (
        f"{method}: mean accepted drafts by step since the hand-off (or the prefill), for aligned and unaligned "
        f"prompts, of {', '.join(cells)}; padded first steps are excluded"
    )
    series = _series(cells, "cell")
    encoding = {
        "x": {
            "field": "step",
            "type": "ordinal",
            "title": "step since the hand-off",
            "sort": {"field": "order"},
            "axis": {"labelAngle": 0},
        },
        "y": {"field": "accepted", "type": "quantitative", "title": "accepted drafts, mean", "scale": {"zero": True}},
        "color": series["color"],
        "detail": {"field": "prompts"},
        "tooltip": [{"field": f} for f in ("series", "prompts", "step", "accepted", "of")],
    }
    dashes = _dashes("prompts", "prompts", {"domain": ["aligned", "unaligned"], "range": [[1, 0], [5, 4]]})
    layer = [
        {"mark": {"type": "line"}, "encoding": {"strokeDash": dashes}},
        {
            "mark": {"type": "point", "filled": False, "opacity": 1},
            "encoding": {"shape": series["shape"], "size": _SIZE},
        },
    ]
    return _chart("steps", method, words, rows, {"encoding": encoding, "layer": layer})


def _size(rank: int) -> int:
    """Return the area of a cell's symbols in square pixels; cells of a higher rank get smaller ones."""
    return max(20, 160 - 70 * rank)


def _survival(method: str, figures: Figures) -> Chart:
    mine = [s for s in figures.survival if _method(s.cell) == method]
    rows = [{"token": s.token, "series": s.cell, "share": s.share} for s in mine]
    rows += [
        {"token": s.token, "series": _EQUAL_RUNS, "share": s.share} for s in figures.equal_runs if s.cell == method
    ]
    names = list(dict.fromkeys(str(r["series"]) for r in rows))
    last = {s.cell: s.share for s in mine}
    words = f"{method}: share of prompts whose output still equals the recorded one, by output token; at the end " + (
        ", ".join(f"{cell} {100 * share:.0f} %" for cell, share in last.items())
    )
    colour = _series(names, "run")["color"]
    encoding = {
        "x": {"field": "token", "type": "quantitative", "title": "output token"},
        "y": {
            "field": "share",
            "type": "quantitative",
            "title": "still identical",
            "axis": {"format": ".0%"},
            "scale": {"domain": [0, 1]},
        },
        "color": colour,
        "strokeDash": {"field": "series", "type": "nominal", "title": "run", "scale": colour["scale"]},
        "tooltip": [{"field": "series"}, {"field": "token"}, {"field": "share", "format": ".1%"}],
    }
    mark = {"type": "line", "interpolate": "step-after", "strokeWidth": 2}
    return _chart("survival", method, words, rows, {"encoding": encoding, "mark": mark})


def acceptance_over_runs(method: str, trend: Trend, links: Mapping[int, str]) -> Chart:
    """Return the chart of acceptance per cell and position of a method; ``links`` are the runs' reports by index."""
    mine = [p for p in trend.points if _method(p.cell) == method]
    cells = list(dict.fromkeys(p.cell for p in mine))
    rows = [
        {
            "index": p.run,
            "run": trend.runs[p.run].run_id,
            "started": trend.runs[p.run].started,
            "series": p.cell,
            "position": str(p.position),
            "rate": round(p.rate, 5),
            "size": _size(cells.index(p.cell)),
            **({"report": links[p.run]} if p.run in links else {}),
        }
        for p in mine
    ]
    words = f"{method}: share of accepted drafts at each position over {len(trend.runs)} runs, of {', '.join(cells)}"
    encoding = {
        "x": {
            "field": "index",
            "type": "ordinal",
            "title": "run (by start time)",
            "axis": {"labelAngle": 0, "labelOverlap": True},
        },
        "y": {
            "field": "rate",
            "type": "quantitative",
            "title": "accepted",
            "axis": {"format": ".1%"},
            "scale": {"zero": False},
        },
        "color": _series(cells, "cell")["color"],
        "detail": {"field": "position"},
        "tooltip": [{"field": f} for f in ("run", "started", "series", "position", "rate")],
    }
    layer: list[Spec] = [
        {"mark": {"type": "line"}, "encoding": {"strokeDash": _dashes("position", "draft position")}},
        {
            "mark": {"type": "point", "filled": False, "fill": "var(--card)", "opacity": 1, "cursor": "pointer"},
            "encoding": {"shape": _series(cells, "cell")["shape"], "size": _SIZE},
        },
    ]
    return _chart("trend", method, words, rows, {"encoding": encoding, "layer": layer})


def curve(name: str, title: str, rows: Sequence[Mapping[str, Any]], mark: float) -> Chart:
    """Return a chart of series over time, with a vertical line at ``mark`` (minutes).

    Rows have the keys ``minute``, ``series`` and ``value``.
    """
    encoding = {
        "x": {"field": "minute", "type": "quantitative", "title": "minutes"},
        "y": {"field": "value", "type": "quantitative", "title": title, "scale": {"zero": False, "nice": True}},
        "color": {"field": "series", "type": "nominal", "title": "process tree"},
        "strokeDash": {"field": "series", "type": "nominal", "title": "process tree"},
        "tooltip": [{"field": "series"}, {"field": "minute"}, {"field": "value"}],
    }
    rule = {
        "data": {"values": [{"minute": round(mark, 2)}]},
        "mark": {"type": "rule", "color": "var(--soft)", "strokeDash": [4, 4]},
        "encoding": {"x": {"field": "minute", "type": "quantitative"}},
    }
    line = {"mark": {"type": "line", "interpolate": "step-after", "strokeWidth": 1.5}, "encoding": encoding}
    return _chart("soak", name, title, map(dict, rows), {"layer": [line, rule]})
