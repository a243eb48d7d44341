"""Report a soak: on the terminal, in soak.json and in soak.html."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from harness.lab.soak.growth import WARM_UP
from harness.lab.soak.model import HARNESS, RESULT, Soak
from harness.lab.soak.sampler import Record
from harness.reports.charts import Chart, curve
from harness.reports.html import environment, render_page
from harness.reports.terminal import verdict_text
from harness.util.files import write_atomic, write_json
from harness.util.text import counted

_POINTS = 400
"""Most points of a curve; longer ones are thinned."""
_SHOWN = 8
_CURVES = (
    ("rss_mib", "RSS of the harness, MiB", (HARNESS,)),
    ("pss_mib", "PSS of each tree, MiB", ()),
    ("descriptors", "open descriptors", ()),
    ("threads", "threads", ()),
    ("processes", "processes", ()),
    ("shm_files", "shared memory files", ()),
    ("shm_mib", "shared memory, MiB", ()),
)


def write_soak(result: Soak, record: Record, folder: Path) -> None:
    values = {**result.model_dump(mode="json"), "verdict": result.verdict, "exit_code": result.verdict.exit_code}
    write_json(folder / RESULT, values)
    write_atomic(folder / "soak.html", render_soak(result, record))


def render_soak(result: Soak, record: Record) -> str:
    """Render soak.html, one self-contained file."""
    return render_page("soak.html.j2", environment(), _charts(record), soak=result, sentence=sentence(result))


def _charts(record: Record) -> list[Chart]:
    if not record.times_s:
        return []
    step = -(-len(record.times_s) // _POINTS)
    warm = record.times_s[-1] * WARM_UP / 60
    out = []
    for figure, title, trees in _CURVES:
        rows: list[dict[str, Any]] = [
            {"minute": round(record.times_s[i] / 60, 2), "series": name, "value": columns[figure][i]}
            for name, columns in record.trees.items()
            if name in (trees or record.trees)
            for i in range(0, len(record.times_s), step)
        ]
        out.append(curve(figure, title, rows, warm))
    return out


def sentence(result: Soak) -> str:
    share = f"{100 * result.acceptance:.2f} %" if result.acceptance is not None else "none"
    return (
        f"{result.cell}, {result.seconds / 60:.1f} minutes at concurrency {result.concurrency}: "
        f"{counted(result.rounds, 'round')}, {result.answered} answers with {result.tokens} tokens, {result.broken} "
        f"broken, {counted(result.found, 'finding')}; {share} of {result.drafts} drafts accepted, "
        f"{result.moved_bytes / 2**20:.0f} MiB moved by NIXL, {result.preemptions} preemptions; "
        f"{result.samples} samples."
        + (f" Engines under test with {' '.join(result.engine_flags)}." if result.engine_flags else "")
    )


def print_soak(result: Soak, console: Console) -> None:
    table = Table(title=f"soak of {result.cell}", title_justify="left")
    for name in ("figure", "after warm-up", "at the end", "verdict", "because"):
        table.add_column(name, justify="right" if name in ("after warm-up", "at the end") else "left")
    for g in result.growths:
        table.add_row(g.name, f"{g.first:g}", f"{g.last:g}", verdict_text(g.verdict), escape(g.why))
    console.print(table)
    _lines(console, "finding", [f"{f.verdict} {f.id}: {f.message}" for f in result.findings], result.found)
    _lines(console, "doubt", result.doubts, len(result.doubts))
    console.print(sentence(result), highlight=False, markup=False)
    console.print(verdict_text(result.verdict))


def _lines(console: Console, word: str, lines: Sequence[str], count: int) -> None:
    for text in lines[:_SHOWN]:
        console.print(f"{word}: {text[:400]}", highlight=False, markup=False, soft_wrap=True)
    if count > _SHOWN:
        console.print(f"{count - min(_SHOWN, len(lines))} more of this kind", highlight=False)
