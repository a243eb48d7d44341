"""Run the process drills: each is a separate run by the ordinary runner, with its engines behind proxies."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from faults.context import Context
from faults.leaks import Footprint, sweep
from faults.model import Result
from faults.process_drills import ProcessDrill, served
from faults.proxy import completions
from faults.request_drill import Topology
from faults.request_runner import FORMS, drill_profile, require_prompts
from faults.testbed import ProxiedExecutor, Scene
from faults.verdict import Seen, judge_drill, lost, reasons_of
from harness.history.records import COLD
from harness.profiles.cells import Cell, Role, make_plan
from harness.profiles.model import Profile
from harness.reports.judge_run import judge_and_report
from harness.reports.summary import RunSummary
from harness.runner.groups import Runner
from harness.runner.options import RunOptions
from harness.runner.run import prepared_recorder
from harness.util.storage import FolderLock
from harness.workload.cells import Choice, cell_work

METHOD = "none"
"""Process faults do not depend on the method, and plain engines start fastest."""
_END_S = 30.0
_ROLES: dict[Topology, tuple[Role, ...]] = {"pd": ("decode", "prefill"), "single": ("single",)}


class SoloDriller:
    """Runs drills that engines need not survive, each on engines of its own."""

    def __init__(self, context: Context) -> None:
        """Raises UsageError when there are not enough prompts."""
        self._context = context
        self._prompts = require_prompts(context.prepared)

    def run(self, drills: Sequence[ProcessDrill]) -> None:
        """Run the controls first, one for each topology used, then the drills."""
        topologies = dict.fromkeys(d.topology for d in drills)
        failed = {topology: self._control(topology) for topology in topologies}
        for drill in drills:
            if why := failed[drill.topology]:
                self._context.add(lost(drill.drill, f"its control failed: {why}"))
            else:
                self._context.attempt(drill.drill, partial(self._drill, drill))

    def _control(self, topology: Topology) -> str:
        """Run the same prompts through the same proxies without a fault; return the error, or an empty string."""
        name = f"control-process-{topology}"
        footprint = Footprint(self._context.mark)
        try:
            with Scene(_ROLES[topology]) as scene:
                summary, seconds = self._perform(scene, topology, drill_profile(self._context.prepared.profile), name)
            self._context.tried.control(name, summary, seconds, self._context.reporter)
        except Exception as error:
            sweep(footprint)
            self._context.reporter.line(f"control {name}: {type(error).__name__}: {error}")
            return f"{type(error).__name__}: {error}"
        return ""

    def _drill(self, drill: ProcessDrill, footprint: Footprint) -> Result:
        profile = drill_profile(self._context.prepared.profile)
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
                # The prompt before the struck one was answered and must be recorded.
                planned=0 if drill.proxy is None else 1,
                recorded=len(summary.history.observations),
                seconds=seconds,
                left=footprint.left(_END_S),
                struck=not trouble,
                trouble=trouble,
            )
        return judge_drill(drill.drill, seen, drill.drill.id)

    def _perform(self, scene: Scene, topology: Topology, profile: Profile, name: str) -> tuple[RunSummary, float]:
        """Run one cell with three prompts; return the summary and the duration in seconds."""
        begun = time.monotonic()
        method = next(m for m in profile.methods if m.kind == METHOD)
        cell = Cell(topology, method)
        ids = frozenset(p.id for p in self._prompts)
        choice = Choice(scenarios=(COLD,), prompts=ids, forms=FORMS)
        work = cell_work(profile, self._context.prepared.prompts, cell, choice)
        plan = make_plan(profile, [cell])
        prepared = self._context.prepared._replace(profile=profile, plan=plan, works=(work,), lacking={})
        recorder = prepared_recorder(prepared, self._context.environment, self._context.folder / name, kind="drill")
        with FolderLock(recorder.folder):
            options = RunOptions(executor=ProxiedExecutor(scene))
            history = Runner(prepared, self._context.environment, recorder, self._context.reporter, options).run()
        if history.run.interrupted:
            # The runner has ended the engines; end the remaining drills, too.
            raise KeyboardInterrupt
        return judge_and_report(history), time.monotonic() - begun
