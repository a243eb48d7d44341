"""Options of a run that are not part of its profile."""

from __future__ import annotations

from typing import NamedTuple

from harness.engines.executor import Executor


class RunOptions(NamedTuple):
    """Choices about a run besides its profile: where engines run, and which mutants are enabled."""

    engine_python: str | None = None
    """Python interpreter for the engines; None means the harness's own."""
    executor: Executor | None = None
    """Where engines are placed; None means this machine."""
    mutants: tuple[str, ...] = ()
    """Mutants (fault injections) enabled for the whole run."""
    together: bool = False
    """Whether several mutants may be enabled at the same time."""


DEFAULTS = RunOptions()
