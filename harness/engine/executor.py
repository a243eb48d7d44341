"""Who gives a group of engines its places: this machine, or a cluster."""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import Protocol, Self

from harness.config import Profile
from harness.engine.environment import EngineEnvironment
from harness.engine.place import Places
from harness.matrix import EngineGroup
from harness.schedule.model import Placement
from harness.slots import Inventory, local_inventory, local_places


class Executor(Protocol):
    """Use as a context manager; leaving it gives back what it holds."""

    @property
    def at_once(self) -> int | None:
        """Most groups of engines that may run at one time; None leaves it to the devices."""

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


class LocalExecutor:
    """This machine, on loopback. From ``base_port`` on there is room for one group of engines at a time."""

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
