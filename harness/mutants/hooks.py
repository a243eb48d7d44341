"""Installs switchable patches in an engine's process, only on targets with the expected signature.

Modules are patched when the engine itself imports them, because importing the model runner into the API server would
cost seconds. A target with another signature than the patch was written for ends the process with one clear line.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

from harness.mutants import LOG_MARK, TOGETHER_VARIABLE
from harness.mutants.model import DECLARED

Runner = Literal["V1", "V2"]
Change = Callable[..., Any]


class MutantRefused(RuntimeError):
    """A mutant cannot be installed: it is unknown, not alone, or its target has another signature."""


class Patch(NamedTuple):
    """The change of one symbol for one mutant."""

    mutant: str
    module: str
    symbol: str
    """Dotted path inside the module."""
    parameters: tuple[str, ...]
    """Leading parameter names of the original that the patch relies on."""
    change: Change
    """Called in place of the original, with the original and an ``Active`` before the arguments."""
    runner: Runner | None = None
    """The model runner whose engines import the module; None: those of both."""
    by_drafter: bool = False
    """Whether an engine imports the module for one kind of drafter alone: of the fault's patches for which that is so,
    it needs one."""


class Active:
    """Tells whether a mutant is switched on right now, and logs when its code takes effect."""

    def __init__(self, mutant: str, switch: Switch) -> None:
        self._mutant = mutant
        self._switch = switch
        self._fired = -1

    def __call__(self) -> bool:
        return self._mutant in self._switch.on()

    def fired(self) -> None:
        """Log that the changed behaviour took effect, once for each time that the mutant was switched on."""
        if self._fired != self._switch.generation:
            self._fired = self._switch.generation
            say(f"fired {self._mutant}")


class Switch:
    """The set of mutants that are on: all installed ones, or those that a file names."""

    def __init__(self, installed: frozenset[str], path: str | None, together: bool) -> None:
        self._installed = installed
        self._path = Path(path) if path else None
        self._together = together
        self._seen: tuple[int, int] | None = None
        self._on: frozenset[str] = frozenset() if path else installed
        self.generation = 0
        """How often the file has changed the set."""
        if not path:
            self._require_alone(installed)

    def _require_alone(self, wanted: frozenset[str]) -> None:
        if len(wanted) > 1 and not self._together:
            raise MutantRefused(
                f"expected one injected fault at a time, found {', '.join(sorted(wanted))}; two at once hide each "
                f"other, so set {TOGETHER_VARIABLE}=1 if you want both"
            )

    def on(self) -> frozenset[str]:
        """Return the ids of the mutants that are on. Raises MutantRefused when the file names others than installed."""
        if self._path is None:
            return self._on
        try:
            stat = self._path.stat()
        except OSError:
            return frozenset()
        mark = (stat.st_ino, stat.st_mtime_ns)
        if mark != self._seen:
            wanted = frozenset(filter(None, self._path.read_text(encoding="utf-8").strip().split(",")))
            if wanted - self._installed:
                raise MutantRefused(
                    f"expected the switch file to name installed faults ({', '.join(sorted(self._installed))}), found "
                    f"{', '.join(sorted(wanted - self._installed))}"
                )
            self._require_alone(wanted)
            self._on, self._seen = wanted, mark
            self.generation += 1
        return self._on


PATCHES: list[Patch] = []


def patch(
    mutant: str,
    module: str,
    symbol: str,
    parameters: Sequence[str],
    runner: Runner | None = None,
    by_drafter: bool = False,
) -> Callable[[Change], Change]:
    """Declare a patch: the decorated function is called in place of the original."""

    def declare(change: Change) -> Change:
        PATCHES.append(Patch(mutant, module, symbol, tuple(parameters), change, runner, by_drafter))
        return change

    return declare


def say(text: str) -> None:
    """Write one marked line to the engine's log."""
    print(f"{LOG_MARK} {text} pid={os.getpid()}", file=sys.stderr, flush=True)


def refuse(text: str) -> None:
    """Log one line and end the process: an engine must not run with half a mutant."""
    say(f"refused: {text}")
    sys.stderr.flush()
    os._exit(70)


def parse_ids(text: str) -> tuple[str, ...]:
    """Return the mutant ids of a comma-separated list. Raises MutantRefused on an unknown one."""
    ids = tuple(filter(None, (part.strip() for part in text.split(","))))
    unknown = [i for i in ids if i not in DECLARED]
    if unknown:
        raise MutantRefused(f"expected injected faults ({', '.join(DECLARED)}), found {', '.join(unknown)}")
    return ids


_installed = False


def install_all(ids: str, switch_path: str | None, together: bool = False) -> None:
    """Install the named mutants in this process; modules that are not imported yet are patched when they are."""
    global _installed
    if _installed:
        return
    _installed = True
    try:
        wanted = parse_ids(ids)
        switch = Switch(frozenset(wanted), switch_path, together)
    except MutantRefused as error:
        refuse(str(error))
        return
    install_patches([p for p in PATCHES if p.mutant in wanted], switch)
    say(f"installed {','.join(wanted)}")


def install_patches(patches: Iterable[Patch], switch: Switch) -> None:
    """Install patches in this process, each as soon as its module is imported."""
    waiting: dict[str, list[Patch]] = {}
    for item in patches:
        if item.module in sys.modules:
            _install_or_end(sys.modules[item.module], [item], switch)
        else:
            waiting.setdefault(item.module, []).append(item)
    sys.meta_path.insert(0, _Finder(waiting, switch))


def _install_or_end(module: ModuleType, patches: Iterable[Patch], switch: Switch) -> None:
    for item in patches:
        try:
            install(module, item, Active(item.mutant, switch))
        except MutantRefused as error:
            refuse(str(error))


def install(module: ModuleType, item: Patch, active: Active) -> None:
    """Replace the patch's symbol in an imported module. Raises MutantRefused when it has another signature."""
    owner: Any = module
    *path, name = item.symbol.split(".")
    for part in path:
        owner = getattr(owner, part, None)
    where = f"{item.module}.{item.symbol}"
    missing = f"{item.mutant}: expected {where}({', '.join(item.parameters)}, ...), found "
    raw = inspect.getattr_static(owner, name, None) if owner is not None else None
    if raw is None:
        raise MutantRefused(f"{missing}no such symbol in this vLLM version; rewrite the fault for it")
    static = isinstance(raw, staticmethod)
    original = raw.__func__ if static else raw
    try:
        found = tuple(inspect.signature(original).parameters)
    except (TypeError, ValueError) as error:
        raise MutantRefused(f"{missing}something that is not callable") from error
    taken = inspect.signature(item.change).parameters.values()
    others = any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in taken)
    # The change has the original and an ``Active`` before the arguments.
    if found[: len(item.parameters)] != item.parameters or not (others or len(found) == len(taken) - 2):
        raise MutantRefused(f"{missing}({', '.join(found)}) in this vLLM version; rewrite the fault for it")

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return item.change(original, active, *args, **kwargs)

    setattr(owner, name, staticmethod(replacement) if static else replacement)
    say(f"bound {item.mutant} {where}")


class _Finder(importlib.abc.MetaPathFinder):
    """Patches modules right after they are executed."""

    def __init__(self, waiting: dict[str, list[Patch]], switch: Switch) -> None:
        self._waiting = waiting
        self._switch = switch

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        patches = self._waiting.pop(fullname, None)
        if patches is None:
            return None
        # Popped first, because the lookup below comes through here again and must find the real module.
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            refuse(f"{patches[0].mutant}: expected the module {fullname}, found none in this vLLM version")
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _install_or_end(module, patches, self._switch)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
