"""The plain engine beside a finding that is tried again: where parameters say what an answer is, it alone knows."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

from harness.engines.environment import EngineEnvironment
from harness.engines.session import EngineGroupSession
from harness.history.folder import History
from harness.history.layout import WITNESS, witness_files
from harness.profiles.cells import all_cells, make_plan
from harness.runner.record_cells import record_cells
from harness.runner.recorder import Recorder
from harness.runner.run import prepared_recorder
from harness.util.progress import Reporter
from harness.workload.cells import CellWork
from harness.workload.prepare import Prepared


class PlainAnswers(NamedTuple):
    """What the plain engine answered to the same requests, once for all tries."""

    work: CellWork
    history: History

    def put_into(self, recorder: Recorder) -> None:
        """Record them as those of a try, whose recorder was made for ``work``, too."""
        cell = self.work.cell.id
        (record,) = self.history.run.cells
        recorder.engines(self.history.run.engines)
        for observation in self.history.observations:
            recorder.append(observation)
        kept = ("group", "state", "reason", "start_seconds", "request_seconds", "seconds", "emptied_s")
        recorder.set_cell(cell, **{name: getattr(record, name) for name in kept})
        for notes in witness_files(self.history.folder):
            folder = recorder.folder / WITNESS
            folder.mkdir(exist_ok=True)
            shutil.copyfile(notes, folder / notes.name)


def plain_work(prepared: Prepared) -> CellWork | None:
    """Return what the plain engine has to be asked beside the only cell of what was prepared; None if nothing."""
    (work,) = prepared.works
    wanted = {s.id for s in prepared.profile.scenarios if s.by_plain_alone and "single" in s.topologies}
    scripts = tuple(s for s in work.scripts if s.scenario in wanted)
    plain = next((c for c in all_cells(prepared.profile) if c.id == work.cell.name.reference), None)
    if not scripts or plain is None or plain.id == work.cell.id:
        return None
    return CellWork(plain, (), scripts)


def ask_plain(
    prepared: Prepared, environment: EngineEnvironment, folder: Path, reporter: Reporter
) -> PlainAnswers | None:
    """Ask the plain engine, which is started for that and ended again; return None where it is not needed. Raises
    InfrastructureError when it does not answer."""
    work = plain_work(prepared)
    if work is None:
        return None
    alone = prepared._replace(works=(work,), plan=make_plan(prepared.profile, [work.cell]), lacking={})
    (group,) = alone.plan.groups
    reporter.line(f"{work.cell.id}: asked first, since a parameter says what the answers are")
    recorder = prepared_recorder(alone, environment, folder, run_id=f"{folder.parent.name}-{folder.name}")
    with EngineGroupSession(group, prepared.profile, environment, folder / "logs", reporter.line) as session:
        record_cells(session, alone.works, recorder, reporter)
    return PlainAnswers(work, recorder.finish())
