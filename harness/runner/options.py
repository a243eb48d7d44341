"""Options of a run that are not part of its profile."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from harness.engines.environment import EngineEnvironment
from harness.engines.executor import Executor
from harness.engines.flags import NO_FLAGS, EngineFlags
from harness.history.folder import History

Watch = Callable[[History], str | None]
"""Gets the cells of a group of engines as soon as all of them are recorded; returns why no further group is to be
started, or None."""

BeforeEnding = Callable[[tuple[History, ...]], None]
"""Gets what was recorded, a history for each repetition, when a signal ends the run."""


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
    watch: Watch | None = None
    """Called for each group but the last, while the next one starts, or before that if ``decides``."""
    decides: bool = False
    """Whether ``watch`` is waited for, since it may end the run."""
    before_ending: BeforeEnding | None = None
    """Called before the engines are ended, which may take longer than whoever sent the signal waits."""
    must_start: bool = False
    """Whether the run ends when the first engines that it starts do not become ready: an argument of theirs is wrong,
    and the others have it too."""
    flags: EngineFlags = NO_FLAGS
    """What the user adds to engines."""
    environment: EngineEnvironment | None = None
    """That of the engines, if it was asked for already."""


DEFAULTS = RunOptions()
