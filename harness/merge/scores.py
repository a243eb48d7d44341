"""Re-scored outputs of the parts as one run has them: each output once. They are read where they were recorded when
they are asked for: a run of a million observations has a quarter of a million of them, at 10 KB of memory each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from harness.history import RESCORE, Form, History, Observation
from harness.parts import rescored


class _Seen(NamedTuple):
    """What is kept of a re-scored output of a part."""

    cell: str
    key: str
    form: Form
    ordinal: int
    """Of the part's in this cell and form."""
    answered: bool


class _Place(NamedTuple):
    part: int
    form: Form
    ordinal: int
    answered: bool
    sequence: int


class ScoreIndex:
    """Which outputs each part re-scored, read once."""

    def __init__(self, histories: Sequence[History]) -> None:
        self._histories = tuple(histories)
        self._seen = [list(_seen(h)) for h in histories]
        self._last: tuple[int, Scores] | None = None

    def scores(self, first: int = 0) -> Scores:
        """Each distinct output's re-scoring: of several the first that was answered, those of the part ``first``
        before others."""
        if self._last is None or self._last[0] != first:
            order = sorted(range(len(self._histories)), key=lambda i: i != first)
            self._last = first, Scores(self._histories, [(i, self._seen[i]) for i in order])
        return self._last[1]


def _seen(history: History) -> Iterator[_Seen]:
    for ordinal, o in _numbered(history.of_scenario(RESCORE)):
        yield _Seen(o.cell, o.key, o.form, ordinal, rescored(o))


def _numbered(observations: Iterable[Observation]) -> Iterator[tuple[int, Observation]]:
    counts: Counter[tuple[str, str]] = Counter()
    for o in observations:
        yield counts[o.cell, o.form], o
        counts[o.cell, o.form] += 1


class Scores:
    """The re-scored outputs that count. ``sequence`` is their number."""

    def __init__(self, histories: Sequence[History], seen: Iterable[tuple[int, Iterable[_Seen]]]) -> None:
        self._histories = tuple(histories)
        kept: dict[tuple[str, str], _Place] = {}
        for part, items in seen:
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
