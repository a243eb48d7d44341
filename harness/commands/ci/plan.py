"""Split a run into steps: engine groups packed by the time that they take on the GPUs of a step, each with the plain
engine that its cells need."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from harness.commands.plan import GPU_GIB, assumed_gpus
from harness.engines.inventory import jobs_of, too_few_to_part
from harness.errors import UsageError
from harness.profiles.availability import references_of
from harness.profiles.cells import Cell, EngineGroup, all_cells, make_plan
from harness.profiles.load import read_profile
from harness.profiles.model import Profile
from harness.scheduling.model import Job
from harness.scheduling.packing import impossible
from harness.scheduling.planning import least_s, simulate
from harness.workload.cells import CellWork, expected_s
from harness.workload.prepare import Prepared, prepare

SETUP_MINUTES = 20
"""Minutes for the checkout, installing an environment with vLLM, and the artifacts."""
SLOWER = 2
"""Factor by which a machine may be slower than the one on which the expected times were measured."""
_EVEN_S = 1e-3
"""Two sums of the same seconds differ by less."""
_MACHINES = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of GPUs that machines have."""


class MachineStep(NamedTuple):
    """The cells that one machine records."""

    name: str
    cells: tuple[Cell, ...]
    expected_s: float
    timeout_minutes: int
    gpus: int
    """GPUs of its machine; 0 for CPU engines."""

    @property
    def title(self) -> str:
        """The name with the methods."""
        lineups = dict.fromkeys(c.name.lineup for c in self.cells if c.id != c.name.reference)
        return f"{self.name}: {', '.join(lineups) or ', '.join(c.id for c in self.cells)}"


class SplitRun(NamedTuple):
    profile: Profile
    source: str
    patterns: tuple[str, ...]
    steps: tuple[MachineStep, ...]
    fetches: bool
    """Whether models from the hub, or prompts built from a data set, must be present before a part runs."""
    record: bool
    """Whether baselines are recorded, instead of a run that is compared with them."""

    @property
    def device(self) -> str:
        """The device of the engines, which is also the name of the lock file that they need."""
        return self.profile.engine.device


def split_run(
    source: str, patterns: Sequence[str] = (), minutes: int | None = None, gpus: int | None = None, record: bool = False
) -> SplitRun:
    """Pack the cells of a profile, or with ``record`` its single engines, into steps of about ``minutes``; None takes
    the longest indivisible unit.

    A step has ``gpus`` GPUs, or as few as its engines need; cells that need unlike numbers are in unlike steps then.
    The models need not be on this machine. Raises ProfileError, DataError or UsageError.
    """
    for pattern in patterns:
        if pattern.split() != [pattern]:
            raise UsageError(
                f"--cell {pattern!r}: a pattern must have no blanks, since they separate the patterns of a step; put "
                "? in their place"
            )
    chosen = tuple(patterns) or (("single-*",) if record else ())
    prepared = prepare(source, chosen, planned=True, record=record)
    if record and (plain := _plain_of(prepared)):
        chosen = (*chosen, *plain)
        prepared = prepare(source, chosen, planned=True, record=record)
    profile = prepared.profile
    works = {w.cell.id: w for w in prepared.works}
    machine = _Machine(profile, works, gpus, record)
    units = [(cells, machine.gpus(cells)) for u in _units(profile, works) if (cells := _with_reference(u, works))]
    limit_s = 60 * minutes if minutes is not None else max(machine.seconds(*u) for u in units)
    packed: list[tuple[list[Cell], int]] = []
    for unit, count in units:
        for step, has in packed:
            together = _in_order({*(c.id for c in step), *(c.id for c in unit)}, works)
            if has == count and machine.fits(together, count, limit_s):
                step[:] = together
                break
        else:
            packed.append((list(unit), count))
    steps = tuple(machine.step(f"part-{n}", *step) for n, step in enumerate(packed, 1))
    fetches = any(references_of(p) or p.workload.recipe is not None for p in read_profile(source).written_parts)
    return SplitRun(profile, source, chosen, steps, fetches, record)


class _Machine(NamedTuple):
    profile: Profile
    works: dict[str, CellWork]
    given: int | None
    record: bool

    def gpus(self, cells: Sequence[Cell]) -> int:
        """Return how many GPUs cells need. Raises UsageError when the given ones are too few."""
        if self.profile.engine.device != "gpu":
            return 0
        plan = make_plan(self.profile, cells)
        for count in _MACHINES if self.given is None else (self.given,):
            inventory = assumed_gpus(count)
            reasons = impossible(self._jobs(cells, count), inventory.devices)
            if not reasons and (self.given is not None or not too_few_to_part(plan, self.profile, inventory)):
                return count
        raise UsageError(
            f"--gpus: some cells do not fit on {self.given or _MACHINES[-1]} GPUs of {GPU_GIB:g} GiB "
            f"({'; '.join(reasons.values()) or 'P and D cannot be apart'}); give more, or leave cells out"
        )

    def fits(self, cells: Sequence[Cell], gpus: int, limit_s: float) -> bool:
        """Return whether the cells take no longer. Many take too long in whatever order."""
        jobs = self._jobs(cells, gpus) if gpus else ()
        least = least_s(jobs, assumed_gpus(gpus).devices) if gpus else 0.0
        return self._times * least <= limit_s + _EVEN_S and self._seconds(cells, gpus, jobs) <= limit_s

    def seconds(self, cells: Sequence[Cell], gpus: int) -> float:
        """Return the expected seconds; groups of engines run at the same time where there are GPUs for them."""
        return self._seconds(cells, gpus, self._jobs(cells, gpus) if gpus else ())

    def _seconds(self, cells: Sequence[Cell], gpus: int, jobs: Sequence[Job]) -> float:
        if gpus:
            return self._times * simulate(jobs, assumed_gpus(gpus).devices).makespan_s
        return self._times * expected_s(make_plan(self.profile, cells), [self.works[c.id] for c in cells])

    @property
    def _times(self) -> int:
        """How often everything is asked: for baselines twice."""
        return 1 + self.record

    def step(self, name: str, cells: Sequence[Cell], gpus: int) -> MachineStep:
        seconds = self.seconds(cells, gpus)
        judging = self.profile.judging
        stages = judging.stages if judging.tier == "normal" and not self.record else 1
        return MachineStep(name, tuple(cells), seconds, math.ceil(SLOWER * stages * seconds / 60) + SETUP_MINUTES, gpus)

    def _jobs(self, cells: Sequence[Cell], gpus: int) -> tuple[Job, ...]:
        works = [self.works[c.id] for c in cells]
        plan, rescores = make_plan(self.profile, cells), self.profile.workload.rescore
        return jobs_of(plan, works, self.profile, assumed_gpus(gpus), rescores)


def _plain_of(prepared: Prepared) -> list[str]:
    """Return the plain single engines that verify the chosen ones' tokens and are not among them."""
    wanted = {w.cell.name.reference for w in prepared.works} & {c.id for c in all_cells(prepared.profile)}
    return sorted(wanted - {w.cell.id for w in prepared.works})


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
