"""Executors, which give groups of engines their places on this machine or on a cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import NamedTuple, Protocol, Self, cast, get_args

from harness.engines.environment import EngineEnvironment
from harness.engines.inventory import (
    Inventory,
    claimed_gpus,
    describe,
    jobs_of,
    local_inventory,
    sharing_note,
    too_few_to_part,
)
from harness.engines.places import LocalPlace, PairNodes, Places, default_places
from harness.errors import EngineStartError, UsageError
from harness.profiles.cells import EngineGroup, Plan, Role
from harness.profiles.model import Profile
from harness.scheduling.model import Placement, PlacementRule
from harness.scheduling.planning import one_by_one


class Executor(Protocol):
    """Gives groups of engines their places. A context manager; leaving it gives back what it holds."""

    @property
    def at_once(self) -> int | None:
        """The maximum number of groups that may run at the same time; None leaves it to the devices."""

    @property
    def rule(self) -> PlacementRule:
        """The rule for the nodes that the engines of a pair may be on."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...
    def inventory(self, profile: Profile) -> Inventory:
        """Return the devices that the profile's engines can be put on."""

    def places(
        self, group: EngineGroup, profile: Profile, environment: EngineEnvironment, placement: Placement
    ) -> contextlib.AbstractContextManager[Places]:
        """Return places for the engines of a group, held while the context lasts; ``profile`` is its variant's.

        Entering the context raises InfrastructureError when there are no places.
        """

    def lost(self) -> Mapping[str, str]:
        """Return the nodes of the inventory that are gone, with the reasons."""


class HoldsNothing:
    """The part of an executor that has nothing to give back, and no nodes that could be lost."""

    rule: PlacementRule = "any"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def lost(self) -> Mapping[str, str]:
        return {}


class LocalExecutor(HoldsNothing):
    """Runs engines on this machine, on loopback; with a ``base_port``, only one group of engines at a time."""

    def __init__(self, base_port: int | None = None) -> None:
        self._base_port = base_port

    @property
    def at_once(self) -> int | None:
        return None if self._base_port is None else 1

    def inventory(self, profile: Profile) -> Inventory:
        self._inventory = local_inventory(profile)
        return self._inventory

    @contextlib.contextmanager
    def places(
        self, group: EngineGroup, profile: Profile, environment: EngineEnvironment, placement: Placement
    ) -> Iterator[Places]:
        found = local_places(self._inventory, placement, self._base_port, profile.engine.device == "cpu")
        try:
            yield found
        finally:
            for place in found.values():
                place.give_back()


def local_places(inventory: Inventory, placement: Placement, base_port: int | None, cores: bool = False) -> Places:
    """Return places on this machine for the engines of a job, with consecutive ports from ``base_port`` on.

    With ``cores``, each engine gets cores that nobody else has claimed, where there are enough.
    """
    ports = None if base_port is None else count(base_port)
    return {
        cast(Role, engine.role): LocalPlace(
            [inventory.names[d.id] for d in engine.devices if d.id in inventory.names], ports=ports, claim=cores
        )
        for engine in placement.engines
    }


def lone_places(group: EngineGroup, profile: Profile, tell: Callable[[str], None]) -> Places:
    """Return places on this machine for a group that has it to itself, on the GPUs that a run would choose; ``tell`` is
    told which. Where no GPU can be seen, the choice is vLLM's. ``profile`` is the group's variant's.

    Raises EngineStartError when they do not fit.
    """
    inventory = claimed_gpus() if profile.engine.device == "gpu" else None
    if inventory is None or not inventory.devices:
        return default_places(group.roles, profile.engine)
    plan = Plan(group.cells, (group,))
    scheduler = one_by_one(jobs_of(plan, (), profile, inventory, rescore=False), inventory.devices)
    placements = scheduler.start_next()
    if not placements:
        raise EngineStartError(f"{group.id}: {'; '.join(scheduler.refused.values())}")
    shared = too_few_to_part(plan, profile, inventory)
    notes = [sharing_note(shared, len(inventory.devices))] if shared else []
    for words in (*inventory.notes, *notes, describe(placements[0], inventory)):
        tell(words)
    return local_places(inventory, placements[0], None)


class ExecutorChoice(NamedTuple):
    """The executor options of the command line; None where an option was not given."""

    name: str = "local"
    ray_address: str | None = None
    pair_nodes: str | None = None


def make_executor(choice: ExecutorChoice, mutants: Sequence[str] = (), base_port: int | None = None) -> Executor:
    """Return the chosen executor, which has not started or connected to anything yet. Raises UsageError."""
    if choice.name not in ("local", "ray"):
        raise UsageError(f"--executor {choice.name!r}: there are local and ray")
    if choice.name == "local":
        for option, value in zip(("--ray-address", "--pair-nodes"), choice[1:], strict=True):
            if value is not None:
                raise UsageError(f"{option} needs --executor ray; add it, or leave {option} out")
        return LocalExecutor(base_port)
    if mutants:
        raise UsageError(
            f"--executor ray and --mutant {', '.join(mutants)} exclude each other, since faults are switched by "
            "files on the machine of the harness; use --executor local"
        )
    if base_port is not None:
        raise UsageError(
            "--executor ray and --base-port exclude each other, since each node picks its own free ports; leave one out"
        )
    pair_nodes = choice.pair_nodes or "any"
    if pair_nodes not in get_args(PairNodes):
        raise UsageError(f"--pair-nodes {pair_nodes!r}: there are {', '.join(get_args(PairNodes))}")
    if (choice.ray_address or "").startswith("ray://"):
        raise UsageError(
            f"--ray-address {choice.ray_address!r} is not HOST:PORT of the cluster's head: the harness talks to "
            "engines directly, so run it on a node of the cluster instead of through a Ray client"
        )
    from harness.engines.ray.driver import RayExecutor

    return RayExecutor(choice.ray_address, cast(PairNodes, pair_nodes))
