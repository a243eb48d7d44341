"""Judge the recordings that do not count, too, so that a retry is not a second chance."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from harness.commands.merge.assemble import assemble
from harness.commands.merge.expected_run import Loaded, MergeOptions
from harness.commands.merge.selection import Holdings, ScoreIndex
from harness.commands.merge.shards import Completeness
from harness.history.folder import History
from harness.history.index import RecordedCells
from harness.history.records import COLD, RESCORE, RunRecord
from harness.history.verdict import Verdict, worst
from harness.judging.checks.registry import evidence_for, judge_cells
from harness.judging.findings import Finding, Judgement
from harness.judging.known_defects import apply_known
from harness.judging.references import baselines_for, known_of
from harness.profiles.known_defects import load_known


def findings_in_duplicates(
    parts: Sequence[Loaded],
    holdings: Holdings,
    scores: ScoreIndex,
    chosen: Mapping[str, int],
    run: RunRecord,
    out: Path,
    wanted: MergeOptions,
) -> list[str]:
    """Return a sentence for each recording that does not count and would fail in the place of the one that counts.

    Missing evidence does not fail it: filling that in is what duplicates are for.
    """
    histories = [p.history for p in parts]
    recorded = [
        (i, cell)
        for cell, best in chosen.items()
        for i, h in enumerate(histories)
        if i != best and any(o.scenario != RESCORE for o in h.in_order(cell))
    ]
    if not recorded:
        return []
    whole = History(folder=out, run=run, observations=(), own=wanted.expect is not None)
    baselines = baselines_for(whole, wanted.baselines)
    known = load_known(wanted.known or known_of(whole))
    together = list(_judged_together(holdings, recorded))
    notices: dict[int, list[str]] = {}
    # Sorted by part, because the scores of a part are first in all its substituted runs, and are cached.
    for at in sorted(range(len(together)), key=lambda n: together[n][0]):
        i, cells = together[at]
        substituted = _substituted(holdings, scores.scores(i), chosen, run, out, i, cells)
        evidence = evidence_for(substituted, baselines)
        verdicts = judge_cells(evidence, parts[i].stages, cells)
        judgement = Judgement(run_id=run.run_id, verdict=Verdict.UNKNOWN, cells=verdicts)
        notices[at] = [
            f"{item.cell}: {', '.join(f'{name} {verdict}' for name, verdict in found)}"
            + (f" in {item.scenario}" if item.scenario != COLD else "")
            + f" in the recording of {parts[i].run.run_id}, which does not count; an intermittent defect gets no "
            "second chance, so it cannot pass"
            for item in apply_known(judgement, known, substituted).cells
            if (found := [(r.check, _shown(r.findings)) for r in item.results if any(map(_is_wrong, r.findings))])
        ]
    return [notice for at in sorted(notices) for notice in notices[at]]


def _judged_together(holdings: Holdings, recorded: Iterable[tuple[int, str]]) -> Iterable[tuple[int, list[str]]]:
    """Yield, with their part, the cells that can be judged in one substituted run.

    Complete recordings of a part go together, so that they can be each other's references as they were there; a broken
    one cannot be a reference and goes alone.
    """
    whole: dict[int, list[str]] = {}
    for i, cell in recorded:
        if holdings.of(i, cell) is Completeness.WHOLE:
            whole.setdefault(i, []).append(cell)
        else:
            yield i, [cell]
    yield from whole.items()


def _substituted(
    holdings: Holdings,
    scores: RecordedCells,
    chosen: Mapping[str, int],
    run: RunRecord,
    out: Path,
    part: int,
    cells: Sequence[str],
) -> History:
    """Return the merged run with a part's recordings of ``cells``, and its complete ones in place of the others."""
    mine = holdings.histories[part].run.cells
    own = {c.cell for c in mine if c.cell in cells or holdings.of(part, c.cell) is Completeness.WHOLE}
    whole = assemble(holdings.histories, {**chosen, **dict.fromkeys(own, part)}, scores)
    group = {c.cell: c.group for c in whole.cells.values()}
    records = tuple(
        whole.cells[c.cell] if c.cell in own else c.model_copy(update={"group": group.get(c.cell, c.group)})
        for c in run.cells
    )
    substituted = run.model_copy(update={"cells": records, "engines": whole.engines})
    return History(folder=out, run=substituted, observations=whole.observations)


def _is_wrong(finding: Finding) -> bool:
    """Return whether this is more than missing evidence, as is a change that failed a test and was not repeated."""
    if finding.verdict is Verdict.UNKNOWN:
        return bool(finding.changed)
    return finding.verdict not in (Verdict.PASS, Verdict.KNOWN)


def _shown(findings: Iterable[Finding]) -> str:
    verdict = worst(f.verdict for f in findings if _is_wrong(f))
    return "failed once" if verdict is Verdict.UNKNOWN else verdict.value
