"""Split a run into steps: engine groups packed by expected time, each with the plain engine that its cells need."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from harness.errors import UsageError
from harness.profiles.cells import Cell, EngineGroup, make_plan
from harness.profiles.model import Profile, read_profile, references_of
from harness.workload.cells import CellWork, expected_s
from harness.workload.prepare import prepare

SETUP_MINUTES = 20
"""Minutes for the checkout, installing an environment with vLLM, and the artifacts."""
SLOWER = 2
"""Factor by which a machine may be slower than the one on which the expected times were measured."""


class Step(NamedTuple):
    """The cells that one machine records."""

    name: str
    cells: tuple[Cell, ...]
    expected_s: float
    timeout_minutes: int
    """Limit of one try."""

    @property
    def title(self) -> str:
        """The name with the methods."""
        lineups = dict.fromkeys(c.name.lineup for c in self.cells if c.id != c.name.reference)
        return f"{self.name}: {', '.join(lineups) or ', '.join(c.id for c in self.cells)}"


class SplitRun(NamedTuple):
    """A run of a profile, split into steps."""

    profile: Profile
    source: str
    patterns: tuple[str, ...]
    steps: tuple[Step, ...]
    fetches: bool
    """Whether models from the hub, or prompts built from a data set, must be present before a part runs."""

    @property
    def device(self) -> str:
        """The device of the engines, which is also the name of the lock file that they need."""
        return self.profile.engine.device


def split_run(source: str, patterns: Sequence[str] = (), minutes: int | None = None) -> SplitRun:
    """Pack the cells of a profile into steps of about ``minutes``; None takes the longest indivisible unit.

    The models need not be on this machine. Raises ProfileError, DataError or UsageError.
    """
    for pattern in patterns:
        if pattern.split() != [pattern]:
            raise UsageError(
                f"--cell: expected a pattern without blanks, which separate the patterns of a step, found {pattern!r}; "
                "put ? in their place"
            )
    prepared = prepare(source, patterns, planned=True)
    profile = prepared.profile
    works = {w.cell.id: w for w in prepared.works}
    units = [_with_reference(u, works) for u in _units(profile, works)]
    limit_s = 60 * minutes if minutes is not None else max(_seconds(profile, u, works) for u in units)
    packed: list[list[Cell]] = []
    for unit in units:
        for step in packed:
            together = _in_order({*(c.id for c in step), *(c.id for c in unit)}, works)
            if _seconds(profile, together, works) <= limit_s:
                step[:] = together
                break
        else:
            packed.append(list(unit))
    steps = tuple(_step(profile, f"part-{n}", cells, works) for n, cells in enumerate(packed, 1))
    fetches = any(references_of(p) or p.workload.recipe is not None for p in read_profile(source).written_parts)
    return SplitRun(profile, source, tuple(patterns), steps, fetches)


def _step(profile: Profile, name: str, cells: Sequence[Cell], works: dict[str, CellWork]) -> Step:
    seconds = _seconds(profile, cells, works)
    stages = profile.judging.stages if profile.judging.tier == "normal" else 1
    return Step(name, tuple(cells), seconds, math.ceil(SLOWER * stages * seconds / 60) + SETUP_MINUTES)


def _units(profile: Profile, works: dict[str, CellWork]) -> list[list[Cell]]:
    """Return cells in units that must not be split: a pair, and the single engine that it is compared with."""
    units: list[tuple[set[str], list[EngineGroup]]] = []
    for group in make_plan(profile, [w.cell for w in works.values()]).groups:
        singles = {c.name.single for c in group.cells}
        touching = [u for u in units if u[0] & singles]
        units = [u for u in units if u not in touching]
        units.append((set().union(singles, *(u[0] for u in touching)), [*(g for u in touching for g in u[1]), group]))
    return [_in_order({c.id for g in groups for c in g.cells}, works) for _, groups in units]


def _with_reference(cells: Sequence[Cell], works: dict[str, CellWork]) -> list[Cell]:
    """Return the cells with the plain single engine that their tokens are compared with and that re-scores them."""
    return _in_order({*(c.id for c in cells), *(c.name.reference for c in cells)} & set(works), works)


def _in_order(ids: set[str], works: dict[str, CellWork]) -> list[Cell]:
    return [w.cell for cell, w in works.items() if cell in ids]


def _seconds(profile: Profile, cells: Sequence[Cell], works: dict[str, CellWork]) -> float:
    return expected_s(make_plan(profile, cells), [works[c.id] for c in cells])
