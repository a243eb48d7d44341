"""Cores of this machine, claimed so that engines do not share one, whoever started them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from harness.errors import EngineStartError
from harness.supervision import procfs
from harness.util import file_lock


def claimed(cores: Iterable[int]) -> list[int]:
    """Return those of ``cores`` that some engine has, of this harness or of another one of this user."""
    return [core for core in cores if file_lock.held(procfs.folder_path() / _name(core))]


def _name(core: int) -> str:
    return f"core-{core}"


def claim_file(name: str, what: str, folder: Path | None = None) -> int | None:
    """Lock the file of a claim, by default in the folder of ledgers; return its descriptor, or None if others hold it.
    Raises EngineStartError, naming ``what`` is claimed, when there is no folder for claims."""
    try:
        return file_lock.claim((folder or procfs.state_folder()) / name)
    except OSError as error:
        raise EngineStartError(f"expected to claim {what} for an engine, but that failed: {error}") from error


class Cores:
    """The cores of one engine, claimed by locks on files.

    Ray counts cores but does not assign particular ones, several nodes of a cluster may be one machine, and several
    harnesses may run at once. A claim ends with the processes that hold it: the harness, and the engine's supervisor.
    The files lie in the folder of ledgers, where nobody else can replace them by links.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._held: list[int] = []

    def claim(self, count: int) -> tuple[str, ...]:
        """Claim ``count`` free cores and return their numbers; claim none and return an empty tuple when there are too
        few, which leaves the choice to vLLM. Raises EngineStartError when there is no folder for claims."""
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
        handle = claim_file(_name(core), f"core {core}", self._folder)
        if handle is None:
            return False
        self._held.append(handle)
        return True

    @property
    def handles(self) -> tuple[int, ...]:
        """The descriptors of the claims, for the supervisor, which holds them too."""
        return tuple(self._held)

    def release(self) -> None:
        """Release all claimed cores."""
        while self._held:
            procfs.drop_claim(self._held.pop())
