"""``harness run``: record, judge, repeat the cells that failed a registered test, and report."""

from __future__ import annotations

from pathlib import Path

from harness.history.folder import History
from harness.history.layout import SECOND
from harness.history.records import COLD
from harness.history.verdict import Verdict
from harness.judging.checks.registry import tripped_tests
from harness.judging.references import baselines_for
from harness.mutants.install import require_alone, require_known
from harness.profiles.cells import CellName, make_plan
from harness.reports.judge_run import Outcome, judge_and_report, judged
from harness.runner.options import DEFAULTS, RunOptions, Watch
from harness.runner.run import new_folder, point_to, record_into, removed_if_empty
from harness.util.progress import Reporter
from harness.util.storage import FolderLock
from harness.workload.cells import SECOND_STAGE, cell_work
from harness.workload.prepare import Prepared


def execute(
    prepared: Prepared, out: Path, reporter: Reporter, options: RunOptions = DEFAULTS, fail_fast: bool = False
) -> Outcome:
    """Run, judge and report. The run folder is complete even when cells are UNKNOWN.

    With ``fail_fast``, no further engines are started after those of the first cell with a regression.

    Raises UsageError when a mutant is unknown, or when mutants that cannot be combined are.
    """
    require_known(options.mutants)
    require_alone(options.mutants, options.together)
    # The tests of the normal tier need the whole run.
    if prepared.profile.judging.tier == "bitwise":
        options = options._replace(watch=first_verdicts(reporter, fail_fast), decides=fail_fast)
    folder = new_folder(out, prepared.profile)
    # Hold the lock until the reports are written, so that nobody resumes a run whose second stage is still due.
    with removed_if_empty(folder), FolderLock(folder):
        history = record_into(folder, prepared, reporter, options)
        point_to(folder, reporter)
        second_stage(prepared, history, reporter, options)
        return Outcome(folder, judge_and_report(history, carrying=True))


def first_verdicts(reporter: Reporter, fail_fast: bool) -> Watch:
    """Return a watch that prints the verdicts of cells as soon as they are recorded.

    They are compared with baselines and with each other, but not yet with the plain single engine, which runs last; the
    run's verdict comes at its end.
    """

    def watch(history: History) -> str | None:
        try:
            verdicts = judged(history).by_cell()
        except Exception as error:
            # Judging the whole run is what counts, and says what is wrong if the record is damaged.
            reporter.line(f"not judged yet: {type(error).__name__}: {error}")
            return None
        for cell, verdict in verdicts.items():
            reporter.line(f"{cell}: {verdict.value} so far")
        failed = [cell for cell, verdict in verdicts.items() if verdict is Verdict.REGRESSION]
        if not (fail_fast and failed):
            return None
        return f"not asked: the run ended after the first regression, in {failed[0]} (--fail-fast)"

    return watch


def second_stage(prepared: Prepared, history: History, reporter: Reporter, options: RunOptions) -> None:
    """Repeat the cells that failed a registered test, on fresh engines, with held-out prompts, in a separate folder."""
    if history.run.interrupted or prepared.profile.judging.tier == "bitwise":
        return
    tests = tripped_tests(history, baselines_for(history))
    if not tests:
        return
    if prepared.profile.judging.tier == "auto" and not all(p.held_out for p in prepared.sets.values()):
        reporter.line(
            "no second stage: the prompt set has no prompts held out for it; build one with `harness prompts build "
            "--held-out`"
        )
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
    reporter.more(again.expected_s, again.starts_s)
    record_into(history.folder / SECOND, again, reporter, options)
