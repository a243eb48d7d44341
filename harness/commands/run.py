"""``harness run``: record, judge, ask again what failed once, and report."""

from __future__ import annotations

from pathlib import Path

from harness.commands.later_stages import later_stages
from harness.history.folder import History
from harness.history.verdict import Verdict
from harness.mutants.install import require_alone, require_known
from harness.reports.judge_run import Outcome, judge_and_report, judged
from harness.runner.options import DEFAULTS, RunOptions, Watch
from harness.runner.run import new_folder, point_to, record_into, removed_if_empty
from harness.util.progress import Reporter
from harness.util.storage import FolderLock
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
    # Hold the lock until the reports are written, so that nobody resumes a run whose later stages are still due.
    with removed_if_empty(folder), FolderLock(folder):
        history = record_into(folder, prepared, reporter, options)
        point_to(folder, reporter)
        later_stages(prepared, history, reporter, options)
        reporter.step("judging", 0.0)
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
