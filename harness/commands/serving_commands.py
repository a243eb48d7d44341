"""``harness plan --commands``: the commands that start the engines of a plan by hand, as the harness starts them."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from harness.engines.command import EngineCommand, NotesOfKV, build_command
from harness.engines.environment import EngineEnvironment, inspect_environment
from harness.engines.router import router_arguments
from harness.engines.router_program import PROGRAM as ROUTER_PROGRAM
from harness.engines.typed_command import typed, typed_command
from harness.errors import EnvironmentFault
from harness.profiles.cells import EngineGroup, Role
from harness.profiles.engine_config import EngineConfig
from harness.profiles.model import Profile
from harness.supervision.server import LOOPBACK, url_of
from harness.util import allowance
from harness.workload.prepare import Prepared

PORTS: Mapping[Role, int] = MappingProxyType({"prefill": 8100, "decode": 8200, "single": 8300})
_SIDE_CHANNELS: Mapping[Role, int] = MappingProxyType({"prefill": 5600, "decode": 5700})
ROUTER_PORT, _ROUTER_METRICS = 8000, 8001


class StartedByHand(NamedTuple):
    """A server of a group of engines, and how it is started by hand."""

    what: str
    text: str


class Servers(NamedTuple):
    """The servers of a group of engines."""

    group: EngineGroup
    started: tuple[StartedByHand, ...]
    urls: Mapping[Role, str]
    router: str | None
    """The address of the router, if cells are asked through one."""

    def options(self) -> list[str]:
        """Return the options that name these servers on the command lines of ``harness attach`` and ``harness run``."""
        found = [word for role, url in self.urls.items() for word in (f"--{role}", url)]
        return found + (["--router", self.router] if self.router is not None else [])


def environment_to_type(engine_python: str | None, device: str) -> EngineEnvironment:
    """Return the environment of the engines. Where none is named and this one has no vLLM, one of which nothing is
    known, whose programs the shell finds. Raises EnvironmentFault for a named one without vLLM."""
    try:
        return inspect_environment(engine_python or sys.executable)
    except EnvironmentFault:
        if engine_python is not None:
            raise
        return EngineEnvironment.unknown(device)


def servers_of(prepared: Prepared, environment: EngineEnvironment, notes: Path | None) -> Iterator[Servers]:
    """Yield the servers of each group of engines; ``notes`` is the folder in which they note what their KV caches
    hold."""
    for group in prepared.plan.groups:
        part = prepared.profile.part(group.variant)
        commands = engine_commands(group, part, environment, notes)
        started = [
            StartedByHand(_NAMES[role], typed_command(command, environment)) for role, command in commands.items()
        ]
        urls = {role: url_of(command.host, command.port) for role, command in commands.items()}
        routed = any(cell.routed for cell in group.cells)
        if routed:
            words = [ROUTER_PROGRAM, *router_arguments(urls, ROUTER_PORT, _ROUTER_METRICS)]
            started.append(
                StartedByHand("a router that hands off between them", typed([shlex.quote(w) for w in words]))
            )
        yield Servers(group, tuple(started), urls, url_of(LOOPBACK, ROUTER_PORT) if routed else None)


_NAMES: Mapping[Role, str] = MappingProxyType({"prefill": "P", "decode": "D", "single": "an engine alone"})


def engine_commands(
    group: EngineGroup, part: Profile, environment: EngineEnvironment, notes: Path | None
) -> dict[Role, EngineCommand]:
    """Return the launcher's commands of a group, on fixed ports of this machine."""
    # P first, as people read of a pair.
    roles = [role for role in PORTS if role in group.roles]
    devices = _devices(roles, part.engine)
    return {
        role: build_command(
            part,
            group.method_of(role),
            role,
            environment,
            PORTS[role],
            _SIDE_CHANNELS.get(role),
            devices[role],
            witness=NotesOfKV(notes.absolute(), role) if notes is not None else None,
        )
        for role in roles
    }


def _devices(roles: Sequence[Role], engine: EngineConfig) -> dict[Role, list[str]]:
    """Return the cores or GPUs of each engine: others for P than for D, unless they are too few or both fit on one."""
    fits = engine.placement != "apart" and 2 * engine.gpu_memory_utilization <= 1
    free = [str(core) for core in allowance.cores()] if engine.device == "cpu" else None
    found: dict[Role, list[str]] = {}
    taken = 0
    for role in roles:
        count = engine.devices_of(role)
        if free is not None:
            found[role], free = (free[:count], free[count:]) if len(free) >= count else ([], free)
        else:
            found[role] = [str(n) for n in range(taken, taken + count)]
            taken += 0 if fits else count
    return found


def lines_of(prepared: Prepared, source: str, environment: EngineEnvironment, notes: Path | None) -> Iterator[str]:
    """Yield the lines to print: comments, and commands to paste into terminals, each group of engines by itself."""
    yield "# Each command starts one server, in a terminal of its own."
    yield "# They listen on this machine alone, and ask for no key."
    if not environment.vllm:
        yield "# No vLLM was found here: name the interpreter that has one (--engine-python), so that paths are right."
        if prepared.profile.engine.device == "cpu":
            yield "# On CPUs, preload Intel's OpenMP, or hand-offs stall: LD_PRELOAD=$VIRTUAL_ENV/lib/libiomp5.so"
    for servers in servers_of(prepared, environment, notes):
        yield ""
        yield f"# === {servers.group.id}: {', '.join(servers.group.cell_ids)}"
        if notes is not None:
            yield f"mkdir -p {shlex.quote(str(notes.absolute()))}"
        for server in servers.started:
            yield f"# {server.what}:"
            yield server.text
        yield "# When they are ready:"
        known = ["--witness-notes", str(notes.absolute())] if notes is not None else []
        file = f"{servers.group.id}.yaml"
        yield shlex.join(["harness", "attach", *servers.options(), "--extends", source, "--out", file, *known])
        yield shlex.join(["harness", "run", "-p", file, *servers.options(), *known])
