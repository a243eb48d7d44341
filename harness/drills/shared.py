"""Runs the drills on exchanges: one pair behind proxies serves them all, one cell of three prompts for each."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from harness.config import Profile
from harness.drills.exchange import LEASE_S, REQUEST_S, ExchangeDrill
from harness.drills.footprint import Footprint
from harness.drills.model import Drill
from harness.drills.proxy import COMPLETIONS, Wanted, completions, path
from harness.drills.scene import Scene
from harness.drills.tried import Tried
from harness.drills.verdict import Seen, judge_drill, lost, reasons_of, strays
from harness.engine.client import Sampling
from harness.engine.environment import EngineEnvironment
from harness.engine.exchange import new_id
from harness.engine.place import default_places, roles_of
from harness.engine.topology import EngineGroupSession
from harness.errors import EngineDiedError, HandoffError, InfrastructureError, UsageError
from harness.files import write_traceback
from harness.history import COLD, Form
from harness.matrix import Cell, EngineGroup
from harness.operations import Prepared, judge_and_report, prepared_recorder
from harness.progress import Reporter
from harness.prompts import Prompt
from harness.recorder import Recorder
from harness.runner import run_cell
from harness.storage import FolderLock
from harness.summary import RunSummary
from harness.workload import CellWork, Choice, cell_work

METHOD = "eagle3"
FORMS: tuple[Form, ...] = ("ids",)
_PROMPTS = 3
_OUTPUT = 16
_CALM_S = 90.0
"""Time in which P must have given up all blocks: a hoard of 18 prompts takes five leases."""
_END_S = 30.0
_RESTARTS = 1
"""Further starts of engines that did not come up: P answered no /metrics for 15 s after one of them."""


def chosen_prompts(prepared: Prepared) -> list[Prompt]:
    """Three cold prompts of two to four blocks, with outputs long enough to be cut, changed and repeated."""
    size = prepared.profile.engine.block_size
    fitting = [
        p for p in prepared.prompts.cold if 2 * size - 2 <= p.tokens <= 4 * size and len(p.expected or ()) >= _OUTPUT
    ]
    step = max(1, len(fitting) // _PROMPTS)
    return fitting[::step][:_PROMPTS]


def require_prompts(prepared: Prepared) -> list[Prompt]:
    """The prompts of drills. Raises UsageError when there are not enough, before anything is started."""
    found = chosen_prompts(prepared)
    if len(found) < _PROMPTS:
        size = prepared.profile.engine.block_size
        raise UsageError(
            f"expected {_PROMPTS} cold prompts of {2 * size - 2} to {4 * size} tokens with a known output of at least "
            f"{_OUTPUT} tokens in profile {prepared.profile.name}, found {len(found)}; drills need a profile of probe "
            "models, as cpu"
        )
    return found


def drill_profile(profile: Profile) -> Profile:
    """The profile with a short lease and a short limit for requests, neither of which a baseline depends on."""
    return profile.model_copy(
        update={
            "engine": profile.engine.model_copy(update={"kv_lease_s": LEASE_S}),
            "timeouts": profile.timeouts.model_copy(update={"request": REQUEST_S}),
            "workload": profile.workload.model_copy(update={"rescore": False}),
            "scenarios": (),
        }
    )


class SharedDriller:
    """Drills on the exchanges with one pair."""

    def __init__(
        self,
        prepared: Prepared,
        environment: EngineEnvironment,
        folder: Path,
        reporter: Reporter,
        mark: str,
        tried: Tried,
    ) -> None:
        """Raises UsageError when there are not enough prompts."""
        self._tried = tried
        self._prepared = prepared._replace(profile=drill_profile(prepared.profile))
        self._environment = environment
        self._folder = folder
        self._reporter = reporter
        self._mark = mark
        method = next(m for m in prepared.profile.methods if m.kind == METHOD)
        self._group = EngineGroup("pd", method, (Cell("pd", method), Cell("single", method)))
        self._prompts = require_prompts(prepared)

    def run(self, drills: Sequence[ExchangeDrill]) -> None:
        """Engines that a drill ended are started again for those after it."""
        todo = list(drills)
        starts = failed = 0
        while todo:
            starts += 1
            before = len(todo)
            footprint = Footprint(self._mark)
            try:
                self._on_one_pair(todo, self._folder / f"engines-{starts}", starts)
            except InfrastructureError as error:
                self._reporter.line(f"engines: {error}")
                failed = failed + 1 if len(todo) == before else 0
                if failed > _RESTARTS:
                    self._lose(todo, f"the engines did not come up: {error}")
            except Exception as error:
                # What fails of a control would fail of the next one; other groups go on.
                self._lose(todo, f"a control failed: {type(error).__name__}: {error}")
            self._tried.left += footprint.left(_END_S)

    def _lose(self, todo: list[ExchangeDrill], why: str) -> None:
        for drill in todo:
            self._tried.add(lost(drill.drill, why), self._reporter)
        todo.clear()

    def _on_one_pair(self, todo: list[ExchangeDrill], folder: Path, start: int) -> None:
        with Scene(roles_of(self._group)) as scene:
            places = scene.places(default_places(roles_of(self._group), self._prepared.profile.engine))
            session = EngineGroupSession(
                self._group,
                self._prepared.profile,
                self._environment,
                folder / "logs",
                progress=self._reporter.line,
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
        return cell_work(self._prepared.profile, self._prepared.prompts, cell, choice)

    def _recorder(self, work: CellWork, name: str) -> Recorder:
        one = self._prepared._replace(works=(work,))
        recorder = prepared_recorder(one, self._environment, self._folder / name, kind="drill")
        # The engines' group is that of the pair, whatever cell is asked.
        recorder.set_cell(work.cell.id, group=self._group.id)
        return recorder

    def _perform(
        self, session: EngineGroupSession, cell: Cell, name: str
    ) -> tuple[RunSummary, InfrastructureError | None]:
        work = self._work(cell)
        recorder = self._recorder(work, name)
        recorder.engines(session.records())
        died: InfrastructureError | None = None
        with FolderLock(recorder.folder):
            try:
                run_cell(session, work, recorder, self._reporter)
            except InfrastructureError as error:
                died = error
                recorder.fail_pending([cell.id], "failed", str(error))
            history = recorder.finish()
        return judge_and_report(history), died

    def _control(self, session: EngineGroupSession, cell: Cell, name: str) -> None:
        """The same proxies and prompts without a fault. Raises HandoffError when an exchange broke."""
        begun = time.monotonic()
        session.refresh_counters()
        summary, died = self._perform(session, cell, name)
        if died is not None:
            raise died
        self._tried.control(name, summary, time.monotonic() - begun, self._reporter)

    def _struck(self, drill: ExchangeDrill) -> tuple[slice, Wanted]:
        """Which prompts are struck, and how their exchanges are known."""
        if drill.struck == "all":
            return slice(0, None), completions() if drill.path == COMPLETIONS else path(drill.path)
        at = 1 if drill.struck == "one" else len(self._prompts) - 1
        return slice(at, at + 1), completions(self._prompts[at].ids)

    def _drill(self, session: EngineGroupSession, scene: Scene, drill: ExchangeDrill) -> bool:
        """One drill; False when the engines cannot be used any more."""
        cell = next(c for c in self._group.cells if c.topology == drill.topology)
        struck, wanted = self._struck(drill)
        prompts = [p.id for p in self._prompts]
        begun = time.monotonic()
        alive = True
        trouble = "it was not made"
        try:
            scene.begin()
            with scene.proxies[drill.proxy].armed(drill.make(scene), wanted, drill.fatal) as armed:
                try:
                    summary, died = self._perform(session, cell, drill.drill.id)
                finally:
                    trouble = armed.failed or scene.failed
            scene.settle()
            # Again, because one that went wrong while it was called off is wrong, too.
            trouble = armed.failed or scene.failed
            alive = not isinstance(died, EngineDiedError)
            after = prompts[struck.stop :][:1] if drill.late and struck.stop else []
            seen = Seen(
                verdict=summary.verdict,
                reasons=reasons_of(summary.judgement, summary.history),
                # All must be there, unless engines died on the way: then those before the strike.
                planned=len(prompts) if died is None else struck.start,
                recorded=len(summary.history.observations),
                seconds=time.monotonic() - begun,
                struck=not trouble,
                trouble=trouble,
                strays=() if drill.fatal else strays(summary.judgement, prompts[struck], after),
            )
            self._tried.add(judge_drill(drill.drill, seen, drill.drill.id), self._reporter)
        except Exception as error:
            # A crash of the harness in a drill is what drills are for.
            self._crashed(drill.drill, error, trouble)
        return alive and self._calm(session)

    def _crashed(self, drill: Drill, error: Exception, trouble: str) -> None:
        log = self._folder / drill.id / "crash.log"
        write_traceback(log)
        words = f"the harness itself failed: {type(error).__name__}: {error}"
        said = (" ".join(words.split())[:300],)
        seen = Seen(None, said, len(self._prompts), 0, 0.0, struck=not trouble, trouble=trouble)
        self._tried.add(judge_drill(drill, seen, drill.id), self._reporter)

    def _calm(self, session: EngineGroupSession) -> bool:
        """Wait until the engines hold nothing of the drill any more; False when they do not let go."""
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
                    self._reporter.line(f"engines are started again: {error}")
                    return False

    def _count_out(self, session: EngineGroupSession) -> None:
        """One more request to each engine, which is no drill's: vLLM counts a failed transfer with the next one. Raises
        HandoffError."""
        ids = list(range(1, self._prepared.profile.engine.block_size))
        sampling = Sampling(1, self._prepared.profile.workload.logprobs)
        for role in session.roles:
            client = session.client(role)
            client.complete(ids, sampling, new_id(), new_id(), await_counters=("finished_requests",))
        session.refresh_counters()
