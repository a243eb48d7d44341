"""What a person reads in ten seconds on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from harness.findings import Verdict
from harness.history import COLD
from harness.summary import RunSummary, grouped_findings

STYLE = {
    Verdict.PASS: "green",
    Verdict.KNOWN: "blue",
    Verdict.IMPROVED: "cyan",
    Verdict.SUSPECT: "yellow",
    Verdict.UNKNOWN: "yellow",
    Verdict.DRIFT: "magenta",
    Verdict.REGRESSION: "bold red",
}
_GROUPS = 8


def verdict_text(verdict: Verdict) -> Text:
    return Text(f"{verdict.symbol} {verdict.value}", style=STYLE[verdict])


def print_summary(summary: RunSummary, console: Console) -> None:
    console.print()
    console.print(_cells(summary))
    if summary.scenarios:
        console.print(_scenarios(summary))
    if summary.acceptance:
        console.print(_acceptance(summary))
    for cell in summary.diagnosed[:_GROUPS]:
        assert cell.diagnosis is not None
        console.print(
            Text.assemble(
                (f"{cell.verdict.symbol} {cell.verdict} ", STYLE[cell.verdict]),
                f"{place(cell.cell, cell.scenario)}: {cell.diagnosis.text}",
            )
        )
    for finding, count, strata in grouped_findings(summary.judgement)[:_GROUPS]:
        where = f" in {', '.join(strata)}" if strata else ""
        console.print(
            Text.assemble(
                (f"{finding.verdict.symbol} {finding.verdict} ", STYLE[finding.verdict]),
                f"{place(finding.cell, finding.scenario)} {finding.check} ({finding.damage}), {count} "
                f"finding{'s' if count > 1 else ''}{where}" + (f": {finding.link}" if finding.link else ""),
            )
        )
        first = f"{finding.prompt_id}: " if finding.prompt_id else ""
        console.print(f"    {escape(first + finding.message)}", highlight=False)
    more = len(grouped_findings(summary.judgement)) - _GROUPS
    if more > 0:
        console.print(f"… {more} more groups of findings in the report")
    for line in summary.published:
        console.print(f"advisory: {escape(line)}", highlight=False)
    for notice in summary.judgement.notices:
        console.print(f"notice: {escape(notice)}")
    seconds = summary.history.run.seconds
    if seconds:
        console.print(
            f"{seconds.get('total', 0):.0f} s: engine start {seconds.get('engine_start', 0):.0f} s, requests "
            f"{seconds.get('requests', 0):.0f} s, engine stop {seconds.get('engine_stop', 0):.0f} s, harness "
            f"{seconds.get('own', 0):.0f} s",
            highlight=False,
        )
    console.print(Text.assemble(verdict_text(summary.verdict), "  ", summary.sentence))


def place(cell: str, scenario: str) -> str:
    """A cell, with its scenario when that is not the cold one."""
    return cell if scenario == COLD else f"{cell} in {scenario}"


def _scenarios(summary: RunSummary) -> Table:
    table = Table(title="scenarios", title_justify="left")
    table.add_column("cell", no_wrap=True)
    for scenario in summary.scenarios:
        table.add_column(scenario, justify="center")
    for cell, row in summary.scenario_grid.items():
        marks = [
            Text(row[s].symbol, style=STYLE[row[s]]) if s in row else Text("–", style="dim") for s in summary.scenarios
        ]
        table.add_row(cell, *marks)
    return table


def _cells(summary: RunSummary) -> Table:
    table = Table(title=f"run {summary.history.run.run_id}", title_justify="left")
    table.add_column("cell", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("tokens equal", justify="right")
    strata = [s for s in summary.strata if any(s in row for row in summary.grid.values())]
    for stratum in strata:
        table.add_column(stratum, justify="right")
    for cell, verdict in summary.cells.items():
        row = summary.grid.get(cell, {})
        marks = []
        for stratum in strata:
            entry = row.get(stratum)
            marks.append(
                Text(f"{entry.verdict.symbol} {entry.prompts}", style=STYLE[entry.verdict]) if entry else Text("–")
            )
        table.add_row(cell, verdict_text(verdict), summary.equal_tokens.get(cell, ""), *marks)
    return table


def _acceptance(summary: RunSummary) -> Table:
    table = Table(title="acceptance per position (accepted / steps)", title_justify="left")
    table.add_column("cell", no_wrap=True)
    width = max(len(r.ours.accepted_at) for r in summary.acceptance)
    for position in range(width):
        table.add_column(str(position), justify="right")
    table.add_column("steps", justify="right")
    table.add_column("length", justify="right")
    table.add_column("baseline", justify="right")
    table.add_column("padded", justify="right")
    for row in summary.acceptance:
        rates = [f"{r:.4f}" for r in row.ours.rates] + ["–"] * (width - len(row.ours.rates))
        length = f"{row.ours.length_pooled:.3f}" if row.ours.length_pooled else "–"
        baseline = " ".join(f"{r:.4f}" for r in row.baseline_rates) if row.baseline_rates else "none"
        table.add_row(row.cell, *rates, str(row.ours.steps), length, baseline, str(row.padded))
    return table
