"""Report an A/A run: on the terminal, in aa.json and in aa.md."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.history.verdict import Verdict
from harness.reports.aa_result import AgainstItself
from harness.reports.terminal import STYLE
from harness.util.files import write_atomic, write_json

_COLUMNS = (
    "cell",
    "scenario",
    "requests",
    "compared",
    "different tokens",
    "different accepted counts",
    "findings",
    "verdicts",
)


def write_repeat(result: AgainstItself, folder: Path) -> None:
    """Write every report file of an A/A run into its folder."""
    write_json(folder / "aa.json", {**result.model_dump(mode="json"), "exit_code": result.exit_code})
    write_atomic(folder / "aa.md", render_markdown(result))


def _rows(result: AgainstItself) -> list[list[str]]:
    return [
        [
            c.cell,
            c.scenario,
            str(c.requests),
            str(c.compared),
            str(c.tokens_differ),
            str(c.steps_differ),
            str(c.findings),
            ", ".join(f"{n} {v}" for v, n in c.verdicts.items()),
        ]
        for c in result.counts
    ]


def render_markdown(result: AgainstItself) -> str:
    """Render the counts as a Markdown page that fits into ``docs/``."""
    versions = ", ".join(f"{k} {v}" for k, v in result.versions.items() if v and k in ("vllm", "torch", "nixl"))
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
    style = STYLE[
        Verdict.PASS if result.exit_code == 0 else Verdict.REGRESSION if result.exit_code == 1 else Verdict.UNKNOWN
    ]
    console.print(Text(result.sentence, style=style))
