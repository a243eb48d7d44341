"""Real engines behind proxies: places that put a proxy in front of each engine, for sessions and runs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

from faults.background import Task
from faults.process_group import ProcessGroup
from faults.proxy import FaultError, Proxy
from harness.engines.command import EngineCommand
from harness.engines.environment import EngineEnvironment
from harness.engines.executor import LocalExecutor
from harness.engines.places import EngineHandle, Place, Places
from harness.profiles.cells import EngineGroup, Role
from harness.profiles.model import Profile
from harness.scheduling.model import Placement


class Scene:
    """The proxies and engines of one group. Use as a context manager; leaving it closes the proxies."""

    def __init__(self, roles: tuple[Role, ...]) -> None:
        self.resources = contextlib.ExitStack()
        """Contexts that are closed with the scene."""
        self.proxies: dict[Role, Proxy] = {role: self.resources.enter_context(Proxy()) for role in roles}
        self.engines: dict[Role, EngineHandle] = {}
        self.side_channels: dict[Role, int] = {}
        self.groups: dict[Role, ProcessGroup] = {}
        self._troubles: list[str] = []
        self._proofs: list[Callable[[], str]] = []
        self._tasks: list[Task] = []
        self._settling = threading.Lock()

    def __enter__(self) -> Scene:
        return self

    def __exit__(self, *_: object) -> None:
        self.settle()
        self.resources.close()

    def begin(self) -> None:
        """Start a new fault: forget what was noted about the last one."""
        self.settle()
        self._troubles.clear()
        self._proofs.clear()

    def trouble(self, words: str) -> None:
        """Note why a fault could not take place."""
        self._troubles.append(" ".join(words.split()))

    def require(self, proof: Callable[[], str]) -> None:
        """Register a proof, which is called at the end and returns why the fault did not take place, or nothing."""
        self._proofs.append(proof)

    @property
    def failed(self) -> str:
        """Why the fault did not take place as stated; empty if it did."""
        return "; ".join(dict.fromkeys(filter(None, (*self._troubles, *(proof() for proof in self._proofs)))))

    def task(self, function: Callable[[threading.Event], object]) -> Task:
        """Run a function in the background until ``settle``."""
        task = Task(function, self.trouble)
        self._tasks.append(task)
        return task

    def later(self, seconds: float, act: Callable[[], object]) -> Task:
        """Act after ``seconds``. If the run is over before, the fault did not take place as stated."""

        def wait(over: threading.Event) -> None:
            if over.wait(seconds):
                raise FaultError(f"expected the run to last {seconds:g} s after the strike, found it over")
            act()

        return self.task(wait)

    def settle(self) -> None:
        """End all background tasks, before engines are ended and anything is judged."""
        with self._settling:
            tasks, self._tasks = self._tasks, []
            for task in tasks:
                task.end()

    def started(self, command: EngineCommand, handle: EngineHandle) -> None:
        self.engines[command.role] = handle
        self._follow(command.role, handle.pid)
        self.proxies[command.role].target = handle.url
        if command.side_channel_port is not None:
            self.side_channels[command.role] = command.side_channel_port

    def _follow(self, role: Role, pid: int) -> None:
        self.groups.pop(role, None)
        # It is up to the harness to notice that an engine has already ended.
        with contextlib.suppress(FaultError):
            self.groups[role] = ProcessGroup(pid)

    def process_group(self, role: Role) -> ProcessGroup:
        """Return the processes of an engine. Raises FaultError when it is not running."""
        if role not in self.groups:
            raise FaultError(f"expected a running {role} engine, found none")
        return self.groups[role]

    def places(self, inner: Places) -> Places:
        return {role: cast(Place, ProxiedPlace(place, self)) for role, place in inner.items()}


class ProxiedPlace:
    """A place whose engine is reached through the scene's proxy of its role; all else is the inner one's."""

    def __init__(self, inner: Place, scene: Scene) -> None:
        self._inner = inner
        self._scene = scene

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def start(self, command: EngineCommand, log_path: Path) -> EngineHandle:
        handle = self._inner.start(command, log_path)
        self._scene.started(command, handle)
        return cast(EngineHandle, ProxiedEngine(handle, self._scene.proxies[command.role], self._scene.settle))


class ProxiedEngine:
    """A started engine whose address is that of its proxy; all else is the inner one's."""

    def __init__(self, inner: EngineHandle, proxy: Proxy, before_end: Callable[[], object]) -> None:
        self._inner = inner
        self._before_end = before_end
        self.url = proxy.url

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def stop(self, grace_s: float) -> list[str]:
        self._before_end()
        return self._inner.stop(grace_s)


class ProxiedExecutor(LocalExecutor):
    """This machine, with the scene's proxies in front of its engines."""

    def __init__(self, scene: Scene) -> None:
        super().__init__()
        self._scene = scene

    @contextlib.contextmanager
    def places(
        self, group: EngineGroup, profile: Profile, environment: EngineEnvironment, placement: Placement
    ) -> Iterator[Places]:
        with super().places(group, profile, environment, placement) as places:
            yield self._scene.places(places)
