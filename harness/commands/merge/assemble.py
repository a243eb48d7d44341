"""Assemble the recordings that count into one: cells, engines, and what is missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from harness.commands.merge.expected_run import ExpectedRun
from harness.history.folder import History
from harness.history.layout import witness_files
from harness.history.plan import counts_of, plan_key
from harness.history.records import COLD, COUNTED, CellRecord, EngineRecord, PlannedRequest, numbered
from harness.profiles.cells import Cell
from harness.workload.rows import planned_rows

NO_PART = "no part ran it"
_NO_GROUP = "(no part)"


class Assembled(NamedTuple):
    histories: tuple[History, ...]
    chosen: dict[str, int]
    """Index of the history whose recording of a cell counts."""
    cells: dict[str, CellRecord]
    engines: tuple[EngineRecord, ...]
    logs: tuple[tuple[Path, str], ...]
    """Log files and their names in the merged run."""
    notes: tuple[tuple[Path, str], ...]
    """What the engines' KV caches held, likewise."""

    @property
    def plans(self) -> dict[str, tuple[PlannedRequest, ...]]:
        return {key: rows for h in self.histories for key, rows in h.run.plans.items()}


def assemble(histories: Sequence[History], preferred: Mapping[str, int] | None = None) -> Assembled:
    """Return the recordings that count (``choose``) as one. Engine groups whose names clash are renamed."""
    chosen = choose(histories, preferred or {})
    cells: dict[str, CellRecord] = {}
    engines: list[EngineRecord] = []
    logs: list[tuple[Path, str]] = []
    notes: list[tuple[Path, str]] = []
    taken: set[str] = set()
    for i, history in enumerate(histories):
        mine = [c for c in history.run.cells if chosen[c.cell] == i]
        names = {g: g if g not in taken else numbered(g, i + 1) for g in dict.fromkeys(c.group for c in mine)}
        taken.update(names.values())
        cells |= {c.cell: c.model_copy(update={"group": names[c.group]}) for c in mine}
        engines += [e.in_group(names[e.group]) for e in history.run.engines if e.group in names]
        logs += _renamed(sorted((history.folder / "logs").glob("*.log")), names, 2)
        notes += _renamed(witness_files(history.folder), names, 3)
    return Assembled(tuple(histories), chosen, cells, tuple(engines), tuple(logs), tuple(notes))


def choose(histories: Sequence[History], preferred: Mapping[str, int]) -> dict[str, int]:
    """Return the index of the history whose recording counts, by cell.

    That is the preferred one, else the first that completed the cell, else the first that has it.
    """
    best: dict[str, tuple[bool, bool, int]] = {}
    for i, history in enumerate(histories):
        for c in history.run.cells:
            rank = (i != preferred.get(c.cell), c.state != "complete", i)
            best[c.cell] = min(best.get(c.cell, rank), rank)
    return {cell: rank[-1] for cell, rank in best.items()}


def _renamed(paths: Sequence[Path], names: Mapping[str, str], suffixes: int) -> Iterator[tuple[Path, str]]:
    """Yield the files of the groups, and what they are called in the merged run. Names come from existing files, so
    none leads out of the folder."""
    for path in paths:
        # A group's id may contain dots; the role and the suffixes follow it.
        group, *rest = path.name.rsplit(".", suffixes)
        if group in names and path.is_file() and not path.is_symlink():
            yield path, ".".join([names[group], *rest])


def planned(whole: Assembled, expected: ExpectedRun) -> tuple[list[CellRecord], dict[str, tuple[PlannedRequest, ...]]]:
    """Return the records of all cells, those that no part ran among them, and their plans.

    They plan every request of the merged run: what a part did not plan counts as missing.
    """
    plans = whole.plans
    cells = [_planned(whole.cells.get(c.id) or _missing(c, expected), c, expected, plans) for c in expected.cells]
    known = {c.cell for c in cells}
    cells += [record for cell, record in whole.cells.items() if cell not in known]
    return cells, plans


def _missing(cell: Cell, expected: ExpectedRun) -> CellRecord:
    return CellRecord(
        cell=cell.id,
        group=_NO_GROUP,
        block_size=expected.profile.part(cell.variant).engine.block_size,
        lookahead=cell.method.lookahead,
        draft_tokens=cell.method.draft_tokens,
        route=cell.route,
        planned=0,
        state="failed",
        reason=NO_PART,
    )


def _planned(
    record: CellRecord, cell: Cell, expected: ExpectedRun, plans: dict[str, tuple[PlannedRequest, ...]]
) -> CellRecord:
    """Return the record with every request that the merged run plans, and add its plan to ``plans``."""
    had, wanted, key = counts_of(record), expected.asks(cell), record.plan
    work = expected.works.get(cell.id)
    # The plan of an earlier version stays a number.
    if work is not None and key != COUNTED:
        rows = plans.get(key or "", ())
        places = {row.place for row in rows}
        most = expected.profile.part(cell.variant).workload.max_tokens
        rows = (*rows, *(row for row in planned_rows(work, most) if row.place not in places))
        key = plan_key(rows)
        plans[key] = rows
        wanted = Counter(row.scenario for row in rows)
    counts = {s: max(had.get(s, 0), wanted.get(s, 0)) for s in (*had, *wanted)}
    unasked = [s for s, n in wanted.items() if n and not had.get(s)]
    reason = f"no part planned its requests for {', '.join(unasked)}" if unasked else None
    return record.model_copy(
        update={"plan": key, "planned": counts.pop(COLD), "scenarios": counts, "reason": record.reason or reason}
    )
