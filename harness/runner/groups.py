"""Run a plan on real engines and record it; judging happens later, from the record alone."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

from harness.engines.attached import AttachedExecutor
from harness.engines.environment import EngineEnvironment
from harness.engines.executor import LocalExecutor
from harness.engines.inventory import Inventory, describe, jobs_of, sharing_note, too_few_to_part
from harness.engines.session import EngineGroupSession
from harness.errors import InfrastructureError, StorageError
from harness.history.folder import History
from harness.history.layout import WITNESS
from harness.mutants.install import with_mutants
from harness.profiles.cells import EngineGroup, start_expected_s
from harness.runner.jobs import JobEvents, RunningSessions, run_jobs
from harness.runner.options import DEFAULTS, RunOptions
from harness.runner.record_cells import ask_cells
from harness.runner.recorder import Recorder
from harness.runner.timeouts import limited, run_limit_s
from harness.scheduling.model import Placement
from harness.scheduling.planning import all_at_once, one_by_one, planned
from harness.scheduling.scheduler import Scheduler
from harness.util.files import write_traceback
from harness.util.progress import Reporter
from harness.util.signals import ended_by, signal_of
from harness.util.text import listed
from harness.workload.prepare import Prepared

_LOOK_S = 0.5
"""Seconds between looks at whether engines that wait for others were ended."""
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
        for other in again:
            # While one repetition is asked, so are the engines of the others.
            other.busy = recorder.busy
        self._reporter = reporter
        self._sessions = RunningSessions(reporter.line)
        self._limit_s = run_limit_s(prepared.profile.timeouts, len(self._recorders) * prepared.expected_s)
        self._over = threading.Condition()
        """Told whenever a group of engines is over, or will never be started."""
        self._left = set(self._groups)
        """Groups that are not over."""
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
        if self._executor.at_once == 1:
            scheduler = one_by_one(jobs, inventory.devices)
        else:
            # By the plain engine's answers those of the others are verified, which are kept if the recording is ended.
            kept = self._options.before_ending is not None
            first = [g.id for g in self._plan.groups if g.rescores] if kept else []
            scheduler = planned(all_at_once(jobs, inventory.devices), inventory.devices, first=first)
        self._give_up(scheduler.refused)
        try:
            with limited(self._limit_s, self._overdue):
                self._work(scheduler, inventory)
        except KeyboardInterrupt as error:
            by = signal_of(error)
            ended = "the servers run on" if self._attached else "the engines were ended"
            self._reporter.line(f"{ended_by(by)}: {ended}; recorded observations are kept")
            for recorder in self._recorders:
                recorder.interrupted(by)
        if self._kv_folder is not None:
            # Each repetition has been brought its own.
            shutil.rmtree(self._kv_folder, ignore_errors=True)
        return tuple(recorder.finish() for recorder in self._recorders)

    def _work(self, scheduler: Scheduler, inventory: Inventory) -> None:
        unseen: list[EngineGroup] = []
        """Groups that have yet to be shown to the watch."""

        def over(placement: Placement) -> None:
            self._give_up(self._lost(scheduler))
            unseen.append(self._groups[placement.job.id])
            if self._options.decides:
                self._show(unseen)

        def ending(error: BaseException) -> None:
            if isinstance(error, KeyboardInterrupt):
                self._before_ending()

        events = JobEvents(
            started=lambda: self._show(unseen),
            over=over,
            refused=self._give_up,
            ending=ending,
            ended=self._recorder.stopped,
        )
        run = partial(self._job, inventory=inventory)
        run_jobs(scheduler, inventory, run, self._sessions, self._reporter.line, events)

    def _show(self, over: list[EngineGroup]) -> None:
        """Let the watch judge the groups that were recorded completely, and forget them."""
        while over:
            cells = over.pop(0).cell_ids
            if self._options.watch is None or any(self._recorder.cell(c).state != "complete" for c in cells):
                continue
            if reason := self._options.watch(self._recorder.so_far(cells)):
                self._sessions.refuse(reason)

    def _job(self, placement: Placement, inventory: Inventory) -> None:
        try:
            if words := describe(placement, inventory):
                self._reporter.line(words)
            self._run_group(self._groups[placement.job.id], placement)
        finally:
            with self._over:
                self._left.discard(placement.job.id)
                self._over.notify_all()

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
        with self._over:
            self._left -= refused.keys()
            self._over.notify_all()

    def _before_ending(self) -> None:
        """Show what was recorded to whoever asked for it; whatever comes of that, the engines are ended."""
        if self._options.before_ending is None:
            return
        try:
            with ExitStack() as stack:
                for recorder in self._recorders:
                    stack.enter_context(recorder.still())
                recorded = tuple(r.so_far([c.cell for c in r.record.cells]) for r in self._recorders)
                self._options.before_ending(recorded)
        except Exception as trouble:
            self._reporter.line(f"before the engines were ended: {type(trouble).__name__}: {trouble}")

    def _overdue(self) -> None:
        """End all running engines because the run exceeded its time limit, and start no further group."""
        self._sessions.give_up(
            "run",
            f"the run was not finished after {self._limit_s:.0f} s (timeouts.run), so its engines were ended; "
            "raise the limit, or run fewer cells",
        )

    def _run_group(self, group: EngineGroup, placement: Placement) -> None:
        if self._sessions.refusal:
            self._failed(group, self._sessions.refusal)
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
                self._started(
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
                recorder.busy.took(session.ready_seconds)
                recorder.set_cell(first, start_seconds=round(session.ready_seconds, 3))
                self._reporter.step(group.id, start_expected_s(group), start=True)
                self._ask(session, group)
                stopping = time.monotonic()
            recorder.stopped(time.monotonic() - stopping)
        except StorageError:
            # The other groups could not record anything either.
            raise
        except InfrastructureError as error:
            if self._sessions.ending:
                return
            self._failed(group, str(error))
            if self._options.must_start and not recorder.record.engines:
                self._sessions.refuse(f"{NOT_STARTED}{error}")
            if recorder.cell(first).start_seconds == 0.0:
                recorder.busy.took(time.monotonic() - begun)
                recorder.set_cell(first, start_seconds=round(time.monotonic() - begun, 3))
        except Exception as error:
            # An unexpected error in one group must not affect the others.
            if self._sessions.ending:
                return
            log = recorder.folder / "logs" / f"{group.id}.harness.log"
            write_traceback(log)
            self._failed(group, f"the harness itself failed: {type(error).__name__}: {error}; see {log}")

    def _ask(self, session: EngineGroupSession, group: EngineGroup) -> None:
        for number, recorder in enumerate(self._recorders, 1):
            asked = self._works if number == 1 else recorder.works
            works = [asked[c.id] for c in group.cells]
            if len(self._recorders) > 1:
                self._reporter.line(f"{group.id}: repetition {number} of {len(self._recorders)}")
            ask_cells(session, works, recorder, self._reporter, partial(self._wait_for_outputs, session))

    def _wait_for_outputs(self, session: EngineGroupSession) -> None:
        """Wait until the other engines of a variant are over, whose outputs are to be re-scored."""
        mine = session.group
        others = {g.id for g in self._groups.values() if g.variant == mine.variant and g.id != mine.id}
        with self._over:
            if left := others & self._left:
                self._reporter.line(f"{mine.id}: waits for the outputs of {listed(sorted(left), 'and')}")
            while others & self._left and not session.ended:
                self._over.wait(_LOOK_S)

    def _failed(self, group: EngineGroup, reason: str) -> None:
        self._reporter.line(f"{group.id}: UNKNOWN: {reason}")
        for recorder in self._recorders:
            recorder.fail_pending(group.cell_ids, "failed", reason)

    @contextmanager
    def _started(self, session: EngineGroupSession) -> Iterator[EngineGroupSession]:
        """Start the session, and record at its end what is left of it."""
        try:
            with self._sessions.started(session):
                yield session
        finally:
            if session.left:
                for recorder in self._recorders:
                    recorder.set_cell(session.group.cells[0].id, left_over=tuple(session.left))
