"""What runs on a node of a Ray cluster: one engine, below a warden, and what the driver asks about it.

Everything here is plain data and plain calls; Ray itself is only asked where the node is and which devices it gave.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import harness
from harness.engine import traces
from harness.engine.command import EngineCommand, full_environment
from harness.engine.environment import EngineEnvironment, inspect_environment
from harness.engine.key import GUARD_FOLDER, joined_path
from harness.engine.ports import free_ports
from harness.engine.warded import WardedEngine
from harness.errors import EngineStartError, HarnessError
from harness.provenance import gpu_name, gpus

_CHUNK = 4 * 2**20
_GUARD_ENDING = "harness/engine/guard"
LOG_NAME = "engine.log"


class Wanted(NamedTuple):
    """What a node must offer."""

    device: str
    devices: int
    """Devices of the engine."""
    gpu: str
    """Name of the driver's GPU."""
    folders: dict[str, str]
    """Model folders by what they are."""
    environment: dict[str, Any]
    """The engine environment as the driver found it; the node must have the same."""


class Offered(NamedTuple):
    """What a node offers, or why it cannot be used."""

    node: str
    host: str
    devices: tuple[str, ...]
    problem: str = ""


class Look(NamedTuple):
    """How an engine is doing."""

    exit_code: int | None
    log: bytes
    """What it has written since the offset that was asked for."""
    more: bool
    """Whether there is more than fits into one answer."""


class Cores:
    """Cores of this machine, claimed by locks on files, so that engines do not share one: Ray counts cores and does not
    say which, and several nodes of a cluster may be one machine. A claim ends with the process that holds it. The files
    lie where nobody else can put a link in their place: in the folder of ledgers."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._held: list[int] = []

    def claim(self, count: int) -> tuple[str, ...]:
        """Numbers of ``count`` cores that nobody has; empty when there are not enough, which leaves it to vLLM. Raises
        EngineStartError when there is no folder for claims."""
        claimed: list[str] = []
        for core in sorted(os.sched_getaffinity(0)):
            if len(claimed) == count:
                break
            if self._lock(core):
                claimed.append(str(core))
        if len(claimed) < count:
            self.release()
            return ()
        return tuple(claimed)

    def _lock(self, core: int) -> bool:
        try:
            path = (self._folder or traces.state_folder()) / f"core-{core}"
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise EngineStartError(f"expected to claim core {core} for an engine, found: {error}") from error
        known = os.fstat(handle)
        if not stat.S_ISREG(known.st_mode) or known.st_uid != os.getuid():
            os.close(handle)
            raise EngineStartError(f"expected {path} to be a file of this user, found something else; remove it")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever let go of it may have removed the file between the two calls.
            mine = path.stat().st_ino == known.st_ino
        except OSError:
            mine = False
        if not mine:
            os.close(handle)
            return False
        self._held.append(handle)
        return True

    def release(self) -> None:
        while self._held:
            traces.drop_claim(self._held.pop())


def engine_environment(env: dict[str, str]) -> dict[str, str]:
    """What an engine gets on a node: as if it were started there by hand, without what Ray adds for its workers."""
    own = Path(harness.__file__).resolve().parents[1]
    base = {k: v for k, v in full_environment({}).items() if not k.startswith("RAY_")}
    paths = [p for p in base.pop("PYTHONPATH", "").split(os.pathsep) if p and Path(p).resolve() != own]
    if "PYTHONPATH" in env:
        # The guard of the driver's machine lies elsewhere here.
        wanted = env["PYTHONPATH"].split(os.pathsep)
        paths = [str(GUARD_FOLDER) if p.endswith(_GUARD_ENDING) else p for p in wanted] + paths
    if paths:
        env = {**env, "PYTHONPATH": joined_path(*paths)}
    return {**base, **env}


def problems(wanted: Wanted) -> Iterable[str]:
    """What this machine lacks."""
    if wanted.device == "gpu" and (found := gpu_name(gpus())) != wanted.gpu:
        yield (
            f"GPU: expected {wanted.gpu}, which the driver's machine has and baselines are found by, found "
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
    """The actor: at most one engine. When its process ends, in whatever way, the engine is killed."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._cores = Cores()
        self._engine: WardedEngine | None = None
        self._folder: Path | None = None
        self._host = ""
        self._claimed: list[int] = []

    def offer(self) -> Offered:
        """Where this is and what is given to the engine."""
        import ray

        context = ray.get_runtime_context()
        self._host = ray.util.get_node_ip_address()
        if self._wanted.device == "cpu":
            devices = self._cores.claim(self._wanted.devices)
        else:
            devices = tuple(map(str, context.get_accelerator_ids().get("GPU", ())))
        # Ray starts its workers with a niceness of 15, which engines would inherit; not everybody may undo that.
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        found = "; ".join(problems(self._wanted))
        return Offered(f"{self._host}/{context.get_node_id()[:8]}", self._host, devices, found)

    def ports(self, count: int) -> list[int]:
        self._claimed = free_ports(count, self._host)
        return self._claimed

    def start(self, command: tuple[Any, ...]) -> int:
        """Start the engine; returns its process id on this machine."""
        made = EngineCommand(*command)
        self._folder = Path(tempfile.mkdtemp(prefix="kv-harness-"))
        self._engine = WardedEngine(made, self._folder / LOG_NAME, engine_environment(made.env), self._claimed)
        return self._engine.pid

    def look(self, offset: int) -> Look:
        """The exit code, and the log from ``offset`` on."""
        engine = self._running()
        # In this order: what an engine that has ended wrote is all there.
        code = engine.exit_code()
        with engine.log_path.open("rb") as file:
            file.seek(offset)
            log = file.read(_CHUNK)
            return Look(code, log, bool(file.peek(1)))

    def gather_threads(self) -> int:
        return self._running().gather_threads()

    def stop(self, grace_s: float) -> list[str]:
        """End the engine; its log can still be looked at. Returns what is left of it, in words."""
        return self._running().stop(grace_s)

    def forget(self) -> None:
        """Remove the log from this machine."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _running(self) -> WardedEngine:
        if self._engine is None:
            raise EngineStartError("expected a started engine, found none on this node")
        return self._engine
