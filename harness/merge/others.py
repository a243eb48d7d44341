"""Recordings that do not count: judged too, so that a retry is no second chance."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from harness.baseline.lookup import Lookup
from harness.checks.evidence import Evidence as Judged
from harness.checks.listed import listed, most_listed
from harness.checks.night import registered, run_tests
from harness.checks.registry import baselines_for, judge_cell, judging_of, views
from harness.checks.statistical import tripped
from harness.findings import CellVerdict, Finding, Judgement, Verdict, worst
from harness.history import (
    COLD,
    RESCORE,
    History,
    RunRecord,
)
from harness.known import apply_known, load_known
from harness.merge.assemble import assemble
from harness.merge.choose import Holdings
from harness.merge.night import Loaded, Wanted
from harness.merge.scores import ScoreIndex, Scores
from harness.operations import known_of
from harness.parts import Evidence


def found_elsewhere(
    parts: Sequence[Loaded],
    holdings: Holdings,
    scores: ScoreIndex,
    chosen: Mapping[str, int],
    run: RunRecord,
    out: Path,
    wanted: Wanted,
) -> list[str]:
    """A sentence for each recording that does not count and in which something is wrong, if it is judged as part of
    this night in the place of the one that counts. Missing evidence is no such thing: that is what others are for."""
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
    # Part after part: the scores of one part come first in all its nights.
    for at in sorted(range(len(together)), key=lambda n: together[n][0]):
        i, cells = together[at]
        night = _in_place(holdings, scores.scores(i), chosen, run, out, i, cells)
        verdicts = _judge_cells(night, parts[i].second, baselines, cells)
        judgement = Judgement(run_id=run.run_id, verdict=Verdict.UNKNOWN, cells=tuple(verdicts))
        notices[at] = [
            f"{item.cell}: {', '.join(f'{name} {verdict}' for name, verdict in found)}"
            + (f" in {item.scenario}" if item.scenario != COLD else "")
            + f" in the recording of {parts[i].run.run_id}, which does not count; a defect that comes and goes gets no "
            "second chance, so it cannot pass"
            for item in apply_known(judgement, known, night).cells
            if (found := [(r.check, _shown(r.findings)) for r in item.results if any(map(_is_wrong, r.findings))])
        ]
    return [notice for at in sorted(notices) for notice in notices[at]]


def _judged_together(holdings: Holdings, recorded: Iterable[tuple[int, str]]) -> Iterable[tuple[int, list[str]]]:
    """Recordings that can stand in one night. A whole one serves those of its part as the reference, as it did there;
    what broke is no reference of others and stands alone."""
    whole: dict[int, list[str]] = {}
    for i, cell in recorded:
        if holdings.of(i, cell) is Evidence.WHOLE:
            whole.setdefault(i, []).append(cell)
        else:
            yield i, [cell]
    yield from whole.items()


def _in_place(
    holdings: Holdings,
    scores: Scores,
    chosen: Mapping[str, int],
    run: RunRecord,
    out: Path,
    part: int,
    cells: Sequence[str],
) -> History:
    """The night with a part's recordings of some cells, and its whole ones, in the place of those that count."""
    mine = holdings.histories[part].run.cells
    own = {c.cell for c in mine if c.cell in cells or holdings.of(part, c.cell) is Evidence.WHOLE}
    whole = assemble(holdings.histories, {**chosen, **dict.fromkeys(own, part)}, scores)
    group = {c.cell: c.group for c in whole.cells.values()}
    records = tuple(
        whole.cells[c.cell] if c.cell in own else c.model_copy(update={"group": group.get(c.cell, c.group)})
        for c in run.cells
    )
    night = run.model_copy(update={"cells": records, "engines": whole.engines})
    return History(folder=out, run=night, observations=whole.observations)


def _judge_cells(
    night: History, second: History | None, baselines: Mapping[str, Lookup], cells: Sequence[str]
) -> list[CellVerdict]:
    """Some cells of a night, with their tests as part of the whole night's family."""
    evidence = Judged(night, baselines, judging_of(night))
    everything = views(evidence)
    mine = [v for v in everything if v.id in cells]
    if evidence.judging.tier == "normal":
        announced = registered(everything)
        own = [t for t in announced if t.cell in cells]
        evidence = evidence._replace(night=run_tests(mine, evidence.judging, own, len(announced)))
        mine = [v._replace(evidence=evidence) for v in mine]
        if second is not None:
            fresh = views(Judged(second, baselines, evidence.judging))
            evidence = evidence._replace(second=run_tests(fresh, evidence.judging, tripped(mine)))
            mine = [v._replace(evidence=evidence) for v in mine]
    most = most_listed(len(everything))
    return [listed(judge_cell(v), most) for v in mine]


def _is_wrong(finding: Finding) -> bool:
    """More than missing evidence; so is a change that failed a registered test and was not run again."""
    if finding.verdict is Verdict.UNKNOWN:
        return bool(finding.evidence.get("changed"))
    return finding.verdict not in (Verdict.PASS, Verdict.KNOWN)


def _shown(findings: Iterable[Finding]) -> str:
    verdict = worst(f.verdict for f in findings if _is_wrong(f))
    return "failed once" if verdict is Verdict.UNKNOWN else verdict.value
