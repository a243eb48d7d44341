"""Try drills on real engines and write the results."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import ValidationError

from faults.catalogue import EXCHANGES
from faults.context import Context
from faults.filesystem import FolderDriller
from faults.kill_timing import MomentDriller
from faults.leaks import MARK, Footprint, Watch, new_mark, sweep
from faults.model import Drill, DrillSet, joined
from faults.process_drills import PROCESSES
from faults.process_runner import METHOD as PLAIN
from faults.process_runner import SoloDriller
from faults.report import write_drills
from faults.request_runner import METHOD, SharedDriller, require_prompts
from faults.results import Tried
from harness.engines.environment import engines_for, versions
from harness.errors import DataError
from harness.history.records import COLD
from harness.runner.run import new_folder, point_latest
from harness.scheduling import hardware
from harness.util import machine
from harness.util.invalid_data import describe_validation_error
from harness.util.progress import Reporter
from harness.util.signals import ignored, raise_once
from harness.workload.prepare import prepare

RESULTS = "drills.json"
_EXCHANGE_S = 6.0
_STARTS_S = 80.0
_END_S = 30.0


@contextlib.contextmanager
def _marking(tried: Tried) -> Iterator[str]:
    """Mark every process that is started in the context; report and end those that are left at the end."""
    mark = new_mark()
    footprint = Footprint(mark)
    os.environ[MARK] = mark
    with Watch(mark):
        try:
            yield mark
        finally:
            del os.environ[MARK]
            with ignored():
                told = {what for r in tried.results for what in r.left} | set(tried.left)
                tried.left += [what for what in footprint.left(_END_S) if what not in told]
                sweep(footprint)


def _commit() -> str:
    commit, dirty = machine.git_state()
    return f"{commit or 'unknown'}{'+changes' if dirty else ''}"


def drill(
    source: str, drills: Sequence[Drill], out: Path, engine_python: str | None, seed: int
) -> tuple[DrillSet, Path]:
    """Try the drills, and return the results and their folder. The arguments are checked first.

    ``seed`` is for the random moments.
    """
    prepared = prepare(source, [f"{t}-{m}" for t in ("pd", "single") for m in (METHOD, PLAIN)], [COLD])
    if any(d.group not in ("harness", "folder") for d in drills):
        require_prompts(prepared)
    environment = engines_for(prepared.profile, prepared.plan, engine_python)
    folder = new_folder(out, prepared.profile, "drill")
    begun = time.monotonic()
    empty = DrillSet(
        run_id=folder.name,
        started=machine.now(),
        profile=prepared.profile.name,
        commits=(_commit(),),
        versions=versions(environment),
        hardware=hardware.hardware(),
        asked=tuple(d.id for d in drills),
        results=(),
        controls=(),
        seconds=0.0,
        interrupted=True,
    )

    def known(interrupted: bool) -> DrillSet:
        found = {"results": tuple(tried.results), "controls": tuple(tried.controls), "left": tuple(tried.left)}
        seconds = round(time.monotonic() - begun, 1)
        return empty.model_copy(update={**found, "seconds": seconds, "interrupted": interrupted})

    # Results are stored at once, so that a killed set keeps what it has tried.
    tried = Tried(lambda: write_drills(known(interrupted=True), folder))
    interrupted = False
    with raise_once(), _marking(tried) as mark, Reporter(forecast_s(drills)) as reporter:
        reporter.line(f"{len(drills)} fault tests, about {forecast_s(drills) / 60:.0f} minutes")
        try:
            _run(drills, Context(prepared, environment, engine_python, folder, reporter, mark, tried), seed)
        except KeyboardInterrupt:
            interrupted = True
    result = known(interrupted)
    write_drills(result, folder)
    point_latest(folder, "latest-drill")
    return result, folder


def _run(drills: Sequence[Drill], context: Context, seed: int) -> None:
    wanted = {d.id for d in drills}
    if exchanges := [e for e in EXCHANGES if e.drill.id in wanted]:
        SharedDriller(context).run(exchanges)
    if processes := [p for p in PROCESSES if p.drill.id in wanted]:
        SoloDriller(context).run(processes)
    if moments := [d for d in drills if d.group == "harness"]:
        MomentDriller(context, seed).run(moments)
    if folders := [d for d in drills if d.group == "folder"]:
        FolderDriller(context).run(folders)


def forecast_s(drills: Sequence[Drill]) -> float:
    """Estimate the wall time in seconds."""
    shared = {e.drill.id for e in EXCHANGES}
    quick = sum(d.id in shared for d in drills)
    return _STARTS_S * (len(drills) - quick + 2) + _EXCHANGE_S * quick


def load_drills(path: Path) -> DrillSet:
    """Load the results of earlier drills. Raises DataError."""
    file = path / RESULTS if path.is_dir() else path
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            f"{file}: expected the results of fault tests as JSON, but it cannot be read ({error})"
        ) from error
    if isinstance(raw, dict):
        raw.pop("exit_code", None)
    try:
        return DrillSet.model_validate(raw)
    except ValidationError as error:
        raise DataError(f"{file} is damaged:\n{describe_validation_error(error)}") from error


def load_joined(paths: Sequence[Path]) -> DrillSet:
    """Load several sets and join them. Raises DataError."""
    return joined([load_drills(p) for p in paths])
