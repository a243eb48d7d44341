"""Servers already running: the harness asks them, starts nothing and ends nothing.

Nothing is known of such a server but what it answers: its model's name, its metrics, its version, its settings. What a
check needs and a server does not offer is missing evidence.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import httpx

from harness.engines.api_key import ApiKey
from harness.engines.command import EngineCommand
from harness.engines.environment import EngineEnvironment
from harness.engines.executor import HoldsNothing
from harness.engines.http import get
from harness.engines.inventory import Inventory
from harness.engines.listed_models import TIMEOUT_S, listed_models, trouble
from harness.engines.needs import Needs
from harness.engines.places import Places
from harness.engines.server_info import ServerInfo, ask
from harness.errors import EngineDiedError, UsageError
from harness.history.engine_interfaces import PAUSE, RESET_PREFIX_CACHE, SERVER_INFO
from harness.history.records import ATTACHED, EngineRecord
from harness.profiles.cells import EngineGroup, Plan, Role
from harness.profiles.model import Profile
from harness.scheduling.model import Device, Placement
from harness.workload.cells import CellWork

READY_S = 20.0
"""Seconds in which a server that runs already must show that it is ready: it has loaded its model long ago."""
_NODE = "attached"
_LARGEST_PORT = 65535
_PROBED = {PAUSE: "/pause", RESET_PREFIX_CACHE: "/reset_prefix_cache"}
"""What a server offers with VLLM_SERVER_DEV_MODE=1 alone."""
_NO_SUCH_PATH = (httpx.codes.NOT_FOUND, httpx.codes.METHOD_NOT_ALLOWED)
_GIB = 1e6
"""Memory of the imaginary devices that attached servers are scheduled on: enough for any engine."""


class Server(NamedTuple):
    """A server that runs already."""

    option: str
    """The option of the command line that named it, which messages about it begin with."""
    url: str
    key: ApiKey | None
    model: str
    """The name under which it serves its model."""
    version: str
    """Of vLLM; empty if it does not tell."""
    surfaces: dict[str, bool]
    """Whether it has each of ``_PROBED`` and ``/server_info``."""
    info: ServerInfo
    notes: Path | None = None
    """The folder in which it notes what its KV cache holds, if that is to be judged."""


class Front(NamedTuple):
    """A router that runs already, in front of such servers."""

    url: str
    key: ApiKey | None
    model: str
    """The name under which it is asked for the model."""
    lists_model: bool = True
    """Whether it told that name; a bare proxy, as vLLM's tests have one, passes on the one that P and D know."""


def look_at(option: str, url: str, key: ApiKey | None, wanted: str | None = None) -> Server:
    """Ask a server for its model, version and settings; ``wanted`` is the model to ask for where it lists several.

    Raises UsageError when it does not answer as vLLM does, or does not list the model, or several without ``wanted``.
    """
    root, headers = _root(option, url), _headers(key)
    listed = listed_models(root, headers)
    model = listed.choose(option, url, wanted)
    _require_health(option, root, headers)
    version = ""
    with contextlib.suppress(httpx.HTTPError, ValueError, KeyError, TypeError):
        version = str(get(f"{root}/version", headers, TIMEOUT_S).json()["version"]).partition("+")[0]
    info = ask(root, headers).with_model(listed.settings.get(model, {}))
    surfaces = {name: _has(f"{root}{path}", headers) for name, path in _PROBED.items()} | {SERVER_INFO: info.offered}
    return Server(option, root, key, model, version, surfaces, info)


def look_at_router(url: str, key: ApiKey | None, behind: Iterable[Server], wanted: str | None = None) -> Front:
    """Ask a router for its model. Raises UsageError as ``look_at`` does, and when it lists none and P and D have
    different names for theirs.

    That it hands off between these P and D is shown by their counters alone.
    """
    root = _root("router", url)
    listed = listed_models(root, _headers(key))
    if not listed.has_no_list:
        return Front(root, key, listed.choose("router", url, wanted))
    names = sorted({server.model for server in behind})
    if len(names) > 1:
        raise UsageError(
            f"--router {url} lists no model at /v1/models, so P and D have to serve theirs under one name, and they "
            f"have {' and '.join(names)}; start both with the same --served-model-name"
        )
    return Front(root, key, names[0], lists_model=False)


def _require_health(option: str, root: str, headers: Mapping[str, str]) -> None:
    """Raise UsageError for a server without the path by which the harness sees that it is still there."""
    with contextlib.suppress(httpx.HTTPError):
        status = get(f"{root}/health", headers, TIMEOUT_S).status_code
        if status in _NO_SUCH_PATH:
            raise UsageError(
                f"--{option} {root}: expected vLLM's path /health, found status {status}; give the address of vLLM's "
                "own server, or let the proxy in front of it pass /health on"
            )


def _root(option: str, url: str) -> str:
    try:
        parts = httpx.URL(url)
    except httpx.InvalidURL:
        parts = httpx.URL()
    served = bool(parts.scheme in ("http", "https") and parts.host and (parts.port or 0) <= _LARGEST_PORT)
    if not served or parts.path.rstrip("/") or parts.query:
        remedy = f"; leave out {parts.path}" if served and parts.path.rstrip("/") else ""
        raise UsageError(f"--{option} {url}: expected the address of a server, such as http://10.0.0.7:8000{remedy}")
    return url.rstrip("/")


def _headers(key: ApiKey | None) -> Mapping[str, str]:
    return key.headers if key is not None else {}


def _has(url: str, headers: Mapping[str, str]) -> bool:
    """Return whether a path that is to be posted to exists: then it refuses to be read with another status than 404."""
    with contextlib.suppress(httpx.HTTPError):
        return get(url, headers, TIMEOUT_S).status_code != httpx.codes.NOT_FOUND
    return False


class AttachedRouter:
    """The handle of a router that runs already."""

    def __init__(self, url: str) -> None:
        self.url = url

    def require_alive(self) -> None:
        """Leave it to the requests: not every router has a path for its health."""

    def record(self, group: str) -> EngineRecord:
        """Return where the router is, for the provenance of a run."""
        return EngineRecord(
            role="router",
            group=group,
            pid=0,
            argv=(ATTACHED, self.url),
            env={},
            log=f"{group}.router.log",
            ready_seconds=0.0,
            model_runner=None,
            attention_backend=None,
        )

    def end(self) -> list[str]:
        return []


class AttachedEngine:
    """The handle of a server that runs already. Ending it does nothing."""

    def __init__(self, server: Server, command: EngineCommand, log_path: Path, router: Front | None = None) -> None:
        self.server = server
        self.router = router
        self.command = command
        self.log_path = log_path
        self.started = time.monotonic()
        self.pid = 0
        self.url = server.url
        log_path.parent.mkdir(parents=True, exist_ok=True)
        log_path.write_text(f"attached to {server.url}, whose log is kept where it was started\n", encoding="utf-8")

    def alive(self) -> bool:
        return not self._ailing()

    def _ailing(self) -> str:
        """Return what the server answers instead of its health; "" when it is well."""
        try:
            status = get(f"{self.url}/health", {}, TIMEOUT_S).status_code
        except httpx.HTTPError as error:
            return trouble(error)
        return "" if status < httpx.codes.INTERNAL_SERVER_ERROR else f"status {status}"

    def require_alive(self) -> None:
        if found := self._ailing():
            raise EngineDiedError(
                f"expected {self.url}/health to answer, found {found}; see the log of the server where it was started"
            )

    def python_processes(self) -> list[int]:
        return []

    def log_text(self) -> str:
        return ""

    def log_tail(self) -> str:
        return f"(see the log of {self.url})"

    def exception(self) -> str:
        return ""

    def root_error(self) -> str:
        return ""

    def settle_threads(self) -> int:
        return 0

    def stop(self, grace_s: float) -> list[str]:
        return []


class AttachedPlace:
    """The place of a server that runs already."""

    devices: tuple[str, ...] = ()
    node: str | None = None

    def __init__(self, server: Server, router: Front | None = None) -> None:
        self._server = server
        self._router = router
        self._parts = urlsplit(server.url)

    @property
    def host(self) -> str:
        return self._parts.hostname or ""

    def ports(self, count: int) -> list[int]:
        """Return the server's port alone: nothing is known of its NIXL side channel."""
        return [self._parts.port or (443 if self._parts.scheme == "https" else 80)]

    def give_back(self) -> None:
        pass

    def start(self, command: EngineCommand, log_path: Path) -> AttachedEngine:
        attached = command._replace(argv=[ATTACHED, self._server.url], env={})
        return AttachedEngine(self._server, attached, log_path, self._router)


class AttachedExecutor(HoldsNothing):
    """Gives groups of engines the servers already running, one group after the other."""

    at_once: int | None = 1

    def __init__(self, servers: Mapping[Role, Server], router: Front | None = None) -> None:
        """``router`` hands off between the servers of the pair."""
        self.servers = dict(servers)
        self.router = router

    def environment(self, profile: Profile) -> EngineEnvironment:
        """Return what is known of the servers' vLLM. Raises UsageError when their versions differ."""
        versions = {server.version for server in self.servers.values()}
        if len(versions) > 1:
            found = ", ".join(sorted(version or "one that does not tell" for version in versions))
            raise UsageError(f"the servers run different versions of vLLM ({found}); judge them one by one")
        offered = [server.surfaces for server in self.servers.values()]
        surfaces = {name: all(of[name] for of in offered) for name in (*_PROBED, SERVER_INFO)}
        known = {"vllm": next(iter(versions)), "surfaces": surfaces}
        return EngineEnvironment.unknown(profile.engine.device).model_copy(update=known)

    def require_fit(self, plan: Plan, profile: Profile, works: Sequence[CellWork] | None = None) -> None:
        """Raise UsageError unless the cells are one method's on the pair, and one method's on the single server, and
        the servers have the settings of the profile, as far as they say. ``works`` are the requests of the cells, which
        say what they need; without, every setting counts."""
        for topology, roles in (("pd", ("prefill", "decode")), ("single", ("single",))):
            groups = [g for g in plan.groups if g.topology == topology]
            missing = [role for role in roles if role not in self.servers]
            if groups and missing:
                raise UsageError(
                    f"{', '.join(groups[0].cell_ids)} needs --{' and --'.join(missing)}; name the server, or select "
                    "other cells (--cell)"
                )
            if len(groups) > 1:
                raise UsageError(
                    "servers run one method, and the selected cells are of several "
                    f"({', '.join(g.id for g in groups)}); select those of the servers' method with --cell"
                )
            if not groups and not missing:
                named = " and ".join(f"--{server.option}" for role, server in self.servers.items() if role in roles)
                raise UsageError(f"{named} can answer none of the selected cells; select others with --cell")
        routed = [c.id for g in plan.groups for c in g.cells if c.routed]
        if routed and self.router is None:
            raise UsageError(
                f"{routed[0]} needs --router, the address of a router that runs in front of the pair; add it, or "
                "leave *-router out with --cell"
            )
        if not routed and self.router is not None:
            raise UsageError("--router can answer none of the selected cells; select *-router, too, with --cell")
        self._require_settings(plan, profile, works)

    def _require_settings(self, plan: Plan, profile: Profile, works: Sequence[CellWork] | None) -> None:
        """Raise UsageError that names every setting of every server that is not the profile's."""
        found: dict[str, list[str]] = {}
        for group in plan.groups:
            part = profile.part(group.variant)
            mine = [w for w in works if w.cell in group.cells] if works is not None else None
            needs = Needs.of(mine, part.workload.max_tokens) if mine is not None else None
            for role in self._in_order(group):
                server = self.servers[role]
                others = found.setdefault(f"--{server.option} {server.url}", [])
                others += server.info.differences(part, group.method_of(role), role, needs)
        if said := [
            f"{which}: expected the settings of the profile: {'; '.join(o)}" for which, o in found.items() if o
        ]:
            raise UsageError(
                "\n".join(said) + "; start the "
                f"{'server' if len(said) == 1 else 'servers'} with them, or let `harness attach` write a profile that "
                "has the settings of the servers"
            )

    def _in_order(self, group: EngineGroup) -> list[Role]:
        """Return the roles of a group as their servers were named."""
        return [role for role in self.servers if role in group.roles]

    def on_trust(self, plan: Plan, profile: Profile) -> list[str]:
        """Return a sentence for each server that does not tell all settings on which judging relies."""
        sentences: dict[str, str] = {}
        for group in plan.groups:
            for role in self._in_order(group):
                server, part = self.servers[role], profile.part(group.variant)
                if untold := server.info.untold(part, group.method_of(role), role):
                    sentences[server.url] = (
                        f"--{server.option} {server.url}: taken on trust, since the server does not tell them: "
                        f"{', '.join(untold)}; start it with VLLM_SERVER_DEV_MODE=1"
                    )
        return list(sentences.values())

    def inventory(self, profile: Profile) -> Inventory:
        devices = tuple(Device(f"{_NODE}/{role}", _NODE, _GIB, n) for n, role in enumerate(self.servers))
        return Inventory(devices, {}, shared=True)

    @contextlib.contextmanager
    def places(
        self, group: EngineGroup, profile: Profile, environment: EngineEnvironment, placement: Placement
    ) -> Iterator[Places]:
        yield {role: AttachedPlace(self.servers[role], self.router) for role in group.roles}
