"""Putting mutants into the engines of a group, and switching them on and off while the engines run."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from importlib.metadata import distribution
from pathlib import Path
from typing import NamedTuple

from harness.config import REPOSITORY
from harness.engine.command import Role
from harness.errors import UsageError
from harness.mutants import ARM_VARIABLE, LOG_MARK, SWITCH_VARIABLE, TOGETHER_VARIABLE
from harness.mutants.catalogue import MUTANTS

_ENTRY_POINT = "[vllm.general_plugins]\nkv_harness_mutants = harness.mutants:register\n"


def require_known(ids: Sequence[str]) -> None:
    """Raise UsageError naming the first id that is no mutant."""
    for mutant in ids:
        if mutant not in MUTANTS:
            raise UsageError(f"expected the id of a mutant ({', '.join(MUTANTS)}), found {mutant!r}")


def require_alone(ids: Sequence[str], together: bool) -> None:
    """Raise UsageError when several mutants are asked for at once without saying that this is meant."""
    if len(set(ids)) > 1 and not together:
        raise UsageError(
            f"expected one mutant at a time, found {', '.join(ids)}: two at once hide each other. Try them one by one "
            "with `harness selftest`, or add --together if you mean it"
        )


def roles_of(mutant: str, pair: bool) -> tuple[Role, ...]:
    """The engines that get a mutant's patches; none for mutants of the client or of the command line."""
    place = MUTANTS[mutant].place
    if place in ("client", "command"):
        return ()
    if not pair:
        return ("single",)
    if place == "both":
        return ("prefill", "decode")
    return ("prefill",) if place == "prefill" else ("decode",)


class Arming:
    """Which mutants each engine of a group carries. Each has a switch file; all are off until switched on."""

    def __init__(self, mutants: Sequence[str], pair: bool, folder: Path, together: bool = False) -> None:
        require_known(mutants)
        self._mutants = tuple(mutants)
        self._together = together
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.by_role: dict[Role, tuple[str, ...]] = {}
        for mutant in mutants:
            for role in roles_of(mutant, pair):
                self.by_role[role] = (*self.by_role.get(role, ()), mutant)
        self.switch(())

    @property
    def forgets_prefill(self) -> bool:
        """Whether a router is needed that knows of D alone (N6)."""
        return "N6" in self._mutants

    def _file(self, role: Role) -> Path:
        return self._folder / f"switch.{role}"

    def environment(self, role: Role, plugin_folder: Path | None) -> dict[str, str]:
        """Variables for the engine of ``role``; empty when it carries no mutant."""
        if role not in self.by_role:
            return {}
        env = {ARM_VARIABLE: ",".join(self.by_role[role]), SWITCH_VARIABLE: str(self._file(role))}
        if self._together:
            env[TOGETHER_VARIABLE] = "1"
        if plugin_folder is not None:
            paths = [str(plugin_folder), str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
            env["PYTHONPATH"] = os.pathsep.join(p for p in paths if p)
        return env

    def switch(self, mutants: Collection[str]) -> None:
        """Turn mutants on, and all others off, in every engine that carries them. Files are replaced in one step."""
        for role, carried in self.by_role.items():
            temporary = self._folder / f".switch.{role}"
            temporary.write_text(",".join(m for m in carried if m in mutants), encoding="utf-8")
            temporary.replace(self._file(role))


def plugin_folder(engine_prefix: str, folder: Path) -> Path | None:
    """A folder for PYTHONPATH that declares the plugin to an engine Python in which this project is not installed.

    None when the engine's Python is this one, which has the entry point already.
    """
    import sys

    if engine_prefix == sys.prefix and any(
        e.group == "vllm.general_plugins" for e in distribution("kv-acceptance-harness").entry_points
    ):
        return None
    info = folder / "kv_harness_mutants-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kv-harness-mutants\nVersion: 0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(_ENTRY_POINT, encoding="utf-8")
    return folder


class Marks:
    """What the mutant package wrote into an engine's log."""

    def __init__(self, log: str) -> None:
        lines = [line.partition(LOG_MARK)[2].strip() for line in log.splitlines() if LOG_MARK in line]
        self.refused = [line.removeprefix("refused: ").rpartition(" pid=")[0] for line in lines if "refused" in line]
        self.bound = {tuple(line.split()[1:3]) for line in lines if line.startswith("bound ")}
        """(mutant, target) of each patch that was installed."""
        self.fired = [line.split()[1] for line in lines if line.startswith("fired ")]


class Unbound(NamedTuple):
    """A patch that an engine never installed."""

    mutant: str
    target: str
    role: Role


def unbound(arming: Arming, logs: Mapping[Role, str]) -> list[Unbound]:
    """Patches of armed mutants of which an engine says nothing: their targets were never imported there."""
    import harness.mutants.patches  # noqa: F401  (declares the patches)
    from harness.mutants.hooks import PATCHES

    out = []
    for role, carried in arming.by_role.items():
        bound = Marks(logs.get(role, "")).bound
        for item in PATCHES:
            target = f"{item.module}.{item.symbol}"
            if item.mutant in carried and (item.mutant, target) not in bound:
                out.append(Unbound(item.mutant, target, role))
    return out
