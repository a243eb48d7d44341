"""The side of the node: an actor that runs one engine below a supervisor and answers the driver's calls.

Everything here is plain data and plain calls; Ray itself is only asked for the node's address and the engine's devices.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from harness.engines.api_key import GUARD_FOLDER
from harness.engines.command import EngineCommand
from harness.engines.environment import EngineEnvironment, inspect_environment
from harness.errors import EngineStartError, HarnessError
from harness.scheduling.gpus import gpu_name, gpus
from harness.supervision.cores import Cores
from harness.supervision.ports import free_ports
from harness.supervision.process import SupervisedEngine
from harness.supervision.server import full_environment, joined_path
from harness.util.paths import IMPORT_ROOT

_CHUNK = 4 * 2**20
_GUARD_ENDING = "/".join(GUARD_FOLDER.parts[-3:])
"""The guard's folder in this package; the package may be installed elsewhere on the driver's machine."""
LOG_NAME = "engine.log"


class NodeRequirements(NamedTuple):
    """The requirements that a node must meet for one engine."""

    device: str
    devices: int
    """Number of devices of the engine."""
    gpu: str
    """Name of the driver's GPU."""
    folders: dict[str, str]
    """Model folders, by a description for messages."""
    environment: dict[str, Any]
    """The driver's engine environment; the node must have the same."""


class Offered(NamedTuple):
    """A node's offer for one engine, or the reason why the node cannot be used."""

    node: str
    host: str
    devices: tuple[str, ...]
    problem: str = ""


class EngineState(NamedTuple):
    """The state of an engine and the next part of its log."""

    exit_code: int | None
    log: bytes
    """The log from the requested offset on."""
    more: bool
    """Whether there is more log than fits into one answer."""


def engine_environment(env: dict[str, str]) -> dict[str, str]:
    """Return an engine's environment on a node, without what Ray adds for its workers."""
    own = IMPORT_ROOT
    base = full_environment({})
    paths = [p for p in base.pop("PYTHONPATH", "").split(os.pathsep) if p and Path(p).resolve() != own]
    if "PYTHONPATH" in env:
        # The guard may lie elsewhere on the driver's machine.
        wanted = env["PYTHONPATH"].split(os.pathsep)
        paths = [str(GUARD_FOLDER) if p.endswith(_GUARD_ENDING) else p for p in wanted] + paths
    if paths:
        env = {**env, "PYTHONPATH": joined_path(*paths)}
    return {**base, **env}


def problems(wanted: NodeRequirements) -> Iterable[str]:
    """Yield what this machine lacks of the requirements, as sentences."""
    if wanted.device == "gpu" and (found := gpu_name(gpus())) != wanted.gpu:
        yield (
            f"GPU: expected {wanted.gpu}, as on the driver's machine, because baselines belong to a kind of GPU, found "
            f"{found}; run the harness on a node with the engines' kind of GPU, and use nodes of one kind"
        )
    for what, folder in wanted.folders.items():
        if not (Path(folder) / "config.json").is_file():
            yield (
                f"{what}: expected a model folder with config.json at {folder}, found none; put the models at the same "
                "path on every node, or on a file system that all of them mount"
            )
    theirs = EngineEnvironment.model_validate(wanted.environment)
    try:
        ours = inspect_environment(theirs.executable)
    except HarnessError as error:
        yield f"{error}; every node needs the same environment at the same path"
        return
    for name in ("python", "prefix", "vllm", "vllm_build", "torch", "transformers", "nixl", "openmp"):
        if getattr(ours, name) != getattr(theirs, name):
            yield (
                f"{theirs.executable}: expected {name} {getattr(theirs, name)} as on the machine of the harness, found "
                f"{getattr(ours, name)}; install the same environment on every node"
            )


class NodeEngine:
    """The actor, which runs at most one engine. However its process ends, the engine is killed."""

    def __init__(self, wanted: NodeRequirements) -> None:
        self._wanted = wanted
        self._cores = Cores()
        self._engine: SupervisedEngine | None = None
        self._folder: Path | None = None
        self._host = ""
        self._claimed: list[int] = []

    def offer(self) -> Offered:
        """Return where this is and which devices the engine gets, or why this node cannot be used."""
        import ray

        context = ray.get_runtime_context()
        self._host = ray.util.get_node_ip_address()
        if self._wanted.device == "cpu":
            devices = self._cores.claim(self._wanted.devices)
        else:
            devices = tuple(map(str, context.get_accelerator_ids().get("GPU", ())))
        # Ray starts its workers with a niceness of 15, which engines would inherit; undoing it may not be permitted.
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        found = "; ".join(problems(self._wanted))
        return Offered(f"{self._host}/{context.get_node_id()[:8]}", self._host, devices, found)

    def ports(self, count: int) -> list[int]:
        """Claim consecutive free ports of this node. Raises EngineStartError."""
        self._claimed = free_ports(count, self._host)
        return self._claimed

    def start(self, command: tuple[Any, ...]) -> int:
        """Start the engine; return its process id on this machine. Raises EngineStartError."""
        engine = EngineCommand(*command)
        self._folder = Path(tempfile.mkdtemp(prefix="kv-harness-"))
        self._engine = SupervisedEngine(engine, self._folder / LOG_NAME, engine_environment(engine.env), self._claimed)
        return self._engine.pid

    def state(self, offset: int) -> EngineState:
        """Return the exit code, and the log from ``offset`` on."""
        engine = self._running()
        # The exit code first, so that the log of an ended engine is complete.
        code = engine.exit_code()
        with engine.log_path.open("rb") as file:
            file.seek(offset)
            return EngineState(code, file.read(_CHUNK), bool(file.peek(1)))

    def settle_threads(self) -> int:
        """See ``EngineProcess.settle_threads``."""
        return self._running().settle_threads()

    def stop(self, grace_s: float) -> list[str]:
        """End the engine, keeping its log; return descriptions of what is left of it."""
        return self._running().stop(grace_s)

    def forget(self) -> None:
        """Remove the log from this machine."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _running(self) -> SupervisedEngine:
        if self._engine is None:
            raise EngineStartError("expected a started engine, found none on this node")
        return self._engine
