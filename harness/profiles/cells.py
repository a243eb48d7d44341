"""The cells of a profile, and the engines that they need."""

from __future__ import annotations

import fnmatch
import shlex
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

from harness.errors import UsageError
from harness.profiles.methods import Method
from harness.profiles.model import ROUTES, Expected, Profile, Route, TopologyName
from harness.util.choices import matching, no_such

Role = Literal["single", "prefill", "decode", "second-prefill"]
"""The role of an engine in its group."""
SECOND_P: Role = "second-prefill"
"""Another P beside a pair, which is started for a scenario alone."""
_ROUTER_MARK = "-router"
_VARIANT_MARK = "+"


class CellName(NamedTuple):
    """The parts of a cell's id: ``pd-eagle3``, ``pd-eagle3-router`` for the same engines behind a router, and
    ``pd-eagle3+qwen3-8b.b16`` for a variant of a profile with axes."""

    topology: str
    method: str
    route: Route = "client"
    variant: str = ""

    @classmethod
    @lru_cache(maxsize=8192)
    def of(cls, cell_id: str) -> CellName:
        """Parse the id of a cell or of a group of engines."""
        cell, _, variant = cell_id.partition(_VARIANT_MARK)
        topology, _, method = cell.partition("-")
        routed = method.endswith(_ROUTER_MARK)
        return cls(topology, method.removesuffix(_ROUTER_MARK), "router" if routed else "client", variant)

    @classmethod
    def of_lineup(cls, lineup: str) -> CellName:
        """Return the single engine that runs a lineup."""
        return cls.of(f"single-{lineup}")

    @property
    def id(self) -> str:
        return _marked(
            f"{self.topology}-{self.method}" + (_ROUTER_MARK if self.route == "router" else ""), self.variant
        )

    def beside(self, topology: str, method: str | None = None) -> CellName:
        """Return the cell of a topology in the same variant, without a router; ``method`` defaults to this one's."""
        return CellName(topology, method or self.method, "client", self.variant)

    @property
    def single(self) -> str:
        """Id of the single engine of the same method, without a router: what P/D is compared with."""
        return self.beside("single").id

    @property
    def reference(self) -> str:
        """Id of the plain single engine, whose tokens are correct by definition."""
        return self.beside("single", "none").id

    @property
    def lineup(self) -> str:
        """The method in its variant, whatever the topology: what a baseline describes."""
        return _marked(self.method, self.variant)

    @property
    def plain(self) -> str:
        """The lineup without speculation."""
        return _marked("none", self.variant)


def _marked(name: str, variant: str) -> str:
    return f"{name}{_VARIANT_MARK}{variant}" if variant else name


class Cell(NamedTuple):
    """One point of the matrix."""

    topology: TopologyName
    method: Method
    route: Route = "client"
    """Who performs the hand-off: the harness, or a router that gets a single request."""
    variant: str = ""
    """Its part of a profile with axes."""

    @property
    def name(self) -> CellName:
        return CellName(self.topology, self.method.kind, self.route, self.variant)

    @property
    def id(self) -> str:
        return self.name.id

    @property
    def routed(self) -> bool:
        return self.route == "router"


class EngineGroup(NamedTuple):
    """Engines that start together, and the cells that run on them one after the other.

    ``topology`` is ``pd`` for a pair of engines; requests of a ``single`` cell of such a group go to the decode engine
    without hand-off parameters.
    """

    topology: TopologyName
    method: Method
    cells: tuple[Cell, ...]
    prefill_method: Method | None = None
    """What P is started with instead of D's method, for the mutant M10."""
    variant: str = ""
    expected: Expected = Expected()

    @property
    def name(self) -> CellName:
        return CellName(self.topology, self.method.kind, variant=self.variant)

    @property
    def id(self) -> str:
        return self.name.id

    @property
    def cell_ids(self) -> tuple[str, ...]:
        return tuple(c.id for c in self.cells)

    @property
    def rescores(self) -> bool:
        """Whether the plain single engine is among its cells: it re-scores the outputs of the variant's other cells."""
        return any(c.id == self.name.reference for c in self.cells)

    def method_of(self, role: str) -> Method:
        return (self.prefill_method or self.method.on_prefill) if role == "prefill" else self.method

    @property
    def roles(self) -> tuple[Role, ...]:
        """Roles of the engines, in the order in which they are started."""
        return ("decode", "prefill") if self.topology == "pd" else ("single",)

    @property
    def engines(self) -> int:
        return len(self.roles)


class Plan(NamedTuple):
    cells: tuple[Cell, ...]
    groups: tuple[EngineGroup, ...]

    @property
    def engines(self) -> int:
        return sum(g.engines for g in self.groups)


def start_expected_s(group: EngineGroup) -> float:
    """Return the rough time in seconds until a group's engines answer."""
    return group.expected.start_s(group.topology)


def all_cells(profile: Profile) -> list[Cell]:
    """Return the cells in running order: by variant and method, P/D before single, client before router."""
    cells = [c for part in profile.parts for c in _cells_of(part)]
    return [c for c in cells if not any(matches(c.id, e.cells) for e in profile.exclude)]


def matches(cell_id: str, pattern: str) -> bool:
    """Return whether a shell pattern matches a cell's id, with or without its variant."""
    return any(fnmatch.fnmatchcase(name, pattern) for name in (cell_id, cell_id.partition(_VARIANT_MARK)[0]))


def _cells_of(part: Profile) -> list[Cell]:
    order = sorted(part.topologies, key=lambda t: t != "pd")
    routes = [r for r in ROUTES if r in part.routes]
    return [Cell(t, m, r, part.variant) for m in part.methods for t in order for r in routes]


def select_cells(profile: Profile, patterns: Sequence[str], source: str | None = None) -> list[Cell]:
    """Return the cells whose id matches any of the shell patterns. Raises UsageError when a pattern matches nothing; it
    names the command that lists all, with the ``source`` of the profile."""
    cells = all_cells(profile)
    _check_excludes(profile)
    if not cells:
        raise UsageError(f"profile {profile.name} excludes all of its cells; leave some")
    if not patterns:
        return cells
    known = [c.id for c in cells]
    wanted: set[str] = set()
    for pattern in patterns:
        found = matching(pattern, known, matches)
        if not found:
            raise no_such("--cell", pattern, known, *what_lists(profile, "cell", source))
        wanted.update(found)
    return [c for c in cells if c.id in wanted]


def what_lists(profile: Profile, noun: str, source: str | None) -> tuple[str, str]:
    """Return what there is none of, for a message, and the command that lists all of them; empty for a profile that was
    read from a record, and is not shipped."""
    shipped = (Path(__file__).resolve().parent / f"{profile.name}.yaml").is_file()
    named = source or (profile.name if shipped else None)
    command = shlex.join(["harness", "list", f"{noun}s", "-p", named]) if named is not None else ""
    return f"{noun} of profile {profile.name}", command


def excluded_cells(profile: Profile) -> dict[str, str]:
    """Return the reasons for the cells that the profile leaves out, by cell id."""
    left = {c.id for c in all_cells(profile)}
    whole = all_cells(profile.model_copy(update={"exclude": ()}))
    return {c.id: next(e.reason for e in profile.exclude if matches(c.id, e.cells)) for c in whole if c.id not in left}


def _check_excludes(profile: Profile) -> None:
    """Raise UsageError when an exclusion matches no cell: it was misspelt, or its axis has been removed."""
    known = [c.id for c in all_cells(profile.model_copy(update={"exclude": ()}))]
    for entry in profile.exclude:
        if not any(matches(k, entry.cells) for k in known):
            raise UsageError(
                f"profile {profile.name}: exclude {entry.cells!r}: expected a pattern that matches a cell "
                f"({', '.join(known)}), found no match"
            )


def make_plan(profile: Profile, cells: Sequence[Cell]) -> Plan:
    """Group cells by the engines that they share.

    In each variant the plain engines come last, because they re-score the outputs of the others.
    """
    return Plan(tuple(cells), tuple(g for part in profile.parts for g in _groups_of(part, cells)))


def _groups_of(part: Profile, cells: Sequence[Cell]) -> Iterator[EngineGroup]:
    for method in sorted(part.methods, key=lambda m: m.kind == "none"):
        mine = [c for c in cells if c.method.kind == method.kind and c.variant == part.variant]
        pair = tuple(c for c in mine if c.topology == "pd")
        single = tuple(c for c in mine if c.topology == "single")
        if pair and single and part.share_engines:
            yield EngineGroup("pd", method, (*pair, *single), variant=part.variant, expected=part.expected)
            continue
        if pair:
            yield EngineGroup("pd", method, pair, variant=part.variant, expected=part.expected)
        if single:
            yield EngineGroup("single", method, single, variant=part.variant, expected=part.expected)
