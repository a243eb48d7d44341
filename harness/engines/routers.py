"""The routers of a group: one that hands off between P and D, one in front of the answering engine alone, or both."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from harness.engines.api_key import ApiKey
from harness.engines.attached import AttachedRouter, Front
from harness.engines.client import Client
from harness.engines.launcher import Progress
from harness.engines.places import end_and_report
from harness.engines.router import Router
from harness.engines.router_program import program
from harness.history.records import EngineRecord
from harness.profiles.cells import EngineGroup, Role
from harness.supervision.ports import free_ports


class Routers:
    """Starts the routers that the cells of a group are asked through, and ends them."""

    def __init__(self, group: EngineGroup, logs: Path, key: ApiKey, timeout_s: float, progress: Progress) -> None:
        self._group_id = group.id
        self._logs = logs
        self._key = key
        self._timeout_s = timeout_s
        self._progress = progress
        self.running: list[Router | AttachedRouter] = []
        self.clients: dict[bool, Client] = {}
        """The clients, by whether their router hands off."""

    def start(self, engines: Mapping[Role, str], kinds: Collection[bool], attached: Front | None = None) -> None:
        """Start routers in front of engines at these URLs; each of ``kinds`` is whether a router hands off. Where one
        is ``attached``, which runs already and hands off, none is started.

        Raises EnvironmentFault when the program is not installed, EngineStartError when one does not become ready.
        """
        if attached is not None:
            self._attach(attached)
            return
        for hands_off in sorted(set(kinds), reverse=True):
            self._start(engines, hands_off)

    def _attach(self, front: Front) -> None:
        self.running.append(AttachedRouter(front.url))
        self.clients[True] = Client("decode", front.url, self._timeout_s, front.key, front.model)
        told = "" if front.lists_model else " (P's and D's name for it; only their counters show what the router does)"
        self._progress(f"{self._group_id}: attached to router, {front.url}, model {front.model}{told}")

    def _start(self, engines: Mapping[Role, str], hands_off: bool) -> None:
        answering = "decode" if "decode" in engines else "single"
        roles = ("prefill", answering) if hands_off else (answering,)
        urls = {role: url for role, url in engines.items() if role in roles}
        name = f"{self._group_id}.router" + ("" if hands_off else "-single")
        program()
        port, metrics = free_ports(2)
        router = Router(urls, port, metrics, self._logs / f"{name}.log", self._key)
        self.running.append(router)
        router.__enter__()
        role: Role = "decode" if hands_off else "single"
        self.clients[hands_off] = Client(role, router.url, self._timeout_s, self._key)
        self._progress(f"{self._group_id}: started router, pid {router.pid}, {router.url}")

    def require_alive(self) -> None:
        """Raise EngineDiedError when a router is gone."""
        for router in self.running:
            router.require_alive()

    def records(self) -> list[EngineRecord]:
        """Return how the routers were started, for the provenance of a run."""
        return [router.record(self._group_id) for router in self.running]

    def end(self) -> list[str]:
        """Close the connections and end the routers; return descriptions of what is left of them."""
        for client in self.clients.values():
            client.close()
        left = [words for router in self.running for words in end_and_report("the router", router.end)]
        self.running.clear()
        return left
