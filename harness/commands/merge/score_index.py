"""Index of the parts' re-scored outputs, each output once, as in a single run.

The outputs themselves are read from the parts on demand, because a large run's do not fit into memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from harness.commands.merge.shards import rescored
from harness.history.folder import History
from harness.history.records import RESCORE, Form, Observation


class _Entry(NamedTuple):
    """A part's re-scored output, in the index."""

    cell: str
    key: str
    form: Form
    ordinal: int
    """Position among the part's re-scored outputs of this cell and form."""
    answered: bool


class _Place(NamedTuple):
    """The part that an output is read from, and where; ``sequence`` is its number in the merged run."""

    part: int
    form: Form
    ordinal: int
    answered: bool
    sequence: int


class ScoreIndex:
    """The outputs that each part re-scored, read once."""

    def __init__(self, histories: Sequence[History]) -> None:
        self._histories = tuple(histories)
        self._entries = [list(_entries(h)) for h in histories]
        self._last: tuple[int, Scores] | None = None

    def scores(self, first: int = 0) -> Scores:
        """Return one re-scoring of each distinct output: the first that was answered, with the part ``first`` first."""
        if self._last is None or self._last[0] != first:
            order = sorted(range(len(self._histories)), key=lambda i: i != first)
            self._last = first, Scores(self._histories, [(i, self._entries[i]) for i in order])
        return self._last[1]


def _entries(history: History) -> Iterator[_Entry]:
    for ordinal, o in _numbered(history.of_scenario(RESCORE)):
        yield _Entry(o.cell, o.key, o.form, ordinal, rescored(o))


def _numbered(observations: Iterable[Observation]) -> Iterator[tuple[int, Observation]]:
    counts: Counter[tuple[str, str]] = Counter()
    for o in observations:
        yield counts[o.cell, o.form], o
        counts[o.cell, o.form] += 1


class Scores:
    """The re-scored outputs that count, with ``sequence`` as their number."""

    def __init__(self, histories: Sequence[History], entries: Iterable[tuple[int, Iterable[_Entry]]]) -> None:
        self._histories = tuple(histories)
        kept: dict[tuple[str, str], _Place] = {}
        for part, items in entries:
            for s in items:
                known = kept.get((s.cell, s.key))
                if known is None:
                    kept[s.cell, s.key] = _Place(part, s.form, s.ordinal, s.answered, len(kept))
                elif s.answered and not known.answered:
                    kept[s.cell, s.key] = _Place(part, s.form, s.ordinal, True, known.sequence)
        self._kept = kept
        self._parts: dict[str, set[int]] = {}
        for (cell, _), place in kept.items():
            self._parts.setdefault(cell, set()).add(place.part)

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Observation]:
        for part, history in enumerate(self._histories):
            for ordinal, o in _numbered(history.of_scenario(RESCORE)):
                yield from self._chosen(part, ordinal, o)

    def of_cell(self, cell: str) -> Iterator[Observation]:
        for part in sorted(self._parts.get(cell, ())):
            for (_, scenario), rows in self._histories[part].of_cell(cell).by_place.items():
                for ordinal, o in enumerate(rows) if scenario == RESCORE else ():
                    yield from self._chosen(part, ordinal, o)

    def _chosen(self, part: int, ordinal: int, o: Observation) -> Iterator[Observation]:
        place = self._kept.get((o.cell, o.key))
        if place is not None and place[:3] == (part, o.form, ordinal):
            yield o.model_copy(update={"sequence": place.sequence})
