"""Choose which recording of a cell counts, and find recordings that contradict each other."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from harness.commands.merge.expected_run import ExpectedRun, Loaded
from harness.commands.merge.shards import Completeness, contradictions, evidence_of, rescored
from harness.history.folder import History, HistoryWriter, read_cells
from harness.history.index import RecordedCells
from harness.history.records import COLD, RESCORE


class Holdings:
    """How much evidence each part holds of each cell. Cached, since finding out may parse the cell from disk."""

    def __init__(self, histories: Sequence[History]) -> None:
        self.histories = tuple(histories)
        self._known: dict[tuple[int, str], Completeness] = {}

    def of(self, part: int, cell: str) -> Completeness:
        if (part, cell) not in self._known:
            self._known[part, cell] = evidence_of(self.histories[part], cell)
        return self._known[part, cell]


def choose(holdings: Holdings, preferred: Mapping[str, int] | None = None) -> dict[str, int]:
    """Return the index of the history whose recording counts, by cell.

    That is the preferred one if it has the cell, else the most complete one, and on a tie the earliest.
    """
    out: dict[str, int] = {}
    histories = holdings.histories
    for cell in dict.fromkeys(c.cell for h in histories for c in h.run.cells):
        having = [i for i, h in enumerate(histories) if h.cell(cell) is not None]
        favourite = (preferred or {}).get(cell)
        best = max(having, key=lambda i: (holdings.of(i, cell), -i))
        out[cell] = favourite if favourite in having else best
    return out


def compare_duplicates(
    parts: Sequence[Loaded], chosen: Mapping[str, int], expected: ExpectedRun
) -> tuple[list[str], list[str]]:
    """Return contradictions between recordings of the same cell, and a notice for each set of duplicated cells.

    Contradictions exist only in the bitwise tier, in which equal runs give equal results.
    """
    groups: dict[tuple[int, tuple[int, ...]], list[str]] = {}
    contradicted: list[str] = []
    judging = expected.profile.judging
    near = judging.near_tie_assumed(expected.profile.engine.dtype)
    for cell, best in chosen.items():
        others = tuple(i for i, p in enumerate(parts) if i != best and p.history.cell(cell) is not None)
        if others:
            groups.setdefault((best, others), []).append(cell)
        for i in others if judging.tier == "bitwise" else ():
            contradicted += [
                f"{cell}: {c.differing} of {c.compared} {_requests(c.scenario)} gave different tokens or "
                f"accepted drafts in {parts[i].run.run_id} than in {parts[best].run.run_id}: equal runs differ, so it "
                "cannot pass"
                for c in contradictions(parts[best].history, parts[i].history, cell, near)
            ]
    notices = [
        f"{', '.join(cells)}: recorded by {len(others) + 1} parts; that of {parts[best].run.run_id} counts "
        "(the most complete one, and on a tie the earliest)"
        for (best, others), cells in groups.items()
    ]
    if judging.tier == "bitwise":
        contradicted += _scored_differently([p.history for p in parts], near)
    return contradicted, notices


def _requests(scenario: str) -> str:
    return "cold prompts" if scenario == COLD else f"requests of {scenario}"


def _scored_differently(histories: Sequence[History], near_tie_nats: float) -> list[str]:
    """Return a sentence for each plain engine that scored an output as right in one part and wrong in another."""
    # Bit 1 for right, bit 2 for wrong: compact, since there are very many outputs.
    said: dict[tuple[str, str], int] = {}
    for history in histories:
        for o in history.of_scenario(RESCORE):
            if rescored(o) and o.final is not None:
                wrong = any(gap > near_tie_nats for gap in o.final.rescored or ())
                said[o.cell, o.key] = said.get((o.cell, o.key), 0) | (2 if wrong else 1)
    count = Counter(cell for (cell, _), answers in said.items() if answers == 3)
    return [
        f"{cell}: {n} outputs were right in one part and wrong in another when they were re-scored: equal runs "
        "differ, so it cannot pass"
        for cell, n in count.items()
    ]


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
