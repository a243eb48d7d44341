"""The plan of a run as evidence: every request that was to be sent, and whether each was answered exactly once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple

from harness.history.engine_interfaces import (
    BY_SOURCE,
    PER_REQUEST,
    PER_REQUEST_FLAG,
    RESET_PREFIX_CACHE,
    SERVER_INFO,
    STEP_TOKENS,
)
from harness.history.records import (
    COLD,
    COUNTED,
    CellRecord,
    EngineRecord,
    Observation,
    PlannedRequest,
    RunRecord,
    unnumbered,
)
from harness.profiles.cells import CellName
from harness.util.files import sha256_json

_AS_PLANNED = (
    "sequence",
    "route",
    "max_tokens",
    "temperature",
    "concurrent",
    "stage",
    "abandon",
    "feature",
    "api",
    "mistake",
)
"""Fields that an observation and its row of the plan have in common, beside those that identify the request."""
ROUTER = "router"
"""Role of routers, of which each cell may start one of its own."""
_IN_ROUNDS = ("route", "max_tokens", "temperature", "stage")
"""The same for a soak, which sends its prompts many at a time and again in each round."""


@lru_cache(maxsize=4096)
def prompt_sha256(ids: tuple[int, ...], source: str | None, known_answer: tuple[int, ...] | None) -> str:
    """Return the hash that stands for a prompt in a plan; all cells are sent the same prompts, so it is kept."""
    return sha256_json([list(ids), source, None if known_answer is None else list(known_answer)])


def plan_key(rows: Sequence[PlannedRequest]) -> str:
    """Return the key under which a record keeps these rows: a hash, so that a changed plan is noticed."""
    return sha256_json([row.model_dump(mode="json") for row in rows])[:16]


def rows_of(run: RunRecord, cell: CellRecord) -> tuple[PlannedRequest, ...] | None:
    """Return the planned requests of a cell in order; None if the record does not have them."""
    return run.plans.get(cell.plan) if cell.plan is not None else None


def counts_of(cell: CellRecord) -> dict[str, int]:
    """Return the number of planned requests by scenario, the cold ones first."""
    return {COLD: cell.planned, **cell.scenarios}


def unanswered(run: RunRecord, cell: CellRecord, observations: Iterable[Observation]) -> int:
    """Return how many planned requests of a cell have no answer on record, be it an error."""
    in_rounds = run.kind == "soak"
    answered: dict[str, set[tuple[str, ...]]] = {}
    for o in observations:
        answered.setdefault(o.scenario, set()).add(_place(o, in_rounds))
    rows = rows_of(run, cell)
    if rows is None:
        return sum(max(0, n - len(answered.get(scenario, ()))) for scenario, n in counts_of(cell).items())
    return sum(_place(row, in_rounds) not in answered.get(row.scenario, ()) for row in rows)


class Matched(NamedTuple):
    """What is wrong with the answers of a cell in a scenario, compared with its plan."""

    missing: tuple[PlannedRequest, ...]
    """Requests without an answer."""
    repeated: tuple[tuple[Observation, int], ...]
    """The last answer to each request that has several, with their number."""
    unplanned: tuple[Observation, ...]
    """Answers to requests that are not in the plan."""
    otherwise: tuple[tuple[Observation, str], ...]
    """Answers to requests that were sent otherwise than planned, with the differences as text."""


def matched(
    rows: Sequence[PlannedRequest], scenario: str, observations: Sequence[Observation], in_rounds: bool = False
) -> Matched:
    """Match the answers of a cell in one scenario to the plan of the cell. ``in_rounds``: it is a soak."""
    open_rows = {_place(row, in_rounds): row for row in rows if row.scenario == scenario}
    answers: dict[tuple[str, ...], list[Observation]] = {}
    for o in observations:
        answers.setdefault(_place(o, in_rounds), []).append(o)
    return Matched(
        missing=tuple(row for place, row in open_rows.items() if place not in answers),
        repeated=tuple((of[-1], len(of)) for of in answers.values() if len(of) > 1),
        unplanned=tuple(of[-1] for place, of in answers.items() if place not in open_rows),
        otherwise=tuple(
            (o, ", ".join(words))
            for place, of in answers.items()
            if place in open_rows
            for o in of
            if (words := list(_differences(open_rows[place], o, _IN_ROUNDS if in_rounds else _AS_PLANNED)))
        ),
    )


def _place(row: PlannedRequest | Observation, in_rounds: bool) -> tuple[str, ...]:
    """Return what identifies a request within its cell and scenario."""
    return (row.form, row.prompt_id) if in_rounds else (row.form, row.prompt_id, str(row.instance), row.part)


def _differences(row: PlannedRequest, o: Observation, fields: Sequence[str]) -> Iterator[str]:
    every = attrgetter(*fields)
    for name, planned, found in zip(fields, every(row), every(o), strict=True) if every(row) != every(o) else ():
        # One by one, where it is not shown that asking them together changes nothing.
        if planned != found and not (name == "concurrent" and row.scenario == COLD and found == 1):
            yield f"{name} {found} instead of {planned}"
    if prompt_sha256(o.sent_ids, o.source, o.known_answer) != row.prompt_sha256:
        yield "another prompt, source or known answer under this name"
    answered = tuple(leg.role for leg in o.legs)
    # A broken exchange has the answers that came before the error, one that was given up those before that.
    if answered != (row.legs[: len(answered)] if o.cut_short else row.legs):
        yield f"answers of {_roles(answered)} instead of {_roles(row.legs)}"


def contradictions(run: RunRecord) -> Iterator[str]:
    """Yield what in a record contradicts itself: such a record was damaged, whoever wrote it."""
    for name, n in Counter(c.cell for c in run.cells).items():
        if n > 1:
            yield f"cells: {name} stands there {n} times"
    for key, rows in run.plans.items():
        if plan_key(rows) != key:
            yield f"plans: expected the rows under {key} to have this hash, found {plan_key(rows)}"
        if len({row.place for row in rows}) < len(rows):
            yield f"plans: {key} has a request twice"
    for cell in run.cells:
        yield from _of_cell(run, cell)
    yield from _of_engines(run)
    yield from _of_lacking(run)
    for resumption in run.resumed:
        if resumption.set_aside and not resumption.files:
            yield f"resumed: expected the files of {resumption.set_aside} answers that were set aside, found none"


def _of_engines(run: RunRecord) -> Iterator[str]:
    """Yield what is wrong with the engines: of each group one in each role, each a process of its own."""
    # Engines of an interrupted part of the run keep its number.
    groups = {unnumbered(c.group) for c in run.cells}
    roles = Counter((e.group, e.role) for e in run.engines if e.role != ROUTER)
    for (group, role), n in roles.items():
        if n > 1:
            yield f"engines: expected one {role} engine of {group}, found {n}"
    for engine in run.engines:
        if unnumbered(engine.group) not in groups:
            yield f"engines: expected the groups of the cells, found {engine.group}"
    pids = Counter((e.group, e.node, e.pid) for e in run.engines if not e.attached)
    for (group, _, pid), n in pids.items():
        if n > 1:
            yield f"engines: expected each engine of {group} to be a process of its own, found {pid} {n} times"


_SHOWN_BY: dict[str, Callable[[EngineRecord], bool]] = {
    BY_SOURCE: lambda e: "prompt_tokens_local_compute" in (e.counters or ()),
    STEP_TOKENS: lambda e: "engine_steps" in (e.counters or ()),
    SERVER_INFO: lambda e: e.step_tokens is not None,
}
"""What of an engine's record shows that it has an interface."""


def _of_lacking(run: RunRecord) -> Iterator[str]:
    """Yield interfaces that the record says are lacking, and that all engines show: what they are judged by must not be
    talked away."""
    engines = [e for e in run.engines if e.role != ROUTER]
    shown = [name for name, shows in _SHOWN_BY.items() if engines and all(map(shows, engines))]
    if any(PER_REQUEST_FLAG in e.argv for e in engines):
        # Only engines that speculate are asked for them.
        shown.append(PER_REQUEST)
    if run.cells and all(c.emptied_s for c in run.cells):
        shown.append(RESET_PREFIX_CACHE)
    yield from (
        f"lacking: expected what engines lack, found {name}, which all have" for name in shown if name in run.lacking
    )


def _of_cell(run: RunRecord, cell: CellRecord) -> Iterator[str]:
    rows = rows_of(run, cell)
    if rows is None:
        if cell.plan not in (None, COUNTED):
            yield f"{cell.cell}: expected its plan {cell.plan} among the plans, found {', '.join(run.plans) or 'none'}"
    else:
        planned = Counter(row.scenario for row in rows)
        counts = counts_of(cell)
        if short := [s for s, n in planned.items() if counts.get(s, 0) < n]:
            yield (
                f"{cell.cell}: expected as many requests of {short[0]} as its plan has, {planned[short[0]]}, found "
                f"{counts.get(short[0], 0)}"
            )
    name = CellName.of(cell.cell)
    if cell.route != name.route:
        yield f"{cell.cell}: expected its route to be {name.route}, as it is called, found {cell.route}"
    drafts = run.identities.get(name.lineup, {}).get("draft_tokens", cell.draft_tokens)
    if drafts != cell.draft_tokens:
        yield f"{cell.cell}: expected draft_tokens as in its identity, {drafts}, found {cell.draft_tokens}"


def _roles(roles: Sequence[str]) -> str:
    return " and ".join(roles) or "no engine"
