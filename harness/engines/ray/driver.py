"""The side of the driver: one actor per engine, one placement group per group of engines.

Requests to the engines still come from this process, so that there is one code path and one history. A lost node raises
EngineDiedError, as an engine that died on this machine does.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from harness.engines.command import EngineCommand
from harness.engines.environment import EngineEnvironment
from harness.engines.inventory import Inventory, cpu_engine_gib
from harness.engines.places import EngineHandle, PairNodes, Places
from harness.engines.ray.node import EngineState, NodeEngine, NodeRequirements, Offered
from harness.errors import EngineDiedError, EngineStartError, EnvironmentFault, HarnessError, InfrastructureError
from harness.profiles.cells import EngineGroup, Role
from harness.profiles.model import Profile
from harness.scheduling.gpus import gpu_name, gpus
from harness.scheduling.model import Device, Placement, PlacementRule
from harness.supervision.log import EngineLog
from harness.supervision.server import url_of
from harness.util.paths import IMPORT_ROOT

_RULE: dict[PairNodes, PlacementRule] = {"same": "together", "different": "spread", "any": "any"}
_STRATEGY = {"same": "STRICT_PACK", "different": "STRICT_SPREAD", "any": "PACK"}
_CALL_S = 60.0
"""Longest wait for an actor's answer, because a node that has vanished does not refuse calls but never answers."""
_PLACE_S = 60.0
"""Longest wait for free places in the cluster while this run itself holds no place."""
_OFFER_S = 180.0
"""Longest wait until an actor has started, which imports this package, and has examined its node."""
_CONNECT_S = 10.0
_WATCH_S = 2.0
_STORE_BYTES = 80 * 2**20
"""Size of the object store of a cluster that is started here; nothing is put into it."""


def import_ray() -> Any:
    """Return the module ``ray``. Raises EnvironmentFault when it is not installed."""
    # Read when Ray is imported. Otherwise Ray prints 20 lines of internal state about a lost node, twice, around our
    # own message.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise EnvironmentFault(
            "--executor ray: expected the package ray in this environment, found none; install it with "
            "pip install 'kv-acceptance-harness[ray]'"
        ) from error


def require_listening(address: str) -> None:
    """Raise EnvironmentFault when nothing listens at HOST:PORT, because Ray itself would retry for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise EnvironmentFault(
            f"--ray-address {address}: expected the head of a Ray cluster, but nothing answers there ({error}); "
            "start one with `ray start --head`, or correct the address"
        ) from error


class Actor:
    """Calls to one actor, with Ray's failures turned into ours."""

    def __init__(self, ray: Any, actor: Any, name: str) -> None:
        self._ray = ray
        self._actor = actor
        self.name = name
        """What the actor is and where it runs, for messages."""

    def begin(self, method: str, *args: object) -> Any:
        """Start a call; return the reference to its result."""
        return getattr(self._actor, method).remote(*args)

    def end(self, reference: Any, limit_s: float = _CALL_S) -> Any:
        """Wait for the result of a call. Raises EngineStartError when the call failed on the node, EngineDiedError when
        there is no answer because the node, the actor or the connection is gone."""
        try:
            return self._ray.get(reference, timeout=limit_s)
        except self._ray.exceptions.RayTaskError as error:
            cause = error.cause
            why = str(cause) if isinstance(cause, HarnessError) else f"{type(cause).__name__}: {cause}"
            raise EngineStartError(f"{self.name}: {why}") from None
        except self._ray.exceptions.RayError as error:
            words = " ".join(str(error).split())[:400]
            raise EngineDiedError(
                f"{self.name} is lost: expected an answer from its node, found {type(error).__name__} ({words}); check "
                "whether the node is up, and run the cell again"
            ) from None

    def call(self, method: str, *args: object, limit_s: float = _CALL_S) -> Any:
        return self.end(self.begin(method, *args), limit_s)

    def kill(self) -> None:
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.kill(self._actor, no_restart=True)


class RayHandle(EngineLog):
    """An engine on a node. Its log is fetched every two seconds, so that most of it survives the loss of the node."""

    def __init__(self, actor: Actor, command: EngineCommand, log_path: Path) -> None:
        """Start the engine. Raises EngineStartError or EngineDiedError."""
        super().__init__(log_path)
        log_path.parent.mkdir(parents=True, exist_ok=True)
        log_path.touch()
        self.command = command
        self.started = time.monotonic()
        self._actor = actor
        self._lock = threading.Lock()
        self._offset = 0
        self._code: int | None = None
        self.lost: EngineDiedError | None = None
        """The error to raise once the engine can no longer be reached; None while it can."""
        self.pid: int = actor.call("start", tuple(command))
        self._stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    @property
    def url(self) -> str:
        return url_of(self.command.host, self.command.port)

    def _watch(self) -> None:
        while not self._stopping.wait(_WATCH_S):
            self._update()

    def _update(self) -> None:
        """Fetch the state and the new part of the log; a failure is kept in ``lost``."""
        with self._lock:
            more = self._code is None
            while more and self.lost is None:
                try:
                    state: EngineState = self._actor.call("state", self._offset)
                except InfrastructureError as error:
                    seen = EngineLog(self.log_path).log_tail()
                    self.lost = EngineDiedError(f"{error}\nlast lines of its log as fetched:\n{seen}")
                    return
                with self.log_path.open("ab") as file:
                    file.write(state.log)
                self._offset += len(state.log)
                # The exit code is accepted only with the complete log.
                more = state.more
                if not more:
                    self._code = state.exit_code

    def alive(self) -> bool:
        self._update()
        return self._code is None and self.lost is None

    def require_alive(self) -> None:
        """Raise EngineDiedError when the engine has ended or its node is lost."""
        self._update()
        if self.lost is not None:
            raise self.lost
        if self._code is not None:
            name = f"{self._actor.name} (pid {self.pid})"
            raise EngineDiedError(self.obituary(name, self._code), self._code, self.exception())

    def python_processes(self) -> list[int]:
        """Return an empty list, because the processes are on the node."""
        return []

    def log_text(self) -> str:
        """Return what the engine has written so far, as far as its node can be reached."""
        self._update()
        return super().log_text()

    def settle_threads(self) -> int:
        """See ``EngineProcess.settle_threads``. Raises EngineDiedError when the node is lost."""
        return int(self._actor.call("settle_threads"))

    def stop(self, grace_s: float) -> list[str]:
        """End the engine and fetch the rest of its log; return descriptions of what is left.

        A lost engine is reported as left: its supervisor or the loss of its machine ends it, but that cannot be seen
        from here.
        """
        self._stopping.set()
        left = [f"engine {self.pid} on {self._actor.name}, whose end was not confirmed"]
        if self.lost is None:
            with contextlib.suppress(InfrastructureError):
                left = self._actor.call("stop", grace_s, limit_s=grace_s + _CALL_S)
                self._update()
                self._actor.call("forget")
        self._actor.kill()
        self._watcher.join(_WATCH_S)
        return left


class RayPlace:
    """A place on a node: a bundle of a placement group with an actor in it."""

    def __init__(self, actor: Actor, offered: Offered) -> None:
        self._actor = actor
        self.host = offered.host
        self.devices = offered.devices
        self.node: str | None = offered.node
        self.handle: RayHandle | None = None

    def ports(self, count: int) -> list[int]:
        found: list[int] = self._actor.call("ports", count)
        return found

    def give_back(self) -> None:
        """Do nothing, because claims end with the actor."""

    def start(self, command: EngineCommand, log_path: Path) -> EngineHandle:
        self.handle = RayHandle(self._actor, command, log_path)
        return self.handle


class RayExecutor:
    """A connection to a cluster. Without an address and without ``RAY_ADDRESS``, a cluster of this machine only is
    started, and ended when the context is left."""

    at_once: int | None = None

    def __init__(self, address: str | None = None, pair_nodes: PairNodes = "any", place_s: float = _PLACE_S) -> None:
        self._address = address or os.environ.get("RAY_ADDRESS")
        self._pair_nodes = pair_nodes
        self._place_s = place_s
        self._ray: Any = None
        self._holding: set[str] = set()
        """Ids of the groups that have places now."""
        self._nodes: dict[str, str] = {}
        """Addresses of the nodes in the inventory, by id."""

    def __enter__(self) -> Self:
        ray = import_ray()
        if self._address is not None:
            require_listening(self._address)
        package = IMPORT_ROOT / "harness"
        options: dict[str, Any] = {"address": self._address}
        if self._address is None:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            options = {"address": "local", "object_store_memory": _STORE_BYTES, "include_dashboard": False}
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            # Nodes run this very code, even if another version is installed there.
            ray.init(
                **options,
                log_to_driver=False,
                logging_level=logging.ERROR,
                runtime_env={"py_modules": [str(package)], "excludes": ["__pycache__"]},
            )
        except (ConnectionError, RuntimeError, ValueError, OSError, ray.exceptions.RayError) as error:
            where = self._address or "this machine"
            words = " ".join(str(error).split())[:300]
            raise EnvironmentFault(
                f"--ray-address {where}: expected a Ray cluster of version {ray.__version__} with a node on this "
                f"machine, but it cannot be joined ({type(error).__name__}: {words}); see `ray status`"
            ) from error
        finally:
            # Ray installs its own handlers, with which a run that gets TERM would not write its record.
            if threading.current_thread() is threading.main_thread():
                for number, handler in handlers.items():
                    signal.signal(number, handler)
        self._ray = ray
        return self

    def __exit__(self, *_: object) -> None:
        self._ray.shutdown()

    @property
    def rule(self) -> PlacementRule:
        return _RULE[self._pair_nodes]

    def inventory(self, profile: Profile) -> Inventory:
        """Return the cluster's GPUs, or the cores that its nodes declare, one for each CPU engine."""
        gpu = profile.engine.device == "gpu"
        unit = "GPU" if gpu else "CPU"
        # Ray counts GPUs but does not know their memory, so it is counted in shares of a GPU.
        gib = 1.0 if gpu else cpu_engine_gib(profile)
        nodes = [n for n in self._ray.nodes() if n["Alive"]]
        devices = tuple(
            Device(f"{n['NodeID']}/{unit}-{number}", n["NodeID"], gib, number)
            for n in nodes
            for number in range(int(n["Resources"].get(unit, 0)))
        )
        # A node without devices of this kind runs no engines, so its loss does not matter.
        holding = {d.node for d in devices}
        self._nodes = {n["NodeID"]: n["NodeManagerAddress"] for n in nodes if n["NodeID"] in holding}
        return Inventory(devices, {}, shared=gpu, whole=gpu)

    def lost(self) -> Mapping[str, str]:
        alive = {n["NodeID"] for n in self._ray.nodes() if n["Alive"]}
        return {
            node: f"Ray says that node {address} is dead" for node, address in self._nodes.items() if node not in alive
        }

    @contextlib.contextmanager
    def places(
        self, group: EngineGroup, profile: Profile, environment: EngineEnvironment, placement: Placement
    ) -> Iterator[Places]:
        """Return places for the engines of a group on nodes that Ray chooses itself.

        Raises EngineStartError when the cluster has no room or a node is unsuitable, EngineDiedError when one is lost
        meanwhile. A failure caused by a lost node is raised as EngineDiedError too.
        """
        roles = group.roles
        wanted = [_requirements(group, profile, environment, role) for role in roles]
        bundles = self._reserve(group, profile, wanted)
        self._holding.add(group.id)
        actors: list[Actor] = []
        try:
            for number, (role, need) in enumerate(zip(roles, wanted, strict=True)):
                actor = self._actor(bundles, number, need, _unit(profile, need))
                actors.append(Actor(self._ray, actor, f"the {role} engine of {group.id}"))
            found = _offered_places(actors, roles)
            try:
                yield found
            except InfrastructureError as error:
                lost = [p.handle.lost for p in found.values() if p.handle is not None and p.handle.lost is not None]
                if lost and not isinstance(error, EngineDiedError):
                    raise lost[0] from error
                raise
        finally:
            for actor in actors:
                actor.kill()
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._ray.util.remove_placement_group(bundles)
            self._holding.discard(group.id)

    def _reserve(self, group: EngineGroup, profile: Profile, wanted: Sequence[NodeRequirements]) -> Any:
        """Return a placement group once it has its nodes.

        Ray may have put other groups of this run on other nodes than planned, so this waits as long as any of them
        holds a place. Raises EngineStartError when there is still no room ``place_s`` seconds later.
        """
        count = len(wanted)
        strategy = _STRATEGY[self._pair_nodes] if count > 1 else "PACK"
        units = [_unit(profile, need) for need in wanted]
        bundles = self._ray.util.placement_group(units, strategy=strategy)
        others = True
        while others:
            others = bool(self._holding)
            if bundles.wait(self._place_s):
                return bundles
        self._ray.util.remove_placement_group(bundles)
        nodes = [n for n in self._ray.nodes() if n["Alive"]]
        (unit,) = units[0]
        seen = ", ".join(f"{n['NodeManagerAddress']} ({n['Resources'].get(unit, 0):g} {unit})" for n in nodes)
        spread = count if strategy == "STRICT_SPREAD" else 1
        raise EngineStartError(
            f"expected {' and '.join(f'{u[unit]:g}' for u in units)} {unit} for {group.id} on "
            + (f"{spread} different nodes" if spread > 1 else "one node" if strategy == "STRICT_PACK" else "any node")
            + f" of the Ray cluster within {self._place_s:.0f} s, found no room: {len(nodes)} nodes alive: "
            f"{seen or 'none'}; add nodes, end the programs that use them, or change --pair-nodes"
        )

    def _actor(self, bundles: Any, number: int, wanted: NodeRequirements, unit: Mapping[str, float]) -> Any:
        scheduling = importlib.import_module("ray.util.scheduling_strategies")
        given = {"num_gpus": unit.get("GPU", 0.0), "num_cpus": unit.get("CPU", 0.0)}
        return (
            self._ray.remote(NodeEngine)
            .options(
                **given,
                max_restarts=0,
                scheduling_strategy=scheduling.PlacementGroupSchedulingStrategy(
                    bundles, placement_group_bundle_index=number
                ),
            )
            .remote(wanted)
        )


def _unit(profile: Profile, wanted: NodeRequirements) -> dict[str, float]:
    """Return the resources that Ray reserves for an engine. An engine with one GPU takes a share of it, so that two
    fit."""
    if wanted.device == "cpu":
        return {"CPU": float(wanted.devices)}
    # Ray may put two shares on one GPU, so that only whole ones are certain to be different ones.
    whole = wanted.devices > 1 or profile.engine.placement == "apart"
    return {"GPU": float(wanted.devices) if whole else profile.engine.gpu_memory_utilization}


def _requirements(group: EngineGroup, profile: Profile, environment: EngineEnvironment, role: Role) -> NodeRequirements:
    folders = {"target": profile.target_folder}
    for method in (group.method, group.prefill_method):
        if method is not None and method.drafter_path is not None:
            folders[f"drafter of {method.kind}"] = method.drafter_path
    return NodeRequirements(
        profile.engine.device,
        profile.engine.devices_of(role),
        # Baselines are identified by the driver's GPU.
        gpu_name(gpus()),
        {k: str(v) for k, v in folders.items()},
        environment.model_dump(mode="json"),
    )


def _offered_places(actors: list[Actor], roles: tuple[Role, ...]) -> dict[Role, RayPlace]:
    """Return the places that the nodes offer. Raises EngineStartError naming the first node that is unsuitable."""
    asked = [actor.begin("offer") for actor in actors]
    found: dict[Role, RayPlace] = {}
    for role, actor, reference in zip(roles, actors, asked, strict=True):
        offered: Offered = actor.end(reference, _OFFER_S)
        actor.name += f" on node {offered.node}"
        if offered.problem:
            raise EngineStartError(f"{actor.name}: {offered.problem}")
        found[role] = RayPlace(actor, offered)
    return found
