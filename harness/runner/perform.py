"""Send all requests of a cell to its running engines."""

from __future__ import annotations

from collections.abc import Iterator

from harness.engines.session import EngineGroupSession
from harness.history.records import Observation
from harness.runner.play import Player
from harness.workload.cells import CellWork


def perform(session: EngineGroupSession, work: CellWork) -> Iterator[Observation]:
    """Send all requests of a cell, one request or stage at a time, and yield the observations. Raises EngineDiedError
    when an engine of the group died."""
    sequence = 0
    for item in work.items:
        yield session.observe(work.cell, item.prompt, item.form, sequence)
        sequence += 1
    player = Player(session, work.cell)
    for script in work.scripts:
        for observation in player.play(script, sequence):
            yield observation
            sequence += 1
