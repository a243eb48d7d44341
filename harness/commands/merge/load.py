"""Find and read the parts of a run, and compare them with each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from harness.commands.merge.expected_run import Loaded, MergeOptions
from harness.commands.merge.signature import Signature, describe_differences, signature_of
from harness.commands.missing_evidence import unfinished
from harness.errors import HarnessError, NotARunError, UsageError
from harness.history.folder import History, load_history
from harness.history.layout import RUN
from harness.history.run_kind import require_plain
from harness.judging.references import load_stages


def load_parts(folders: Sequence[Path], wanted: MergeOptions) -> tuple[list[Loaded], list[str]]:
    """Return the parts in the order in which they were started, and a sentence for each that cannot be used."""
    parts: list[Loaded] = []
    problems: list[str] = []
    runs: dict[Path, None] = {}
    for folder in folders:
        try:
            runs |= dict.fromkeys(find_runs(folder))
        except HarnessError as error:
            problems.append(str(error))
    for run in runs:
        try:
            # There may be many parts, so neither they nor their later stages are kept in memory.
            history = load_history(run, in_memory=0)
            _require_usable(history, wanted)
            parts.append(Loaded(history, load_stages(history, in_memory=0)))
        except HarnessError as error:
            problems.append(str(error))
    return sorted(parts, key=lambda p: (p.run.started, p.run.run_id)), problems


def find_runs(folder: Path) -> list[Path]:
    """Return the run folders that a path means: itself, or those below it.

    Second stages belong to their runs, and links (``latest``) are only aliases; neither is returned. Raises
    NotARunError when there is no run.
    """
    found = list(_runs_below(folder))
    if not found:
        what = "a folder without one" if folder.is_dir() else "no such folder"
        raise NotARunError(f"{folder}: expected the folder of a recorded run, or one with runs below it, found {what}")
    return found


def _runs_below(folder: Path) -> Iterator[Path]:
    if (folder / RUN).is_file():
        yield folder
    elif folder.is_dir():
        for child in sorted(folder.iterdir()):
            if child.is_dir() and not child.is_symlink():
                yield from _runs_below(child)


def _require_usable(history: History, wanted: MergeOptions) -> None:
    require_plain(history)
    run = history.run
    why = unfinished(run)
    if why and not wanted.keep_going:
        raise UsageError(f"{history.folder}: the run {why}; run it again")
    if run.merged is not None:
        raise UsageError(f"{history.folder}: this is a merged run, not a part; give the parts that it was made of")
    armed = dict.fromkeys((*run.mutants, *(m for e in run.engines for m in e.mutants)))
    if armed and not wanted.armed:
        raise UsageError(
            f"{history.folder}: its engines had injected faults ({', '.join(armed)}); --armed accepts them"
        )


def matching_parts(parts: Sequence[Loaded]) -> tuple[list[Loaded], list[str], Signature | None]:
    """Return the parts of the same run as the first one, a sentence for each other one, and their signature."""
    common: Signature | None = None
    matching: list[Loaded] = []
    problems: list[str] = []
    for part in parts:
        found = signature_of(part.run)
        differences = describe_differences(common, found) if common is not None else ""
        if differences:
            problems.append(
                f"{part.history.folder} is no part of the same run as {matching[0].history.folder} ({differences}); "
                "record all parts with the same profile, models, vLLM, checkout of the harness and kind of machine"
            )
            continue
        matching.append(part)
        common = found if common is None else common.joined(found)
    return matching, problems, common
