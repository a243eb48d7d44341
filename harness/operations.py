"""What the command line and the pytest front end do, without their arguments and printing."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from harness.checks.registry import baselines_for, judge
from harness.config import REPOSITORY, Profile, load_profile
from harness.engine.arming import require_alone, require_known
from harness.engine.environment import EngineEnvironment, inspect_environment, need_nixl
from harness.errors import UsageError
from harness.files import write_json
from harness.history import History, load_history
from harness.matrix import Plan, make_plan, select_cells, start_expected_s
from harness.progress import Reporter
from harness.prompts import PromptSet, load_prompts
from harness.recorder import Recorder, new_run_id
from harness.report import write_reports
from harness.runner import Runner, expected_s, point_latest
from harness.scenarios.script import require_possible
from harness.selftest.outcome import SelfTest
from harness.summary import RunSummary, summarise_run
from harness.workload import RECORDING, CellWork, cell_work, choose_scenarios, spread, total_requests

if TYPE_CHECKING:
    from harness.repeat import AgainstItself

DEFAULT_OUT = REPOSITORY / "reports"


class Prepared(NamedTuple):
    """A validated request: profile, prompts and plan. Nothing has been started."""

    profile: Profile
    source: str
    prompts: PromptSet
    plan: Plan
    works: tuple[CellWork, ...]

    @property
    def requests(self) -> int:
        return total_requests(self.works)

    @property
    def expected_s(self) -> float:
        return expected_s(self.plan, self.works)


def prepare(
    source: str,
    patterns: Sequence[str],
    scenarios: Sequence[str] = (),
    record: bool = False,
    prompts_per_stratum: int | None = None,
) -> Prepared:
    """Load and check everything that can be wrong before an engine is started.

    ``record`` asks for what a baseline needs: every prompt of the set, cold, as ids. ``prompts_per_stratum`` thins out
    the cold prompts.
    """
    profile = load_profile(source)
    cells = select_cells(profile, patterns)
    choice = RECORDING if record else choose_scenarios(profile, scenarios)
    prompts = load_prompts(profile.workload.prompts)
    prompts.check_tokenizer(profile.tokenizer_folder, profile.workload.prompts)
    longest = max(p.tokens for p in prompts.prompts) + profile.workload.max_tokens
    if longest > profile.engine.max_model_len:
        raise UsageError(
            f"profile {source}: expected prompts and outputs to fit engine.max_model_len = "
            f"{profile.engine.max_model_len}, found up to {longest} tokens; raise it or lower workload.max_tokens"
        )
    if prompts_per_stratum is not None:
        strata = {p.stratum for p in prompts.cold}
        kept = spread(prompts.cold, prompts_per_stratum * len(strata))
        choice = choice._replace(prompts=frozenset(p.id for p in kept), texts=prompts_per_stratum)
    require_possible(profile, {p.id: p for p in prompts.prompts})
    works = tuple(w for c in cells if (w := cell_work(profile, prompts, c, choice)).requests)
    if not works:
        raise UsageError(
            f"expected cells in which {', '.join(scenarios)} makes sense, found none among "
            f"{', '.join(c.id for c in cells)}; scenarios that need a prefill engine run in pd cells only"
        )
    return Prepared(profile, source, prompts, make_plan(profile, [w.cell for w in works]), works)


class Outcome(NamedTuple):
    folder: Path
    summary: RunSummary


def execute(
    prepared: Prepared,
    out: Path,
    engine_python: str | None,
    reporter: Reporter,
    base_port: int | None = None,
    mutants: Sequence[str] = (),
    together: bool = False,
) -> Outcome:
    """Run, judge and report. The run folder is complete even when cells are UNKNOWN."""
    history = record(prepared, out, engine_python, reporter, base_port, mutants, together)
    folder = history.folder
    summary = assess(history, None)
    write_reports(summary, folder)
    return Outcome(folder, summary)


def record(
    prepared: Prepared,
    out: Path,
    engine_python: str | None,
    reporter: Reporter,
    base_port: int | None = None,
    mutants: Sequence[str] = (),
    together: bool = False,
) -> History:
    """Run the plan on real engines, with mutants in them if any are named, and return what was recorded."""
    require_known(mutants)
    require_alone(mutants, together)
    environment = inspect_environment(engine_python or sys.executable)
    if any(g.topology == "pd" for g in prepared.plan.groups):
        need_nixl(environment)
    folder = new_folder(out, prepared.profile)
    recorder = prepared_recorder(prepared, environment, folder, mutants)
    history = Runner(
        prepared.profile,
        prepared.plan,
        prepared.works,
        environment,
        recorder,
        reporter,
        base_port,
        mutants,
        together,
    ).run()
    point_latest(folder)
    return history


def new_folder(out: Path, profile: Profile, kind: str = "") -> Path:
    """Make the folder of a new run below ``out``. Raises UsageError when that is not possible."""
    folder = out / new_run_id(profile, kind)
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise UsageError(
            f"--out {out}: expected a folder to write runs into, but {folder} cannot be made ({error.strerror})"
        ) from error
    return folder


def prepared_recorder(
    prepared: Prepared, environment: EngineEnvironment, folder: Path, mutants: Sequence[str] = ()
) -> Recorder:
    """A recorder for everything that was prepared."""
    return Recorder(
        prepared.profile,
        prepared.source,
        prepared.works,
        {c.id: g.id for g in prepared.plan.groups for c in g.cells},
        prepared.prompts,
        environment,
        folder,
        folder.name,
        mutants=mutants,
    )


def assess(history: History, baselines: Path | None) -> RunSummary:
    """Judge a history against the baselines of its profile, or of another folder."""
    return summarise_run(history, judge(history, baselines_for(history, baselines)))


def check(run_dir: Path, baselines: Path | None) -> Outcome:
    """Judge a recorded run again; no engine is needed."""
    history = load_history(run_dir)
    summary = assess(history, baselines)
    write_reports(summary, run_dir)
    return Outcome(run_dir, summary)


def require_unarmed(history: History) -> None:
    """Raise UsageError when a run says nothing about unchanged engines."""
    armed = history.run.mutants or tuple(m for e in history.run.engines for m in e.mutants)
    if armed or history.run.interrupted:
        found = f"mutant {', '.join(dict.fromkeys(armed))} armed" if armed else "one that was interrupted"
        raise UsageError(f"{history.folder}: expected a whole run of unchanged engines, found {found}; record anew")


def write_quality(history: History, target: Path) -> dict[str, object]:
    """Measure the probe models from a recorded run and write the figures beside the weights."""
    from harness.probe.quality import measure

    require_unarmed(history)
    quality = measure(history)
    write_json(target, quality)
    return quality


def self_test(
    source: str, mutants: Sequence[str], quick: bool, out: Path, engine_python: str | None
) -> tuple[SelfTest, Path]:
    """Try mutants on real engines; returns the result and its folder. Everything that can be wrong in the request is
    checked before an engine is started."""
    from harness.report.selftest import write_selftest
    from harness.selftest.run import SelfTester, forecast_s
    from harness.selftest.trials import make_setups, select_trials

    if quick and mutants:
        raise UsageError("expected --quick or --mutant, found both; --quick tries the historic defects")
    trials = select_trials(mutants, quick)
    prepared = prepare(source, ())
    setups = make_setups(trials, prepared.profile, prepared.prompts)
    environment = inspect_environment(engine_python or sys.executable)
    need_nixl(environment)
    folder = new_folder(out, prepared.profile, "selftest")
    seconds = forecast_s(setups, prepared)
    with Reporter(seconds) as reporter:
        reporter.line(
            f"{len(trials)} mutants on {sum(s.group.engines for s in setups)} engines, about {seconds / 60:.0f} minutes"
        )
        result = SelfTester(prepared, environment, folder, reporter).run(setups)
    write_selftest(result, folder)
    point_latest(folder, "latest-selftest")
    return result, folder


def repeat_cells(
    source: str,
    patterns: Sequence[str],
    scenarios: Sequence[str],
    prompts_per_stratum: int | None,
    repetitions: int,
    out: Path,
    engine_python: str | None,
) -> tuple[AgainstItself, Path]:
    """A/A on real engines; returns the counts and their folder."""
    from harness.repeat import against_itself
    from harness.report.repeat import write_repeat

    prepared = prepare(source, patterns, scenarios, prompts_per_stratum=prompts_per_stratum)
    environment = inspect_environment(engine_python or sys.executable)
    if any(g.topology == "pd" for g in prepared.plan.groups):
        need_nixl(environment)
    folder = new_folder(out, prepared.profile, "aa")
    starts = sum(start_expected_s(g) for g in prepared.plan.groups)
    seconds = starts + repetitions * (prepared.expected_s - starts)
    with Reporter(seconds) as reporter:
        reporter.line(
            f"{repetitions} repetitions of {len(prepared.plan.cells)} cells, {repetitions * prepared.requests} "
            f"requests, about {seconds / 60:.0f} minutes"
        )
        result = against_itself(prepared, environment, folder, repetitions, reporter)
    write_repeat(result, folder)
    return result, folder
