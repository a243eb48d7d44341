"""Print start, request and own time per cell of recorded runs: python -m benchmarks.matrix [RUN_DIR …]

Without arguments it first runs the whole cpu matrix. "own" is all time except starting and ending engines and waiting
for answers: reading counters, parsing, writing records.
"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.recorded import show_recorded
from harness.history.folder import load_history


def show(folder: Path, console: Console) -> None:
    run = load_history(folder).run
    table = Table(
        title=f"{run.run_id}: {run.hardware['processor']}, {run.hardware['cores']} cores, vLLM {run.versions['vllm']}"
    )
    for column in ("cell", "start s", "requests", "request s", "s per request", "own s"):
        table.add_column(column, justify="right")
    for cell in run.cells:
        requests = cell.planned + sum(cell.scenarios.values())
        table.add_row(
            cell.cell,
            f"{cell.start_seconds:.1f}",
            str(requests),
            f"{cell.request_seconds:.1f}",
            f"{cell.request_seconds / max(requests, 1):.2f}",
            f"{cell.seconds - cell.request_seconds:.1f}",
        )
    console.print(table)
    total = run.seconds.get("total", 0.0)
    parts = ", ".join(f"{k.replace('_', ' ')} {v:.1f} s" for k, v in run.seconds.items())
    console.print(f"{parts}; own share {100 * run.seconds.get('own', 0.0) / max(total, 1e-9):.1f} %")


if __name__ == "__main__":
    show_recorded("run", "latest", show)
