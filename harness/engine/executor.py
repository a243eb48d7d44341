"""Who gives a group of engines its places: this machine, or a cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Literal, NamedTuple, Protocol, Self, cast, get_args

from harness.config import Profile
from harness.engine.environment import EngineEnvironment
from harness.engine.place import Places
from harness.errors import UsageError
from harness.matrix import EngineGroup
from harness.schedule.model import Placement, PlacementRule
from harness.slots import Inventory, local_inventory, local_places

PairNodes = Literal["same", "different", "any"]


class Executor(Protocol):
    """Use as a context manager; leaving it gives back what it holds."""

    @property
    def at_once(self) -> int | None:
        """Most groups of engines that may run at one time; None leaves it to the devices."""

    @property
    def rule(self) -> PlacementRule:
        """Which nodes the engines of a pair may be on."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def inventory(self, profile: Profile) -> Inventory:
        """What there is to put the profile's engines on."""

    def places(
        self, group: EngineGroup, profile: Profile, environment: EngineEnvironment, placement: Placement
    ) -> contextlib.AbstractContextManager[Places]:
        """Places for the engines of a group, held until the context is left; ``profile`` is that of its variant.

        Entering it raises InfrastructureError when there are none.
        """

    def lost(self) -> Mapping[str, str]:
        """Nodes of the inventory that are gone, with the reason."""


class LocalExecutor:
    """This machine, on loopback. From ``base_port`` on there is room for one group of engines at a time."""

    rule: PlacementRule = "any"

    def __init__(self, base_port: int | None = None) -> None:
        self._base_port = base_port

    @property
    def at_once(self) -> int | None:
        return None if self._base_port is None else 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def inventory(self, profile: Profile) -> Inventory:
        self._inventory = local_inventory(profile)
        return self._inventory

    def places(
        self, group: EngineGroup, profile: Profile, environment: EngineEnvironment, placement: Placement
    ) -> contextlib.AbstractContextManager[Places]:
        return contextlib.nullcontext(local_places(self._inventory, placement, self._base_port))

    def lost(self) -> Mapping[str, str]:
        return {}


class ExecutorChoice(NamedTuple):
    """What a user asked for. Options of a cluster are None where nothing was said."""

    name: str = "local"
    ray_address: str | None = None
    pair_nodes: str | None = None


def make_executor(choice: ExecutorChoice, mutants: Sequence[str] = (), base_port: int | None = None) -> Executor:
    """The executor that was asked for; nothing is started or connected to yet. Raises UsageError."""
    if choice.name not in ("local", "ray"):
        raise UsageError(f"--executor: expected local or ray, found {choice.name!r}")
    if choice.name == "local":
        for option, value in zip(("--ray-address", "--pair-nodes"), choice[1:], strict=True):
            if value is not None:
                raise UsageError(f"{option}: expected --executor ray with it, found --executor local")
        return LocalExecutor(base_port)
    if mutants:
        raise UsageError(
            f"--executor ray: expected no --mutant, found {', '.join(mutants)}: mutants are switched by files on the "
            "machine of the harness; run them with --executor local"
        )
    if base_port is not None:
        raise UsageError("--executor ray: expected no --base-port, found one; each node picks free ports of its own")
    pair_nodes = choice.pair_nodes or "any"
    if pair_nodes not in get_args(PairNodes):
        raise UsageError(f"--pair-nodes: expected {', '.join(get_args(PairNodes))}, found {pair_nodes!r}")
    if (choice.ray_address or "").startswith("ray://"):
        raise UsageError(
            f"--ray-address: expected HOST:PORT of the cluster's head, found {choice.ray_address!r}: the harness talks "
            "to engines itself and has to run on a node of the cluster, not through a Ray client"
        )
    from harness.engine.ray_place import RayExecutor

    return RayExecutor(choice.ray_address, cast(PairNodes, pair_nodes))
