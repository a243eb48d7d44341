"""Run the exchange drills: one pair behind proxies serves all of them; each drill asks one cell with three prompts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from faults.context import Context
from faults.leaks import Footprint
from faults.model import Drill, Result
from faults.proxy import COMPLETIONS, Wanted, completions, path
from faults.request_drill import LEASE_S, REQUEST_S, ExchangeDrill
from faults.testbed import Scene
from faults.verdict import Seen, judge_drill, lost, reasons_of, strays
from harness.engines.answers import Sampling
from harness.engines.places import default_places
from harness.engines.request import new_id
from harness.engines.session import EngineGroupSession
from harness.errors import EngineDiedError, HandoffError, InfrastructureError, UsageError
from harness.history.records import COLD, Form
from harness.profiles.cells import Cell, EngineGroup
from harness.profiles.model import Profile
from harness.prompts.model import Prompt
from harness.reports.judge_run import judge_and_report
from harness.reports.summary import RunSummary
from harness.runner.record_cells import record_cells
from harness.runner.recorder import Recorder
from harness.runner.run import prepared_recorder
from harness.util.files import write_traceback
from harness.util.storage import FolderLock
from harness.workload.cells import CellWork, Choice, cell_work
from harness.workload.prepare import Prepared

METHOD = "eagle3"
FORMS: tuple[Form, ...] = ("ids",)
_PROMPTS = 3
_OUTPUT = 16
_CALM_S = 90.0
"""Seconds within which P must have freed all blocks, which may take several leases."""
_END_S = 30.0
_RESTARTS = 1
"""Retries of an engine start that failed, because starts occasionally time out."""


def require_prompts(prepared: Prepared) -> list[Prompt]:
    """Return three cold prompts of two to four blocks, with outputs long enough to be cut, changed and repeated. Raises
    UsageError when there are too few, before anything is started."""
    size = prepared.profile.engine.block_size
    fitting = [
        p for p in prepared.prompts.cold if 2 * size - 2 <= p.tokens <= 4 * size and len(p.expected or ()) >= _OUTPUT
    ]
    found = fitting[:: max(1, len(fitting) // _PROMPTS)][:_PROMPTS]
    if len(found) < _PROMPTS:
        raise UsageError(
            f"expected {_PROMPTS} cold prompts of {2 * size - 2} to {4 * size} tokens with a known output of at least "
            f"{_OUTPUT} tokens in profile {prepared.profile.name}, found {len(found)}; fault tests need a profile "
            "of probe models, such as cpu"
        )
    return found


def drill_profile(profile: Profile) -> Profile:
    """Return the profile with a short lease and request timeout, on which no baseline depends."""
    return profile.model_copy(
        update={
            "engine": profile.engine.model_copy(update={"kv_lease_s": LEASE_S}),
            "timeouts": profile.timeouts.model_copy(update={"request": REQUEST_S}),
            "workload": profile.workload.model_copy(update={"rescore": False}),
            "scenarios": (),
        }
    )


class SharedDriller:
    """Runs the exchange drills on one pair."""

    def __init__(self, context: Context) -> None:
        """Raises UsageError when there are not enough prompts."""
        prepared = context.prepared._replace(profile=drill_profile(context.prepared.profile))
        self._context = context._replace(prepared=prepared)
        method = next(m for m in context.prepared.profile.methods if m.kind == METHOD)
        self._group = EngineGroup("pd", method, (Cell("pd", method), Cell("single", method)))
        self._prompts = require_prompts(context.prepared)

    def run(self, drills: Sequence[ExchangeDrill]) -> None:
        """Run the drills; engines that a drill ended are restarted for the next."""
        todo = list(drills)
        starts = failed = 0
        while todo:
            starts += 1
            before = len(todo)
            footprint = Footprint(self._context.mark)
            try:
                self._on_one_pair(todo, self._context.folder / f"engines-{starts}", starts)
            except InfrastructureError as error:
                self._context.reporter.line(f"engines: {error}")
                failed = failed + 1 if len(todo) == before else 0
                if failed > _RESTARTS:
                    self._lose(todo, f"the engines did not start: {error}")
            except Exception as error:
                # A control that failed would fail again; other groups of drills are not affected.
                self._lose(todo, f"a control failed: {type(error).__name__}: {error}")
            self._context.tried.left += footprint.left(_END_S)

    def _lose(self, todo: list[ExchangeDrill], why: str) -> None:
        for drill in todo:
            self._context.add(lost(drill.drill, why))
        todo.clear()

    def _on_one_pair(self, todo: list[ExchangeDrill], folder: Path, start: int) -> None:
        with Scene(self._group.roles) as scene:
            places = scene.places(default_places(self._group.roles, self._context.prepared.profile.engine))
            session = EngineGroupSession(
                self._group,
                self._context.prepared.profile,
                self._context.environment,
                folder / "logs",
                progress=self._context.reporter.line,
                places=places,
            )
            with session:
                for cell in self._group.cells:
                    self._control(session, cell, f"control-{start}-{cell.id}")
                while todo:
                    drill = todo.pop(0)
                    if not self._drill(session, scene, drill):
                        return

    def _work(self, cell: Cell) -> CellWork:
        ids = frozenset(p.id for p in self._prompts)
        choice = Choice(scenarios=(COLD,), prompts=ids, forms=FORMS)
        return cell_work(self._context.prepared.profile, self._context.prepared.prompts, cell, choice)

    def _recorder(self, work: CellWork, name: str) -> Recorder:
        one = self._context.prepared._replace(works=(work,))
        recorder = prepared_recorder(one, self._context.environment, self._context.folder / name, kind="drill")
        # Whatever cell is asked, its engines belong to the group of the pair.
        recorder.set_cell(work.cell.id, group=self._group.id)
        return recorder

    def _perform(
        self, session: EngineGroupSession, cell: Cell, name: str
    ) -> tuple[RunSummary, InfrastructureError | None]:
        work = self._work(cell)
        recorder = self._recorder(work, name)
        died: InfrastructureError | None = None
        with FolderLock(recorder.folder):
            try:
                record_cells(session, [work], recorder, self._context.reporter)
            except InfrastructureError as error:
                died = error
            history = recorder.finish()
        return judge_and_report(history), died

    def _control(self, session: EngineGroupSession, cell: Cell, name: str) -> None:
        """Run the same prompts and proxies without a fault. Raises InfrastructureError when engines fail."""
        begun = time.monotonic()
        session.refresh_counters()
        summary, died = self._perform(session, cell, name)
        if died is not None:
            raise died
        self._context.tried.control(name, summary, time.monotonic() - begun, self._context.reporter)

    def _struck(self, drill: ExchangeDrill) -> tuple[slice, Wanted]:
        """Return which prompts the fault strikes, and the matcher for their exchanges."""
        if drill.struck == "all":
            return slice(0, None), completions() if drill.path == COMPLETIONS else path(drill.path)
        at = 1 if drill.struck == "one" else len(self._prompts) - 1
        return slice(at, at + 1), completions(self._prompts[at].ids)

    def _drill(self, session: EngineGroupSession, scene: Scene, drill: ExchangeDrill) -> bool:
        """Run one drill; return False when the engines cannot be used any more.

        It is run again, once, if a hand-off that no fault struck reached D too late: the machine did that.
        """
        result, usable = self._try(session, scene, drill, drill.drill.id)
        if result is None and usable:
            self._context.reporter.line(f"{drill.drill.id}: a hand-off reached D too late by itself; once more")
            result, usable = self._try(session, scene, drill, f"{drill.drill.id}-again", last=True)
        if result is not None:
            self._context.add(result)
        return usable

    def _try(
        self, session: EngineGroupSession, scene: Scene, drill: ExchangeDrill, name: str, last: bool = False
    ) -> tuple[Result | None, bool]:
        """Return the result of a drill and whether the engines can still be used; no result if it has to be repeated.
        The ``last`` try always has one."""
        cell = next(c for c in self._group.cells if c.topology == drill.topology)
        struck, wanted = self._struck(drill)
        prompts = [p.id for p in self._prompts]
        begun = time.monotonic()
        alive = True
        trouble = "the fault was not injected"
        result: Result | None
        try:
            scene.begin()
            with scene.proxies[drill.proxy].armed(drill.make(scene), wanted, drill.fatal) as armed:
                try:
                    summary, died = self._perform(session, cell, name)
                finally:
                    trouble = armed.failed or scene.failed
            scene.settle()
            # Read again, because the fault may also have failed while it was being withdrawn.
            trouble = armed.failed or scene.failed
            alive = not isinstance(died, EngineDiedError)
            after = prompts[struck.stop :][:1] if drill.late and struck.stop else []
            seen = Seen(
                verdict=summary.verdict,
                reasons=reasons_of(summary.judgement, summary.history),
                # All must be recorded; if engines died, only those before the fault.
                planned=len(prompts) if died is None else struck.start,
                recorded=len(summary.history.observations),
                seconds=time.monotonic() - begun,
                struck=not trouble,
                trouble=trouble,
                strays=() if drill.fatal else strays(summary.judgement, prompts[struck], after),
            )
            late = [
                o for o in summary.history.observations if o.came_late(LEASE_S) and o.prompt_id not in prompts[struck]
            ]
            result = None if late and not last else judge_drill(drill.drill, seen, name)
        except Exception as error:
            # Drills are meant to reveal crashes of the harness, so a crash is a result.
            result = self._crashed(drill.drill, error, trouble)
        usable = alive and self._calm(session)
        if result is None and not usable:
            result = judge_drill(drill.drill, seen, name)
        return result, usable

    def _crashed(self, drill: Drill, error: Exception, trouble: str) -> Result:
        log = self._context.folder / drill.id / "crash.log"
        write_traceback(log)
        words = f"the harness itself failed: {type(error).__name__}: {error}"
        said = (" ".join(words.split())[:300],)
        seen = Seen(None, said, len(self._prompts), 0, 0.0, struck=not trouble, trouble=trouble)
        return judge_drill(drill, seen, drill.id)

    def _calm(self, session: EngineGroupSession) -> bool:
        """Wait until the engines have freed everything from the drill; return False when they do not in time."""
        deadline = time.monotonic() + _CALM_S
        while True:
            try:
                session.require_alive()
                session.reset_caches()
                self._count_out(session)
                return True
            except EngineDiedError:
                return False
            except HandoffError as error:
                if time.monotonic() > deadline:
                    self._context.reporter.line(f"restarting the engines: {error}")
                    return False

    def _count_out(self, session: EngineGroupSession) -> None:
        """Send each engine one request outside any drill, because vLLM counts a failed transfer with the next request.
        Raises HandoffError."""
        ids = list(range(1, self._context.prepared.profile.engine.block_size))
        sampling = Sampling(1, self._context.prepared.profile.workload.logprobs)
        for role in session.roles:
            client = session.client(role)
            client.complete(ids, sampling, new_id(), new_id(), await_counters=("finished_requests",))
        session.refresh_counters()
