"""``harness ab``: the same cells on two vLLMs, one after the other, and the second judged by the first.

Both are judged by the single engines of the first, so no baseline is needed, and a finding that both have is not the
second one's.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from harness.commands.run import execute
from harness.engines.environment import EngineEnvironment
from harness.history.verdict import Verdict, worst
from harness.judging.references import References
from harness.profiles.cells import CellName
from harness.prompts.model import Prompt
from harness.reports.beyond import render_comparison
from harness.reports.compare import Comparison, compare_runs
from harness.runner.options import RunOptions
from harness.runner.run import new_folder
from harness.util.files import write_atomic
from harness.util.progress import Reporter
from harness.util.text import counted
from harness.workload.cells import CellWork, Item
from harness.workload.prepare import Prepared, prepare

PAGE = "compare.html"


class Side(NamedTuple):
    """One of the two vLLMs."""

    name: str
    environment: EngineEnvironment


def with_references(source: str, cells: list[str], scenarios: list[str]) -> Prepared:
    """Prepare the cells, and the single ones by which both sides are judged: those of their methods and the plain one,
    asked cold for every prompt of the scenarios, too."""
    prepared = prepare(source, cells, scenarios)
    if cells:
        names = [CellName.of(c.id) for c in prepared.plan.cells]
        singles = dict.fromkeys(name for n in names for name in (n.single, n.reference))
        prepared = prepare(source, [*cells, *singles], scenarios)
    used = {
        (w.cell.variant, send.prompt.id): send.prompt
        for w in prepared.works
        for script in w.scripts
        for stage in script.stages
        for send in stage.sends
    }
    works = [
        _asked_cold(w, [p for (variant, _), p in used.items() if variant == w.cell.variant])
        if w.cell.topology == "single" and not w.cell.routed
        else w
        for w in prepared.works
    ]
    return prepared._replace(works=tuple(works))


def _asked_cold(work: CellWork, prompts: Sequence[Prompt]) -> CellWork:
    asked = {item.prompt.id for item in work.items if item.form == "ids"}
    return work._replace(items=(*work.items, *(Item(p, "ids") for p in prompts if p.id not in asked)))


def record_both(prepared: Prepared, sides: tuple[Side, Side], out: Path, reporter: Reporter) -> tuple[Comparison, Path]:
    """Record both sides and compare them; return the comparison and the folder with both runs and the page."""
    folder = new_folder(out, prepared.profile, "ab")
    runs = []
    for name, environment in sides:
        reporter.line(f"{name}: {environment.executable} {' '.join(environment.flags.options)}".rstrip())
        runs.append(execute(prepared, folder / name, reporter, RunOptions(environment=environment)).folder)
    first, second = runs
    comparison = compare_runs(first, second, References(against=first))
    write_atomic(folder / PAGE, render_comparison(comparison))
    return comparison, folder


def conclusion(comparison: Comparison) -> tuple[Verdict, str]:
    """Return the verdict on the second side, and why, in one sentence.

    It is that of the worst finding that the first side does not have; UNKNOWN if there is none, but a side has a cell
    that could not be judged.
    """
    base, head = (
        {f.id: f for f in run.judgement.findings if f.verdict not in (Verdict.KNOWN, Verdict.UNKNOWN)}
        for run in comparison.runs
    )
    new = [finding for name, finding in head.items() if name not in base]
    unknown = [
        f"{cell} of {name}"
        for name, run in zip(("base", "head"), comparison.runs, strict=True)
        for cell, verdict in run.judgement.by_cell().items()
        if verdict is Verdict.UNKNOWN
    ]
    if new:
        first = new[0]
        return worst([f.verdict for f in new]), (
            f"head has {counted(len(new), 'finding')} that base does not have, first {first.id}: {first.message}"
        )
    if unknown:
        return Verdict.UNKNOWN, f"not judged: {', '.join(unknown[:6])}; nothing else tells head from base"
    return Verdict.PASS, "head has no finding that base does not have, judged by the single engines of base"
