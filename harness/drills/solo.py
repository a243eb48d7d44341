"""Runs the drills on processes: each in a run of its own, by the ordinary runner, behind proxies."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from harness.config import Profile
from harness.drills.exchange import Topology
from harness.drills.footprint import Footprint, sweep
from harness.drills.model import Result
from harness.drills.processes import ProcessDrill, served
from harness.drills.proxy import completions
from harness.drills.scene import ProxiedExecutor, Scene
from harness.drills.shared import FORMS, drill_profile, require_prompts
from harness.drills.tried import Tried
from harness.drills.verdict import Seen, judge_drill, lost, reasons_of
from harness.engine.command import Role
from harness.engine.environment import EngineEnvironment
from harness.history import COLD
from harness.matrix import Cell, make_plan
from harness.operations import Prepared, judge_and_report, prepared_recorder
from harness.progress import Reporter
from harness.runner import Runner
from harness.storage import FolderLock
from harness.summary import RunSummary
from harness.workload import Choice, cell_work

METHOD = "none"
"""What dies does not depend on the method, and plain engines start fastest."""
_END_S = 30.0
_ROLES: dict[Topology, tuple[Role, ...]] = {"pd": ("decode", "prefill"), "single": ("single",)}


class SoloDriller:
    """Drills that engines need not survive."""

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
        self._prepared = prepared
        self._environment = environment
        self._folder = folder
        self._reporter = reporter
        self._mark = mark
        self._prompts = require_prompts(prepared)

    def run(self, drills: Sequence[ProcessDrill]) -> None:
        """The controls first, one for each topology that is drilled."""
        topologies = dict.fromkeys(d.topology for d in drills)
        failed = {topology: self._control(topology) for topology in topologies}
        for drill in drills:
            footprint = Footprint(self._mark)
            if why := failed[drill.topology]:
                self._tried.add(lost(drill.drill, f"its control failed: {why}"), self._reporter)
                continue
            try:
                result = self._drill(drill, footprint)
            except Exception as error:
                # A set goes on; what is not known is said.
                result = lost(drill.drill, f"{type(error).__name__}: {error}", footprint.left(0), drill.drill.id)
            sweep(footprint)
            self._tried.add(result, self._reporter)

    def _control(self, topology: Topology) -> str:
        """The same proxies and prompts without a fault; returns what it failed of, if it did."""
        name = f"control-process-{topology}"
        footprint = Footprint(self._mark)
        try:
            with Scene(_ROLES[topology]) as scene:
                summary, seconds = self._perform(scene, topology, drill_profile(self._prepared.profile), name)
            self._tried.control(name, summary, seconds, self._reporter)
        except Exception as error:
            sweep(footprint)
            self._reporter.line(f"control {name}: {type(error).__name__}: {error}")
            return f"{type(error).__name__}: {error}"
        return ""

    def _drill(self, drill: ProcessDrill, footprint: Footprint) -> Result:
        profile = drill_profile(self._prepared.profile)
        profile = profile.model_copy(update={"engine": profile.engine.model_copy(update=dict(drill.engine))})
        since = time.monotonic()
        trouble = ""
        with Scene(_ROLES[drill.topology]) as scene:
            if drill.proxy is None or drill.make is None:
                summary, _ = self._perform(scene, drill.topology, profile, drill.drill.id)
            else:
                prompt = self._prompts[1]
                fault = drill.make(scene)
                with scene.proxies[drill.proxy].armed(fault, completions(prompt.ids), fatal=True) as armed:
                    summary, _ = self._perform(scene, drill.topology, profile, drill.drill.id)
                scene.settle()
                struck = [o for o in summary.history.observations if o.prompt_id == prompt.id]
                trouble = armed.failed or scene.failed or served(drill, struck)
                since = armed.struck_at or since
            seconds = time.monotonic() - since
            seen = Seen(
                verdict=summary.verdict,
                reasons=reasons_of(summary.judgement, summary.history),
                # The prompt before the struck one was answered and must be there.
                planned=0 if drill.proxy is None else 1,
                recorded=len(summary.history.observations),
                seconds=seconds,
                left=footprint.left(_END_S),
                struck=not trouble,
                trouble=trouble,
            )
        return judge_drill(drill.drill, seen, drill.drill.id)

    def _perform(self, scene: Scene, topology: Topology, profile: Profile, name: str) -> tuple[RunSummary, float]:
        """A whole run of one cell of three prompts; returns its summary and the seconds that it took."""
        begun = time.monotonic()
        method = next(m for m in profile.methods if m.kind == METHOD)
        cell = Cell(topology, method)
        ids = frozenset(p.id for p in self._prompts)
        work = cell_work(profile, self._prepared.prompts, cell, Choice(scenarios=(COLD,), prompts=ids, forms=FORMS))
        plan = make_plan(profile, [cell])
        prepared = self._prepared._replace(profile=profile, plan=plan, works=(work,), lacking={})
        recorder = prepared_recorder(prepared, self._environment, self._folder / name, kind="drill")
        with FolderLock(recorder.folder):
            history = Runner(
                profile, plan, [work], self._environment, recorder, self._reporter, ProxiedExecutor(scene)
            ).run()
        if history.run.interrupted:
            # The runner has ended the engines; the set ends, too.
            raise KeyboardInterrupt
        return judge_and_report(history), time.monotonic() - begun
