"""The parts' re-scored outputs, each output once, as in a single run."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from harness.commands.merge.shards import rescored
from harness.history.folder import History, HistoryWriter, read_cells
from harness.history.index import RecordedCells
from harness.history.records import RESCORE


class ScoreIndex:
    """Chooses one re-scoring of each distinct output; the chosen ones are in temporary files while this exists, because
    those of large parts do not fit into memory."""

    def __init__(self, histories: Sequence[History]) -> None:
        self._histories = tuple(histories)
        temporary = TemporaryDirectory(prefix="harness-scores-")
        weakref.finalize(self, temporary.cleanup)
        self._folder = Path(temporary.name)
        self._known: dict[int, RecordedCells] = {}

    def scores(self, first: int = 0) -> RecordedCells:
        """Return the first re-scoring of each output that was answered, with the part ``first`` before the others."""
        if first not in self._known:
            folder = self._folder / str(first)
            self._write(folder, first)
            self._known[first] = read_cells(folder)
        return self._known[first]

    def _write(self, folder: Path, first: int) -> None:
        chosen: dict[tuple[str, str], tuple[int, bool]] = {}
        for part in sorted(range(len(self._histories)), key=lambda i: i != first):
            for o in self._histories[part].of_scenario(RESCORE):
                answered = rescored(o)
                known = chosen.get((o.cell, o.key))
                if known is None or (answered and not known[1]):
                    chosen[o.cell, o.key] = part, answered
        number = {output: n for n, output in enumerate(chosen)}
        with HistoryWriter(folder) as writer:
            for part, history in enumerate(self._histories):
                for o in history.of_scenario(RESCORE):
                    if chosen.get((o.cell, o.key)) == (part, rescored(o)):
                        del chosen[o.cell, o.key]
                        writer.append(o.model_copy(update={"sequence": number[o.cell, o.key]}))
