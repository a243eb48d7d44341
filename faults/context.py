"""A set of drills in progress."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from faults.leaks import Footprint, sweep
from faults.model import Drill, Result
from faults.results import Tried
from faults.verdict import lost
from harness.engines.environment import EngineEnvironment
from harness.util.progress import Reporter
from harness.workload.prepare import Prepared


class Context(NamedTuple):
    """What all runners of drills are given."""

    prepared: Prepared
    environment: EngineEnvironment
    engine_python: str | None
    """As named on the command line."""
    folder: Path
    reporter: Reporter
    mark: str
    """The mark of the set's processes; see ``faults.leaks``."""
    tried: Tried

    def add(self, result: Result) -> None:
        self.tried.add(result, self.reporter)

    def attempt(self, drill: Drill, run: Callable[[Footprint], Result]) -> None:
        """Run a drill, add its result, and end what it left. One that fails is lost; the remaining ones still run."""
        footprint = Footprint(self.mark)
        try:
            result = run(footprint)
        except Exception as error:
            result = lost(drill, f"{type(error).__name__}: {error}", footprint.left(0), drill.id)
        sweep(footprint)
        self.add(result)
