"""Report a bisection on the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from harness.commands.bisect.run import Bisection, Said

_STYLE: dict[Said, str] = {"shown": "bold red", "not shown": "green", "skipped": "yellow"}
_SYMBOL: dict[Said, str] = {"shown": "✘", "not shown": "✔", "skipped": "?"}


def print_bisection(found: Bisection, console: Console) -> None:
    """Print a table of the versions tried, oldest first, and the result in a sentence."""
    table = Table(title=f"bisect {escape(found.finding)}", title_justify="left")
    table.add_column("version", no_wrap=True)
    table.add_column("finding", no_wrap=True)
    table.add_column("tries", justify="right")
    table.add_column("seconds", justify="right")
    table.add_column("folder or reason", overflow="fold")
    for step in sorted(found.steps, key=lambda s: found.candidates.index(s.version)):
        table.add_row(
            step.version,
            Text(f"{_SYMBOL[step.verdict]} {step.verdict}", style=_STYLE[step.verdict]),
            f"{step.shown} of {step.told}",
            f"{step.seconds:.0f}",
            escape(step.why or step.folder or ""),
        )
    console.print(table)
    if found.mutants:
        console.print(f"engines ran with injected faults: {', '.join(found.mutants)}", highlight=False)
    console.print(Text(found.sentence, style="yellow" if found.exit_code else "bold"), soft_wrap=True)
