"""Where an engine runs: on this machine, or elsewhere behind the same interface."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count as numbers
from itertools import islice
from pathlib import Path
from typing import Protocol

from harness.config import EngineConfig
from harness.engine.command import LOOPBACK, EngineCommand, Role, ServerCommand, full_environment
from harness.engine.ports import claim, free_ports, release
from harness.engine.warded import WardedEngine
from harness.matrix import EngineGroup


class EngineHandle(Protocol):
    """A started engine, wherever it runs. ``WardedEngine`` is the one on this machine."""

    log_path: Path
    """On this machine, also when the engine is not."""
    started: float
    """``time.monotonic()`` of this machine when it was started."""

    @property
    def command(self) -> ServerCommand: ...
    @property
    def pid(self) -> int:
        """Process id on the machine that it runs on; also the id of its session."""

    @property
    def url(self) -> str: ...
    def alive(self) -> bool: ...
    def require_alive(self) -> None:
        """Raise EngineDiedError, quoting the log, when the engine has ended or cannot be reached."""

    def python_processes(self) -> list[int]:
        """Process ids of its Python processes, as far as they are on this machine."""

    def log_text(self) -> str: ...
    def log_tail(self) -> str: ...
    def root_error(self) -> str: ...
    def gather_threads(self) -> int:
        """See ``EngineProcess.gather_threads``."""

    def stop(self, grace_s: float) -> list[str]:
        """End the engine with all its processes and what they made; returns what could not be ended or removed, in
        words. Raises nothing when it is gone already."""


class Place(Protocol):
    """Where one engine runs."""

    @property
    def host(self) -> str:
        """The address that it binds and that others reach it at."""

    @property
    def devices(self) -> tuple[str, ...]:
        """Numbers of CPU cores, or ids of GPUs; empty leaves the choice to vLLM."""

    @property
    def node(self) -> str | None:
        """Name for the record; None for this machine."""

    def ports(self, count: int) -> list[int]:
        """Consecutive free ports of ``host``, claimed until the engine that is started next is gone. Raises
        EngineStartError when there are none."""

    def give_back(self) -> None:
        """Let go of ports that no engine was started on."""

    def start(self, command: EngineCommand, log_path: Path) -> EngineHandle:
        """Start the engine; its log is kept at ``log_path`` on this machine. Raises EngineStartError."""


Places = Mapping[Role, Place]


def ended(name: str, end: Callable[[], Sequence[str]]) -> Sequence[str]:
    """End an engine or a router; returns what is left. One that cannot be ended must not keep the others running."""
    try:
        return end() or ()
    except Exception as error:
        return (f"processes of {name}, whose end failed ({type(error).__name__}: {error})",)


def roles_of(group: EngineGroup) -> tuple[Role, ...]:
    """What each engine of a group is, in the order in which they are started."""
    return ("decode", "prefill") if group.topology == "pd" else ("single",)


class LocalPlace:
    """This machine. ``ports`` numbers the ports to take, so that places that belong together share it; without it, any
    free ones are taken."""

    node = None

    def __init__(self, devices: Sequence[str] = (), host: str = LOOPBACK, ports: Iterator[int] | None = None) -> None:
        self.host = host
        self.devices = tuple(devices)
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

    def start(self, command: EngineCommand, log_path: Path) -> WardedEngine:
        claimed, self._claimed = self._claimed, ()
        return WardedEngine(command, log_path, full_environment(command.env), claimed)


def default_places(roles: Sequence[Role], engine: EngineConfig, base_port: int | None = None) -> dict[Role, Place]:
    """Places on this machine: on CPU each engine has cores of its own while there are enough, GPUs are shared."""
    ports = None if base_port is None else numbers(base_port)
    cores = [str(c) for c in sorted(os.sched_getaffinity(0))] if engine.device == "cpu" else []
    places: dict[Role, Place] = {}
    for role in roles:
        ranks = engine.tensor_parallel.of(role)
        mine, cores = (cores[:ranks], cores[ranks:]) if len(cores) >= ranks else ([], [])
        places[role] = LocalPlace(mine, ports=ports)
    return places
