"""The summary of a judged run on a terminal, readable in ten seconds."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.history.records import COLD, in_words
from harness.history.verdict import Verdict
from harness.judging.diagnosis.diagnose import damage_name
from harness.prompts.lengths import Stratum
from harness.reports.html import repro_line
from harness.reports.summary import (
    AcceptanceRow,
    Group,
    RunSummary,
    can_be_tried,
    causes,
    group_place,
    grouped_findings,
)
from harness.util.text import counted, harmless

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


def print_conclusion(sentence: str, exit_code: int, console: Console) -> None:
    """Print a sentence in the colour of what its exit code means."""
    meant = {0: Verdict.PASS, 1: Verdict.REGRESSION}.get(exit_code, Verdict.UNKNOWN)
    console.print(Text(sentence, style=STYLE[meant]))


def print_summary(summary: RunSummary, console: Console) -> None:
    """Print the verdict, then the cells and findings, then where to read on."""
    console.print()
    _lines(console, summary.sentence, summary.verdict)
    if summary.remote_code:
        _lines(console, summary.remote_code)
    if summary.next_step and not summary.command:
        _lines(console, f"next: {summary.next_step}")
    _lines(console, f"exposure: {summary.exposure.sentence}", most=3)
    if summary.inputs is not None:
        _lines(console, f"judged from: {summary.inputs.sentence}")
    for notice in summary.judgement.notices[:_NOTICES]:
        _lines(console, f"notice: {notice}")
    _more(console, len(summary.judgement.notices) - _NOTICES, "notice")
    console.print(_cells(summary, console.width))
    _more(console, len(summary.cells) - _CELLS, "cell")
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
    _groups(console, summary, first[:_GROUPS])
    for cell in diagnosed[:_DIAGNOSES]:
        assert cell.diagnosis is not None
        _lines(console, f"{in_words(cell.cell, cell.scenario)}: {cell.diagnosis.text}", cell.verdict)
    _groups(console, summary, [g for g in mine if g not in first][: max(0, _GROUPS - len(first))])
    _more(console, max(0, len(diagnosed) - _DIAGNOSES) + max(0, len(mine) - _GROUPS), "group", " of findings")
    known = sorted({f"{f.known} {f.link}" for f, _, _ in groups if f.known})
    if known:
        _lines(console, ", ".join(known), Verdict.KNOWN, most=1)


def _groups(console: Console, summary: RunSummary, groups: list[Group]) -> None:
    for finding, count, strata in groups:
        where = f" in {', '.join(strata)}" if strata else ""
        head = (
            f"{group_place(summary.judgement, finding)}: {finding.check} ({damage_name(finding.damage)}), "
            f"{counted(count, 'finding')}{where}"
        )
        _lines(console, head, finding.verdict, most=1)
        message = f"    {f'{finding.prompt_id}: ' if finding.prompt_id else ''}{finding.message}"
        _lines(console, f"    {finding.reason}" if finding.reason else message, most=1 + bool(finding.reason))


def _read_on(summary: RunSummary, console: Console) -> None:
    seconds = summary.history.run.seconds
    if seconds:
        console.print(
            f"{seconds.get('total', 0):.0f} s: engine start {seconds.get('engine_start', 0):.0f} s, requests "
            f"{seconds.get('requests', 0):.0f} s, engine stop {seconds.get('engine_stop', 0):.0f} s, harness "
            f"{seconds.get('own', 0):.0f} s",
            highlight=False,
        )
    if summary.command:
        _unbroken(console, f"go on: {summary.command}")
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
    wrapped = line.wrap(console, console.width)
    rest = Text(" ").join(wrapped[most - 1 :])
    rest.truncate(console.width, overflow="ellipsis")
    for part in (*wrapped[: most - 1], rest)[: len(wrapped)]:
        console.print(part)


def _unbroken(console: Console, text: str) -> None:
    """Print a line unbroken, so that it can be copied."""
    console.print(harmless(text).replace("\n", "�"), soft_wrap=True, highlight=False, markup=False)


def _more(console: Console, left: int, what: str, of: str = "") -> None:
    if left > 0:
        console.print(f"… {counted(left, f'more {what}')}{of} in the report", highlight=False)


_GAP = 3
"""Columns between two cells of the table."""
_LEAST = 14
"""Columns below which a list of strata says nothing."""


def _cells(summary: RunSummary, width: int) -> Table:
    """Return a table of the worst cells, with where they fail and their acceptance, at most ``width`` columns wide.

    Cell and verdict are never cut. Where room is short, acceptance goes without its baseline, then altogether, then the
    list of strata is cut, then the number of cold prompts with equal tokens goes.
    """
    worst_first = sorted(summary.cells.items(), key=lambda item: -item[1].severity)[:_CELLS]
    rows = {row.cell: row for row in summary.acceptance}
    cells = [cell for cell, _ in worst_first]
    columns = {
        "cell": [Text(harmless(cell)) for cell in cells],
        "verdict": [verdict_text(verdict) for _, verdict in worst_first],
        "cold equal": [Text(summary.equal_tokens.get(cell, "")) for cell in cells],
        "not passing in": [Text(harmless(", ".join(_failing(summary, cell)) or "–")) for cell in cells],
        "accepted per position": [Text(_accepted(rows.get(cell))) for cell in cells],
    }
    short = [Text(_rates(rows.get(cell))) for cell in cells]
    wide = {name: max(len(name), *(t.cell_len for t in texts)) for name, texts in columns.items()}

    def room(*names: str) -> int:
        return width - sum(wide[name] + _GAP for name in names)

    if room("cell", "verdict", "cold equal", "accepted per position") < min(wide["not passing in"], 2 * _LEAST):
        columns["accepted per position"] = short
        wide["accepted per position"] = max(len("accepted per position"), *(t.cell_len for t in short))
    if room("cell", "verdict", "cold equal", "accepted per position") < _LEAST:
        del columns["accepted per position"], wide["accepted per position"]
    if room("cell", "verdict", "cold equal") < _LEAST:
        del columns["cold equal"], wide["cold equal"]
    wide["not passing in"] = max(1, min(wide["not passing in"], room(*(n for n in wide if n != "not passing in"))))
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in columns:
        cut = name == "not passing in"
        # Only a name that is wider than the terminal itself is folded.
        table.add_column(name, width=wide[name], no_wrap=cut, overflow="ellipsis" if cut else "fold")
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    return table


def _failing(summary: RunSummary, cell: str) -> list[str]:
    """Return the strata of cold prompts and the scenarios in which a cell does not pass."""
    heats = summary.prompts.by_stratum.get(cell, {})
    strata = [s for s in Stratum if s in heats and heats[s].symbol not in "·=–"]
    scenarios = [s for s, v in summary.scenario_grid.get(cell, {}).items() if v is not Verdict.PASS]
    return [*strata, *(s for s in scenarios if s != COLD or not strata)]


def _rates(row: AcceptanceRow | None) -> str:
    return " ".join(f"{r:.4f}" for r in row.ours.rates) if row is not None and row.ours.rates else "–"


def _accepted(row: AcceptanceRow | None) -> str:
    if row is None or not row.ours.rates:
        return "–"
    ours = _rates(row)
    recorded = " ".join("–" if r is None else f"{r:.4f}" for r in row.baseline_rates or ())
    if not recorded:
        return f"{ours}, not judged by its baseline" if row.has_baseline else f"{ours}, no baseline"
    return f"{ours}, as in the baseline" if ours == recorded else f"{ours}, baseline {recorded}"
