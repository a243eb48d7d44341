"""Real engines behind proxies: places that put a proxy in front of each engine, for sessions and for runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from harness.config import Profile
from harness.drills.proxy import Proxy
from harness.engine.command import EngineCommand, Role, ServerCommand
from harness.engine.environment import EngineEnvironment
from harness.engine.executor import LocalExecutor
from harness.engine.place import EngineHandle, Place, Places
from harness.matrix import EngineGroup
from harness.schedule.model import Placement


class Scene:
    """The proxies and engines of one group. Use as a context manager; leaving it closes the proxies."""

    def __init__(self, roles: tuple[Role, ...]) -> None:
        self.held = contextlib.ExitStack()
        """What is closed with the scene."""
        self.proxies: dict[Role, Proxy] = {role: self.held.enter_context(Proxy()) for role in roles}
        self.engines: dict[Role, EngineHandle] = {}
        self.side_channels: dict[Role, int] = {}
        self.failed = ""
        """Why a fault could not be brought about, when one could not."""

    def __enter__(self) -> Scene:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.held.close()

    def started(self, command: EngineCommand, handle: EngineHandle) -> None:
        self.engines[command.role] = handle
        self.proxies[command.role].target = handle.url
        if command.side_channel_port is not None:
            self.side_channels[command.role] = command.side_channel_port

    def places(self, inner: Places) -> Places:
        return {role: ProxiedPlace(place, self) for role, place in inner.items()}


class ProxiedPlace:
    """A place whose engine is reached through the scene's proxy of its role."""

    def __init__(self, inner: Place, scene: Scene) -> None:
        self._inner = inner
        self._scene = scene

    @property
    def host(self) -> str:
        return self._inner.host

    @property
    def devices(self) -> tuple[str, ...]:
        return self._inner.devices

    @property
    def node(self) -> str | None:
        return self._inner.node

    def ports(self, count: int) -> list[int]:
        return self._inner.ports(count)

    def give_back(self) -> None:
        self._inner.give_back()

    def start(self, command: EngineCommand, log_path: Path) -> EngineHandle:
        handle = self._inner.start(command, log_path)
        self._scene.started(command, handle)
        return ProxiedEngine(handle, self._scene.proxies[command.role])


class ProxiedEngine:
    """A started engine whose address is that of its proxy."""

    def __init__(self, inner: EngineHandle, proxy: Proxy) -> None:
        self._inner = inner
        self._proxy = proxy
        self.log_path = inner.log_path
        self.started = inner.started

    @property
    def command(self) -> ServerCommand:
        return self._inner.command

    @property
    def pid(self) -> int:
        return self._inner.pid

    @property
    def url(self) -> str:
        return self._proxy.url

    def alive(self) -> bool:
        return self._inner.alive()

    def require_alive(self) -> None:
        self._inner.require_alive()

    def log_text(self) -> str:
        return self._inner.log_text()

    def log_tail(self) -> str:
        return self._inner.log_tail()

    def root_error(self) -> str:
        return self._inner.root_error()

    def python_processes(self) -> list[int]:
        return self._inner.python_processes()

    def gather_threads(self) -> int:
        return self._inner.gather_threads()

    def stop(self, grace_s: float) -> list[str]:
        return self._inner.stop(grace_s)


class ProxiedExecutor(LocalExecutor):
    """This machine, with the scene's proxies in front of its engines."""

    def __init__(self, scene: Scene) -> None:
        super().__init__()
        self._scene = scene

    def places(
        self, group: EngineGroup, profile: Profile, environment: EngineEnvironment, placement: Placement
    ) -> contextlib.AbstractContextManager[Places]:
        return self._proxied(super().places(group, profile, environment, placement))

    @contextlib.contextmanager
    def _proxied(self, inner: contextlib.AbstractContextManager[Places]) -> Iterator[Places]:
        with inner as places:
            yield self._scene.places(places)
