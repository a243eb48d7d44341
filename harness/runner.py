"""Run a plan on real engines and record it. Judging happens elsewhere, later, from the record alone."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from harness.config import NoSpeculation, Profile
from harness.engine.arming import Arming
from harness.engine.environment import EngineEnvironment
from harness.engine.executor import LOCAL, Executor
from harness.engine.topology import EngineGroupSession
from harness.errors import InfrastructureError
from harness.history import History
from harness.matrix import REQUEST_S, EngineGroup, Plan, start_expected_s
from harness.progress import Reporter
from harness.recorder import Recorder
from harness.rescore import REFERENCE
from harness.workload import CellWork, perform


class Runner:
    """Executes the groups of a plan one after the other; a group that fails leaves its cells UNKNOWN."""

    def __init__(
        self,
        profile: Profile,
        plan: Plan,
        works: Sequence[CellWork],
        environment: EngineEnvironment,
        recorder: Recorder,
        reporter: Reporter,
        base_port: int | None = None,
        mutants: Sequence[str] = (),
        together: bool = False,
        executor: Executor = LOCAL,
    ) -> None:
        self._executor = executor
        self._mutants = tuple(mutants)
        self._together = together
        self._profile = profile
        self._plan = plan
        self._works = {w.cell.id: w for w in works}
        self._environment = environment
        self._recorder = recorder
        self._reporter = reporter
        self._base_port = base_port

    def run(self) -> History:
        """KeyboardInterrupt ends the engines, keeps what was recorded and returns the history, marked as
        interrupted."""
        try:
            for group in self._plan.groups:
                self._run_group(group)
        except KeyboardInterrupt:
            self._reporter.line("interrupted: engines are gone, recorded observations are kept")
            self._recorder.interrupted()
        return self._recorder.finish()

    def _run_group(self, group: EngineGroup) -> None:
        begun = time.monotonic()
        recorder = self._recorder
        first = group.cells[0].id
        folder = self._recorder.folder / "arming" / group.id
        group, arming = armed(group, self._profile, self._mutants, folder, self._together)
        try:
            with (
                self._executor.places(group, self._profile, self._environment) as places,
                EngineGroupSession(
                    group,
                    self._profile,
                    self._environment,
                    recorder.folder / "logs",
                    self._base_port,
                    self._reporter.line,
                    arming,
                    places,
                ) as session,
            ):
                session.switch(*self._mutants)
                recorder.engines(session.records())
                recorder.set_cell(first, start_seconds=round(session.ready_seconds, 3))
                self._reporter.step(group.id, start_expected_s(group))
                for cell in group.cells:
                    run_cell(session, self._works[cell.id], recorder, self._reporter)
                if recorder.record.rescore and REFERENCE in [c.id for c in group.cells]:
                    rescore(session, recorder, self._reporter)
                stopping = time.monotonic()
            recorder.stopped(time.monotonic() - stopping)
        except InfrastructureError as error:
            self._reporter.line(f"{group.id}: UNKNOWN: {error}")
            recorder.fail_pending([c.id for c in group.cells], "failed", str(error))
            if recorder.cell(first).start_seconds == 0.0:
                recorder.set_cell(first, start_seconds=round(time.monotonic() - begun, 3))


def armed(
    group: EngineGroup, profile: Profile, mutants: Sequence[str], folder: Path, together: bool
) -> tuple[EngineGroup, Arming | None]:
    """The group with mutants in it; M10 is a change of the command line."""
    if not mutants:
        return group, None
    if "M10" in mutants and group.topology == "pd":
        plain = next((m for m in profile.methods if m.kind == "none"), NoSpeculation(kind="none"))
        group = group._replace(prefill_method=plain)
    return group, Arming(mutants, group.topology == "pd", folder, together)


def run_cell(session: EngineGroupSession, work: CellWork, recorder: Recorder, reporter: Reporter) -> None:
    """Send a cell's requests and record the answers. Raises EngineDiedError when an engine is gone."""
    begun = time.monotonic()
    errors = done = 0
    waited = 0.0
    busy_until = 0.0
    for observation in perform(session, work):
        recorder.append(observation)
        done += 1
        errors += observation.error is not None
        # Requests that were under way together count once.
        end = observation.started_at + sum(leg.seconds for leg in observation.legs)
        waited += max(0.0, end - max(observation.started_at, busy_until))
        busy_until = max(busy_until, end)
        reporter.step(f"{work.cell.id} {observation.scenario} {done}/{work.requests}", REQUEST_S[work.cell.topology])
    spent = time.monotonic() - begun
    recorder.set_cell(
        work.cell.id, state="complete", request_seconds=round(min(waited, spent), 3), seconds=round(spent, 3)
    )
    reporter.line(f"{work.cell.id}: {done} requests in {spent:.1f} s" + (f", {errors} broke" if errors else ""))


def rescore(session: EngineGroupSession, recorder: Recorder, reporter: Reporter) -> None:
    """Let the plain engine read what the cells gave. Raises EngineDiedError when it is gone."""
    begun = time.monotonic()
    count = len(recorder.outputs)
    for observation in list(recorder.outputs.requests(session)):
        recorder.append(observation)
    reporter.line(f"{count} distinct outputs re-scored in {time.monotonic() - begun:.1f} s")


def expected_s(plan: Plan, works: Sequence[CellWork]) -> float:
    """Rough wall time in seconds."""
    return sum(group_expected_s(g, works) for g in plan.groups)


def group_expected_s(group: EngineGroup, works: Sequence[CellWork]) -> float:
    """Rough wall time of one group of engines in seconds."""
    mine = [w for w in works if w.cell in group.cells]
    return start_expected_s(group) + sum(REQUEST_S[w.cell.topology] * w.requests for w in mine)


def point_latest(folder: Path, name: str = "latest") -> None:
    """Let ``latest`` beside the run folder point to it, replaced in one step."""
    link = folder.parent / name
    temporary = folder.parent / f".latest-{os.getpid()}"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(folder.name)
    temporary.replace(link)
