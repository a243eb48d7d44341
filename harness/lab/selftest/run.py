"""Run the self-test on real engines: the control first, then one mutant after another on the same engines."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from harness.engines import environment
from harness.engines.environment import EngineEnvironment, engines_for
from harness.engines.executor import LocalExecutor
from harness.engines.places import Place, Places
from harness.engines.session import EngineGroupSession
from harness.errors import (
    EngineDiedError,
    EngineStartError,
    HandoffError,
    InfrastructureError,
    MutantRefusedError,
    UsageError,
)
from harness.history.verdict import Verdict
from harness.judging.findings import Judgement
from harness.lab.selftest.outcome import check_verdicts, classify_kill, diagnoses, first_caught
from harness.lab.selftest.setups import Setup, trial_works
from harness.lab.selftest.together import best_parts
from harness.mutants.install import EnabledMutants, Marks, patched_roles
from harness.mutants.model import Trial
from harness.profiles.cells import Plan, start_expected_s
from harness.reports.judge_run import judge_and_report
from harness.reports.selftest_result import Caught, Control, Kill, MutantOutcome, SelfTest
from harness.reports.summary import RunSummary
from harness.runner.jobs import RunningSessions, run_jobs
from harness.runner.record_cells import record_cells
from harness.runner.recorder import Recorder
from harness.runner.run import new_folder, point_latest
from harness.scheduling import hardware
from harness.scheduling.model import Placement
from harness.scheduling.planning import planned
from harness.util import machine
from harness.util.progress import Reporter
from harness.util.text import counted, lasting
from harness.workload.cells import CellWork
from harness.workload.prepare import Prepared, narrowed, prepare


class SelfTester:
    """Runs setups one after another and collects the outcome of each mutant."""

    def __init__(self, prepared: Prepared, environment: EngineEnvironment, folder: Path, reporter: Reporter) -> None:
        self._prepared = prepared
        self._environment = environment
        self._folder = folder
        self._reporter = reporter
        self._outcomes: list[MutantOutcome] = []
        self._controls: list[Control] = []
        self._starts = 0
        self._sessions = RunningSessions(reporter.line)
        self._lock = threading.Lock()

    def run(self, setups: Sequence[Setup], executor: LocalExecutor | None = None) -> SelfTest:
        """Run all setups, with an executor several at a time. KeyboardInterrupt ends the engines and returns the
        outcomes so far, marked as interrupted."""
        begun, started, interrupted = time.monotonic(), machine.now(), False
        try:
            if executor is None:
                for setup in setups:
                    self._setup(setup)
            else:
                self._together(setups, executor)
        except KeyboardInterrupt:
            interrupted = True
        asked = tuple(t.mutant for s in setups for t in s.trials)
        return SelfTest(
            run_id=self._folder.name,
            started=started,
            profile=self._prepared.profile.name,
            versions=environment.versions(self._environment),
            hardware=hardware.hardware(),
            asked=asked,
            outcomes=tuple(sorted(self._outcomes, key=lambda outcome: asked.index(outcome.mutant))),
            controls=tuple(self._controls),
            engine_starts=self._starts,
            seconds=round(time.monotonic() - begun, 1),
            interrupted=interrupted,
        )

    def _together(self, setups: Sequence[Setup], executor: LocalExecutor) -> None:
        """Run as many setups at a time as the devices allow, the largest in parts."""
        inventory = executor.inventory(self._prepared.profile)
        packed = best_parts(setups, self._prepared.prompts, inventory)
        by_id = {setup.id: setup for setup in packed.setups}
        scheduler = planned(packed.jobs, inventory.devices)

        def run(placement: Placement) -> None:
            setup = by_id[placement.job.id]
            with executor.places(setup.group, setup.profile, self._environment, placement) as places:
                self._setup(setup, places)

        run_jobs(scheduler, inventory, run, self._sessions, self._reporter.line)
        for setup_id, reason in scheduler.refused.items():
            setup = by_id[setup_id]
            self._broken(setup, list(setup.trials), not setup.controlled, None, EngineStartError(reason))

    def _setup(self, setup: Setup, places: Places | None = None) -> None:
        """Start the engines, run the control and the trials; restart engines that a mutant killed. ``places`` are those
        of the engines, and of the plain one; None means this machine."""
        left = list(setup.trials)
        controlled = not setup.controlled
        attempt = 0
        own = None if places is None else {role: places[role] for role in setup.group.roles}
        beside = places.get("single") if places is not None and setup.group.topology == "pd" else None
        while (left or not controlled) and not self._sessions.ending:
            attempt += 1
            name = setup.id if attempt == 1 else f"{setup.id}-again-{attempt}"
            arming = EnabledMutants([t.mutant for t in left], setup.group.topology == "pd", self._folder / name)
            session = EngineGroupSession(
                setup.group,
                setup.profile,
                self._environment,
                self._folder / name / "logs",
                progress=self._reporter.line,
                mutation=arming,
                places=own,
            )
            with self._lock:
                self._starts += setup.group.engines
            try:
                with self._sessions.started(session):
                    self._reporter.step(setup.id, start_expected_s(setup.group), start=True)
                    if not controlled:
                        self._control(setup, session, beside)
                        controlled = True
                    while left and not self._sessions.ending:
                        self._trial(left.pop(0), setup, session, self._folder / name, beside)
                        if left:
                            self._heal(session, setup)
            except InfrastructureError as error:
                left, controlled = self._broken(setup, left, controlled, session, error)

    def _broken(
        self,
        setup: Setup,
        left: list[Trial],
        controlled: bool,
        session: EngineGroupSession | None,
        error: InfrastructureError,
    ) -> tuple[list[Trial], bool]:
        """Return, after engines died or did not start, the trials left for new engines, and whether the control has its
        verdict."""
        if self._sessions.ending:
            return [], True
        self._reporter.line(f"{setup.id}: {error}")
        started = session is not None and bool(session.ready_seconds)
        if controlled and isinstance(error, (EngineDiedError, HandoffError)) and started:
            return left, True
        refusing = [t for t in left if isinstance(error, MutantRefusedError) and t.mutant in error.mutants]
        if refusing and len(refusing) < len(left):
            # The other mutants may still apply to this vLLM.
            for trial in refusing:
                self._record_no_start(trial, setup, error)
            return [t for t in left if t not in refusing], controlled
        if not controlled:
            self._controls.append(
                Control(
                    id=setup.id, verdict=Verdict.UNKNOWN, requests=0, folder="", seconds=0.0, findings=(str(error),)
                )
            )
        for trial in left:
            self._record_no_start(trial, setup, error)
        return [], True

    def _recorder(self, works: Sequence[CellWork], setup: Setup, folder: Path, mutants: Sequence[str]) -> Recorder:
        p = self._prepared
        beside = setup.plain_works(works)
        groups = {c.id: setup.group.id for c in setup.group.cells}
        return Recorder(
            setup.profile,
            p.source,
            [*works, *beside],
            groups | {w.cell.id: setup.plain.id for w in beside if setup.plain is not None},
            p.sets,
            self._environment,
            folder,
            folder.name,
            mutants=mutants,
            rescore=setup.group.rescores,
            kind="run" if mutants else "control",
        )

    def _control(self, setup: Setup, session: EngineGroupSession, beside: Place | None) -> None:
        session.switch()
        folder = self._folder / f"control-{setup.id}"
        begun = time.monotonic()
        recorder = self._recorder(setup.control, setup, folder, ())
        summary, died = self._perform(setup, session, setup.control, recorder, beside)
        if died is not None:
            raise died
        self._controls.append(
            Control(
                id=setup.id,
                verdict=summary.verdict,
                requests=len(summary.history.observations),
                folder=folder.name,
                seconds=round(time.monotonic() - begun, 1),
                findings=diagnoses(summary.judgement),
            )
        )
        self._reporter.line(f"control {setup.id}: {summary.verdict}")

    def _ask_plain(self, setup: Setup, works: Sequence[CellWork], recorder: Recorder, place: Place | None) -> None:
        """Ask the plain engine what it alone knows of these requests. It is started for that and ended again: beside
        engines with mutants it would take a core of theirs, and two engines on one core hand nothing over in time."""
        beside = setup.plain_works(works)
        if setup.plain is None or not beside:
            return
        with self._lock:
            self._starts += setup.plain.engines
            folder = self._folder / f"{setup.id}-plain-{self._starts}" / "logs"
        session = EngineGroupSession(
            setup.plain,
            setup.profile,
            self._environment,
            folder,
            progress=self._reporter.line,
            places=None if place is None else {"single": place},
        )
        with self._sessions.started(session):
            record_cells(session, beside, recorder, self._reporter)

    def _perform(
        self,
        setup: Setup,
        session: EngineGroupSession,
        works: Sequence[CellWork],
        recorder: Recorder,
        beside: Place | None = None,
    ) -> tuple[RunSummary, InfrastructureError | None]:
        """Send the requests, then judge and report. A failure of the engines leaves cells incomplete, and is returned
        with the summary."""
        died: InfrastructureError | None = None
        try:
            self._ask_plain(setup, works, recorder, beside)
            record_cells(session, works, recorder, self._reporter)
        except InfrastructureError as error:
            if self._sessions.ending:
                # What engines answer that are being ended is no outcome.
                raise
            died = error
        return judge_and_report(recorder.finish()), died

    def _trial(
        self, trial: Trial, setup: Setup, session: EngineGroupSession, engines: Path, beside: Place | None = None
    ) -> None:
        folder = self._folder / trial.mutant
        works = trial_works(trial, setup.profile, self._prepared.prompts, setup.group.cells)
        recorder = self._recorder(works, setup, folder, (trial.mutant,))
        begun = time.monotonic()
        session.switch(trial.mutant)
        try:
            summary, died = self._perform(setup, session, works, recorder, beside)
        finally:
            session.switch()
        judgement = _of_group(summary.judgement, setup)
        fired = _fired(trial, setup, engines)
        anyway = {f.id for cause in summary.causes if cause.anyway is not None for f in cause.findings}
        kill, reason = classify_kill(trial, judgement, fired, setup.group.method.lookahead, anyway)
        caught = first_caught(judgement, summary.history)
        self._add(trial, kill, reason, judgement, folder.name, time.monotonic() - begun, fired, caught)
        if died is not None:
            raise died

    def _add(
        self,
        trial: Trial,
        kill: Kill,
        reason: str,
        judgement: Judgement,
        folder: str,
        seconds: float,
        fired: bool | None,
        caught: Caught | None = None,
    ) -> None:
        self._outcomes.append(
            MutantOutcome(
                mutant=trial.mutant,
                kill=kill,
                reason=reason,
                expected=expectation(trial),
                found=diagnoses(judgement),
                checks=check_verdicts(judgement),
                fired=fired,
                caught=caught,
                folder=folder,
                seconds=round(seconds, 1),
            )
        )
        self._reporter.line(f"{trial.mutant}: {kill.value}: {reason[:240]}")

    def _record_no_start(self, trial: Trial, setup: Setup, error: InfrastructureError) -> None:
        """Record a trial whose engines did not start. For a mutant that prevents the start, this is the right outcome
        if the verdict is UNKNOWN."""
        works = trial_works(trial, setup.profile, self._prepared.prompts, setup.group.cells)
        recorder = self._recorder(works, setup, self._folder / trial.mutant, (trial.mutant,))
        recorder.fail_pending([w.cell.id for w in works], "failed", str(error))
        judgement = judge_and_report(recorder.finish()).judgement
        expected = trial.refusal is not None and re.search(trial.refusal, str(error)) is not None
        if not expected or not isinstance(error, EngineStartError):
            kill, reason = Kill.UNTESTED, " ".join(str(error).split())[:400]
        else:
            kill, reason = classify_kill(trial, judgement, None, setup.group.method.lookahead)
        self._add(trial, kill, reason, judgement, trial.mutant, 0.0, None)

    def _heal(self, session: EngineGroupSession, setup: Setup) -> None:
        """Clear what a mutant left in the caches, and check that the engines answer correctly without it. Raises
        HandoffError when they do not, upon which they are restarted."""
        session.reset_caches()
        item = next((i for w in setup.control for i in w.items), None)
        prompt = item.prompt if item else next(p for p in self._prepared.prompts.cold)
        for cell in setup.group.cells:
            answer = session.observe(cell, prompt, "ids", 0)
            right = prompt.expected
            if answer.error or answer.final is None:
                raise HandoffError(
                    f"expected {cell.id} to answer {prompt.id} after the fault was switched off, found "
                    f"{answer.error or 'no answer'}; the engines are restarted"
                )
            if right is not None and answer.final.output_ids != right[: answer.max_tokens]:
                raise HandoffError(
                    f"expected {cell.id} to answer {prompt.id} correctly after the fault was switched off, found "
                    "different tokens; the engines are restarted"
                )


def _of_group(judgement: Judgement, setup: Setup) -> Judgement:
    """Return the judgement without the plain engine's cells, which say nothing of the mutant."""
    mine = {c.id for c in setup.group.cells}
    return judgement.model_copy(update={"cells": tuple(c for c in judgement.cells if c.cell in mine)})


def _fired(trial: Trial, setup: Setup, engines: Path) -> bool | None:
    """Return whether any engine's log shows that the mutant took effect; None when it patches no engine."""
    if not patched_roles(trial.mutant, setup.group.topology == "pd"):
        return None
    logs = [p.read_text(encoding="utf-8", errors="replace") for p in (engines / "logs").glob("*.log")]
    return any(trial.mutant in Marks(log).fired for log in logs)


def expectation(trial: Trial) -> str:
    """Describe what must be found."""
    where = " or ".join(f"{v.topology} {v.scenario}" for v in trial.caught)
    law = ", at the lookahead's residues only" if trial.spills_only else ""
    clean = f", while {' and '.join(f'{v.topology} {v.scenario}' for v in trial.clean)} passes" if trial.clean else ""
    return f"{trial.damage} by {' or '.join(trial.checks)} in {where}{law}{clean}"


def self_test(
    source: str,
    mutants: Sequence[str],
    quick: bool,
    complete: bool,
    method: str | None,
    out: Path,
    engine_python: str | None,
) -> tuple[SelfTest, Path]:
    """Try mutants on real engines, each with the method that it is listed with or with ``method``; return the result
    and its folder. The arguments are checked before any engine is started."""
    from harness.lab.selftest.report import write_selftest
    from harness.lab.selftest.setups import make_setups, not_shown, select_trials, setup_expected_s

    if bool(mutants) + quick + complete > 1:
        raise UsageError(
            "--quick (the historic defects), --all and names of faults exclude each other; keep one of them"
        )
    trials = select_trials(mutants, quick, method, complete)
    everything = prepare(source, ())
    # Mutants are tried on one set of engines; for a profile with axes, the one with the defaults.
    prepared = narrowed(everything, everything.parts[0].variant)
    hidden = not_shown(trials, prepared.profile)
    if hidden and (mutants or len(hidden) == len(trials)):
        raise UsageError("; ".join(f"fault {mutant} cannot show: {reason}" for mutant, reason in hidden.items()))
    trials = [t for t in trials if t.mutant not in hidden]
    setups = make_setups(trials, prepared.profile, prepared.prompts)
    environment = engines_for(prepared.profile, Plan((), tuple(s.group for s in setups)), engine_python)
    folder = new_folder(out, prepared.profile, "selftest")
    executor = LocalExecutor() if prepared.profile.engine.device == "gpu" else None
    seconds = sum(setup_expected_s(setup, prepared.prompts) for setup in setups)
    with Reporter(seconds) as reporter:
        reporter.line(
            f"{counted(len(trials), 'injected fault')} on {counted(sum(s.group.engines for s in setups), 'engine')}, "
            f"about {lasting(seconds)}"
        )
        for mutant, reason in hidden.items():
            reporter.line(f"{mutant} not tried: {reason}")
        result = SelfTester(prepared, environment, folder, reporter).run(setups, executor)
        result = result.model_copy(update={"not_tried": hidden})
    write_selftest(result, folder)
    point_latest(folder, "latest-selftest")
    return result, folder
