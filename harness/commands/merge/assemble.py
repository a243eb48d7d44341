"""Assemble the recordings that count into one: cells, engines, observations, logs, and what is missing."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from harness import redact
from harness.commands.merge.expected_run import ExpectedRun
from harness.errors import StorageError
from harness.history.folder import History, write_run
from harness.history.index import RecordedCells, RecordedFile
from harness.history.layout import CELLS, ROUNDING, SCORES
from harness.history.parquet import write_parquet
from harness.history.plan import counts_of, plan_key
from harness.history.records import COLD, COUNTED, CellRecord, EngineRecord, PlannedRequest, RunRecord, numbered
from harness.profiles.cells import Cell, CellName
from harness.util.storage import writing
from harness.workload.rows import planned_rows

NO_PART = "no part ran it"
_NO_GROUP = "(no part)"


class _Assembled(NamedTuple):
    cells: dict[str, CellRecord]
    engines: tuple[EngineRecord, ...]
    observations: RecordedCells
    logs: tuple[tuple[Path, str], ...]
    """Log files and their names in the merged run."""


def assemble(histories: Sequence[History], chosen: Mapping[str, int], scores: RecordedCells) -> _Assembled:
    """Return the chosen recordings as one, with the scores of all parts.

    Engine groups whose names clash between parts are renamed.
    """
    cells: dict[str, CellRecord] = {}
    engines: list[EngineRecord] = []
    logs: list[tuple[Path, str]] = []
    taken: set[str] = set()
    for i, history in enumerate(histories):
        mine = [c for c in history.run.cells if chosen.get(c.cell) == i]
        names = {g: g if g not in taken else numbered(g, i + 1) for g in dict.fromkeys(c.group for c in mine)}
        taken.update(names.values())
        cells |= {c.cell: c.model_copy(update={"group": names[c.group]}) for c in mine}
        engines += [e.in_group(names[e.group]) for e in history.run.engines if e.group in names]
        logs += _logs(history.folder / "logs", names)
    return _Assembled(cells, tuple(engines), _files(histories, chosen, scores), tuple(logs))


def _files(histories: Sequence[History], chosen: Mapping[str, int], scores: RecordedCells) -> RecordedCells:
    """Return the answers of the chosen recordings and the scores, as the files that they are in."""
    files: dict[str, list[RecordedFile]] = {}
    for cell, part in chosen.items():
        recorded = histories[part].observations
        if not isinstance(recorded, RecordedCells):
            raise TypeError(f"expected part {histories[part].folder} to be read on demand, found it in memory")
        files[cell] = [file for file in recorded.files.get(cell, ()) if file.path.name not in (SCORES, ROUNDING)]
    for cell, found in scores.files.items():
        files[cell] = [*files.get(cell, ()), *found]
    return RecordedCells(files)


def _logs(folder: Path, names: Mapping[str, str]) -> Iterable[tuple[Path, str]]:
    """Yield the logs of the groups. Names come from existing files, so none leads out of the folder."""
    for path in sorted(folder.glob("*.log")):
        # A group's id may contain dots; the role and the suffix follow it.
        group, *rest = path.name.rsplit(".", 2)
        if group in names and path.is_file() and not path.is_symlink():
            yield path, ".".join([names[group], *rest])


def missing(cell: Cell, expected: ExpectedRun, like: Sequence[CellRecord]) -> CellRecord:
    """Return the record of a cell that no part ran, with its planned requests as far as they are known."""
    return as_planned(
        CellRecord(
            cell=cell.id,
            group=_NO_GROUP,
            block_size=expected.profile.part(cell.variant).engine.block_size,
            lookahead=cell.method.lookahead,
            draft_tokens=cell.method.draft_tokens,
            route=cell.route,
            planned=0,
            state="failed",
            reason=NO_PART,
        ),
        cell,
        expected,
        like,
    )


def as_planned(record: CellRecord, cell: Cell, expected: ExpectedRun, like: Sequence[CellRecord]) -> CellRecord:
    """Return the record with the requests that the merged run plans: those its part did not plan count as missing.

    Their number is known if the prompts are on this machine; otherwise it is taken from similar cells.
    """
    work = expected.works.get(cell.id)
    if work is None and record.reason != NO_PART and not record.planned and not record.scenarios:
        # It could not be sent anything, and gives the reason.
        return record
    cold, asked = (len(work.items), work.planned) if work is not None else _as_alike(record, cell, expected, like)
    had = {COLD: record.planned, **record.scenarios}
    unasked = [s for s, n in {COLD: cold, **asked}.items() if n and not had.get(s)]
    reason = f"no part planned its requests for {', '.join(unasked)}" if unasked else None
    return record.model_copy(
        update={
            "planned": max(record.planned, cold),
            "scenarios": {**record.scenarios, **{s: max(n, record.scenarios.get(s, 0)) for s, n in asked.items()}},
            "reason": record.reason or reason,
        }
    )


def with_whole_plan(
    record: CellRecord, expected: ExpectedRun, plans: dict[str, tuple[PlannedRequest, ...]]
) -> CellRecord:
    """Return the record with a plan that has every request of the merged run, as far as its prompts are known; the plan
    is added to ``plans``. That of an earlier version stays a number."""
    work = expected.works.get(record.cell)
    if work is None or record.plan == COUNTED:
        return record
    rows = plans.get(record.plan or "", ())
    places = {row.place for row in rows}
    most = expected.profile.part(work.cell.variant).workload.max_tokens
    rows = (*rows, *(row for row in planned_rows(work, most) if row.place not in places))
    key = plan_key(rows)
    plans[key] = rows
    counts = Counter(row.scenario for row in rows)
    planned = {scenario: max(n, counts[scenario]) for scenario, n in counts_of(record).items()}
    cold = planned.pop(COLD)
    return record.model_copy(update={"plan": key, "planned": cold, "scenarios": planned})


def _as_alike(
    record: CellRecord, cell: Cell, expected: ExpectedRun, like: Sequence[CellRecord]
) -> tuple[int, dict[str, int]]:
    """Return the missing cold requests, and those by scenario: as many as similar cells have, at least one."""
    alike = [c for c in like if c.route == cell.route and CellName.of(c.cell).topology == cell.topology]
    cold = max([1, *(c.planned for c in alike)]) if expected.choice.wants(COLD) and not record.planned else 0
    lacking = [s for s in expected.asks(cell) if s not in record.scenarios]
    return cold, {s: max([1, *(c.scenarios.get(s, 0) for c in alike)]) for s in lacking}


def save(folder: Path, run: RunRecord, whole: _Assembled) -> list[str]:
    """Write the merged run and return notices about it. Raises StorageError."""
    notices = []
    for cell, files in whole.observations.files.items():
        for file in files:
            _copy(file, folder / CELLS / cell / file.path.name)
    for source, name in whole.logs:
        target = folder / "logs" / name
        with writing(target):
            target.parent.mkdir(exist_ok=True)
            # If the harness of a part was killed, its logs are not redacted yet.
            redact.copy(source, target)
    if len(whole.observations):
        try:
            write_parquet(folder, whole.observations)
        except StorageError as error:
            # The run is complete without it: it only repeats the observations.
            notices.append(str(error))
    # Last, because a folder counts as a run only with this file.
    write_run(folder, run)
    return notices


def _copy(file: RecordedFile, target: Path) -> None:
    """Copy the complete lines of a file to the disk. Raises StorageError."""
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("xb") as stream:
            file.copy_to(stream)
            stream.flush()
            os.fsync(stream.fileno())
