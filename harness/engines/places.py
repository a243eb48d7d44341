"""The places where engines run: this machine, or other machines behind the same interface."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Literal, Protocol

from harness.engines.command import EngineCommand
from harness.profiles.cells import Role
from harness.profiles.engine_config import EngineConfig
from harness.supervision.cores import Cores
from harness.supervision.ports import claim, free_ports, release
from harness.supervision.process import SupervisedEngine
from harness.supervision.server import LOOPBACK, ServerCommand, full_environment
from harness.util import allowance


class EngineHandle(Protocol):
    """A started engine, wherever it runs. ``SupervisedEngine`` is the one on this machine."""

    log_path: Path
    """The log on this machine, even if the engine runs elsewhere."""
    started: float
    """When it was started, in ``time.monotonic()`` of this machine."""

    @property
    def command(self) -> ServerCommand: ...
    @property
    def pid(self) -> int:
        """Process id on the machine where it runs; also the id of its session."""

    @property
    def url(self) -> str: ...
    def alive(self) -> bool: ...
    def require_alive(self) -> None:
        """Raise EngineDiedError, quoting the log, when the engine has ended or cannot be reached."""

    def python_processes(self) -> list[int]:
        """Return the ids of its Python processes that are on this machine."""

    def log_text(self) -> str: ...
    def log_tail(self) -> str: ...
    def exception(self) -> str: ...
    def root_error(self) -> str: ...
    def settle_threads(self) -> int:
        """See ``EngineProcess.settle_threads``."""

    def stop(self, grace_s: float) -> list[str]:
        """End the engine with all its processes and remove what they created; do nothing if it is gone already.

        Return descriptions of what could not be ended or removed.
        """


class Place(Protocol):
    """A place for one engine."""

    @property
    def host(self) -> str:
        """The address that the engine binds and that others reach it at."""

    @property
    def devices(self) -> tuple[str, ...]:
        """Numbers of CPU cores or ids of GPUs; empty leaves the choice to vLLM."""

    @property
    def node(self) -> str | None:
        """Name of the node for the record; None for this machine."""

    def ports(self, count: int) -> list[int]:
        """Claim consecutive free ports of ``host`` until the engine that is started next is gone. Raises
        EngineStartError when there are none."""

    def give_back(self) -> None:
        """Release claimed ports that no engine was started on."""

    def start(self, command: EngineCommand, log_path: Path) -> EngineHandle:
        """Start the engine; its log is kept at ``log_path`` on this machine. Raises EngineStartError."""


Places = Mapping[Role, Place]
PairNodes = Literal["same", "different", "any"]
"""The nodes of a cluster that the engines of a pair may be on."""


def end_and_report(name: str, end: Callable[[], Sequence[str]]) -> Sequence[str]:
    """End an engine or a router; return descriptions of what is left. Raises nothing, because one that cannot be ended
    must not keep the others running."""
    try:
        return end() or ()
    except Exception as error:
        return (f"processes of {name}, which could not be ended ({type(error).__name__}: {error})",)


class LocalPlace:
    """A place on this machine. ``ports`` yields the ports to use and is shared by places that belong together; without
    it, any free ports are used.

    With ``claim``, ``devices`` are cores, and as many that nobody has claimed take their places where there are any.
    """

    node = None

    def __init__(
        self, devices: Sequence[str] = (), host: str = LOOPBACK, ports: Iterator[int] | None = None, claim: bool = False
    ) -> None:
        self.host = host
        self._cores = Cores()
        self.devices = (self._cores.claim(len(devices)) if claim else ()) or tuple(devices)
        self._ports = ports
        self._claimed: tuple[int, ...] = ()

    def ports(self, count: int) -> list[int]:
        if self._ports is None:
            taken = free_ports(count, self.host)
        else:
            taken = list(islice(self._ports, count))
            claim(taken, self.host)
        self._claimed += tuple(taken)
        return taken

    def give_back(self) -> None:
        release(self._claimed)
        self._claimed = ()
        self._cores.release()

    def start(self, command: EngineCommand, log_path: Path) -> SupervisedEngine:
        claimed, self._claimed = self._claimed, ()
        cores, self._cores = self._cores, Cores()
        return SupervisedEngine(command, log_path, full_environment(command.env), claimed, cores)


def default_places(roles: Sequence[Role], engine: EngineConfig) -> dict[Role, Place]:
    """Return places on this machine: each CPU engine has cores of its own while there are enough; vLLM chooses GPUs."""
    cores = [str(c) for c in allowance.cores()] if engine.device == "cpu" else []
    places: dict[Role, Place] = {}
    for role in roles:
        ranks = engine.devices_of(role)
        mine, cores = (cores[:ranks], cores[ranks:]) if len(cores) >= ranks else ([], [])
        places[role] = LocalPlace(mine, claim=engine.device == "cpu")
    return places
