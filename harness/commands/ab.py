"""``harness ab``: the same cells on two vLLMs, head and then base, and head judged by base.

Both are judged by the single engines of base, so no baseline is needed, and a finding that both have is not head's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from harness.commands.run import execute
from harness.engines.api_key import ApiKey
from harness.engines.attached import AttachedExecutor, look_at
from harness.engines.environment import engines_for
from harness.engines.flags import EngineFlags
from harness.errors import EngineStartError, UsageError
from harness.history.verdict import Verdict, worst
from harness.judging.findings import Finding, how_many
from harness.judging.references import References
from harness.profiles.cells import CellName, make_plan
from harness.profiles.model import Profile
from harness.prompts.model import Prompt
from harness.reports.across_runs import render_comparison
from harness.reports.compare import Comparison, compare_runs
from harness.reports.summary import RunSummary
from harness.runner.groups import NOT_STARTED
from harness.runner.options import RunOptions
from harness.runner.run import new_folder
from harness.util.files import write_atomic
from harness.util.progress import Reporter
from harness.util.strict import shortened
from harness.util.text import counted, without_log
from harness.workload.at_once import Item
from harness.workload.cells import CellWork
from harness.workload.prepare import Prepared, prepare

PAGE = "compare.html"


class Side(NamedTuple):
    name: str
    prepared: Prepared
    where: str
    """What answers."""
    options: RunOptions


def started(name: str, prepared: Prepared, python: str | None, flags: EngineFlags) -> Side:
    """Return a side whose engines are started. Raises EnvironmentFault when they cannot be."""
    environment = engines_for(prepared.profile, prepared.plan, python, flags)
    words = " ".join([environment.executable, *flags.options])
    return Side(name, prepared, words, RunOptions(environment=environment))


def attached(prepared: Prepared, url: str, key: ApiKey | None, model: str | None = None) -> Side:
    """Return base as a server that runs already, which is asked the single cells; ``model`` where it lists several.

    Raises UsageError unless it answers, and has the settings of the profile, and the cells are those without
    speculation: the others are judged by the plain engine, too, and a server is one engine.
    """
    cells = [c for c in prepared.plan.cells if c.topology == "single" and not c.routed]
    if others := [c.id for c in cells if c.method.kind != "none"]:
        raise UsageError(
            f"--base {url}: one server can answer for cells without speculation alone (--cell '*-none'), not for "
            f"{', '.join(others)}; record the servers with `harness run --single` and compare with `harness check "
            "--against`"
        )
    works = tuple(w for w in prepared.works if w.cell in cells)
    alone = prepared._replace(plan=make_plan(prepared.profile, cells), works=works, lacking={})
    executor = AttachedExecutor({"single": look_at("base", url, key, model)})
    executor.require_fit(alone.plan, prepared.profile, works)
    environment = executor.environment(prepared.profile)
    return Side("base", alone, url, RunOptions(executor=executor, environment=environment))


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
        for send in script.sends
    }
    works = [
        _asked_cold(w, [p for (variant, _), p in used.items() if variant == w.cell.variant])
        if w.cell.topology == "single" and not w.cell.routed
        else w
        for w in prepared.works
    ]
    # The plugin knows the insides of released versions; a checkout may have others.
    return prepared._replace(works=tuple(works)).witnessing("off")


def _asked_cold(work: CellWork, prompts: Sequence[Prompt]) -> CellWork:
    asked = {item.prompt.id for item in work.items if item.form == "ids"}
    return replace(work, items=(*work.items, *(Item(p, "ids") for p in prompts if p.id not in asked)))


def record_both(profile: Profile, sides: tuple[Side, Side], out: Path, reporter: Reporter) -> tuple[Comparison, Path]:
    """Record both sides and compare them; return the comparison and the folder with both runs and the page.

    Head is recorded first, and ends with the first engine that does not become ready: a wrong argument costs that start
    and not the whole of base. Raises EngineStartError when a side answered nothing.
    """
    folder = new_folder(out, profile, "ab")
    base, head = sides
    second = _recorded(head, folder, reporter)
    first = _recorded(base, folder, reporter)
    comparison = compare_runs(first, second, References(against=first))._replace(names=(base.name, head.name))
    write_atomic(folder / PAGE, render_comparison(comparison))
    return comparison, folder


def _recorded(side: Side, folder: Path, reporter: Reporter) -> Path:
    """Record a side and return its run. Raises EngineStartError when it answered nothing."""
    reporter.line(f"{side.name}: {side.where}")
    outcome = execute(side.prepared, folder / side.name, reporter, side.options._replace(must_start=True))
    if outcome.summary.history.answered == 0 and not outcome.summary.history.run.interrupted:
        raise EngineStartError(
            f"{side.name} gave no answers to compare: {cause(outcome.summary)}; correct that, and see "
            f"{outcome.folder / 'report.html'}"
        )
    return outcome.folder


def cause(run: RunSummary) -> str:
    """Return why a run, or a part of it, was not judged: the reason that most cells share which were not recorded, or
    else the first finding without a verdict."""
    reasons = Counter(
        c.reason.removeprefix(NOT_STARTED) for c in run.history.run.cells if c.state != "complete" and c.reason
    )
    found = [f.message for f in run.judgement.findings if f.verdict is Verdict.UNKNOWN]
    first = next(iter([*(reason for reason, _ in reasons.most_common(1)), *found]), "no reason is on record")
    return shortened(without_log(first))


def conclusion(comparison: Comparison) -> tuple[Verdict, str]:
    """Return the verdict on the second side, and why, in one sentence.

    It is that of the worst finding that the first side does not have; UNKNOWN if there is none, but something of a side
    could not be judged: what both have must not hide that.
    """
    base, head = (_counted(run) for run in comparison.runs)
    new = [finding for finding in _that_fail(comparison.runs[1]) if head[finding.id] > base[finding.id]]
    if new:
        first = new[0]
        return worst([f.verdict for f in new]), (
            f"head has {counted(len(new), 'finding')} that base does not have, first {first.id}: {first.message}"
        )
    sides = zip(comparison.names, comparison.runs, strict=True)
    if unknown := [words for name, run in sides if (words := _unjudged(name, run))]:
        return Verdict.UNKNOWN, f"no other difference, but not all could be judged: {'; '.join(unknown)}"
    return Verdict.PASS, "head has no finding that base does not have, judged by the single engines of base"


def _that_fail(run: RunSummary) -> list[Finding]:
    return [f for f in run.judgement.findings if f.verdict not in (Verdict.KNOWN, Verdict.UNKNOWN)]


def _counted(run: RunSummary) -> Counter[str]:
    """Count a run's findings by id: a check may find several things in one place."""
    found: Counter[str] = Counter()
    for finding in _that_fail(run):
        found[finding.id] += how_many([finding])
    return found


def _unjudged(name: str, run: RunSummary) -> str:
    """Return what of a side could not be judged, whatever else was found there, and why; empty if all could."""
    cells = dict.fromkeys(
        c.cell
        for c in run.judgement.cells
        if any(Verdict.UNKNOWN in (r.verdict, *(f.verdict for f in r.findings)) for r in c.results)
    )
    if cells:
        return f"{', '.join([*cells][:6])} of {name}: {cause(run)}"
    if Verdict.UNKNOWN in (run.verdict, *run.history.limiting_verdicts):
        return f"{name} as a whole: {next(iter(run.judgement.notices), 'no cell was judged')}"
    return ""
