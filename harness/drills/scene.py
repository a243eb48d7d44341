"""Real engines behind proxies: places that put a proxy in front of each engine, for sessions and for runs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

from harness.config import Profile
from harness.drills.family import Family
from harness.drills.proxy import FaultError, Proxy
from harness.drills.tasks import Task
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
        self.families: dict[Role, Family] = {}
        self._troubles: list[str] = []
        self._proofs: list[Callable[[], str]] = []
        self._tasks: list[Task] = []
        self._settling = threading.Lock()

    def __enter__(self) -> Scene:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.settle()
        self.held.close()

    def begin(self) -> None:
        """A new fault: what was noted of the last one is forgotten."""
        self.settle()
        self._troubles.clear()
        self._proofs.clear()

    def trouble(self, words: str) -> None:
        """Note why a fault could not be brought about."""
        self._troubles.append(" ".join(words.split()))

    def require(self, proof: Callable[[], str]) -> None:
        """Ask this when all is over: it says why the fault did not take place, or nothing."""
        self._proofs.append(proof)

    @property
    def failed(self) -> str:
        """Why the fault did not take place as it was stated; empty when it did."""
        return "; ".join(dict.fromkeys(filter(None, (*self._troubles, *(proof() for proof in self._proofs)))))

    def task(self, function: Callable[[threading.Event], object]) -> Task:
        """Do something beside the exchange, until ``settle``."""
        task = Task(function, self.trouble)
        self._tasks.append(task)
        return task

    def later(self, seconds: float, act: Callable[[], object]) -> Task:
        """Do something in so many seconds. When all is over before, the fault did not take place as it was stated."""

        def wait(over: threading.Event) -> None:
            if over.wait(seconds):
                raise FaultError(f"expected the run to last {seconds:g} s after the strike, found it over")
            act()

        return self.task(wait)

    def settle(self) -> None:
        """End whatever faults still do. Done before engines are ended, and before anything is judged."""
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
        self.families.pop(role, None)
        # One that has ended already is the harness's to notice.
        with contextlib.suppress(FaultError):
            self.families[role] = Family(pid)

    def family(self, role: Role) -> Family:
        """The processes of an engine. Raises FaultError when it has none."""
        if role not in self.families:
            raise FaultError(f"expected a running {role} engine, found none")
        return self.families[role]

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
        return ProxiedEngine(handle, self._scene.proxies[command.role], self._scene.settle)


class ProxiedEngine:
    """A started engine whose address is that of its proxy."""

    def __init__(self, inner: EngineHandle, proxy: Proxy, before_end: Callable[[], object]) -> None:
        self._inner = inner
        self._proxy = proxy
        self._before_end = before_end
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
        self._before_end()
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
