"""The interface through which deliberate defects enter a group of engines. No defect is known here by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from harness.engines.client import Client
from harness.engines.request import Exchange
from harness.profiles.cells import Role
from harness.profiles.model import Profile


class Mutation:
    """The mutation that changes nothing. ``harness.mutants.install`` derives from it to put mutants into a group."""

    def installed(self, role: Role) -> tuple[str, ...]:
        """Return the ids of the mutants in the engine of a role, for the record."""
        return ()

    def environment(self, role: Role, engine_prefix: str) -> dict[str, str]:
        """Return variables for the engine of a role, whose Python has this prefix."""
        return {}

    def exchange(self, clients: Mapping[Role, Client], profile: Profile, routers: Mapping[bool, Client]) -> Exchange:
        """Return the object that sends the group's requests."""
        return Exchange(clients, profile, routers)

    def routers(self, kinds: Collection[bool]) -> Collection[bool]:
        """Return the kinds of routers to start, given those that the cells need; a kind is whether it hands off."""
        return kinds

    def require_not_refused(self, group_id: str, role: Role, log: str) -> None:
        """Raise MutantRefusedError when the log of an ended engine says that a mutant refused to be installed."""

    def require_installed(self, group_id: str, logs: Mapping[Role, str]) -> None:
        """Raise MutantRefusedError when a running engine lacks a defect that it should have."""

    def switch(self, mutants: Collection[str]) -> None:
        """Turn these mutants on and all others off, while the engines run."""
