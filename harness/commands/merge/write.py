"""Write the merged run: its record, its later stages, and notices about its parts."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

from harness import redact
from harness.commands.merge.assemble import NO_PART, as_planned, assemble, missing, save, with_whole_plan
from harness.commands.merge.duplicates import findings_in_duplicates
from harness.commands.merge.expected_run import ExpectedRun, Loaded, MergeOptions
from harness.commands.merge.selection import Holdings, ScoreIndex, choose, compare_duplicates
from harness.commands.merge.shards import Completeness, unfinished
from harness.history.folder import History, load_history
from harness.history.layout import SECOND, round_folder
from harness.history.migrations import SCHEMA
from harness.history.records import CellRecord, EngineRecord, Merged, Part, PlannedRequest, RunRecord
from harness.profiles.cells import CellName, all_cells
from harness.version import __version__


def write_merged(
    out: Path, parts: Sequence[Loaded], expected: ExpectedRun, wanted: MergeOptions, notices: list[str]
) -> History:
    histories = [p.history for p in parts]
    holdings, scores = Holdings(histories), ScoreIndex(histories)
    chosen = choose(holdings)
    whole = assemble(histories, chosen, scores.scores())
    recorded = list(whole.cells.values())
    cells = [
        as_planned(whole.cells[c.id], c, expected, recorded) if c.id in whole.cells else missing(c, expected, recorded)
        for c in expected.cells
    ]
    lost = [c.cell for c in cells if c.reason == NO_PART]
    known = {c.cell for c in cells}
    cells += [record for cell, record in whole.cells.items() if cell not in known]
    plans = {key: rows for p in parts for key, rows in p.run.plans.items()}
    cells = [with_whole_plan(c, expected, plans) for c in cells]
    run = _run_record(parts, expected, out.resolve().name, cells, whole.engines).model_copy(
        update={
            "plans": _used(plans, cells),
            "rescore": any(p.run.rescore for p in parts)
            or (expected.profile.workload.rescore and any(c == CellName.of(c).reference for c in lost)),
            "rounding": any(p.run.rounding for p in parts),
            "interrupted": any(_lost_to_interruption(parts, i, holdings) for i in set(chosen.values())),
        }
    )
    contradicted, duplicates = compare_duplicates(parts, chosen, expected)
    wrong = findings_in_duplicates(parts, holdings, scores, chosen, run, out, wanted)
    notices += [f"no part ran {', '.join(lost)}"] if lost else []
    again = [f"part {p.run.run_id} was {r.sentence}" for p in parts for r in p.run.resumed]
    notices += [
        *again,
        *_incomplete(parts, chosen),
        *contradicted,
        *wrong,
        *duplicates,
        *_processors(parts),
        *_unknown_commits(parts),
    ]
    merged = Merged(
        parts=tuple(_part(p, i, chosen) for i, p in enumerate(parts)),
        notices=tuple(notices),
        unsettled=bool(contradicted or wrong) or any(p.run.reasked_after_findings for p in parts),
    )
    said = save(out, run.model_copy(update={"merged": merged}), whole)
    said += _write_stages(out, parts, expected, chosen)
    # With --expect, the profile is the user's own.
    written = load_history(out)
    return written.model_copy(update={"own": wanted.expect is not None, "notices": (*written.notices, *said)})


def _write_stages(
    out: Path, parts: Sequence[Loaded], expected: ExpectedRun, chosen: Mapping[str, int]
) -> Iterator[str]:
    """Merge the later stages of the parts, and yield what is to be said about them."""
    yield from _write_stage(out / SECOND, [p.stages.second for p in parts], expected, chosen)
    for number, round_ in enumerate(zip_longest(*(p.stages.again for p in parts)), 1):
        yield from _write_stage(out / round_folder(number), round_, expected, chosen)


def _write_stage(
    folder: Path, of_parts: Sequence[History | None], expected: ExpectedRun, chosen: Mapping[str, int]
) -> list[str]:
    """Merge one stage of the parts, taking each cell from the part whose first stage counts."""
    having = [(i, h) for i, h in enumerate(of_parts) if h is not None]
    if not having:
        return []
    histories = [h for _, h in having]
    place = {number: at for at, (number, _) in enumerate(having)}
    picked = choose(Holdings(histories), {cell: place[i] for cell, i in chosen.items() if i in place})
    scores = ScoreIndex(histories)  # its files are gone when it is
    whole = assemble(histories, picked, scores.scores())
    order = {c.id: n for n, c in enumerate(all_cells(expected.profile))}
    cells = sorted(whole.cells.values(), key=lambda c: order.get(c.cell, len(order)))
    run = _run_record([Loaded(h) for h in histories], expected, folder.name, cells, whole.engines)
    plans = _used({key: rows for h in histories for key, rows in h.run.plans.items()}, cells)
    return save(
        folder, run.model_copy(update={"plans": plans, "rescore": any(h.run.rescore for h in histories)}), whole
    )


def _used(
    plans: Mapping[str, tuple[PlannedRequest, ...]], cells: Sequence[CellRecord]
) -> dict[str, tuple[PlannedRequest, ...]]:
    return {c.plan: plans[c.plan] for c in cells if c.plan is not None and c.plan in plans}


def _run_record(
    parts: Sequence[Loaded],
    expected: ExpectedRun,
    run_id: str,
    cells: Sequence[CellRecord],
    engines: tuple[EngineRecord, ...],
) -> RunRecord:
    first, runs = parts[0].run, [p.run for p in parts]
    ends = [r.finished for r in runs if r.finished is not None]
    return RunRecord(
        schema_version=SCHEMA,
        run_id=run_id,
        harness_version=__version__,
        started=min(r.started for r in runs),
        finished=max(ends, default=None),
        command=redact.words(sys.argv),
        git_commit=next((r.git_commit for r in runs if r.git_commit), None),
        git_dirty=next((r.git_dirty for r in runs if r.git_dirty), first.git_dirty),
        profile={**expected.profile.model_dump(mode="json"), "source": expected.source},
        prompts_sha256=expected.prompts_sha256 or first.prompts_sha256,
        hardware=first.hardware,
        versions=first.versions,
        identities=expected.identities,
        engines=engines,
        cells=tuple(cells),
        seconds={
            key: round(sum(r.seconds.get(key, 0.0) for r in runs), 3)
            for key in dict.fromkeys(k for r in runs for k in r.seconds)
        },
        mutants=first.mutants,
        lacking={k: v for r in runs for k, v in r.lacking.items()},
    )


def _part(part: Loaded, number: int, chosen: Mapping[str, int]) -> Part:
    run = part.run
    return Part(
        run_id=run.run_id,
        started=run.started,
        finished=run.finished,
        command=redact.words(run.command),
        git_commit=run.git_commit,
        git_dirty=run.git_dirty,
        hardware=run.hardware,
        seconds=run.seconds,
        cells={c.cell: c.state for c in run.cells},
        counted=tuple(c.cell for c in run.cells if chosen.get(c.cell) == number),
        second_stage=part.stages.second is not None,
    )


def _lost_to_interruption(parts: Sequence[Loaded], number: int, holdings: Holdings) -> bool:
    """Return whether a part did not finish and some cell of it is complete in no finished part."""
    part = parts[number]
    if not unfinished(part.run):
        return False
    ended = [i for i, p in enumerate(parts) if not unfinished(p.run)]
    return any(all(holdings.of(i, c.cell) < Completeness.WHOLE for i in ended) for c in part.run.cells)


def _incomplete(parts: Sequence[Loaded], chosen: Mapping[str, int]) -> list[str]:
    """Return a notice for each part that did not finish or whose last line is truncated."""
    out = []
    for i, part in enumerate(parts):
        why = unfinished(part.run) or (
            "lost its last observation, which is truncated" if part.history.torn_line else ""
        )
        if why:
            counted = [c for c, n in chosen.items() if n == i]
            out.append(f"part {part.run.run_id} {why}; judged from it: {', '.join(counted) or 'nothing'}")
    return out


def _processors(parts: Sequence[Loaded]) -> list[str]:
    kinds = dict.fromkeys(str(p.run.hardware.get("processor")) for p in parts)
    return [f"the parts ran on different processors: {', '.join(kinds)}"] if len(kinds) > 1 else []


def _unknown_commits(parts: Sequence[Loaded]) -> list[str]:
    """Return notices about parts whose version of the harness is unknown."""
    unknown = [p.run.run_id for p in parts if p.run.git_commit is None]
    changed = [p.run.run_id for p in parts if p.run.git_commit is not None and p.run.git_dirty]
    said = {
        "recorded with an unknown commit of the harness": unknown,
        "recorded with uncommitted changes of the harness": changed,
    }
    return [f"{what}: {', '.join(names)}" for what, names in said.items() if names]
