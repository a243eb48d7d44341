"""The recordings that count as one: cells, engines, observations, logs, and what is missing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from harness import redact
from harness.errors import StorageError
from harness.history import (
    COLD,
    CellRecord,
    EngineRecord,
    History,
    HistoryWriter,
    RunRecord,
    write_parquet,
    write_run,
)
from harness.matrix import Cell, CellName
from harness.merge.night import Night
from harness.merge.scores import Scores
from harness.merge.together import Together
from harness.storage import writing

NO_PART = "no part ran it"
_NO_GROUP = "(no part)"


class _Assembled(NamedTuple):
    cells: dict[str, CellRecord]
    engines: tuple[EngineRecord, ...]
    observations: Together
    logs: tuple[tuple[Path, str], ...]
    """Log files and what they are called in the merged run."""


def assemble(histories: Sequence[History], chosen: Mapping[str, int], scores: Scores) -> _Assembled:
    """The chosen recordings as one, with the scores of all. Groups of engines that two parts call alike get names of
    their own."""
    cells: dict[str, CellRecord] = {}
    engines: list[EngineRecord] = []
    logs: list[tuple[Path, str]] = []
    taken: set[str] = set()
    for i, history in enumerate(histories):
        mine = [c for c in history.run.cells if chosen.get(c.cell) == i]
        names = {g: g if g not in taken else f"{g}~{i + 1}" for g in dict.fromkeys(c.group for c in mine)}
        taken.update(names.values())
        cells |= {c.cell: c.model_copy(update={"group": names[c.group]}) for c in mine}
        for engine in history.run.engines:
            if engine.group in names:
                group = names[engine.group]
                log = group + engine.log.removeprefix(engine.group)
                engines.append(engine.model_copy(update={"group": group, "log": log}))
        logs += _logs(history.folder / "logs", names)
    return _Assembled(cells, tuple(engines), Together(histories, chosen, scores), tuple(logs))


def _logs(folder: Path, names: Mapping[str, str]) -> Iterable[tuple[Path, str]]:
    """Logs of the groups; names come from files that are there, so none leads out of the folder."""
    for path in sorted(folder.glob("*.log")):
        # The id of a group may have dots itself; what follows is the role and the suffix.
        group, *rest = path.name.rsplit(".", 2)
        if group in names and path.is_file() and not path.is_symlink():
            yield path, ".".join([names[group], *rest])


def missing(cell: Cell, night: Night, like: Sequence[CellRecord]) -> CellRecord:
    """The record of a cell that no part ran, with what it was to be asked as far as that is known."""
    return as_planned(
        CellRecord(
            cell=cell.id,
            group=_NO_GROUP,
            block_size=night.profile.part(cell.variant).engine.block_size,
            lookahead=cell.method.lookahead,
            draft_tokens=cell.method.draft_tokens,
            route=cell.route,
            planned=0,
            state="failed",
            reason=NO_PART,
        ),
        cell,
        night,
        like,
    )


def as_planned(record: CellRecord, cell: Cell, night: Night, like: Sequence[CellRecord]) -> CellRecord:
    """A cell whose part was asked for less than the night: what it was not asked is missing, and not left out. How many
    requests that is, is known where the prompts are; elsewhere it is what other cells of its kind have."""
    work = night.works.get(cell.id)
    if work is None and record.reason != NO_PART and not record.planned and not record.scenarios:
        # It could not be asked anything, and says why.
        return record
    cold, asked = (len(work.items), work.planned) if work is not None else _as_alike(record, cell, night, like)
    had = {COLD: record.planned, **record.scenarios}
    unasked = [s for s, n in {COLD: cold, **asked}.items() if n and not had.get(s)]
    reason = f"no part was to ask it {', '.join(unasked)}" if unasked else None
    return record.model_copy(
        update={
            "planned": max(record.planned, cold),
            "scenarios": {**record.scenarios, **{s: max(n, record.scenarios.get(s, 0)) for s, n in asked.items()}},
            "reason": record.reason or reason,
        }
    )


def _as_alike(record: CellRecord, cell: Cell, night: Night, like: Sequence[CellRecord]) -> tuple[int, dict[str, int]]:
    """Cold requests and those by scenario that a cell lacks, by what other cells of its kind have; one where none has
    any."""
    alike = [c for c in like if c.route == cell.route and CellName.of(c.cell).topology == cell.topology]
    cold = max([1, *(c.planned for c in alike)]) if night.choice.wants(COLD) and not record.planned else 0
    lacking = [s for s in night.asks(cell) if s not in record.scenarios]
    return cold, {s: max([1, *(c.scenarios.get(s, 0) for c in alike)]) for s in lacking}


def save(folder: Path, run: RunRecord, whole: _Assembled) -> list[str]:
    """Write the merged run; returns what has to be said of it. Raises StorageError."""
    notices = []
    with HistoryWriter(folder) as writer:
        for observation in whole.observations:
            writer.append(observation)
    for source, name in whole.logs:
        target = folder / "logs" / name
        with writing(target):
            target.parent.mkdir(exist_ok=True)
            # A part whose harness was killed has its logs as the engines wrote them.
            redact.copy(source, target)
    if whole.observations:
        try:
            write_parquet(folder, whole.observations)
        except StorageError as error:
            # It is a copy: the run is whole without it.
            notices.append(str(error))
    # Last: a folder without it is no run.
    write_run(folder, run)
    return notices
