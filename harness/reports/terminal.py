"""The summary of a judged run on a terminal, readable in ten seconds."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.history.records import COLD
from harness.history.verdict import Verdict
from harness.judging.diagnosis.diagnose import damage_name
from harness.reports.html import repro_line
from harness.reports.summary import AcceptanceRow, Group, RunSummary, can_be_tried, causes, grouped_findings
from harness.util.text import harmless

STYLE = {
    Verdict.PASS: "green",
    Verdict.KNOWN: "blue",
    Verdict.IMPROVED: "cyan",
    Verdict.SUSPECT: "yellow",
    Verdict.UNKNOWN: "yellow",
    Verdict.DRIFT: "magenta",
    Verdict.REGRESSION: "bold red",
}
_CELLS = 8
_NOTICES = 2
_DIAGNOSES = 3
_GROUPS = 3
"""These limits, with the lines around what they limit, keep any summary within 40 lines."""


def verdict_text(verdict: Verdict) -> Text:
    """Return a verdict with its symbol in its colour."""
    return Text(f"{verdict.symbol} {verdict.value}", style=STYLE[verdict])


def print_summary(summary: RunSummary, console: Console) -> None:
    """Print the verdict, then the cells and findings, then where to read on."""
    console.print()
    _lines(console, summary.sentence, summary.verdict)
    if summary.remote_code:
        _lines(console, summary.remote_code)
    if summary.next_step:
        _lines(console, f"next: {summary.next_step}")
    _lines(console, f"exposure: {summary.exposure.sentence}")
    if summary.inputs is not None:
        _lines(console, f"judged from: {summary.inputs.sentence}")
    for notice in summary.judgement.notices[:_NOTICES]:
        _lines(console, f"notice: {notice}")
    _more(console, len(summary.judgement.notices) - _NOTICES, "notices")
    console.print(_cells(summary))
    _more(console, len(summary.cells) - _CELLS, "cells")
    _findings(summary, console)
    for _, line in summary.published[:1]:
        _lines(console, f"advisory: {line}", most=1)
    if summary.unwritten:
        _lines(console, f"no report: {summary.unwritten}")
    else:
        _read_on(summary, console)


def _findings(summary: RunSummary, console: Console) -> None:
    diagnosed = [c for c in summary.diagnosed if c.verdict is not Verdict.KNOWN]
    groups = grouped_findings(summary.judgement)
    mine = [g for g in groups if g[0].known is None]
    first = causes(summary.verdict, mine)
    _groups(console, first[:_GROUPS])
    for cell in diagnosed[:_DIAGNOSES]:
        assert cell.diagnosis is not None
        _lines(console, f"{place(cell.cell, cell.scenario)}: {cell.diagnosis.text}", cell.verdict)
    _groups(console, [g for g in mine if g not in first][: max(0, _GROUPS - len(first))])
    _more(console, max(0, len(diagnosed) - _DIAGNOSES) + max(0, len(mine) - _GROUPS), "groups of findings")
    known = sorted({f"{f.known} {f.link}" for f, _, _ in groups if f.known})
    if known:
        _lines(console, ", ".join(known), Verdict.KNOWN, most=1)


def _groups(console: Console, groups: list[Group]) -> None:
    for finding, count, strata in groups:
        where = f" in {', '.join(strata)}" if strata else ""
        head = (
            f"{place(finding.cell, finding.scenario)} {finding.check} ({damage_name(finding.damage)}), {count} "
            f"finding{'s' if count > 1 else ''}{where}"
        )
        _lines(console, head, finding.verdict, most=1)
        _lines(console, f"    {f'{finding.prompt_id}: ' if finding.prompt_id else ''}{finding.message}", most=1)


def _read_on(summary: RunSummary, console: Console) -> None:
    seconds = summary.history.run.seconds
    if seconds:
        console.print(
            f"{seconds.get('total', 0):.0f} s: engine start {seconds.get('engine_start', 0):.0f} s, requests "
            f"{seconds.get('requests', 0):.0f} s, engine stop {seconds.get('engine_stop', 0):.0f} s, harness "
            f"{seconds.get('own', 0):.0f} s",
            highlight=False,
        )
    tried = [f for f, _, _ in grouped_findings(summary.judgement) if can_be_tried(f)]
    if tried:
        _unbroken(console, f"reproduce the first: {repro_line(summary.history, tried[0])}")
    page = f"{summary.written / 'report.html'}" if summary.written is not None else "none written (--out DIR, --write)"
    _unbroken(console, f"report: {page}")


def _lines(console: Console, text: str, verdict: Verdict | None = None, most: int = 2) -> None:
    """Print a text on at most ``most`` lines, truncated when it is longer."""
    mark = (f"{verdict.symbol} {verdict}  ", STYLE[verdict]) if verdict is not None else ""
    indent = text[: len(text) - len(text.lstrip(" "))]
    line = Text.assemble(mark, indent + harmless(" ".join(text.split())))
    # Word wrap leaves up to 16 columns of a line empty.
    room = most * console.width - (most - 1) * 16
    if line.cell_len > room:
        line.truncate(room, overflow="ellipsis")
    if most == 1:
        console.print(line, no_wrap=True, overflow="ellipsis")
    else:
        console.print(line)


def _unbroken(console: Console, text: str) -> None:
    """Print a line unbroken, so that it can be copied."""
    console.print(harmless(text).replace("\n", "�"), soft_wrap=True, highlight=False, markup=False)


def _more(console: Console, left: int, what: str) -> None:
    if left > 0:
        console.print(f"… {left} more {what} in the report", highlight=False)


def place(cell: str, scenario: str) -> str:
    """Return a cell's name, with its scenario unless that is the cold one."""
    return cell if scenario == COLD else f"{cell} in {scenario}"


def _cells(summary: RunSummary) -> Table:
    """Return a table of the worst cells, with where they fail and their acceptance."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("cell", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for name in ("tokens equal", "not passing in", "accepted per position"):
        table.add_column(name, no_wrap=True, overflow="ellipsis")
    accepted = {row.cell: row for row in summary.acceptance}
    order = list(Verdict)
    worst_first = sorted(summary.cells.items(), key=lambda item: -order.index(item[1]))[:_CELLS]
    for cell, verdict in worst_first:
        table.add_row(
            Text(harmless(cell)),
            verdict_text(verdict),
            summary.equal_tokens.get(cell, ""),
            Text(harmless(", ".join(_failing(summary, cell)) or "–")),
            _accepted(accepted.get(cell)),
        )
    return table


def _failing(summary: RunSummary, cell: str) -> list[str]:
    """Return the strata of cold prompts and the scenarios in which a cell does not pass."""
    strata = [s for s, e in summary.grid.get(cell, {}).items() if e.verdict is not Verdict.PASS and s != "all"]
    scenarios = [s for s, v in summary.scenario_grid.get(cell, {}).items() if v is not Verdict.PASS]
    return [*strata, *(s for s in scenarios if s != COLD or not strata)]


def _accepted(row: AcceptanceRow | None) -> str:
    if row is None or not row.ours.rates:
        return "–"
    ours = " ".join(f"{r:.4f}" for r in row.ours.rates)
    recorded = " ".join("–" if r is None else f"{r:.4f}" for r in row.baseline_rates or ())
    if not recorded:
        return f"{ours}, no baseline"
    return f"{ours}, as in the baseline" if ours == recorded else f"{ours}, baseline {recorded}"
