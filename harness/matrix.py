"""From a profile to cells, and from cells to the engines that have to be started."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import NamedTuple

from harness.config import Method, Profile, TopologyName
from harness.errors import UsageError

# Seconds, measured on two cores; estimates for `plan` and the progress line only.
PAIR_START_S = 45.0
SINGLE_START_S = 30.0
REQUEST_S = {"single": 0.45, "pd": 0.65}


class Cell(NamedTuple):
    """One point of the matrix."""

    topology: TopologyName
    method: Method

    @property
    def id(self) -> str:
        return f"{self.topology}-{self.method.kind}"


class EngineGroup(NamedTuple):
    """Engines that are started together and the cells that run on them, one after the other.

    ``topology`` is ``pd`` when a pair is started; a ``single`` cell of such a group is sent to the decode engine
    without hand-off parameters.
    """

    topology: TopologyName
    method: Method
    cells: tuple[Cell, ...]
    prefill_method: Method | None = None
    """What P speculates with, when that is not what D does."""

    @property
    def id(self) -> str:
        return f"{self.topology}-{self.method.kind}"

    def method_of(self, role: str) -> Method:
        return self.prefill_method if role == "prefill" and self.prefill_method is not None else self.method

    @property
    def engines(self) -> int:
        return 2 if self.topology == "pd" else 1


class Plan(NamedTuple):
    cells: tuple[Cell, ...]
    groups: tuple[EngineGroup, ...]

    @property
    def engines(self) -> int:
        return sum(g.engines for g in self.groups)


def start_expected_s(group: EngineGroup) -> float:
    """Rough time in seconds until a group's engines answer."""
    return PAIR_START_S if group.topology == "pd" else SINGLE_START_S


def all_cells(profile: Profile) -> list[Cell]:
    """Cells in running order: by method, the pair before the single engine that shares it."""
    order = sorted(profile.topologies, key=lambda t: t != "pd")
    return [Cell(t, m) for m in profile.methods for t in order]


def select_cells(profile: Profile, patterns: Sequence[str]) -> list[Cell]:
    """Cells whose id matches any of the shell patterns. Raises UsageError when a pattern matches nothing."""
    cells = all_cells(profile)
    if not patterns:
        return cells
    known = [c.id for c in cells]
    for pattern in patterns:
        if not fnmatch.filter(known, pattern):
            raise UsageError(
                f"--cell {pattern!r}: expected a pattern that matches a cell of profile {profile.name} "
                f"({', '.join(known)}), found no match"
            )
    return [c for c in cells if any(fnmatch.fnmatchcase(c.id, p) for p in patterns)]


def make_plan(profile: Profile, cells: Sequence[Cell]) -> Plan:
    """Group cells by the engines that they share; the plain ones last, because they re-score what the others gave."""
    groups: list[EngineGroup] = []
    for method in sorted(profile.methods, key=lambda m: m.kind == "none"):
        mine = [c for c in cells if c.method.kind == method.kind]
        pair = [c for c in mine if c.topology == "pd"]
        single = [c for c in mine if c.topology == "single"]
        if pair and single and profile.share_engines:
            groups.append(EngineGroup("pd", method, (*pair, *single)))
            continue
        if pair:
            groups.append(EngineGroup("pd", method, tuple(pair)))
        if single:
            groups.append(EngineGroup("single", method, tuple(single)))
    return Plan(tuple(cells), tuple(groups))
