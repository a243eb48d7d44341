"""The chosen recordings of several parts as one lazy sequence, since parts may be larger than memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from harness.commands.merge.score_index import Scores
from harness.history.folder import History
from harness.history.index import CellRows, Lazy
from harness.history.records import RESCORE, Observation

_NOTHING: CellRows[Observation] = CellRows({}, [])


class MergedObservations(Lazy[Observation]):
    """The observations of each cell's chosen part, part after part, followed by the scores."""

    def __init__(self, histories: Sequence[History], chosen: Mapping[str, int], scores: Scores) -> None:
        self._histories = tuple(histories)
        self._chosen = dict(chosen)
        self._scores = scores
        self._last: tuple[str, CellRows[Observation]] | None = None

    def __iter__(self) -> Iterator[Observation]:
        for i, history in enumerate(self._histories):
            for o in history.observations:
                if o.scenario != RESCORE and self._chosen.get(o.cell) == i:
                    yield o
        yield from self._scores

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __bool__(self) -> bool:
        return next(iter(self), None) is not None

    def of_scenario(self, scenario: str) -> Iterator[Observation]:
        return (o for o in self if o.scenario == scenario) if scenario != RESCORE else iter(self._scores)

    def of_cell(self, cell: str) -> CellRows[Observation]:
        # Cached because each check of a cell asks for it.
        last = self._last
        if last is None or last[0] != cell:
            self._last = last = cell, self._rows(cell)
        return last[1]

    def _rows(self, cell: str) -> CellRows[Observation]:
        number = self._chosen.get(cell)
        rows = self._histories[number].of_cell(cell) if number is not None else _NOTHING
        scores = sorted(self._scores.of_cell(cell), key=lambda o: o.sequence)
        by_place = {place: found for place, found in rows.by_place.items() if place[1] != RESCORE}
        for o in scores:
            by_place.setdefault((o.form, o.scenario), []).append(o)
        ordered = [*(o for o in rows.ordered if o.scenario != RESCORE), *scores]
        return CellRows(by_place, sorted(ordered, key=lambda o: o.sequence))
