"""Reports about more than one run: a comparison of two, and the trend over many."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from harness.history.verdict import Verdict
from harness.profiles.cells import CellName
from harness.reports.cause_words import BRIEF, sentence_of
from harness.reports.charts import Chart, acceptance_over_runs
from harness.reports.compare import Comparison
from harness.reports.html import environment, render_page
from harness.reports.terminal import STYLE, verdict_text
from harness.reports.trend_model import Trend
from harness.stats.paired import Difference
from harness.util.text import harmless


def points(d: Difference) -> str:
    """Format a difference in percentage points with its interval."""
    if math.isnan(d.effect):
        return "not comparable"
    if math.isnan(d.low):
        return f"{100 * d.effect:+.2f} points"
    return f"{100 * d.effect:+.2f} points ({100 * d.low:+.2f} to {100 * d.high:+.2f})"


# --- two runs --------------------------------------------------------------------------------------------------------


def render_comparison(comparison: Comparison) -> str:
    """Render compare.html, one self-contained file."""
    env = environment()
    env.filters["points"] = points
    env.filters["sentence"] = sentence_of
    a, b = (r.history.run for r in comparison.runs)
    return render_page("compare.html.j2", env, (), comparison=comparison, a=a, b=b)


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print the cells, settings and findings in which two runs differ."""
    first, second = comparison.names
    columns = (Column("cell", no_wrap=True), first, second, "same tokens", f"acceptance, {second} minus {first}")
    table = Table(*columns, title=f"{first} and {second} run", title_justify="left")
    for c in comparison.cells:
        verdicts = [verdict_text(v) if v is not None else Text("not run") for v in c.verdicts]
        moved = [f"{p}: {points(d)}" for p, d in enumerate(c.positions) if d.effect]
        table.add_row(c.cell, *verdicts, c.same_tokens, "\n".join(moved) or ("equal" if c.positions else "–"))
    console.print(table)
    for name, x, y in (row for row in comparison.rows if row[1] != row[2]):
        console.print(f"{escape(name)}: {escape(x)} → {escape(y)}", highlight=False)
    for word, found in (("new", comparison.new), ("resolved", comparison.gone)):
        for cause in found[:6]:
            mark = (f"{cause.verdict.symbol} {cause.verdict} ", STYLE[cause.verdict])
            console.print(Text.assemble(f"{word}: ", mark, f"{harmless(sentence_of(cause, BRIEF))} ×{cause.count}"))
    console.print(comparison.sentence, highlight=False)


# --- many runs -------------------------------------------------------------------------------------------------------


def render_trend(trend: Trend, page: Path) -> str:
    """Render trend.html, one self-contained file, with links from ``page`` to the reports of the runs that have one."""
    cells = list(dict.fromkeys(c for n in trend.runs for c in n.cells))
    links = _links(trend, page)
    return render_page("trend.html.j2", environment(), _charts(trend, links), trend=trend, cells=cells, links=links)


def _links(trend: Trend, page: Path) -> dict[int, str]:
    """Return the paths of the runs' reports by index, relative to the page and quoted for a URL."""
    found = {}
    for index, run in enumerate(trend.runs):
        report = run.folder.resolve() / "report.html"
        if report.is_file():
            # Without the dot, a folder called "https:" would be read as a scheme.
            found[index] = "./" + quote(os.fsencode(os.path.relpath(report, page.resolve().parent)))
    return found


def _charts(trend: Trend, links: Mapping[int, str]) -> list[Chart]:
    methods = dict.fromkeys(CellName.of(p.cell).lineup for p in trend.points)
    return [acceptance_over_runs(m, trend, links) for m in methods]


def print_trend(trend: Trend, console: Console) -> None:
    """Print the latest runs, the drifts found, and the runs left out."""
    columns = (Column("run", overflow="fold"), Column("verdict", no_wrap=True), "cells not passing")
    table = Table(*columns, title="runs", title_justify="left")
    for n in trend.runs[-20:]:
        bad = [f"{c} {v}" for c, v in n.cells.items() if v.exit_code != 0]
        table.add_row(n.run_id, verdict_text(n.verdict), ", ".join(bad[:4]) + (" …" if len(bad) > 4 else ""))
    console.print(table)
    for d in trend.drifts:
        style = STYLE[Verdict.DRIFT if d.falls else Verdict.IMPROVED]
        what = "falls" if d.falls else "rises"
        console.print(
            Text(
                f"slow drift: {d.cell} position {d.position} {what} since {trend.runs[d.since].run_id}, "
                f"{100 * d.effect:+.2f} points from {trend.runs[d.first].run_id}",
                style=style,
            )
        )
    for answers in trend.wrong_answers:
        style = STYLE[Verdict.REGRESSION] if answers.wrong else ""
        console.print(Text(f"{answers.engines}, {answers.what}: {answers.sentence}", style=style), highlight=False)
    for what, count in trend.suspects:
        console.print(
            Text(f"{what}: SUSPECT in {count} runs, which chance alone does not repeat", style=STYLE[Verdict.SUSPECT])
        )
    for row in trend.intermittent:
        style = STYLE[Verdict.REGRESSION if row.certain else Verdict.SUSPECT]
        console.print(Text(f"{row.engines}: {row.sentence}", style=style), highlight=False)
    for line in trend.left_out[:6]:
        console.print(f"left out: {escape(line[:300])}", highlight=False)
    console.print(trend.sentence, highlight=False)
