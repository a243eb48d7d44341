"""What a recorded run lacks of a profile's plan: a run that planned less than it should passes what it has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from harness.errors import HarnessError
from harness.history.plan import rows_of
from harness.history.records import COLD, COUNTED, CellRecord, PlannedRequest, RunRecord
from harness.profiles.axes import MODEL_KEYS
from harness.profiles.cells import CellName, all_cells
from harness.util.differences import differing
from harness.workload.prepare import Prepared, prepare
from harness.workload.rows import planned_rows

_SETTINGS = ("engine", "judging", "scenarios", "axes", "witness", "methods")
"""Keys of a profile that change what a request or a verdict means; the plan covers what is sent."""


def lacking(run: RunRecord, source: str) -> list[str]:
    """Return a sentence for each setting and cell in which the plan of a run is not that of the profile ``source``.
    Raises the errors of ``prepare``."""
    return list(_lacking(run, prepare(source, (), fetch=False), source))


def left_out(run: RunRecord) -> str:
    """Return which cells and scenarios of its own profile a run did not ask; empty if it asked all, or if
    this version cannot read the profile."""
    try:
        profile = run.asked_for.as_profile()
        cells = all_cells(profile)
    except (ValidationError, HarnessError):
        return ""
    asked = {c.cell for c in run.cells}
    without = [c.id for c in cells if c.id not in asked]
    planned = {COLD for c in run.cells if c.planned} | {s for c in run.cells for s in c.scenarios}
    wanted = [COLD, *dict.fromkeys(s.id for p in profile.parts for s in p.scenarios)]
    states = [s for s in wanted if s not in planned]
    pairs = [any(CellName.of(c).topology == "pd" for c in some) for some in (asked, without)]
    kind = "no pair, " if pairs == [False, True] else ""
    parts = [
        f"{kind}{len(without)} of {len(cells)} cells ({_some(without)})" if without else "",
        f"{len(states)} of {len(wanted)} scenarios ({_some(states)})" if states else "",
    ]
    found = " and ".join(filter(None, parts))
    return f"Not run of profile {profile.name}: {found}." if found else ""


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (" …" if len(names) > 4 else "")


def _lacking(run: RunRecord, prepared: Prepared, source: str) -> Iterator[str]:
    recorded = {c.cell: c for c in run.cells}
    ours = prepared.profile.model_dump(mode="json")
    for key in _SETTINGS:
        yield from differing(_without_models(ours[key]), _without_models(run.asked_for.setting(key)), key)
    if prepared.rescores and not run.rescore:
        yield f"this run does not re-score outputs, as profile {source} does"
    for work in prepared.works:
        cell = recorded.get(work.cell.id)
        rows = planned_rows(work, prepared.profile.part(CellName.of(work.cell.id).variant).workload.max_tokens)
        if cell is None:
            yield f"{work.cell.id}: the run has no such cell; profile {source} plans {len(rows)} requests for it"
        elif cell.draft_tokens != work.cell.method.draft_tokens:
            yield f"{work.cell.id}: expected {work.cell.method.draft_tokens} drafts a step, found {cell.draft_tokens}"
        elif problem := _short(run, cell, rows):
            yield f"{work.cell.id}: expected the plan of profile {source}, found {problem}"


def _without_models(value: Any) -> Any:
    """Return the methods of a profile without the folders of their models, which other machines have elsewhere."""
    if not isinstance(value, list) or not all(isinstance(v, Mapping) for v in value):
        return value
    return [{k: v for k, v in of.items() if k not in MODEL_KEYS} for of in value]


def _short(run: RunRecord, cell: CellRecord, rows: tuple[PlannedRequest, ...]) -> str | None:
    """Return what is missing or different in the plan of a cell, or None."""
    planned = rows_of(run, cell)
    if planned is None:
        earlier = "only the number of its requests, as earlier versions recorded it"
        return earlier if cell.plan == COUNTED else "none"
    found = {row.place: row for row in planned}
    missing = [row for row in rows if row.place not in found]
    if missing:
        return f"{len(missing)} of {len(rows)} requests not planned, {' '.join(missing[0].place)} among them"
    other = [row for row in rows if found[row.place] != row]
    return f"{len(other)} requests planned otherwise, {' '.join(other[0].place)} among them" if other else None
