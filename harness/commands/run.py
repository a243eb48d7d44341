"""``harness run``: record, judge, repeat the cells that failed a registered test, and report."""

from __future__ import annotations

from pathlib import Path

from harness.history.folder import History
from harness.history.layout import SECOND
from harness.history.records import COLD
from harness.judging.checks.registry import baselines_for, tripped_tests
from harness.mutants.install import require_alone, require_known
from harness.profiles.cells import CellName, make_plan
from harness.reports.judge_run import Outcome, judge_and_report
from harness.runner.options import DEFAULTS, RunOptions
from harness.runner.run import new_folder, point_to, record_into
from harness.util.progress import Reporter
from harness.util.storage import FolderLock
from harness.workload.cells import SECOND_STAGE, cell_work
from harness.workload.prepare import Prepared


def execute(
    prepared: Prepared,
    out: Path,
    reporter: Reporter,
    options: RunOptions = DEFAULTS,
) -> Outcome:
    """Run, judge and report. The run folder is complete even when cells are UNKNOWN.

    Raises UsageError when a mutant is unknown, or when mutants that cannot be combined are.
    """
    require_known(options.mutants)
    require_alone(options.mutants, options.together)
    folder = new_folder(out, prepared.profile)
    # Hold the lock until the reports are written, so that nobody resumes a run whose second stage is still due.
    with FolderLock(folder):
        history = record_into(folder, prepared, reporter, options)
        point_to(folder, reporter)
        second_stage(prepared, history, reporter, options)
        return Outcome(folder, judge_and_report(history))


def second_stage(
    prepared: Prepared,
    history: History,
    reporter: Reporter,
    options: RunOptions,
) -> None:
    """Repeat the cells that failed a registered test, on fresh engines, with held-out prompts, in a separate folder."""
    if history.run.interrupted or prepared.profile.judging.tier != "normal":
        return
    tests = tripped_tests(history, baselines_for(history))
    if not tests:
        return
    failed = {t.cell for t in tests}
    # P/D is compared with the single engine of the same stage; tokens need the plain engine's margins.
    names = [CellName.of(c) for c in failed]
    wanted = {*failed, *(n.single for n in names), *(n.reference for n in names)}
    reporter.line(f"second stage: {', '.join(map(str, tests))}")
    choice = SECOND_STAGE._replace(scenarios=frozenset({COLD, *(t.scenario for t in tests)}))
    cells = [c for c in prepared.plan.cells if c.id in wanted]
    works = tuple(cell_work(prepared.profile.part(c.variant), prepared.sets[c.variant], c, choice) for c in cells)
    again = prepared._replace(plan=make_plan(prepared.profile, cells), works=works, lacking={})
    record_into(history.folder / SECOND, again, reporter, options)
