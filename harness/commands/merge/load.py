"""Find and read the parts of a run, drop copies, and compare the parts with each other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from harness.commands.merge.expected_run import Loaded, MergeOptions
from harness.commands.merge.shards import (
    Signature,
    common_signature,
    describe_differences,
    find_runs,
    signature_of,
    unfinished,
)
from harness.errors import DataError, HarnessError, UsageError
from harness.history.folder import History, load_history
from harness.history.run_kind import require_plain
from harness.judging.references import load_stages


def load_parts(folders: Sequence[Path], wanted: MergeOptions) -> tuple[list[Loaded], list[str], list[str]]:
    """Return the parts by start time, each run once, a sentence for each that cannot be used, and one for each copy."""
    parts: dict[str, Loaded] = {}
    problems: list[str] = []
    copies: list[str] = []
    runs: list[Path] = []
    for folder in folders:
        try:
            runs += find_runs(folder)
        except HarnessError as error:
            problems.append(str(error))
    twins: dict[str, list[Path]] = {}
    for run in runs:
        try:
            # There may be many parts, so neither they nor their later stages are kept in memory.
            history = load_history(run, in_memory=0)
            _require_usable(history, wanted)
        except HarnessError as error:
            problems.append(str(error))
            continue
        part, why = _with_stages(history)
        known = parts.setdefault(history.run.run_id, part)
        if not _is_copy(part, known):
            twins.setdefault(history.run.run_id, [known.history.folder]).append(run)
        elif known is not part:
            copies.append(f"{run} is a copy of {known.history.folder}, and does not count again")
        elif why:
            problems.append(why)
    for name, places in twins.items():
        del parts[name]
        problems.append(
            f"{', '.join(map(str, places))}: expected one run named {name}, or copies of it, found runs that differ; "
            "give only the right one"
        )
    return sorted(parts.values(), key=lambda p: (p.run.started, p.run.run_id)), problems, copies


def _with_stages(history: History) -> tuple[Loaded, str]:
    """Return a run with its later stages, and why they cannot be read or an empty string."""
    try:
        return Loaded(history, load_stages(history, in_memory=0)), ""
    except HarnessError as error:
        return Loaded(history), f"a later stage of {history.run.run_id}: {error}"


def _is_copy(part: Loaded, of: Loaded) -> bool:
    """Return whether two folders hold the same recording with the same later stages."""
    ours, theirs = part.recordings, of.recordings
    return len(ours) == len(theirs) and all(map(_same_recording, ours, theirs))


def _same_recording(first: History | None, second: History | None) -> bool:
    if first is None or second is None:
        return first is second
    return first is second or (first.run == second.run and first.observations == second.observations)


def _require_usable(history: History, wanted: MergeOptions) -> None:
    require_plain(history)
    run = history.run
    why = unfinished(run)
    if why and not wanted.keep_going:
        raise UsageError(f"{history.folder}: expected a finished run, found one that {why}; run it again")
    if run.merged is not None:
        raise UsageError(f"{history.folder}: expected a recorded run, found one that was merged; give its parts")
    armed = dict.fromkeys((*run.mutants, *(m for e in run.engines for m in e.mutants)))
    if armed and not wanted.armed:
        raise UsageError(
            f"{history.folder}: expected unmodified engines, found injected faults: {', '.join(armed)}; --armed "
            "accepts them"
        )
    names = [c.cell for c in run.cells]
    if len(set(names)) != len(names):
        raise DataError(
            f"{history.folder}: expected each cell once in run.json, found one twice: the record is damaged"
        )


def matching_parts(parts: Sequence[Loaded]) -> tuple[list[Loaded], list[str], Signature | None]:
    """Return the parts of the same run, a sentence for each other one, and the signature of the matching parts.

    The signature of the majority decides; on a tie, the earliest.
    """
    if not parts:
        return [], [], None
    signatures = [signature_of(p.run) for p in parts]
    expected = common_signature(signatures)
    matching, problems = [], []
    for part, found in zip(parts, signatures, strict=True):
        differences = describe_differences(expected, found)
        if differences:
            problems.append(
                f"{part.history.folder}: expected a part of the same run as the others, found one of another "
                f"run ({differences}); record it with the same profile, models, vLLM and kind of machine"
            )
        else:
            matching.append(part)
    first = next((p.run.git_commit for p in matching if p.run.git_commit), None)
    strangers = [p for p in matching if p.run.git_commit not in (None, first)]
    problems += [
        f"{p.history.folder}: expected the harness's commit of the parts before it, {first}, found {p.run.git_commit}; "
        "record all parts from one checkout"
        for p in strangers
    ]
    matching = [p for p in matching if p not in strangers]
    # Again, without what the parts that were left out say.
    return matching, problems, common_signature([signature_of(p.run) for p in matching]) if matching else None
