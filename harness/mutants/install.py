"""Puts mutants into the engines of a group, and switches them on and off while the engines run."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from harness.engines.client import Client
from harness.engines.log_facts import model_runner
from harness.engines.mutation import Mutation
from harness.errors import MutantRefusedError, UsageError
from harness.mutants import LOG_MARK, MUTANTS_VARIABLE, SWITCH_VARIABLE, TOGETHER_VARIABLE
from harness.mutants.catalogue import MUTANTS
from harness.mutants.exchange import MutatedExchange
from harness.mutants.hooks import PATCHES, Patch
from harness.profiles.cells import EngineGroup, Role
from harness.profiles.methods import NoSpeculation
from harness.profiles.model import Profile
from harness.util.paths import IMPORT_ROOT

PLUGIN_FOLDER = Path(__file__).resolve().parent / "plugin"
"""Declares this package to vLLM as a plugin, in engines that have it on their Python path and in no others."""


def require_known(ids: Sequence[str]) -> None:
    """Raise UsageError naming the first id that is not a mutant's."""
    for mutant in ids:
        if mutant not in MUTANTS:
            raise UsageError(f"expected an injected fault ({', '.join(MUTANTS)}), found {mutant!r}")


def require_alone(ids: Sequence[str], together: bool) -> None:
    """Raise UsageError when several mutants are requested without ``together``."""
    if len(set(ids)) > 1 and not together:
        raise UsageError(
            f"expected one injected fault at a time, found {', '.join(ids)}: two at once hide each other. Try them one "
            "by one with `harness selftest`, or add --together"
        )


def patched_roles(mutant: str, pair: bool) -> tuple[Role, ...]:
    """Return the roles whose engines get a mutant's patches; empty for mutants of the client or command line."""
    place = MUTANTS[mutant].place
    if place in ("client", "command"):
        return ()
    if not pair:
        return ("single",)
    if place == "both":
        return ("prefill", "decode")
    return ("prefill",) if place == "prefill" else ("decode",)


class EnabledMutants(Mutation):
    """The mutants that a group of engines carries. Each engine has a switch file; all mutants are off at first."""

    def __init__(self, mutants: Sequence[str], pair: bool, folder: Path, together: bool = False) -> None:
        require_known(mutants)
        self._mutants = tuple(mutants)
        self._together = together
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.by_role: dict[Role, tuple[str, ...]] = {}
        for mutant in mutants:
            for role in patched_roles(mutant, pair):
                self.by_role[role] = (*self.by_role.get(role, ()), mutant)
        self.switch(())

    def _file(self, role: Role) -> Path:
        return self._folder / f"switch.{role}"

    def installed(self, role: Role) -> tuple[str, ...]:
        return self.by_role.get(role, ())

    def environment(self, role: Role, engine_prefix: str) -> dict[str, str]:
        """Return variables for the engine of a role; empty when it carries no mutant."""
        if role not in self.by_role:
            return {}
        env = {MUTANTS_VARIABLE: ",".join(self.by_role[role]), SWITCH_VARIABLE: str(self._file(role))}
        if self._together:
            env[TOGETHER_VARIABLE] = "1"
        # An engine of another environment has no harness.
        paths = [str(PLUGIN_FOLDER), *([str(IMPORT_ROOT)] if engine_prefix != sys.prefix else [])]
        return {**env, "PYTHONPATH": os.pathsep.join(paths)}

    def exchange(
        self, clients: Mapping[Role, Client], profile: Profile, routers: Mapping[bool, Client]
    ) -> MutatedExchange:
        return MutatedExchange(clients, profile, routers, lambda mutant: mutant in self._on)

    def routers(self, kinds: Collection[bool]) -> Collection[bool]:
        """Return the kinds of routers to start: N6 needs one that knows only D, beside the one that hands off."""
        return {*kinds, False} if True in kinds and "N6" in self._mutants else kinds

    def require_not_refused(self, group_id: str, role: Role, log: str) -> None:
        refused = Marks(log).refused
        if not refused:
            return
        carried = self.installed(role)
        ids = tuple(m for m in carried if any(line.startswith(f"{m}:") for line in refused))
        raise MutantRefusedError(
            f"an injected fault refused the {role} engine of {group_id}: {refused[0]}", ids or carried
        )

    def require_installed(self, group_id: str, logs: Mapping[Role, str]) -> None:
        """Raise MutantRefusedError when a mutant found nothing to patch, because no check could catch it."""
        missing = unbound(self, logs)
        if missing:
            words = ", ".join(f"{m.mutant} ({m.target}) in the {m.role} engine" for m in missing)
            raise MutantRefusedError(
                f"an injected fault of {group_id} did not reach all of its targets ({words}): this engine does not "
                "import the module that the fault changes",
                tuple(dict.fromkeys(m.mutant for m in missing)),
            )

    def switch(self, mutants: Collection[str]) -> None:
        """Turn mutants on, and all others off, in every engine that carries them. Files are replaced atomically."""
        self._on = frozenset(mutants)
        for role, carried in self.by_role.items():
            temporary = self._folder / f".switch.{role}"
            temporary.write_text(",".join(m for m in carried if m in mutants), encoding="utf-8")
            temporary.replace(self._file(role))


def with_mutants(
    group: EngineGroup, profile: Profile, mutants: Sequence[str], folder: Path, together: bool
) -> tuple[EngineGroup, Mutation]:
    """Return the group as changed by the mutants, and the mutation that puts them into its engines.

    ``folder`` takes the switch files. Raises UsageError for an unknown mutant.
    """
    if not mutants:
        return group, Mutation()
    if "M10" in mutants and group.topology == "pd":
        plain = next((m for m in profile.methods if m.kind == "none"), NoSpeculation(kind="none"))
        group = group._replace(prefill_method=plain)
    return group, EnabledMutants(mutants, group.topology == "pd", folder, together)


class Marks:
    """The lines that this package wrote to an engine's log, parsed."""

    def __init__(self, log: str) -> None:
        lines = [line.partition(LOG_MARK)[2].strip() for line in log.splitlines() if LOG_MARK in line]
        self.refused = [line.removeprefix("refused: ").rpartition(" pid=")[0] for line in lines if "refused" in line]
        self.bound = {tuple(line.split()[1:3]) for line in lines if line.startswith("bound ")}
        """The mutant and the target of each patch that was installed."""
        self.fired = [line.split()[1] for line in lines if line.startswith("fired ")]


class Unbound(NamedTuple):
    """A patch that an engine never installed."""

    mutant: str
    target: str
    role: Role


def unbound(enabled: EnabledMutants, logs: Mapping[Role, str]) -> list[Unbound]:
    """Return the patches that an engine's log does not mention: their targets were never imported there. Those of the
    other model runner are not wanted, unless there is none of the engine's own, nor those of other drafters."""
    out = []
    for role, carried in enabled.by_role.items():
        log = logs.get(role, "")
        bound, runner = Marks(log).bound, model_runner(log)
        for mutant in carried:
            mine = [p for p in PATCHES if p.mutant == mutant]
            mine = [p for p in mine if p.runner in (None, runner)] or mine
            found = [p for p in mine if (mutant, target_of(p)) in bound]
            drafters = any(p.by_drafter for p in found)
            out += [
                Unbound(mutant, target_of(p), role) for p in mine if p not in found and not (p.by_drafter and drafters)
            ]
    return out


def target_of(patch: Patch) -> str:
    return f"{patch.module}.{patch.symbol}"
