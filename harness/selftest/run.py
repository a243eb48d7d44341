"""Runs the self-test on real engines: the control first, then one mutant after the other on the same engines."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path

from harness import provenance
from harness.engine.arming import Arming, Marks, roles_of
from harness.engine.environment import EngineEnvironment
from harness.engine.topology import EngineGroupSession
from harness.errors import (
    EngineDiedError,
    EngineStartError,
    HandoffError,
    InfrastructureError,
    MutantRefusedError,
)
from harness.findings import Judgement, Verdict
from harness.matrix import start_expected_s
from harness.operations import Prepared, judge_and_report
from harness.progress import Reporter
from harness.recorder import Recorder
from harness.runner import run_cell
from harness.selftest.outcome import Control, Kill, Outcome, SelfTest, check_verdicts, classify_kill, diagnoses
from harness.selftest.trials import Setup, Trial, trial_works
from harness.summary import RunSummary
from harness.workload import CellWork


class SelfTester:
    """Executes setups one after the other and collects what became of each mutant."""

    def __init__(
        self,
        prepared: Prepared,
        environment: EngineEnvironment,
        folder: Path,
        reporter: Reporter,
    ) -> None:
        self._prepared = prepared
        self._environment = environment
        self._folder = folder
        self._reporter = reporter
        self._kinds = {s.id: s.kind for s in prepared.profile.scenarios}
        self._outcomes: list[Outcome] = []
        self._controls: list[Control] = []
        self._starts = 0

    def run(self, setups: Sequence[Setup]) -> SelfTest:
        """KeyboardInterrupt ends the engines and returns what is known so far, marked as interrupted."""
        begun, started, interrupted = time.monotonic(), provenance.now(), False
        try:
            for setup in setups:
                self._setup(setup)
        except KeyboardInterrupt:
            interrupted = True
        return SelfTest(
            run_id=self._folder.name,
            started=started,
            profile=self._prepared.profile.name,
            versions=provenance.versions(self._environment),
            hardware=provenance.hardware(),
            asked=tuple(t.mutant for s in setups for t in s.trials),
            outcomes=tuple(self._outcomes),
            controls=tuple(self._controls),
            engine_starts=self._starts,
            seconds=round(time.monotonic() - begun, 1),
            interrupted=interrupted,
        )

    def _setup(self, setup: Setup) -> None:
        """Start the engines, run the control and the trials. Engines that a mutant killed are started again."""
        left = list(setup.trials)
        controlled = not setup.controlled
        attempt = 0
        while left or not controlled:
            attempt += 1
            name = setup.id if attempt == 1 else f"{setup.id}-again-{attempt}"
            arming = Arming([t.mutant for t in left], setup.group.topology == "pd", self._folder / name)
            session = EngineGroupSession(
                setup.group,
                self._prepared.profile,
                self._environment,
                self._folder / name / "logs",
                progress=self._reporter.line,
                arming=arming,
            )
            self._starts += setup.group.engines
            try:
                with session:
                    if not controlled:
                        self._control(setup, session)
                        controlled = True
                    while left:
                        trial = left.pop(0)
                        self._trial(trial, setup, session, self._folder / name)
                        if left:
                            self._heal(session, setup)
            except InfrastructureError as error:
                left, controlled = self._broken(setup, left, controlled, session, error)

    def _broken(
        self,
        setup: Setup,
        left: list[Trial],
        controlled: bool,
        session: EngineGroupSession,
        error: InfrastructureError,
    ) -> tuple[list[Trial], bool]:
        """After an engine died or did not start: which trials are still to be tried on new engines, and whether the
        control has its verdict."""
        self._reporter.line(f"{setup.id}: {error}")
        if controlled and isinstance(error, (EngineDiedError, HandoffError)) and session.ready_seconds:
            return left, True
        refusing = [t for t in left if isinstance(error, MutantRefusedError) and t.mutant in error.mutants]
        if refusing and len(refusing) < len(left):
            # The others may still fit this vLLM.
            for trial in refusing:
                self._record_no_start(trial, setup, error)
            return [t for t in left if t not in refusing], controlled
        if not controlled:
            self._controls.append(
                Control(
                    id=setup.id,
                    verdict=Verdict.UNKNOWN,
                    requests=0,
                    folder="",
                    seconds=0.0,
                    findings=(str(error),),
                )
            )
        for trial in left:
            self._record_no_start(trial, setup, error)
        return [], True

    def _recorder(self, works: Sequence[CellWork], setup: Setup, folder: Path, mutants: Sequence[str]) -> Recorder:
        p = self._prepared
        return Recorder(
            p.profile,
            p.source,
            works,
            {c.id: setup.group.id for c in setup.group.cells},
            p.sets,
            self._environment,
            folder,
            folder.name,
            mutants=mutants,
        )

    def _control(self, setup: Setup, session: EngineGroupSession) -> None:
        session.switch()
        folder = self._folder / f"control-{setup.id}"
        begun = time.monotonic()
        recorder = self._recorder(setup.control, setup, folder, ())
        summary, died = self._perform(session, setup.control, recorder)
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

    def _perform(
        self, session: EngineGroupSession, works: Sequence[CellWork], recorder: Recorder
    ) -> tuple[RunSummary, InfrastructureError | None]:
        """Send the requests, then judge and report. What breaks on the way leaves its cells incomplete, and is
        returned too."""
        recorder.engines(session.records())
        died: InfrastructureError | None = None
        for work in works:
            try:
                if died is None:
                    run_cell(session, work, recorder, self._reporter)
            except InfrastructureError as error:
                died = error
                recorder.fail_pending([w.cell.id for w in works], "failed", str(error))
        return judge_and_report(recorder.finish()), died

    def _trial(self, trial: Trial, setup: Setup, session: EngineGroupSession, engines: Path) -> None:
        folder = self._folder / trial.mutant
        works = trial_works(trial, self._prepared.profile, self._prepared.prompts, setup.group.cells)
        recorder = self._recorder(works, setup, folder, (trial.mutant,))
        begun = time.monotonic()
        session.switch(trial.mutant)
        try:
            summary, died = self._perform(session, works, recorder)
        finally:
            session.switch()
        judgement = summary.judgement
        fired = _fired(trial, setup, engines)
        kill, reason = self._classify(trial, setup, judgement, fired)
        self._add(trial, kill, reason, judgement, folder.name, time.monotonic() - begun, fired)
        if died is not None:
            raise died

    def _classify(self, trial: Trial, setup: Setup, judgement: Judgement, fired: bool | None) -> tuple[Kill, str]:
        return classify_kill(trial, judgement, self._kinds, fired, setup.group.method.lookahead)

    def _add(
        self,
        trial: Trial,
        kill: Kill,
        reason: str,
        judgement: Judgement,
        folder: str,
        seconds: float,
        fired: bool | None,
    ) -> None:
        self._outcomes.append(
            Outcome(
                mutant=trial.mutant,
                kill=kill,
                reason=reason,
                expected=expectation(trial),
                found=diagnoses(judgement),
                checks=check_verdicts(judgement),
                fired=fired,
                folder=folder,
                seconds=round(seconds, 1),
            )
        )
        self._reporter.line(f"{trial.mutant}: {kill.value}: {reason[:240]}")

    def _record_no_start(self, trial: Trial, setup: Setup, error: InfrastructureError) -> None:
        """A trial whose engines did not come up. For a mutant that cannot start, that is the right end, if the
        harness says UNKNOWN."""
        works = trial_works(trial, self._prepared.profile, self._prepared.prompts, setup.group.cells)
        recorder = self._recorder(works, setup, self._folder / trial.mutant, (trial.mutant,))
        recorder.fail_pending([w.cell.id for w in works], "failed", str(error))
        judgement = judge_and_report(recorder.finish()).judgement
        expected = trial.refusal is not None and re.search(trial.refusal, str(error)) is not None
        if not expected or not isinstance(error, EngineStartError):
            kill, reason = Kill.UNTESTED, " ".join(str(error).split())[:400]
        else:
            kill, reason = self._classify(trial, setup, judgement, None)
        self._add(trial, kill, reason, judgement, trial.mutant, 0.0, None)

    def _heal(self, session: EngineGroupSession, setup: Setup) -> None:
        """Forget what a mutant left in the caches, and see that the engines answer rightly without it.

        Raises HandoffError when they do not; they are started again then.
        """
        session.reset_caches()
        item = next((i for w in setup.control for i in w.items), None)
        prompt = item.prompt if item else next(p for p in self._prepared.prompts.cold)
        for cell in setup.group.cells:
            answer = session.observe(cell, prompt, "ids", 0)
            right = prompt.expected
            if answer.error or answer.final is None:
                raise HandoffError(
                    f"expected {cell.id} to answer {prompt.id} after the mutant was switched off, found "
                    f"{answer.error or 'no answer'}; the engines are started again"
                )
            if right is not None and answer.final.output_ids != right[: answer.max_tokens]:
                raise HandoffError(
                    f"expected {cell.id} to answer {prompt.id} rightly after the mutant was switched off, found other "
                    "tokens; the engines are started again"
                )


def _fired(trial: Trial, setup: Setup, engines: Path) -> bool | None:
    """Whether any engine's log says that the mutant took effect; None when it is not in an engine."""
    if not roles_of(trial.mutant, setup.group.topology == "pd"):
        return None
    logs = [p.read_text(encoding="utf-8", errors="replace") for p in (engines / "logs").glob("*.log")]
    return any(trial.mutant in Marks(log).fired for log in logs)


def expectation(trial: Trial) -> str:
    """What must be found, in words."""
    where = " or ".join(f"{v.topology} {v.kind}" for v in trial.caught)
    law = ", at the lookahead's residues only" if trial.spills_only else ""
    clean = f", while {' and '.join(f'{v.topology} {v.kind}' for v in trial.clean)} passes" if trial.clean else ""
    return f"{trial.damage} by {' or '.join(trial.checks)} in {where}{law}{clean}"


def forecast_s(setups: Sequence[Setup], prepared: Prepared) -> float:
    """Rough wall time of a self-test in seconds."""
    total = 0.0
    for setup in setups:
        works = [w for t in setup.trials for w in trial_works(t, prepared.profile, prepared.prompts, setup.group.cells)]
        if setup.controlled:
            works += setup.control
        total += start_expected_s(setup.group) + sum(
            setup.group.expected.request_s(w.cell.topology) * w.requests for w in works
        )
    return total
