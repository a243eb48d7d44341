"""Measure size and times of the report of a large run: python -m benchmarks.report [CELLS] [PROMPTS]

Generates a run of that size with every tenth prompt damaged in every second cell, judges it, and renders the page. With
Chromium on the PATH, it also measures how long the page takes until its filters and links work.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.table import Table

from harness.baselines.lookup import Lookup
from harness.baselines.model import Baseline
from harness.history.folder import History
from harness.judging.checks.registry import judge
from harness.reports.html import render_html
from harness.reports.summary import summarise_run
from tests.support.builders import change_final, history, lookup, observation

LENGTHS = range(40, 140)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--dump-dom",
)


def large_run(cells: int, prompts: int) -> History:
    """Return a run of pairs and single engines with methods that differ only in name."""
    out = []
    for number in range(cells):
        cell = f"{('pd', 'single')[number % 2]}-eagle3.{number // 2}"
        templates = {n: observation(cell, n) for n in LENGTHS}
        for i in range(prompts):
            o = templates[LENGTHS[i % len(LENGTHS)]]
            if number % 2 == 0 and i % 10 == 0 and o.final is not None and o.final.output_ids is not None:
                o = change_final(o, output_ids=(9, *o.final.output_ids[1:]))
            out.append(o.model_copy(update={"prompt_id": f"{o.prompt_id}-{i:04d}", "sequence": i}))
    return history(out)


def references(run: History, prompts: int) -> dict[str, Lookup]:
    """Return a baseline of every method, with a row for each prompt."""
    out = {}
    for method in {"none", *(c.cell.split("-", 1)[1] for c in run.run.cells)}:
        known = lookup(list(LENGTHS), method.split(".")[0]).baseline
        assert known is not None
        rows = known.by_prompt()
        lengths = (LENGTHS[i % len(LENGTHS)] for i in range(prompts))
        made = (rows[f"p{n}"].model_copy(update={"prompt_id": f"p{n}-{i:04d}"}) for i, n in enumerate(lengths))
        out[method] = Lookup(Baseline(header=known.header, rows=tuple(made)), "")
    return out


def main(cells: int, prompts: int) -> None:
    run = large_run(cells, prompts)
    baselines = references(run, prompts)
    times = [time.perf_counter()]
    judgement = judge(run, baselines)
    times.append(time.perf_counter())
    summary = summarise_run(run, judgement, baselines)
    times.append(time.perf_counter())
    page = render_html(summary)
    times.append(time.perf_counter())
    table = Table(title=f"{cells} cells × {prompts} prompts, {len(judgement.findings):,} findings")
    for column in ("judge s", "figures s", "page s", "page MB", "ready in a browser, s"):
        table.add_column(column, justify="right")
    spent = [f"{b - a:.1f}" for a, b in pairwise(times)]
    table.add_row(*spent, f"{len(page.encode()) / 1e6:.2f}", _ready(page))
    Console().print(table)


def _ready(page: str) -> str:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        return "no browser"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.html"
        path.write_text(page, encoding="utf-8")
        done = subprocess.run(
            [browser, *FLAGS, f"--user-data-dir={folder}/profile", path.as_uri()],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
    found = re.search(r'<html[^>]* data-ready="(\d+)"', done.stdout)
    return f"{int(found.group(1)) / 1000:.1f}" if found else "not reached"


if __name__ == "__main__":
    numbers = [int(a) for a in sys.argv[1:3]]
    main(*(numbers + [36, 1000][len(numbers) :]))
