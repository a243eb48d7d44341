"""Run a plan on real engines and record it; judging happens later, from the record alone."""

from __future__ import annotations

import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager

from harness.engines.attached import AttachedExecutor
from harness.engines.environment import EngineEnvironment
from harness.engines.executor import LocalExecutor
from harness.engines.inventory import Inventory, Memory, describe, jobs_of, sharing_note, too_few_to_part
from harness.engines.session import EngineGroupSession
from harness.errors import EngineStartError, InfrastructureError, StorageError
from harness.history.folder import History
from harness.history.layout import WITNESS
from harness.mutants.install import with_mutants
from harness.profiles.cells import EngineGroup, start_expected_s
from harness.runner.options import DEFAULTS, RunOptions
from harness.runner.record_cells import ask_cells
from harness.runner.recorder import Recorder
from harness.runner.timeouts import limited, run_limit_s
from harness.scheduling.model import Placement
from harness.scheduling.planning import one_by_one, planned
from harness.scheduling.scheduler import Scheduler
from harness.util.files import write_traceback
from harness.util.progress import Reporter
from harness.util.signals import deferred, ignored
from harness.workload.prepare import Prepared

NOT_STARTED = "not started, since the first engines did not become ready: "
"""How the reason begins for the cells of engines that were not tried any more."""


class Runner:
    """Runs the groups of a plan, each in its own thread, as many at a time as the devices allow. A group that fails
    leaves its cells UNKNOWN and does not affect the others."""

    def __init__(
        self,
        prepared: Prepared,
        environment: EngineEnvironment,
        recorder: Recorder,
        reporter: Reporter,
        options: RunOptions = DEFAULTS,
        again: Sequence[Recorder] = (),
    ) -> None:
        """Prepare a run; ``again`` takes the answers of repetitions, for which engines are asked the same once more."""
        self._executor = options.executor or LocalExecutor()
        self._attached = isinstance(self._executor, AttachedExecutor)
        self._options = options
        self._profile = prepared.profile
        self._plan = prepared.plan
        self._groups = {g.id: g for g in prepared.plan.groups}
        self._works = {w.cell.id: w for w in prepared.works}
        self._environment = environment
        self._recorder = recorder
        self._recorders = (recorder, *again)
        self._kv_folder = recorder.folder.parent / WITNESS if again else None
        """Where engines note what their KV caches hold when it is not of one run."""
        self._reporter = reporter
        self._lock = threading.Lock()
        self._sessions: set[EngineGroupSession] = set()
        self._on: Counter[str] = Counter()
        """Number of engine groups on each device."""
        self._ending = False
        self._limit_s = run_limit_s(prepared.profile.timeouts, len(self._recorders) * prepared.expected_s)
        self._late = ""
        """Why no further group is started: the time limit, or the watch; empty until then."""
        self._gone: set[str] = set()
        """Nodes already reported as lost."""

    def run(self) -> History:
        """Run all groups and return the history, that of the first repetition if there are more.

        KeyboardInterrupt ends the engines; what was recorded is kept and returned, marked as interrupted. Raises
        StorageError when recording fails; all engines have ended by then.
        """
        return self.run_all()[0]

    def run_all(self) -> tuple[History, ...]:
        """Run all groups as ``run`` does and return the history of each repetition."""
        inventory = self._executor.inventory(self._profile)
        for note in inventory.notes:
            self._reporter.line(note)
        if shared := too_few_to_part(self._plan, self._profile, inventory):
            self._reporter.line(sharing_note(shared, len(inventory.devices)))
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
            ended = "the servers run on" if self._attached else "the engines were ended"
            self._reporter.line(f"interrupted: {ended}; recorded observations are kept")
            for recorder in self._recorders:
                recorder.interrupted()
        if self._kv_folder is not None:
            # Each repetition has been brought its own.
            shutil.rmtree(self._kv_folder, ignore_errors=True)
        return tuple(recorder.finish() for recorder in self._recorders)

    def _work(self, scheduler: Scheduler, inventory: Inventory) -> None:
        memory = Memory(inventory)
        running: dict[Future[dict[str, str]], Placement] = {}
        over: list[EngineGroup] = []
        """Groups that have yet to be shown to the watch."""
        pool = ThreadPoolExecutor(max(1, len(self._groups)))
        try:
            while True:
                # Of a thread that is interrupted while it starts, the pool would not know, nor wait for its end.
                with deferred():
                    for placement in scheduler.start_next():
                        running[pool.submit(self._job, placement, inventory, memory)] = placement
                if not running:
                    return
                self._show(over)
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    placement = running.pop(future)
                    for device, reason in future.result().items():
                        self._reporter.line(f"{device} will not be used again: {reason}")
                        self._give_up(scheduler.quarantine(device, reason))
                    self._give_up(self._lost(scheduler))
                    over.append(self._groups[placement.job.id])
                    if self._options.decides:
                        self._show(over)
                    scheduler.done(placement.job.id)
        except BaseException:
            # A second signal must not leave engines behind.
            with ignored():
                self._end_engines()
                pool.shutdown()
            raise
        finally:
            pool.shutdown()

    def _show(self, over: list[EngineGroup]) -> None:
        """Let the watch judge the groups that were recorded completely, and forget them."""
        while over:
            cells = over.pop(0).cell_ids
            if self._options.watch is None or any(self._recorder.cell(c).state != "complete" for c in cells):
                continue
            if reason := self._options.watch(self._recorder.so_far(cells)):
                self._late = self._late or reason

    def _job(self, placement: Placement, inventory: Inventory, memory: Memory) -> dict[str, str]:
        """Run one group of engines; return the devices that cannot be used again, with the reason."""
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
        """Return the groups that no longer fit anywhere because nodes were lost, with the reason."""
        refused: dict[str, str] = {}
        for node, reason in self._executor.lost().items():
            if node not in self._gone:
                self._gone.add(node)
                self._reporter.line(f"node {node} will not be used again: {reason}")
                refused |= scheduler.quarantine(node, reason)
        return refused

    def _give_up(self, refused: Mapping[str, str]) -> None:
        """Mark the cells of groups that fit on no device as failed."""
        for group_id, reason in refused.items():
            self._failed(self._groups[group_id], reason)

    def _end_engines(self) -> None:
        """End all engines now; the threads that use them will notice."""
        with self._lock:
            self._ending = True
            sessions = list(self._sessions)
        with ThreadPoolExecutor(max(1, len(sessions))) as pool:
            ends = [pool.submit(s.end_engines) for s in sessions]
        for trouble in filter(None, (e.exception() for e in ends)):
            self._reporter.line(f"while ending the engines: {type(trouble).__name__}: {trouble}")

    def _overdue(self) -> None:
        """End all running engines because the run exceeded its time limit, and start no further group."""
        with self._lock:
            if self._ending:
                return
            self._late = (
                f"the run was not finished after {self._limit_s:.0f} s (timeouts.run), so its engines were ended; "
                "raise the limit, or run fewer cells"
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
        group, mutation = with_mutants(group, profile, self._options.mutants, folder, self._options.together)
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
                        mutation=mutation,
                        places=places,
                        kv_folder=self._kv_folder,
                    )
                ) as session,
            ):
                session.switch(*self._options.mutants)
                recorder.set_cell(first, start_seconds=round(session.ready_seconds, 3))
                self._reporter.step(group.id, start_expected_s(group), start=True)
                self._ask(session, group)
                stopping = time.monotonic()
            recorder.stopped(time.monotonic() - stopping)
        except StorageError:
            # The other groups could not record anything either.
            raise
        except InfrastructureError as error:
            if self._ending:
                return
            self._failed(group, str(error))
            if self._options.must_start and not recorder.record.engines:
                self._late = self._late or f"{NOT_STARTED}{error}"
            if recorder.cell(first).start_seconds == 0.0:
                recorder.set_cell(first, start_seconds=round(time.monotonic() - begun, 3))
        except Exception as error:
            # An unexpected error in one group must not affect the others.
            if self._ending:
                return
            log = recorder.folder / "logs" / f"{group.id}.harness.log"
            write_traceback(log)
            self._failed(group, f"the harness itself failed: {type(error).__name__}: {error}; see {log}")

    def _ask(self, session: EngineGroupSession, group: EngineGroup) -> None:
        works = [self._works[c.id] for c in group.cells]
        for number, recorder in enumerate(self._recorders, 1):
            if len(self._recorders) > 1:
                self._reporter.line(f"{group.id}: repetition {number} of {len(self._recorders)}")
            ask_cells(session, works, recorder, self._reporter)

    def _failed(self, group: EngineGroup, reason: str) -> None:
        self._reporter.line(f"{group.id}: UNKNOWN: {reason}")
        for recorder in self._recorders:
            recorder.fail_pending(group.cell_ids, "failed", reason)

    @contextmanager
    def _known(self, session: EngineGroupSession) -> Iterator[EngineGroupSession]:
        """Start the session, and register it so that it is ended when the run is interrupted."""
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
                for recorder in self._recorders:
                    recorder.set_cell(session.group.cells[0].id, left_over=tuple(session.left))
