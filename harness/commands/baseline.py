"""``harness baseline``: record, accept, compare and list baselines."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from harness.baselines.build import NewBaselines, Recorded, new_baselines
from harness.baselines.diff import diff
from harness.baselines.lookup import unused
from harness.baselines.model import Baseline, Header
from harness.baselines.store import load_baseline, stored
from harness.errors import DataError, UsageError
from harness.history.folder import History, load_history
from harness.history.identity import identity_of
from harness.judging.power import lookups_now
from harness.profiles.availability import reason_for
from harness.profiles.cells import CellName, all_cells
from harness.profiles.load import load_profile, read_profile, require_here, shipped_profile_names
from harness.profiles.methods import Method
from harness.scheduling.gpus import gpus
from harness.util.signals import ignored
from harness.util.text import listed
from harness.workload.prepare import Prepared, prepare

if TYPE_CHECKING:
    from harness.engines.attached import AttachedExecutor, Server
    from harness.engines.flags import EngineFlags
    from harness.util.progress import Reporter


def record(
    prepared: Prepared,
    out: Path,
    engine_python: str | None,
    reporter: Reporter,
    repeat: int,
    folder: Path,
    flags: EngineFlags,
    server: AttachedExecutor | None = None,
) -> NewBaselines:
    """Send every prompt to single engines, or to ``server``, which runs already, ``repeat`` times and write the answers
    of complete cells as baselines, after a signal before the engines are ended.

    The second repetition measures by how much equal runs differ. Raises UsageError, before anything is written, when
    an answer of a complete cell is missing or wrong, or a baseline that would be replaced has more prompts.
    """
    from harness.engines.environment import inspect_environment
    from harness.runner.options import RunOptions
    from harness.runner.repetitions import record_repetitions
    from harness.runner.run import new_folder, point_latest

    _require_no_loss(prepared, folder)
    environment = (
        server.environment(prepared.profile)
        if server is not None
        else inspect_environment(engine_python or sys.executable).model_copy(update={"flags": flags})
    )
    early: list[Recorded] = []

    def save(so_far: tuple[History, ...]) -> None:
        made = new_baselines(so_far[0], so_far[1] if repeat > 1 else None, prepared.sets, folder)
        early.extend(made.recorded)

    options = RunOptions(executor=server, before_ending=save)
    runs = new_folder(out, prepared.profile, "baseline")
    done = record_repetitions(prepared, environment, runs, repeat, reporter, rounding=True, options=options)
    # A second signal must not keep the complete cells of an interrupted recording from being written.
    with ignored() if done[0].run.interrupted else nullcontext():
        point_latest(runs / "repetition-01", "latest")
        made = new_baselines(done[0], done[1] if repeat > 1 else None, prepared.sets, folder)
    # What was saved before the engines were ended knows what it replaced.
    before = {r.method: r.change for r in early}
    return made._replace(
        recorded=tuple(r._replace(change=(*before.get(r.method, ()), *r.change)) for r in made.recorded)
    )


def cells_of(server: Server, source: str) -> list[str]:
    """Return the single cell of a profile that a server which runs already can answer, by what it tells of its method.
    Raises UsageError where it does not tell enough, or the profile has no such cell."""
    told = server.info.config.get("speculative_config", {})
    singles = [c for c in all_cells(load_profile(source)) if c.topology == "single" and not c.routed]
    drafts = (told or {}).get("num_speculative_tokens", 0)
    if "speculative_config" not in server.info.config:
        raise UsageError(f"--single {server.url}: the server does not tell its method; name its cell with --cell")
    found = [c.id for c in singles if c.method.draft_tokens == drafts and _may_be(c.method, (told or {}).get("method"))]
    if len(found) != 1:
        which = f"as {listed(found, 'or')}" if found else "as no single cell of the profile"
        raise UsageError(
            f"--single {server.url}: the server drafts {drafts} tokens a step, {which}; name its cell with --cell, or "
            "give another profile"
        )
    return found


def _may_be(method: Method, told: str | None) -> bool:
    """Return whether a method may be the one that vLLM calls so."""
    return told is None or method.vllm_method == told or (told == "mtp" and method.vllm_method.endswith("_mtp"))


def _require_no_loss(prepared: Prepared, folder: Path) -> None:
    """Raise UsageError when the folder has a baseline with prompts that would not be asked: another profile shares it,
    and sends more of the same set."""
    if folder.resolve() != prepared.profile.baselines.resolve():
        return
    for lineup, known in lookups_now(prepared, None).items():
        asked = {p.id for p in prepared.sets[CellName.of_lineup(lineup).variant].prompts}
        lost = [] if known.baseline is None else [r for r in known.baseline.rows if r.prompt_id not in asked]
        if lost:
            raise UsageError(
                f"{folder}: its baseline of {lineup} has {len(lost)} prompts that this profile does not send "
                "(workload.per_stratum) and that would be lost; record with the profile that sends them, or name "
                "another folder with --baselines DIR"
            )


def accept(run_dir: Path, again_dir: Path | None, source: str | None, folder: Path | None) -> NewBaselines:
    """Make the single cells of a recorded run the new baselines.

    Prompts that a matrix run does not send cold (those of scenarios and of the second stage) keep their old rows, and
    the result says so.
    """
    history = load_history(run_dir)
    again = load_history(again_dir) if again_dir is not None else None
    named = source or require_here(history.run.asked_for.source, "name a profile with --profile")
    prepared = prepare(named, ["single-*"])
    where = folder_for(prepared, folder, history.run.engine_flags)
    return new_baselines(history, again, prepared.sets, where, keep_unasked=True)


def folder_for(prepared: Prepared, given: Path | None, flags: Sequence[str]) -> Path:
    """Return the folder to write baselines to, the profile's if none is given.

    Raises UsageError when it would be the profile's and the engines had arguments or variables added: a baseline's
    identity has none of them, so that it would stand for engines without.
    """
    usual = prepared.profile.baselines
    if flags and (given is None or given.resolve() == usual.resolve()):
        raise UsageError(
            f"baselines of engines with {shlex.join(flags)} need a folder of their own, since {usual} has those of "
            "engines without: add --baselines DIR, and judge runs by it with `harness check --baselines DIR`"
        )
    return given or usual


class Change(NamedTuple):
    name: str
    lines: tuple[str, ...]


def compare(old: Path, new: Path) -> list[Change]:
    """Return the changes between two baselines (``.json`` files) or two folders of them. Raises UsageError for other
    paths, and for a folder without baselines."""
    for path in (old, new):
        if not path.exists():
            raise UsageError(f"there is no baseline, and no folder of them, at {path}; correct the path")
    if old.is_dir() != new.is_dir():
        raise UsageError("one is a file and the other a folder; give two baseline files, or two folders of them")
    if not old.is_dir():
        lines = diff(_load(old), _load(new))
        return [Change(new.name, tuple(lines))] if lines else []
    before, after = ({p.name: p for p in stored(folder)} for folder in (old, new))
    for folder, found in ((old, before), (new, after)):
        if not found:
            raise UsageError(f"there are no baselines in {folder}; correct the path")
    out = [Change(name, ("only in the old folder",)) for name in before if name not in after]
    out += [Change(name, ("only in the new folder",)) for name in after if name not in before]
    for name in sorted(set(before) & set(after)):
        lines = diff(_load(before[name]), _load(after[name]))
        out += [Change(name, tuple(lines))] if lines else []
    return out


def _load(path: Path) -> Baseline:
    # Either of the two files of a baseline may be named.
    if path.suffix not in (".json", ".csv"):
        raise UsageError(f"{path}: expected the .json file of a baseline, found one of another kind; correct the path")
    return load_baseline(path.with_suffix(".json"))


def overview(source: str, folder: Path | None) -> tuple[list[tuple[str, Header]], list[str]]:
    """Return the file name and header of each stored baseline, and a sentence for each that is damaged, unused or
    orphaned."""
    prepared = prepare(source, ["single-*"], fetch=False)
    where = folder or prepared.profile.baselines
    if folder is not None and not folder.is_dir():
        raise UsageError(f"--baselines {folder}: there is no such folder; correct the path")
    rows = []
    for path in stored(where):
        with suppress(DataError):
            rows.append((path.name, load_baseline(path).header))
    hardware = tuple(gpus())
    known = [
        identity_of(part, m, prepared.sets[part.variant].sha256, None, hardware)
        for part in prepared.parts
        for m in part.methods
        if reason_for(part, m.kind) is None
    ]
    foreign = [(name, of.identity.method) for name, of in rows if of.identity.method not in {i.method for i in known}]
    others = _shipped_methods(where) if foreign else set()
    needless = [
        f"baseline {name} is unused: no cell of profile {source} uses {method}"
        for name, method in foreign
        if method not in others
    ]
    return rows, [*unused(where, known), *needless]


def _shipped_methods(folder: Path) -> set[str]:
    """Return the methods of the shipped profiles whose baselines lie in a folder: several may share it."""
    profiles = (part for name in shipped_profile_names() for part in read_profile(name).written_parts)
    return {m.kind for part in profiles if part.baselines == folder for m in part.methods}
