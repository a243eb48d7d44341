"""Tries drills on real engines and writes what became of them."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import ValidationError

from harness import provenance
from harness.config import describe_validation_error
from harness.drills.catalogue import EXCHANGES
from harness.drills.folders import FolderDriller
from harness.drills.footprint import MARK, Footprint, Watch, new_mark, sweep
from harness.drills.model import Drill, DrillSet, joined
from harness.drills.moments import MomentDriller
from harness.drills.processes import PROCESSES
from harness.drills.shared import METHOD, SharedDriller, require_prompts
from harness.drills.solo import METHOD as PLAIN
from harness.drills.solo import SoloDriller
from harness.drills.tried import Tried
from harness.engine.environment import EngineEnvironment
from harness.errors import DataError
from harness.history import COLD
from harness.operations import Prepared, engines_for, new_folder, prepare
from harness.progress import Reporter
from harness.report.drills import write_drills
from harness.runner import point_latest
from harness.signals import deaf, heard_once

RESULTS = "drills.json"
_EXCHANGE_S = 6.0
_STARTS_S = 80.0
_END_S = 30.0


@contextlib.contextmanager
def _marking(tried: Tried) -> Iterator[str]:
    """Mark every process that is started meanwhile. What is still there at last is told, and ended."""
    mark = new_mark()
    footprint = Footprint(mark)
    os.environ[MARK] = mark
    with Watch(mark):
        try:
            yield mark
        finally:
            del os.environ[MARK]
            with deaf():
                told = {what for r in tried.results for what in r.left} | set(tried.left)
                tried.left += [what for what in footprint.left(_END_S) if what not in told]
                sweep(footprint)


def _commit() -> str:
    commit, dirty = provenance.git_state()
    return f"{commit or 'unknown'}{'+changes' if dirty else ''}"


def drill(
    source: str, drills: Sequence[Drill], out: Path, engine_python: str | None, seed: int
) -> tuple[DrillSet, Path]:
    """Try the drills; returns the results and their folder. What can be wrong in the request is checked first.
    ``seed`` is that of the random moments."""
    prepared = prepare(source, [f"{t}-{m}" for t in ("pd", "single") for m in (METHOD, PLAIN)], [COLD])
    if any(d.group not in ("harness", "folder") for d in drills):
        require_prompts(prepared)
    environment = engines_for(prepared.profile, prepared.plan, engine_python)
    folder = new_folder(out, prepared.profile, "drill")
    begun = time.monotonic()
    empty = DrillSet(
        run_id=folder.name,
        started=provenance.now(),
        profile=prepared.profile.name,
        commits=(_commit(),),
        versions=provenance.versions(environment),
        hardware=provenance.hardware(),
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

    # A set that is killed keeps what it has tried.
    tried = Tried(lambda: write_drills(known(interrupted=True), folder))
    interrupted = False
    with heard_once(), _marking(tried) as mark, Reporter(forecast_s(drills)) as reporter:
        reporter.line(f"{len(drills)} drills, about {forecast_s(drills) / 60:.0f} minutes")
        try:
            _on_engines(drills, prepared, environment, folder, reporter, mark, tried)
            _on_the_harness(drills, source, engine_python, folder, reporter, mark, tried, seed)
        except KeyboardInterrupt:
            interrupted = True
    result = known(interrupted)
    write_drills(result, folder)
    point_latest(folder, "latest-drill")
    return result, folder


def _on_engines(
    drills: Sequence[Drill],
    prepared: Prepared,
    environment: EngineEnvironment,
    folder: Path,
    reporter: Reporter,
    mark: str,
    tried: Tried,
) -> None:
    wanted = {d.id for d in drills}
    exchanges = [e for e in EXCHANGES if e.drill.id in wanted]
    if exchanges:
        shared = SharedDriller(prepared, environment, folder, reporter, mark, tried)
        shared.run(exchanges)
    processes = [p for p in PROCESSES if p.drill.id in wanted]
    if processes:
        solo = SoloDriller(prepared, environment, folder, reporter, mark, tried)
        solo.run(processes)


def _on_the_harness(
    drills: Sequence[Drill],
    source: str,
    engine_python: str | None,
    folder: Path,
    reporter: Reporter,
    mark: str,
    tried: Tried,
    seed: int,
) -> None:
    moments = [d for d in drills if d.group == "harness"]
    if moments:
        MomentDriller(source, engine_python, folder, reporter, mark, tried, seed).run(moments)
    folders = [d for d in drills if d.group == "folder"]
    if folders:
        FolderDriller(source, engine_python, folder, reporter, mark, tried).run(folders)


def forecast_s(drills: Sequence[Drill]) -> float:
    """Rough wall time in seconds."""
    shared = {e.drill.id for e in EXCHANGES}
    quick = sum(d.id in shared for d in drills)
    return _STARTS_S * (len(drills) - quick + 2) + _EXCHANGE_S * quick


def load_drills(path: Path) -> DrillSet:
    """Results of earlier drills. Raises DataError."""
    file = path / RESULTS if path.is_dir() else path
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{file}: expected the results of drills as JSON, but it cannot be read ({error})") from error
    if isinstance(raw, dict):
        raw.pop("exit_code", None)
    try:
        return DrillSet.model_validate(raw)
    except ValidationError as error:
        raise DataError(f"{file} is damaged:\n{describe_validation_error(error)}") from error


def load_joined(paths: Sequence[Path]) -> DrillSet:
    """Results of several sets as one. Raises DataError."""
    return joined([load_drills(p) for p in paths])
