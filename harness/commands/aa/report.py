"""Report an A/A run: on the terminal, in aa.json and in aa.md."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from harness.reports.aa_result import AgainstItself, Count
from harness.reports.markdown import versions_in_words
from harness.reports.terminal import print_conclusion
from harness.util.files import write_atomic, write_json

_COLUMNS: dict[str, Callable[[Count], object]] = {
    "cell": lambda c: c.cell,
    "scenario": lambda c: c.scenario,
    "requests": lambda c: c.requests,
    "compared": lambda c: c.compared,
    "different tokens": lambda c: c.tokens_differ,
    "different accepted counts": lambda c: c.steps_differ,
    "findings": lambda c: c.findings,
    "verdicts": lambda c: ", ".join(f"{n} {v}" for v, n in c.verdicts.items()),
}


def write_repeat(result: AgainstItself, folder: Path) -> None:
    """Write every report file of an A/A run into its folder."""
    write_json(folder / "aa.json", {**result.model_dump(mode="json"), "exit_code": result.exit_code})
    write_atomic(folder / "aa.md", render_markdown(result))


def _rows(result: AgainstItself) -> list[list[str]]:
    return [[str(value(c)) for value in _COLUMNS.values()] for c in result.counts]


def render_markdown(result: AgainstItself) -> str:
    """Render the counts as a Markdown page that fits into ``docs/``."""
    versions = versions_in_words(result.versions)
    lines = ["# A/A", "", f"{result.sentence} Profile {result.profile}, {versions}, {result.seconds:.0f} s.", ""]
    lines += ["| " + " | ".join(_COLUMNS) + " |", "|---|---|" + "---:|" * 5 + "---|"]
    lines += ["| " + " | ".join(row) + " |" for row in _rows(result)]
    return "\n".join(lines) + "\n"


def print_repeat(result: AgainstItself, console: Console) -> None:
    table = Table(title=f"A/A, {result.repetitions} repetitions", title_justify="left")
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name in ("cell", "scenario", "verdicts") else "right")
    for row in _rows(result):
        table.add_row(*row)
    console.print(table)
    print_conclusion(result.sentence, result.exit_code, console)
