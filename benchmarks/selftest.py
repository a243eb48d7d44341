"""Print the seconds per mutant and control of recorded self-tests: python -m benchmarks.selftest [SELFTEST_DIR …]

Without arguments it first runs the whole self-test.
"""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.recorded import show_recorded


def show(folder: Path, console: Console) -> None:
    test = json.loads((folder / "selftest.json").read_text(encoding="utf-8"))
    table = Table(title=f"{test['run_id']}: {test['hardware']['processor']}, vLLM {test['versions']['vllm']}")
    for column in ("what", "requests", "seconds"):
        table.add_column(column, justify="right")
    for control in test["controls"]:
        table.add_row(f"control {control['id']}", str(control["requests"]), f"{control['seconds']:.1f}")
    for outcome in test["outcomes"]:
        table.add_row(outcome["mutant"], "", f"{outcome['seconds']:.1f}")
    console.print(table)
    busy = sum(x["seconds"] for x in (*test["controls"], *test["outcomes"]))
    console.print(
        f"{test['seconds']:.0f} s in all, {busy:.0f} s of requests and judging, {test['seconds'] - busy:.0f} s for "
        f"{test['engine_starts']} engine starts and ends"
    )


if __name__ == "__main__":
    show_recorded("selftest", "latest-selftest", show)
