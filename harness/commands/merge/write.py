"""Write the merged run: its record, its observations and logs, its later stages, and notices about its parts."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count, zip_longest
from pathlib import Path

from harness import redact
from harness.commands.merge.assemble import NO_PART, Assembled, assemble, planned
from harness.commands.merge.expected_run import ExpectedRun, Loaded
from harness.commands.missing_evidence import rescored, unfinished
from harness.errors import StorageError
from harness.history.folder import History, HistoryWriter, read_cells, write_run
from harness.history.index import RecordedCells
from harness.history.layout import CELLS, SCORES, SECOND, WITNESS, round_folder
from harness.history.migrations import SCHEMA
from harness.history.parquet import write_parquet
from harness.history.records import RESCORE, CellRecord, Merged, Part, PlannedRequest, RunRecord
from harness.profiles.cells import CellName, all_cells
from harness.util.storage import writing
from harness.version import __version__


def merged_record(parts: Sequence[Loaded], whole: Assembled, expected: ExpectedRun, name: str) -> RunRecord:
    """Return the record of the merged run, without notices."""
    cells, plans = planned(whole, expected)
    run = _record([p.run for p in parts], expected, name, cells, whole, plans)
    unscored = [c for c in cells if c.reason == NO_PART and c.cell == CellName.of(c.cell).reference]
    rescore = run.rescore or (expected.profile.workload.rescore and bool(unscored))
    return run.model_copy(update={"rescore": rescore, "interrupted": _interrupted(parts)})


def write_merged(
    out: Path, parts: Sequence[Loaded], whole: Assembled, run: RunRecord, expected: ExpectedRun, notices: Sequence[str]
) -> list[str]:
    """Write the merged run and its later stages, and return notices about what could not be. Raises StorageError."""
    merged = Merged(
        parts=tuple(_part(p, i, whole.chosen) for i, p in enumerate(parts)),
        notices=(*notices, *_notices(parts, whole, run)),
        unsettled=any(p.run.reasked_after_findings for p in parts),
    )
    said = _save(out, run.model_copy(update={"merged": merged}), whole)
    said += _save_stage(out / SECOND, [p.stages.second for p in parts], expected, whole.chosen)
    for number, round_ in enumerate(zip_longest(*(p.stages.again for p in parts)), 1):
        said += _save_stage(out / round_folder(number), round_, expected, whole.chosen)
    return said


def _save_stage(
    folder: Path, of_parts: Sequence[History | None], expected: ExpectedRun, chosen: Mapping[str, int]
) -> list[str]:
    """Merge one stage of the parts, taking each cell from the part whose first stage counts if that has it."""
    having = {i: h for i, h in enumerate(of_parts) if h is not None}
    if not having:
        return []
    place = {number: at for at, number in enumerate(having)}
    whole = assemble(list(having.values()), {cell: place[i] for cell, i in chosen.items() if i in place})
    order = {c.id: n for n, c in enumerate(all_cells(expected.profile))}
    cells = sorted(whole.cells.values(), key=lambda c: order.get(c.cell, len(order)))
    run = _record([h.run for h in having.values()], expected, folder.name, cells, whole, whole.plans)
    merged = Merged(parts=tuple(_part(Loaded(h), i, whole.chosen) for i, h in enumerate(having.values())))
    return _save(folder, run.model_copy(update={"merged": merged}), whole)


def _record(
    runs: Sequence[RunRecord],
    expected: ExpectedRun,
    run_id: str,
    cells: Sequence[CellRecord],
    whole: Assembled,
    plans: Mapping[str, tuple[PlannedRequest, ...]],
) -> RunRecord:
    first = runs[0]
    return RunRecord(
        schema_version=SCHEMA,
        run_id=run_id,
        harness_version=__version__,
        started=min(r.started for r in runs),
        finished=max((r.finished for r in runs if r.finished is not None), default=None),
        command=redact.words(sys.argv),
        git_commit=next((r.git_commit for r in runs if r.git_commit), None),
        git_dirty=next((r.git_dirty for r in runs if r.git_dirty), first.git_dirty),
        profile={**expected.profile.model_dump(mode="json"), "source": expected.source},
        prompts_sha256=expected.prompts_sha256 or first.prompts_sha256,
        hardware=first.hardware,
        versions=first.versions,
        identities=expected.identities,
        engines=whole.engines,
        cells=tuple(cells),
        plans={c.plan: plans[c.plan] for c in cells if c.plan is not None and c.plan in plans},
        seconds={
            key: round(sum(r.seconds.get(key, 0.0) for r in runs), 3)
            for key in dict.fromkeys(k for r in runs for k in r.seconds)
        },
        mutants=first.mutants,
        engine_flags=tuple(dict.fromkeys(flag for r in runs for flag in r.engine_flags)),
        rescore=any(r.rescore for r in runs),
        rounding=any(r.rounding for r in runs),
        lacking={k: v for r in runs for k, v in r.lacking.items()},
    )


def _part(part: Loaded, number: int, chosen: Mapping[str, int]) -> Part:
    run = part.run
    return Part(
        run_id=run.run_id,
        started=run.started,
        finished=run.finished,
        command=redact.words(run.command),
        git_commit=run.git_commit,
        git_dirty=run.git_dirty,
        hardware=run.hardware,
        seconds=run.seconds,
        cells={c.cell: c.state for c in run.cells},
        counted=tuple(c.cell for c in run.cells if chosen[c.cell] == number),
        second_stage=part.stages.second is not None,
    )


def _interrupted(parts: Sequence[Loaded]) -> bool:
    """Return whether a part did not finish and no finished one completed some cell of it."""
    done = {c.cell for p in parts if not unfinished(p.run) for c in p.run.cells if c.state == "complete"}
    return any(c.cell not in done for p in parts if unfinished(p.run) for c in p.run.cells)


def _notices(parts: Sequence[Loaded], whole: Assembled, run: RunRecord) -> Iterator[str]:
    if lost := [c.cell for c in run.cells if c.reason == NO_PART]:
        yield f"no part ran {', '.join(lost)}"
    for part in parts:
        yield from (f"part {part.run.run_id} was {r.sentence}" for r in part.run.resumed)
        torn = "lost its last observation, which is truncated" if part.history.torn_line else ""
        if why := unfinished(part.run) or torn:
            counted = [c for c, n in whole.chosen.items() if parts[n] is part]
            yield f"part {part.run.run_id} {why}; judged from it: {', '.join(counted) or 'nothing'}"
    if twice := [c for c in whole.chosen if sum(p.history.cell(c) is not None for p in parts) > 1]:
        yield f"recorded by several parts, of which the first that completed the cell counts: {', '.join(twice)}"
    kinds = dict.fromkeys(str(p.run.hardware.get("processor")) for p in parts)
    if len(kinds) > 1:
        yield f"the parts ran on different processors: {', '.join(kinds)}"
    if unknown := [p.run.run_id for p in parts if p.run.git_commit is None]:
        yield f"recorded with an unknown commit of the harness: {', '.join(unknown)}"
    if changed := [p.run.run_id for p in parts if p.run.git_commit is not None and p.run.git_dirty]:
        yield f"recorded with uncommitted changes of the harness: {', '.join(changed)}"


def _save(folder: Path, run: RunRecord, whole: Assembled) -> list[str]:
    """Write one stage of the merged run and return a notice if its columnar copy is missing. Raises StorageError."""
    for cell, part in whole.chosen.items():
        _copy(whole.histories[part], cell, folder / CELLS / cell)
    write_scores(folder, whole.histories)
    # If the harness of a part was killed, its logs are not redacted yet.
    _copy_all(whole.logs, folder / "logs", redact.copy)
    _copy_all(whole.notes, folder / WITNESS, shutil.copyfile)
    notices = []
    recorded = read_cells(folder, (c.cell for c in run.cells))
    if len(recorded):
        try:
            write_parquet(folder, recorded)
        except StorageError as error:
            # The run is complete without it: it only repeats the observations.
            notices.append(str(error))
    # Last, because a folder counts as a run only with this file.
    write_run(folder, run)
    return notices


def _copy_all(files: Iterable[tuple[Path, str]], folder: Path, copy: Callable[[Path, Path], object]) -> None:
    """Copy files into a folder under their new names. Raises StorageError."""
    for source, name in files:
        target = folder / name
        with writing(target):
            folder.mkdir(exist_ok=True)
            copy(source, target)


def _copy(history: History, cell: str, folder: Path) -> None:
    """Copy the complete lines of a cell's answers to the disk. Raises StorageError."""
    recorded = history.observations
    if not isinstance(recorded, RecordedCells):
        raise TypeError(f"expected part {history.folder} to be read on demand, found it in memory")
    for file in recorded.files.get(cell, ()):
        if file.path.name != SCORES:
            target = folder / file.path.name
            with writing(target):
                folder.mkdir(parents=True, exist_ok=True)
                with target.open("xb") as stream:
                    file.copy_to(stream)
                    stream.flush()
                    os.fsync(stream.fileno())


def write_scores(folder: Path, histories: Sequence[History]) -> None:
    """Write the scores of all parts, of each output the first that has figures. Raises StorageError."""
    known: dict[tuple[str, str], bool] = {}
    number = count()
    with HistoryWriter(folder) as writer:
        for history in histories:
            for o in history.of_scenario(RESCORE):
                found = known.get((o.cell, o.key))
                # A request that failed stays on record until one is answered, which then counts.
                if o.scores and (found is None or (rescored(o) and not found)):
                    known[o.cell, o.key] = rescored(o)
                    writer.append(o.model_copy(update={"sequence": next(number)}))
