"""What the command line and the pytest front end do, without their arguments and printing."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from harness.baseline.build import identity_in, references_in, require_unarmed
from harness.baseline.lookup import Lookup
from harness.checks.registry import baselines_for, judge, out_of_reach, tripped_tests, unused_baselines
from harness.config import REPOSITORY, Profile, check_paths, load_profile
from harness.confine import recorded
from harness.engine.arming import require_alone, require_known
from harness.engine.environment import EngineEnvironment, inspect_environment, need_build, need_nixl
from harness.engine.executor import Executor
from harness.engine.router import program
from harness.errors import HarnessError, ModelUnavailableError, StorageError, UsageError
from harness.files import write_json, write_traceback
from harness.history import COLD, SECOND, History, Kind, RunRecord, load_history
from harness.hub import reason_for
from harness.known import apply_known, load_known
from harness.matrix import CellName, Plan, make_plan, select_cells, start_expected_s
from harness.progress import Reporter
from harness.prompts import PromptSet, load_prompts, planned_prompts
from harness.recorder import Recorder, new_run_id
from harness.report import write_reports
from harness.runner import Runner, point_latest
from harness.scenarios.script import require_possible
from harness.selftest.outcome import SelfTest
from harness.storage import FolderLock
from harness.summary import RunSummary, summarise_run
from harness.workload import (
    RECORDING,
    SECOND_STAGE,
    CellWork,
    Choice,
    cell_work,
    choose_scenarios,
    expected_s,
    spread,
    total_requests,
)

if TYPE_CHECKING:
    from harness.repeat import AgainstItself

DEFAULT_OUT = REPOSITORY / "reports"


class Prepared(NamedTuple):
    """A validated request: profile, prompts and plan. Nothing has been started."""

    profile: Profile
    source: str
    sets: Mapping[str, PromptSet]
    """Prompts by variant; a profile without axes has one, of the variant ``""``."""
    plan: Plan
    """Of the cells that can run."""
    works: tuple[CellWork, ...]
    lacking: Mapping[str, str] = {}
    """Cells that cannot run, with the reason: a model or prompts that are not here. They are UNKNOWN."""

    @property
    def prompts(self) -> PromptSet:
        """Of the first variant, which is the only one of a plain profile."""
        return next(iter(self.sets.values()))

    @property
    def parts(self) -> tuple[Profile, ...]:
        """The parts of the profile that have cells in the plan."""
        return tuple(p for p in self.profile.parts if p.variant in self.sets)

    @property
    def rescores(self) -> bool:
        """Whether outputs are re-scored: asked for, and the plain single engine answers cold prompts in this run."""
        asked = any(w.cell.id == w.cell.name.reference and w.items for w in self.works)
        return self.profile.workload.rescore and asked

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
    planned: bool = False,
) -> Prepared:
    """Load and check everything that can be wrong before an engine is started.

    ``record`` asks for what a baseline needs: every prompt of the set, cold, as ids. ``prompts_per_stratum`` thins out
    the cold prompts. With ``planned``, models need not be here, and prompts that are not are as many as their recipe
    says: nothing can be run then.
    """
    profile = load_profile(source)
    cells = select_cells(profile, patterns)
    if record:
        # A baseline is of the engines alone.
        cells = [c for c in cells if not c.routed]
    choice = RECORDING if record else choose_scenarios(profile, scenarios)
    # A damaged list must be found now, not after the run.
    load_known(known_path(profile.known_defects))
    sets: dict[str, PromptSet] = {}
    works: list[CellWork] = []
    lacking: dict[str, str] = {}
    for part in profile.parts:
        mine = [c for c in cells if c.variant == part.variant]
        if not mine:
            continue
        try:
            prompts = _planned_prompts(part) if planned else None
            sets[part.variant] = prompts = prompts or _fitting_prompts(part, source, record)
        except HarnessError as error:
            # One variant that lacks something must not cost the others.
            if not profile.axes:
                raise
            lacking |= {c.id: str(error) for c in mine}
            works += [CellWork(c, (), ()) for c in mine]
            continue
        chosen = _thinned(choice, prompts, prompts_per_stratum)
        works += [w for c in mine if (w := cell_work(part, prompts, c, chosen)).requests]
        reasons = {} if planned else {c.id: reason_for(part, c.method.kind) for c in mine}
        lacking |= {cell: reason for cell, reason in reasons.items() if reason is not None}
    if works and all(w.cell.id in lacking for w in works):
        words = "\n".join(f"  {reason}" for reason in dict.fromkeys(lacking.values()))
        raise ModelUnavailableError(f"profile {source}: expected cells that can run, found none:\n{words}")
    if not works:
        raise UsageError(
            f"expected cells in which {', '.join(scenarios)} makes sense, found none among "
            f"{', '.join(c.id for c in cells)}; scenarios that need a prefill engine run in pd cells only"
        )
    sets = {v: prompts for v, prompts in sets.items() if any(w.cell.variant == v for w in works)}
    plan = make_plan(profile, [w.cell for w in works if w.cell.id not in lacking])
    asked = {w.cell.id for w in works}
    return Prepared(profile, source, sets, plan, tuple(works), {c: r for c, r in lacking.items() if c in asked})


def _planned_prompts(part: Profile) -> PromptSet | None:
    """Stand-ins of prompts that have not been built; None when they have, or when nothing says what they will be."""
    recipe = part.workload.recipe
    return planned_prompts(recipe) if recipe is not None and not part.workload.prompts.is_file() else None


def _thinned(choice: Choice, prompts: PromptSet, per_stratum: int | None) -> Choice:
    """The choice with so many cold prompts of each stratum only."""
    if per_stratum is None:
        return choice
    strata = {p.stratum for p in prompts.cold}
    kept = spread(prompts.cold, per_stratum * len(strata))
    return choice._replace(prompts=frozenset(p.id for p in kept), texts=per_stratum)


def _fitting_prompts(part: Profile, source: str, record: bool) -> PromptSet:
    """The prompts of one part of a profile. Raises UsageError or DataError when they cannot be used with it."""
    where = f"profile {source}" + (f", variant {part.variant}" if part.variant else "")
    check_paths(part, Path(source))
    prompts = load_prompts(part.workload.prompts)
    prompts.check_tokenizer(part.tokenizer_folder, part.workload.prompts)
    longest = max(p.tokens for p in prompts.prompts) + part.workload.max_tokens
    if longest > part.engine.max_model_len:
        raise UsageError(
            f"{where}: expected prompts and outputs to fit engine.max_model_len = "
            f"{part.engine.max_model_len}, found up to {longest} tokens; raise it or lower workload.max_tokens"
        )
    if part.judging.tier == "normal" and part.judging.stages == 2 and not prompts.held_out and not record:
        raise UsageError(
            f"{where}: expected prompts held out for the second stage (use: held-out) in "
            f"{part.workload.prompts.name}, found none; build a set with "
            "`harness prompts build --held-out`, or set judging.stages to 1"
        )
    if part.judging.tier == "normal" and part.scenarios:
        raise UsageError(
            f"{where}: expected no scenarios in the normal tier, found {part.scenarios[0].id}: a handful "
            "of requests cannot reach a p-value; judge scenarios with a profile of the bitwise tier"
        )
    require_possible(part, {p.id: p for p in prompts.prompts})
    return prompts


def narrowed(prepared: Prepared, variant: str) -> Prepared:
    """What was prepared, of one variant alone, as a plain profile."""
    works = tuple(w for w in prepared.works if w.cell.variant == variant)
    part = prepared.profile.part(variant)
    plan = make_plan(part, [w.cell for w in works if w.cell.id not in prepared.lacking])
    lacking = {w.cell.id: prepared.lacking[w.cell.id] for w in works if w.cell.id in prepared.lacking}
    return Prepared(part, prepared.source, {variant: prepared.sets[variant]}, plan, works, lacking)


class Outcome(NamedTuple):
    folder: Path
    summary: RunSummary


def execute(
    prepared: Prepared,
    out: Path,
    engine_python: str | None,
    reporter: Reporter,
    mutants: Sequence[str] = (),
    together: bool = False,
    executor: Executor | None = None,
) -> Outcome:
    """Run, judge and report. The run folder is complete even when cells are UNKNOWN."""
    require_known(mutants)
    require_alone(mutants, together)
    folder = new_folder(out, prepared.profile)
    # Until the reports are written: nobody goes on with a run that waits for its second stage.
    with FolderLock(folder):
        history = _record_into(folder, prepared, engine_python, reporter, mutants, together, executor)
        point_to(folder, reporter)
        second_stage(prepared, history, engine_python, reporter, mutants, together, executor)
        return Outcome(folder, judge_and_report(history))


def point_to(folder: Path, reporter: Reporter) -> None:
    """``latest`` is a convenience: a run that has it not is whole."""
    try:
        point_latest(folder)
    except StorageError as error:
        reporter.line(str(error))


def second_stage(
    prepared: Prepared,
    history: History,
    engine_python: str | None,
    reporter: Reporter,
    mutants: Sequence[str],
    together: bool,
    executor: Executor | None,
) -> None:
    """Run again what failed a registered test: fresh engines, prompts held out for this, in a folder of its own."""
    if history.run.interrupted or prepared.profile.judging.tier != "normal":
        return
    tests = tripped_tests(history, baselines_for(history))
    if not tests:
        return
    failed = {t.cell for t in tests}
    # P/D is compared with the single engine of the same stage, and tokens need the plain one's margins.
    names = [CellName.of(c) for c in failed]
    wanted = {*failed, *(n.single for n in names), *(n.reference for n in names)}
    reporter.line(f"second stage: {', '.join(map(str, tests))}")
    choice = SECOND_STAGE._replace(scenarios=frozenset({COLD, *(t.scenario for t in tests)}))
    cells = [c for c in prepared.plan.cells if c.id in wanted]
    works = tuple(cell_work(prepared.profile.part(c.variant), prepared.sets[c.variant], c, choice) for c in cells)
    again = prepared._replace(plan=make_plan(prepared.profile, cells), works=works, lacking={})
    _record_into(history.folder / SECOND, again, engine_python, reporter, mutants, together, executor)


def record(
    prepared: Prepared,
    out: Path,
    engine_python: str | None,
    reporter: Reporter,
    mutants: Sequence[str] = (),
    together: bool = False,
    executor: Executor | None = None,
) -> History:
    """Run the plan on real engines, with mutants in them if any are named, and return what was recorded."""
    require_known(mutants)
    require_alone(mutants, together)
    folder = new_folder(out, prepared.profile)
    with FolderLock(folder):
        history = _record_into(folder, prepared, engine_python, reporter, mutants, together, executor)
    point_to(folder, reporter)
    return history


def _record_into(
    folder: Path,
    prepared: Prepared,
    engine_python: str | None,
    reporter: Reporter,
    mutants: Sequence[str],
    together: bool,
    executor: Executor | None,
) -> History:
    environment = engines_for(prepared.profile, prepared.plan, engine_python)
    recorder = prepared_recorder(prepared, environment, folder, mutants)
    for cell, reason in prepared.lacking.items():
        reporter.line(f"{cell}: UNKNOWN: {reason}")
        recorder.fail_pending([cell], "failed", reason)
    return Runner(
        prepared.profile,
        prepared.plan,
        prepared.works,
        environment,
        recorder,
        reporter,
        executor,
        mutants,
        together,
    ).run()


def engines_for(profile: Profile, plan: Plan, engine_python: str | None) -> EngineEnvironment:
    """The environment of the engines. Raises EnvironmentFault when it lacks what the plan needs."""
    environment = inspect_environment(engine_python or sys.executable)
    need_build(environment, profile.engine.device)
    if any(g.topology == "pd" for g in plan.groups):
        need_nixl(environment)
    if any(c.routed for g in plan.groups for c in g.cells):
        program()
    return environment


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
    prepared: Prepared,
    environment: EngineEnvironment,
    folder: Path,
    mutants: Sequence[str] = (),
    run_id: str | None = None,
    adopt: Callable[[RunRecord], RunRecord] = lambda fresh: fresh,
    kind: Kind = "run",
) -> Recorder:
    """A recorder for everything that was prepared; the run is called like its folder unless said otherwise. See
    ``Recorder`` for ``adopt``."""
    return Recorder(
        prepared.profile,
        prepared.source,
        prepared.works,
        {w.cell.id: w.cell.id for w in prepared.works} | {c.id: g.id for g in prepared.plan.groups for c in g.cells},
        prepared.sets,
        environment,
        folder,
        run_id or folder.name,
        mutants=mutants,
        # Under load nobody re-scores anything: a soak of the plain single engine could never pass.
        rescore=prepared.rescores and kind != "soak",
        adopt=adopt,
        kind=kind,
    )


class References(NamedTuple):
    """What a run is judged against instead of its profile's: None takes the profile's."""

    baselines: Path | None = None
    known: Path | None = None
    against: Path | None = None
    """Another recorded run, whose single cells are the reference."""


PROFILE_OWN = References()


def known_path(listed: object) -> Path | None:
    """The list of known defects that a profile names; it may be absent when none is known."""
    path = Path(str(listed)) if listed else None
    return path if path is not None and path.is_file() else None


def known_of(history: History) -> Path | None:
    """The list of known defects of a run; None when a recorded run names one that judging may not read."""
    listed = history.run.profile.get("known_defects")
    return known_path(listed if history.own or not listed else recorded(listed))


def load_second(history: History, in_memory: int | None = None) -> History | None:
    """The second stage of a run, if it had one. One that was interrupted or belongs to something else is none.
    ``in_memory`` as for ``load_history``."""
    folder = history.folder / SECOND
    if not (folder / "run.json").is_file():
        return None
    second = load_history(folder, in_memory)
    ours, theirs = history.run, second.run
    # It has the variants of what failed alone.
    ended = theirs.finished is not None and not theirs.interrupted
    same = bool(theirs.identities) and all(ours.identities.get(n) == i for n, i in theirs.identities.items())
    return second if same and theirs.mutants == ours.mutants and ended else None


def lookups_for(history: History, references: References) -> dict[str, Lookup]:
    """The references that judging the run needs, by method."""
    if references.against is None:
        return baselines_for(history, references.baselines)
    other = load_history(references.against)
    return references_in(other, {m: identity_in(history, m) for m in history.run.identities})


def assess(history: History, references: References = PROFILE_OWN) -> RunSummary:
    """Judge a history with its second stage, against the baselines and known defects of its profile or others."""
    baselines = lookups_for(history, references)
    judgement = judge(history, baselines, load_second(history))
    if references.against is None:
        idle = unused_baselines(history, references.baselines)
        judgement = judgement.model_copy(update={"notices": (*judgement.notices, *idle)})
    listed = history.run.profile.get("known_defects")
    if references.known is None and listed and not history.own and recorded(listed) is None:
        notice = out_of_reach("known_defects", "--known", history)
        judgement = judgement.model_copy(update={"notices": (*judgement.notices, notice)})
    known = load_known(references.known or known_of(history))
    return summarise_run(history, apply_known(judgement, known, history), baselines)


def judge_and_report(history: History, references: References = PROFILE_OWN) -> RunSummary:
    """Judge a history and write its reports into its folder. Reports that cannot be written do not cost the verdict:
    the summary says so."""
    summary = assess(history, references)
    try:
        write_reports(summary, history.folder)
    except StorageError as error:
        return summary._replace(unwritten=str(error))
    except Exception as error:
        # Whatever a recorded run holds that a page cannot show, the verdict is known.
        log = history.folder / "report-error.txt"
        with contextlib.suppress(StorageError):
            write_traceback(log)
        return summary._replace(unwritten=f"writing the report failed: {type(error).__name__}: {error}; see {log}")
    return summary


def check(run_dir: Path, references: References = PROFILE_OWN) -> Outcome:
    """Judge a recorded run again; no engine is needed."""
    return Outcome(run_dir, judge_and_report(load_history(run_dir), references))


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
    everything = prepare(source, ())
    # A mutant is put into one set of engines; of a profile with axes, those with the defaults.
    prepared = narrowed(everything, everything.parts[0].variant)
    setups = make_setups(trials, prepared.profile, prepared.prompts)
    environment = engines_for(prepared.profile, Plan((), tuple(s.group for s in setups)), engine_python)
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
    environment = engines_for(prepared.profile, prepared.plan, engine_python)
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
