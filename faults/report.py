"""Report fault tests on the terminal, in drills.json and in drills.md, with the same table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from faults.model import GROUPS, Drill, DrillSet, Ending, Result
from harness.reports.markdown import plain_cell
from harness.util.files import write_atomic, write_json

STYLE = {Ending.SURVIVED: "green", Ending.FALSE_GREEN: "bold red", Ending.FAILED: "red", Ending.LOST: "yellow"}


def write_drills(drills: DrillSet, folder: Path) -> None:
    """Write every report file of a set of fault tests into its folder."""
    write_json(folder / "drills.json", {**drills.model_dump(mode="json"), "exit_code": drills.exit_code})
    write_atomic(folder / "drills.md", render_markdown(drills))


def print_catalogue(drills: Sequence[Drill], console: Console) -> None:
    """Print what each test does and what must follow."""
    table = Table(title=f"{len(drills)} fault tests", title_justify="left")
    for name in ("test", "group", "fault", "where and when", "expected", "expected reason", "within"):
        table.add_column(name, overflow="fold", no_wrap=name in ("test", "within"))
    for d in drills:
        table.add_row(d.id, d.group, *map(escape, (d.title, d.strikes, d.expected, d.reason)), f"{d.bound_s:.0f} s")
    console.print(table)


def print_drills(drills: DrillSet, console: Console) -> None:
    """Print the table, and why faults were not survived."""
    table = Table(title="fault tests", title_justify="left")
    for name in ("test", "result", "verdict", "recorded", "leftovers", "seconds", "fault"):
        table.add_column(name, no_wrap=name != "fault", overflow="fold")
    for r in drills.results:
        ending = Text(f"{r.ending.symbol} {r.ending}", style=STYLE[r.ending])
        table.add_row(r.id, ending, r.verdict or "none", _kept(r), str(len(r.left)), _seconds(r), escape(r.title))
    console.print(table)
    for r in drills.results:
        if r.ending is not Ending.SURVIVED:
            console.print(Text(f"{r.ending.symbol} {r.id}: {r.ending}", STYLE[r.ending]))
            for problem in r.problems:
                console.print(f"    {escape(problem)}", highlight=False)
            console.print(f"    the run's reason: {escape(r.reason or 'none')}", highlight=False)
    for control in drills.controls:
        console.print(f"control {control.id}: {control.verdict}, {control.requests} requests", highlight=False)
    for what in drills.left:
        console.print(f"left behind at the end: {escape(what)}", highlight=False)
    console.print(Text(drills.sentence, style="green" if drills.exit_code == 0 else "red"))


def _kept(result: Result) -> str:
    return f"{result.recorded}/{result.planned}"


def _seconds(result: Result) -> str:
    return f"{result.seconds:.0f} of {result.bound_s:.0f}"


def render_markdown(drills: DrillSet) -> str:
    """Render the table as Markdown that fits into ``docs/``."""
    versions = ", ".join(f"{k} {v}" for k, v in drills.versions.items() if v and k in ("vllm", "torch", "nixl"))
    at = ", ".join(c[:12] + ("+changes" if c.endswith("+changes") else "") for c in drills.commits) or "unknown"
    lines = [f"{drills.sentence} Profile {drills.profile}, {versions}, harness at {at}.", ""]
    for group in GROUPS:
        mine = [r for r in drills.results if r.group == group]
        if mine:
            lines += [f"### {group} ({len(mine)})", "", *_rows(mine), ""]
    return "\n".join(lines)


def _rows(results: Sequence[Result]) -> list[str]:
    lines = [
        "| test | fault | where and when | expected | verdict | result | reason | recorded | leftovers | seconds |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        cells = [r.id, r.title, r.strikes, r.expected, r.verdict or "none", f"{r.ending.symbol} {r.ending}"]
        cells += [r.reason[:160], _kept(r), str(len(r.left)), _seconds(r)]
        lines.append("| " + " | ".join(plain_cell(c, 200) for c in cells) + " |")
    return lines
