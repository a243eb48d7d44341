"""The summary of a judged run on a terminal, readable in ten seconds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.history.records import COLD
from harness.history.verdict import Verdict
from harness.prompts.lengths import Stratum
from harness.reports.cause_words import BRIEF, detail_of, sentence_of
from harness.reports.summary import AcceptanceRow, RunSummary
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
_CAUSES = 6
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
    _lines(console, summary.brief, summary.verdict, most=4)
    if summary.remote_code:
        _lines(console, summary.remote_code)
    if summary.next_step and not summary.command:
        _lines(console, f"next: {summary.next_step}", most=4)
    _lines(console, f"exposure: {summary.exposure.sentence}", most=3)
    if summary.inputs is not None:
        _lines(console, f"judged from: {summary.inputs.sentence}")
    for notice in summary.judgement.notices[:_NOTICES]:
        _lines(console, f"notice: {notice}")
    _more(console, len(summary.judgement.notices) - _NOTICES, "notice", summary)
    console.print(_cells(summary, console.width))
    _more(console, len(summary.cells) - _CELLS, "cell", summary)
    _causes(summary, console)
    for _, line in summary.published[:1]:
        _lines(console, f"advisory: {line}", most=1)
    if summary.unwritten:
        _lines(console, f"no report: {summary.unwritten}")
    else:
        _read_on(summary, console)


def _causes(summary: RunSummary, console: Console) -> None:
    """Print the causes: where the gravest one is, then a line for each of the others."""
    for nth, cause in enumerate(summary.found[:_CAUSES]):
        first = "" if nth else detail_of(cause)
        _lines(console, first or sentence_of(cause, BRIEF), cause.verdict, most=1 if nth else 3)
    _more(console, len(summary.found) - _CAUSES, "cause", summary)
    if summary.untested:
        _lines(console, summary.untested_words, most=1)
    known = sorted({f"{c.known} {c.link}" for c in summary.expected})
    if known:
        _lines(console, ", ".join(known), Verdict.KNOWN)


def _read_on(summary: RunSummary, console: Console) -> None:
    if summary.history.run.seconds:
        console.print(_times(summary.history.run.seconds), highlight=False)
    if summary.command and not summary.only_repro:
        _unbroken(console, f"go on: {summary.command}")
    if summary.repro:
        _unbroken(console, f"reproduce: {summary.repro}")
    page = f"{summary.written / 'report.html'}" if summary.written is not None else "none written (--out DIR, --write)"
    _unbroken(console, f"report: {page}")


def _times(seconds: Mapping[str, float]) -> str:
    total, start, requests, stop, own = (
        seconds.get(key, 0.0) for key in ("total", "engine_start", "requests", "engine_stop", "own")
    )
    parts = f"engine start {start:.0f} s, requests {requests:.0f} s, engine stop {stop:.0f} s"
    if start + requests + stop <= total:
        return f"{total:.0f} s: {parts}, harness {own:.0f} s"
    # Earlier versions recorded 0 for the harness's own time where cells overlapped: that says nothing.
    alone = f"; harness alone {own:.0f} s" if own else ""
    return f"{total:.0f} s; of all cells, some side by side: {parts}{alone}"


def _lines(console: Console, text: str, verdict: Verdict | None = None, most: int = 2) -> None:
    """Print a text on at most ``most`` lines, cut between words when it is longer."""
    mark = (f"{verdict.symbol} {verdict}  ", STYLE[verdict]) if verdict is not None else ""
    wrapped = list(Text.assemble(mark, harmless(" ".join(text.split()))).wrap(console, console.width))
    for line in wrapped:
        line.rstrip()
    for line in wrapped[: most - 1] if len(wrapped) > most else wrapped:
        console.print(line)
    if len(wrapped) > most:
        console.print(_ended(wrapped[most - 1], console.width))


def _ended(line: Text, width: int) -> Text:
    """Return the last line of a text that goes on, with an ellipsis behind its last whole word that fits."""
    while line.cell_len + 2 > width and " " in line.plain.strip():
        line = line[: line.plain.rstrip().rindex(" ")]
        line.rstrip()
    return Text.assemble(line, " …")


def _unbroken(console: Console, text: str) -> None:
    """Print a line unbroken, so that it can be copied."""
    console.print(harmless(text).replace("\n", "�"), soft_wrap=True, highlight=False, markup=False)


def _more(console: Console, left: int, what: str, summary: RunSummary) -> None:
    """Print how many more there are, and where they can be read."""
    if left > 0:
        where = (
            " in the report" if summary.written is not None else ": `harness check` has all with --json or --out DIR"
        )
        console.print(f"… {counted(left, f'more {what}')}{where}", highlight=False)


_GAP = 3
"""Columns between two cells of the table."""
_LEAST = 14
"""Columns below which a list of strata says nothing."""
_CUT = "not passing in"
_ACCEPTED = "accepted per position"
_Columns = dict[str, list[Text]]


def _cells(summary: RunSummary, width: int) -> Table:
    """Return a table of the worst cells, with where they fail and their acceptance, at most ``width`` columns wide.

    Cell and verdict are never cut. Where room is short, acceptance has fewer digits, then the list of strata goes,
    where acceptance changed, or else acceptance, then the number of cold prompts with equal tokens.
    """
    columns = next((c for c in _layouts(summary) if _least(c) <= width), None) or list(_layouts(summary))[-1]
    rest = width - sum(_wide(name, texts) + _GAP for name, texts in columns.items() if name != _CUT)
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name, texts in columns.items():
        cut = name == _CUT
        wide = max(1, min(_wide(name, texts), rest)) if cut else _wide(name, texts)
        # Only a name that is wider than the terminal itself is folded.
        table.add_column(name, width=wide, no_wrap=cut, overflow="ellipsis" if cut else "fold")
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    return table


def _layouts(summary: RunSummary) -> Iterator[_Columns]:
    """Yield the columns of the table, by what they hold, the fullest first."""
    worst_first = sorted(summary.cells.items(), key=lambda item: -item[1].severity)[:_CELLS]
    cells = [cell for cell, _ in worst_first]
    rows = {row.cell: row for row in summary.acceptance}
    names: _Columns = {
        "cell": [Text(harmless(cell)) for cell in cells],
        "verdict": [verdict_text(verdict) for _, verdict in worst_first],
    }
    equal: _Columns = {"cold equal": [Text(summary.equal_tokens.get(cell, "")) for cell in cells]}
    failing: _Columns = {_CUT: [Text(harmless(", ".join(_failing(summary, cell)) or "–")) for cell in cells]}
    long: _Columns = {_ACCEPTED: [Text(_accepted(rows.get(cell))) for cell in cells]}
    arrows: list[_Columns] = [{_ACCEPTED: [Text(_moved(rows.get(cell), d)) for cell in cells]} for d in (3, 2)]
    yield names | equal | failing | long
    yield names | equal | failing | arrows[0]
    if any("→" in text.plain for text in arrows[0][_ACCEPTED]):
        yield from (names | equal | accepted for accepted in arrows)
    yield names | equal | failing
    yield names | failing


def _wide(name: str, texts: list[Text]) -> int:
    return max(len(name), *(t.cell_len for t in texts))


def _least(columns: _Columns) -> int:
    """Return how wide a table must be to hold columns, with a list of strata that says something."""
    wide = {name: _wide(name, texts) for name, texts in columns.items()}
    most = _LEAST if _ACCEPTED not in columns else 2 * _LEAST
    return sum(min(w, most) if name == _CUT else w for name, w in wide.items()) + _GAP * (len(wide) - 1)


def _failing(summary: RunSummary, cell: str) -> list[str]:
    """Return the strata of cold prompts and the scenarios in which a cell does not pass."""
    heats = summary.prompts.by_stratum.get(cell, {})
    strata = [s for s in Stratum if s in heats and heats[s].symbol not in "·=–"]
    scenarios = [s for s, v in summary.scenario_grid.get(cell, {}).items() if v is not Verdict.PASS]
    return [*strata, *(s for s in scenarios if s != COLD or not strata)]


def _rates(row: AcceptanceRow | None) -> str:
    return " ".join(f"{r:.4f}" for r in row.ours.rates) if row is not None and row.ours.rates else "–"


def _moved(row: AcceptanceRow | None, digits: int) -> str:
    """Return the rates in few columns, each behind that of the baseline: ``0.907→0.000``, or ``0.907 =``."""
    if row is None or not row.ours.rates:
        return "–"
    ours = " ".join(f"{r:.{digits}f}" for r in row.ours.rates)
    if row.baseline_rates is None:
        return ours
    pairs = list(zip(row.baseline_rates, row.ours.rates, strict=False))
    if all(b is not None and f"{b:.4f}" == f"{r:.4f}" for b, r in pairs):
        return f"{ours} ="
    return " ".join(f"{'–' if b is None else f'{b:.{digits}f}'}→{r:.{digits}f}" for b, r in pairs)


def _accepted(row: AcceptanceRow | None) -> str:
    if row is None or not row.ours.rates:
        return "–"
    ours = _rates(row)
    recorded = " ".join("–" if r is None else f"{r:.4f}" for r in row.baseline_rates or ())
    if not recorded:
        return f"{ours}, not judged by its baseline" if row.has_baseline else f"{ours}, no baseline"
    return f"{ours}, as in the baseline" if ours == recorded else f"{ours}, baseline {recorded}"
