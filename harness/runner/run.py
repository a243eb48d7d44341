"""Record a run: create its folder and recorder, and run the engine groups of its plan."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from harness.engines.command import build_command
from harness.engines.environment import EngineEnvironment, engines_for
from harness.engines.flags import NO_FLAGS, EngineFlags
from harness.errors import StorageError, UsageError
from harness.history.folder import History
from harness.history.records import Kind, RunRecord
from harness.profiles.model import Profile
from harness.runner.groups import Runner
from harness.runner.options import RunOptions
from harness.runner.recorder import Recorder, new_run_id
from harness.util.progress import Reporter
from harness.util.storage import writing
from harness.workload.prepare import Prepared


def point_to(folder: Path, reporter: Reporter) -> None:
    """Point ``latest`` to the run; a failure is only reported, because the run is complete without the link."""
    try:
        point_latest(folder)
    except StorageError as error:
        reporter.line(str(error))


def record_into(folder: Path, prepared: Prepared, reporter: Reporter, options: RunOptions) -> History:
    """Record the prepared cells into a folder; cells that cannot run are UNKNOWN, with the reason."""
    environment = options.environment or engines_for(
        prepared.profile, prepared.plan, options.engine_python, options.flags
    )
    recorder = prepared_recorder(prepared, environment, folder, options.mutants)
    for cell, reason in prepared.lacking.items():
        reporter.line(f"{cell}: UNKNOWN: {reason}")
    return Runner(prepared, environment, recorder, reporter, options).run()


def require_free(prepared: Prepared, flags: EngineFlags, every_role: bool = True) -> None:
    """Raise UsageError for a flag that the harness itself sets for an engine of the run, and, unless ``every_role`` is
    False, for one of a role that no engine of the run has."""
    if flags == NO_FLAGS:
        return
    if every_role:
        flags.require_engines({role for group in prepared.plan.groups for role in group.roles})
    environment = EngineEnvironment.unknown(prepared.profile.engine.device).model_copy(update={"flags": flags})
    for group in prepared.plan.groups:
        profile = prepared.profile.part(group.variant) if group.variant else prepared.profile
        for role in group.roles:
            build_command(profile, group.method_of(role), role, environment, 1, None if role == "single" else 2)


def new_folder(out: Path, profile: Profile, kind: str = "") -> Path:
    """Create the folder of a new run below ``out``. Raises UsageError when it cannot be created."""
    folder = out / new_run_id(profile, kind)
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise UsageError(
            f"--out {out}: expected a folder to write runs into, but {folder} cannot be created ({error.strerror})"
        ) from error
    return folder


@contextlib.contextmanager
def removed_if_empty(folder: Path) -> Iterator[None]:
    """Remove a new folder at the end if nothing was written into it, as when the engines cannot be had."""
    try:
        yield
    finally:
        # This fails where something is in it.
        with contextlib.suppress(OSError):
            folder.rmdir()


def prepared_recorder(
    prepared: Prepared,
    environment: EngineEnvironment,
    folder: Path,
    mutants: Sequence[str] = (),
    run_id: str | None = None,
    adopt: Callable[[RunRecord], RunRecord] = lambda fresh: fresh,
    kind: Kind = "run",
    rounding: bool | None = None,
) -> Recorder:
    """Return a recorder for all prepared cells, those that lack something marked as failed; ``run_id`` defaults to the
    folder's name. ``rounding`` says whether the plain engine shows how it rounds; by default, where the tier follows
    from that. See ``Recorder`` for ``adopt``."""
    measures = prepared.profile.judging.tier == "auto" if rounding is None else rounding
    recorder = Recorder(
        prepared.profile,
        prepared.source,
        prepared.works,
        {w.cell.id: w.cell.id for w in prepared.works} | {c.id: g.id for g in prepared.plan.groups for c in g.cells},
        prepared.sets,
        environment,
        folder,
        run_id or folder.name,
        mutants=mutants,
        # A soak re-scores nothing; if it were expected to, a soak of the plain single engine could never pass.
        rescore=prepared.rescores and kind != "soak",
        rounding=measures and prepared.has_plain and kind != "soak",
        adopt=adopt,
        kind=kind,
    )
    for cell, reason in prepared.lacking.items():
        recorder.fail_pending([cell], "failed", reason)
    return recorder


def point_latest(folder: Path, name: str = "latest") -> None:
    """Point the link ``latest`` beside the run folder to it, atomically. Raises StorageError."""
    link = folder.parent / name
    temporary = folder.parent / f".latest-{os.getpid()}"
    with writing(link):
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(folder.resolve().name)
        temporary.replace(link)
