"""Run a plan on real engines and record it. Judging happens elsewhere, later, from the record alone."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path

from harness.config import NoSpeculation, Profile
from harness.engine.arming import Arming
from harness.engine.environment import EngineEnvironment
from harness.engine.executor import Executor, LocalExecutor
from harness.engine.topology import EngineGroupSession
from harness.errors import EngineStartError, InfrastructureError, StorageError
from harness.files import write_traceback
from harness.history import History
from harness.limits import cell_limit_s, limited, rescore_limit_s, run_limit_s
from harness.matrix import EngineGroup, Plan, start_expected_s
from harness.progress import Reporter
from harness.recorder import Recorder
from harness.schedule.model import Placement
from harness.schedule.planning import one_by_one, planned
from harness.schedule.scheduler import Scheduler
from harness.signals import deaf
from harness.slots import Inventory, Memory, describe, jobs_of
from harness.storage import writing
from harness.workload import CellWork, expected_s, group_expected_s, perform

__all__ = ["Runner", "armed", "expected_s", "group_expected_s", "point_latest", "rescore", "run_cell"]


class Runner:
    """Executes the groups of a plan, as many at a time as there are devices for, each in a thread of its own. A group
    that fails leaves its cells UNKNOWN, and the others go on."""

    def __init__(
        self,
        profile: Profile,
        plan: Plan,
        works: Sequence[CellWork],
        environment: EngineEnvironment,
        recorder: Recorder,
        reporter: Reporter,
        executor: Executor | None = None,
        mutants: Sequence[str] = (),
        together: bool = False,
    ) -> None:
        self._executor = executor or LocalExecutor()
        self._mutants = tuple(mutants)
        self._together = together
        self._profile = profile
        self._groups = {g.id: g for g in plan.groups}
        self._plan = plan
        self._works = {w.cell.id: w for w in works}
        self._environment = environment
        self._recorder = recorder
        self._reporter = reporter
        self._lock = threading.Lock()
        self._sessions: set[EngineGroupSession] = set()
        self._on: Counter[str] = Counter()
        """Groups of engines on each device."""
        self._ending = False
        self._limit_s = run_limit_s(profile.timeouts, expected_s(plan, works))
        self._late = ""
        """Why no group is started any more, when the run takes too long."""
        self._gone: set[str] = set()
        """Nodes."""

    def run(self) -> History:
        """KeyboardInterrupt ends the engines, keeps what was recorded and returns the history, marked as
        interrupted.

        Raises StorageError when something cannot be recorded any more; the engines are gone then.
        """
        inventory = self._executor.inventory(self._profile)
        for note in inventory.notes:
            self._reporter.line(note)
        works = list(self._works.values())
        rescore = self._recorder.record.rescore
        jobs = jobs_of(self._plan, works, self._profile, inventory, rescore, self._executor.rule)
        policy = one_by_one if self._executor.at_once == 1 else planned
        scheduler = policy(jobs, inventory.devices)
        self._give_up(scheduler.refused)
        try:
            with limited(self._limit_s, self._overdue):
                self._work(scheduler, inventory)
        except KeyboardInterrupt:
            self._reporter.line("interrupted: engines are gone, recorded observations are kept")
            self._recorder.interrupted()
        return self._recorder.finish()

    def _work(self, scheduler: Scheduler, inventory: Inventory) -> None:
        memory = Memory(inventory)
        running: dict[Future[dict[str, str]], Placement] = {}
        pool = ThreadPoolExecutor(max(1, len(self._groups)))
        try:
            while True:
                for placement in scheduler.start_next():
                    running[pool.submit(self._job, placement, inventory, memory)] = placement
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    placement = running.pop(future)
                    for device, reason in future.result().items():
                        self._reporter.line(f"{device} is not used again: {reason}")
                        self._give_up(scheduler.quarantine(device, reason).refused)
                    self._give_up(self._lost(scheduler))
                    scheduler.done(placement.job.id)
        except BaseException:
            # A second signal must not leave engines behind.
            with deaf():
                self._end_engines()
                pool.shutdown()
            raise
        finally:
            pool.shutdown()

    def _job(self, placement: Placement, inventory: Inventory, memory: Memory) -> dict[str, str]:
        """Run a group of engines from start to end; returns devices that cannot be used again, with the reason."""
        with self._lock:
            self._on.update(placement.devices)
        try:
            if words := describe(placement, inventory):
                self._reporter.line(words)
            self._run_group(self._groups[placement.job.id], placement)
        finally:
            with self._lock:
                self._on.subtract(placement.devices)
                empty = [d for d in placement.devices if not self._on[d]]
        return {d: reason for d in empty if not self._ending and (reason := memory.kept(d))}

    def _lost(self, scheduler: Scheduler) -> dict[str, str]:
        """Groups that fit nowhere any more because nodes are gone, with the reason."""
        refused: dict[str, str] = {}
        for node, reason in self._executor.lost().items():
            if node not in self._gone:
                self._gone.add(node)
                self._reporter.line(f"node {node} is not used again: {reason}")
                refused |= scheduler.lost(node, reason).refused
        return refused

    def _give_up(self, refused: Mapping[str, str]) -> None:
        """Mark the cells of groups that fit nowhere."""
        for group_id, reason in refused.items():
            self._reporter.line(f"{group_id}: UNKNOWN: {reason}")
            self._recorder.fail_pending([c.id for c in self._groups[group_id].cells], "failed", reason)

    def _end_engines(self) -> None:
        """End all engines now; the threads that use them find them gone."""
        with self._lock:
            self._ending = True
            sessions = list(self._sessions)
        with ThreadPoolExecutor(max(1, len(sessions))) as pool:
            ends = [pool.submit(s.end_engines) for s in sessions]
        for trouble in filter(None, (e.exception() for e in ends)):
            self._reporter.line(f"while engines were ended: {type(trouble).__name__}: {trouble}")

    def _overdue(self) -> None:
        """The run takes too long: end what runs; what has not started will not."""
        with self._lock:
            if self._ending:
                return
            self._late = (
                f"expected the run to take at most {self._limit_s:.0f} s (timeouts.run), found it unfinished, so its "
                "engines were ended; raise the limit, or run fewer cells"
            )
            sessions = list(self._sessions)
        self._reporter.line(self._late)
        with ThreadPoolExecutor(max(1, len(sessions))) as pool:
            for session in sessions:
                pool.submit(session.give_up, "run", self._late)

    def _run_group(self, group: EngineGroup, placement: Placement) -> None:
        if self._late:
            self._failed(group, self._late)
            return
        begun = time.monotonic()
        recorder = self._recorder
        first = group.cells[0].id
        folder = self._recorder.folder / "arming" / group.id
        profile = self._profile.part(group.variant)
        group, arming = armed(group, profile, self._mutants, folder, self._together)
        try:
            with (
                self._executor.places(group, profile, self._environment, placement) as places,
                self._known(
                    EngineGroupSession(
                        group,
                        profile,
                        self._environment,
                        recorder.folder / "logs",
                        progress=self._reporter.line,
                        arming=arming,
                        places=places,
                    )
                ) as session,
            ):
                session.switch(*self._mutants)
                recorder.engines(session.records())
                recorder.set_cell(first, start_seconds=round(session.ready_seconds, 3))
                self._reporter.step(group.id, start_expected_s(group))
                for cell in group.cells:
                    run_cell(session, self._works[cell.id], recorder, self._reporter)
                if recorder.record.rescore and group.rescores:
                    rescore(session, recorder, self._reporter)
                stopping = time.monotonic()
            recorder.stopped(time.monotonic() - stopping)
        except StorageError:
            # Nobody else could record anything either.
            raise
        except InfrastructureError as error:
            if self._ending:
                return
            self._failed(group, str(error))
            if recorder.cell(first).start_seconds == 0.0:
                recorder.set_cell(first, start_seconds=round(time.monotonic() - begun, 3))

        except Exception as error:
            # Whatever it is, it must not cost the other groups.
            if self._ending:
                return
            log = recorder.folder / "logs" / f"{group.id}.harness.log"
            write_traceback(log)
            self._failed(group, f"the harness itself failed: {type(error).__name__}: {error}; see {log}")

    def _failed(self, group: EngineGroup, reason: str) -> None:
        self._reporter.line(f"{group.id}: UNKNOWN: {reason}")
        self._recorder.fail_pending([c.id for c in group.cells], "failed", reason)

    @contextmanager
    def _known(self, session: EngineGroupSession) -> Iterator[EngineGroupSession]:
        """The session, started, and ended with the others when the run is interrupted."""
        with self._lock:
            if self._late:
                raise EngineStartError(self._late)
            if self._ending:
                raise EngineStartError(f"{session.group.id}: not started, because the run is ending")
            self._sessions.add(session)
        try:
            with session:
                yield session
        finally:
            with self._lock:
                self._sessions.discard(session)
            if session.left:
                self._recorder.set_cell(session.group.cells[0].id, left_over=tuple(session.left))


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
    """Send a cell's requests and record the answers.

    Raises EngineDiedError when an engine is gone; engines of a cell that takes too long are ended.
    """
    if not work.requests:
        # Of a resumed run: the cell is complete, and its engine is here to re-score what the others give.
        return
    limit_s = cell_limit_s(session.profile.timeouts, session.group, work)
    late = (
        f"expected the requests of {work.cell.id} to take at most {limit_s:.0f} s (timeouts.cell), found them "
        f"unfinished, so its engines were ended; see logs/{session.group.id}.*.stacks.txt, or raise the limit"
    )
    with limited(limit_s, lambda: session.give_up("cell", late)):
        _send_all(session, work, recorder, reporter)


def _send_all(session: EngineGroupSession, work: CellWork, recorder: Recorder, reporter: Reporter) -> None:
    begun = time.monotonic()
    errors = done = 0
    waited = 0.0
    busy_until = 0.0
    for observation in perform(session, work):
        # An engine that is told to end cuts its answers short.
        if session.ended:
            break
        recorder.append(observation)
        done += 1
        errors += observation.error is not None
        # Requests that were under way together count once.
        end = observation.started_at + sum(leg.seconds for leg in observation.legs)
        waited += max(0.0, end - max(observation.started_at, busy_until))
        busy_until = max(busy_until, end)
        step = session.group.expected.request_s(work.cell.topology)
        reporter.step(f"{work.cell.id} {observation.scenario} {done}/{work.requests}", step)
    # A cell is complete when those who answered are still there: another server may have taken a dead one's port.
    session.require_alive()
    spent = time.monotonic() - begun
    recorder.set_cell(
        work.cell.id, state="complete", request_seconds=round(min(waited, spent), 3), seconds=round(spent, 3)
    )
    reporter.line(f"{work.cell.id}: {done} requests in {spent:.1f} s" + (f", {errors} broke" if errors else ""))


def rescore(session: EngineGroupSession, recorder: Recorder, reporter: Reporter) -> None:
    """Let the plain engine read what the cells gave. Raises EngineDiedError when it is gone, or when it takes too long:
    it is ended then. What was read in time is kept."""
    begun = time.monotonic()
    count = recorder.outputs.count(session.group.variant)
    limit_s = rescore_limit_s(session.profile.timeouts, session.group, count)
    late = (
        f"expected {count} outputs to be re-scored within {limit_s:.0f} s (timeouts.cell), found them unfinished, so "
        f"the engine was ended; see logs/{session.group.id}.*.stacks.txt, or raise the limit"
    )
    with limited(limit_s, lambda: session.give_up("re-scoring", late)):
        for observation in recorder.outputs.requests(session):
            recorder.append(observation)
    reporter.line(f"{count} distinct outputs re-scored in {time.monotonic() - begun:.1f} s")


def point_latest(folder: Path, name: str = "latest") -> None:
    """Let ``latest`` beside the run folder point to it, replaced in one step. Raises StorageError."""
    link = folder.parent / name
    temporary = folder.parent / f".latest-{os.getpid()}"
    with writing(link):
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(folder.resolve().name)
        temporary.replace(link)
