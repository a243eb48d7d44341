"""``harness run --resume``: resume an interrupted run in its folder, with the cells that are not complete.

The record is reopened first, so that the run is neither finished nor sealed while it grows. Then the answers of
incomplete cells are moved aside, so that the judge sees one recording of each cell. Complete cells are never asked
again. Regressions in answers that were set aside stay on record and keep the run from passing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from harness import redact
from harness.commands.later_stages import ROUNDS, later_stages
from harness.commands.missing_evidence import not_rescored, unfinished
from harness.engines.environment import engines_for
from harness.errors import UsageError
from harness.history.folder import History, load_history, write_run
from harness.history.layout import AGAIN, CELLS, LINES, PARQUET, ROUNDING, SCORES, SECOND, bytes_recorded
from harness.history.plan import counts_of, unanswered
from harness.history.records import COLD, RESCORE, CellRecord, Resumption, RunRecord, numbered
from harness.history.run_kind import require_plain
from harness.judging.checks.registry import NOTHING, tripped_once
from harness.judging.references import baselines_for, load_stages
from harness.profiles.cells import CellName, EngineGroup, Plan
from harness.profiles.load import require_here
from harness.reports.judge_run import Outcome, assess, judge_and_report
from harness.runner.groups import Runner
from harness.runner.options import DEFAULTS, RunOptions
from harness.runner.recorder import Recorder
from harness.runner.run import point_to, prepared_recorder
from harness.util import machine
from harness.util.differences import differing
from harness.util.json_io import printable
from harness.util.progress import Reporter
from harness.util.storage import FolderLock, writing
from harness.workload.prepare import Prepared, prepare

_VARYING = {"memory_gib"}
"""Hardware fields that may differ: memory is rounded, and operating-system kernels reserve different amounts of it."""


_SETTINGS = {"block_size", "lookahead", "draft_tokens", "route"}
"""Fields of a cell's record that are settled before it is asked."""


class Resumable(NamedTuple):
    """An interrupted run, and the work that is left."""

    folder: Path
    """The resolved folder of the run, because the link ``latest`` may change meanwhile."""
    history: History
    recorded: int
    """Size of the observations in bytes when they were read."""
    whole: Prepared
    """The whole run, prepared again."""
    rest: Prepared
    """The work that is left."""

    @property
    def again(self) -> tuple[str, ...]:
        """Cells that are asked again from the beginning."""
        return tuple(w.cell.id for w in self.rest.works if w.requests)


def prepare_resume(folder: Path) -> Resumable:
    """Load an interrupted run and prepare the work that is left, without changing anything. Raises UsageError for runs
    that cannot be resumed, and the errors of ``load_history`` and ``prepare``."""
    folder = folder.resolve()
    recorded = bytes_recorded(folder)
    history = load_history(folder)
    _require_resumable(history)
    run = history.run
    scenarios = dict.fromkeys(s for c in run.cells for s in ([COLD] if c.planned else []) + list(c.scenarios))
    source = require_here(run.asked_for.source, "resume it in the folder that it was started in, or restore the file")
    whole = prepare(source, [c.cell for c in run.cells], list(scenarios))
    # ``--witness`` and ``--no-witness`` are not in the profile.
    whole = whole.witnessing("kv" if run.asked_for.witness == "kv" else "off")
    # A run that finished can lack its later stages only; its failed cells are not repeated.
    rest = _rest(whole, history) if unfinished(run) else whole._replace(plan=Plan((), ()), works=(), lacking={})
    return Resumable(folder, history, recorded, whole, rest)


def resume(left: Resumable, reporter: Reporter, options: RunOptions = DEFAULTS) -> Outcome:
    """Resume the run, judge it and write its reports. Raises UsageError, naming each difference, when the conditions
    are not those under which the run began; nothing has been changed in that case."""
    with FolderLock(left.folder):
        # The run may still have been active a moment ago; its latest answers must not be set aside unread.
        if bytes_recorded(left.folder) != left.recorded or load_history(left.folder).run != left.history.run:
            raise UsageError(f"{left.folder} was changed by another process while it was read; try again")
        run = left.history.run
        options = options._replace(mutants=run.mutants, together=len(run.mutants) > 1)
        history = left.history
        if unfinished(run):
            recorder, environment = _recorder(left, options)
            history = Runner(left.rest, environment, recorder, reporter, options).run()
        point_to(left.folder, reporter)
        if not history.run.interrupted and (lacking := _missing_stages(history)):
            for stage in lacking:
                _put_away(left.folder / stage)
            later_stages(left.whole, history, reporter, options)
        reporter.step("judging", 0.0)
        return Outcome(left.folder, judge_and_report(history, carrying=True))


# --- what can be resumed ---------------------------------------------------------------------------------------------


def _require_resumable(history: History) -> None:
    require_plain(history)
    folder, run = history.folder, history.run
    name = folder.name
    if run.merged is not None:
        raise UsageError(
            f"{folder}: a run that was merged from parts cannot be resumed; run the missing parts again, and merge"
        )
    if name == SECOND or run.run_id != name:
        raise UsageError(
            f"{folder}: this folder is called {name} and its run {run.run_id}, so it is a repetition, a try or a "
            "copy, which cannot be resumed"
        )
    lost = [c.cell for c in run.cells if c.state == "complete" and not history.in_order(c.cell)]
    if lost:
        raise UsageError(
            f"{folder}: the answers of {lost[0]} are gone, which is complete by run.json; restore {CELLS}/{lost[0]} "
            "from a copy, or run again"
        )
    if run.finished is not None and not run.interrupted and not _missing_stages(history):
        raise UsageError(
            f"{folder}: this run finished at {run.finished}, so nothing is left to resume; `harness check` judges it "
            "again"
        )


def _missing_stages(history: History) -> list[str]:
    """Return the folders of the later stages that are due, but missing or incomplete."""
    once = tripped_once(history, baselines_for(history)) if history.run.normal else NOTHING
    stages = load_stages(history)
    whole = {SECOND: stages.second is not None, AGAIN: len(stages.again) == ROUNDS}
    due = {SECOND: bool(once.tests), AGAIN: bool(once.answers)}
    return [name for name in whole if not whole[name] and (due[name] or (history.folder / name).exists())]


def _rest(whole: Prepared, history: History) -> Prepared:
    """Return the work that is left: incomplete cells, in their engine groups, and re-scoring."""
    done = {c.cell for c in history.run.cells if _complete(history, c)}
    score = _to_rescore(history, done) if history.run.rescore else set()
    groups = []
    for group in whole.plan.groups:
        cells = tuple(c for c in group.cells if c.id not in done or c.id in score)
        if cells:
            groups.append(group._replace(cells=cells))
    works = tuple(
        replace(w, items=(), scripts=(), at_once=None) if w.cell.id in done else w
        for w in whole.works
        if w.cell.id not in done or w.cell.id in score
    )
    lacking = {cell: reason for cell, reason in whole.lacking.items() if cell not in done}
    return whole._replace(plan=Plan(_cells(groups), tuple(groups)), works=works, lacking=lacking)


def _cells(groups: list[EngineGroup]) -> tuple[Any, ...]:
    return tuple(c for g in groups for c in g.cells)


def _complete(history: History, record: CellRecord) -> bool:
    """Return whether a cell completed and all its answers are on record; a power failure may have lost some."""
    return record.state == "complete" and not unanswered(history.run, record, history.in_order(record.cell))


def _to_rescore(history: History, done: set[str]) -> set[str]:
    """Return the plain single cells that have to re-score outputs: those of variants in which cells are asked again or
    outputs are not all scored."""
    missing = {cell for cell, _ in not_rescored(history)}
    changed = {CellName.of(c.cell).reference for c in history.run.cells if c.cell not in done}
    return (missing | changed) & {c.cell for c in history.run.cells}


# --- unchanged conditions --------------------------------------------------------------------------------------------


def _conditions(plain: Mapping[str, Any], run: RunRecord) -> dict[str, Any]:
    """Return what must be unchanged when a run is resumed; ``plain`` is the record in its JSON form."""
    return {
        "profile": plain["profile"],
        "prompts": run.prompts_sha256,
        "identities": plain["identities"],
        "versions": plain["versions"],
        "hardware": {k: v for k, v in plain["hardware"].items() if k not in _VARYING},
        "cells": {c.cell: {**c.model_dump(include=_SETTINGS), **counts_of(c), "plan": c.plan} for c in run.cells},
        "mutants": list(run.mutants),
        "engine_flags": list(run.engine_flags),
        "rescore": run.rescore,
        "rounding": run.rounding,
        "lacking": plain["lacking"],
    }


def require_same(earlier: RunRecord, now: RunRecord) -> None:
    """Raise UsageError, naming each difference, when the conditions of two records differ."""
    before, after = (_conditions(printable(r.model_dump(mode="json")), r) for r in (earlier, now))
    places = [text for key in before for text in differing(before[key], after[key], key)]
    if places:
        shown = "\n".join(f"  {p}" for p in places)
        raise UsageError(f"run {earlier.run_id} cannot be resumed, because something has changed:\n{shown}")


# --- resuming --------------------------------------------------------------------------------------------------------


def _recorder(left: Resumable, options: RunOptions) -> tuple[Recorder, Any]:
    """Return a recorder that continues the run's record, and the environment of its engines."""
    environment = engines_for(left.whole.profile, left.whole.plan, options.engine_python, options.flags)
    recorder = prepared_recorder(
        left.whole, environment, left.folder, left.history.run.mutants, adopt=lambda fresh: _reopen(left, fresh)
    )
    for o in load_history(left.folder).observations:
        if o.scenario != RESCORE:
            recorder.outputs.add(o)
    return recorder, environment


def _reopen(left: Resumable, fresh: RunRecord) -> RunRecord:
    """Reopen the run's record, set superseded answers aside, and return the record.

    The record is written, without its end, before anything else is changed.
    """
    run, folder = left.history.run, left.folder
    require_same(run, fresh)
    again = set(left.again)
    scored = {w.cell.id for w in left.rest.works}

    number = len(run.resumed) + 1
    name = f"superseded-{number}"
    moved = [
        *(Path(cell, name) for cell in again for name in (LINES, ROUNDING)),
        *(Path(cell, SCORES) for cell in scored),
    ]
    aside = sum(o.cell in (scored if o.scores else again) for o in left.history.observations)
    restarted = {g.id for g in left.rest.plan.groups}
    resumption = Resumption(
        at=machine.now(),
        command=tuple(sys.argv),
        git_commit=fresh.git_commit,
        git_dirty=fresh.git_dirty,
        hardware=fresh.hardware,
        cells=left.again,
        set_aside=aside,
        files=(name,) if aside else (),
        found=_found(left.history),
    )
    record = run.model_copy(
        update={
            "finished": None,
            "interrupted": False,
            "ended_by": None,
            "references": {},
            "engines": tuple(e.in_group(numbered(e.group, number)) if e.group in restarted else e for e in run.engines),
            "cells": tuple(_again(c, again, restarted, number) for c in run.cells),
            "resumed": (*run.resumed, resumption),
        }
    )
    write_run(folder, record)
    with writing(folder):
        for path in moved:
            if (folder / CELLS / path).exists():
                (folder / name / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / CELLS / path).rename(folder / name / path)
        redact.logs(folder)
        (folder / PARQUET).unlink(missing_ok=True)
        for old, new in _logs(folder / "logs", restarted, number):
            old.rename(new)
    return record


def _found(history: History) -> tuple[str, ...]:
    """Return the regressions found before anything is set aside, without known defects. Cells that are not asked again
    are included, because their outputs may be re-scored."""
    # The profile is the user's own: it was loaded again and is unchanged.
    return tuple(
        f"{f.cell} {f.check} {f.verdict}: {f.message}" + (f" … and {f.others} more like it" if f.others else "")
        for f in assess(history.model_copy(update={"own": True})).judgement.findings
        if f.known is None and f.verdict.fails
    )


def _again(cell: CellRecord, again: set[str], restarted: set[str], number: int) -> CellRecord:
    if cell.cell in again:
        clear: Mapping[str, Any] = {"state": "pending", "reason": None}
        return cell.model_copy(update={**clear, **dict.fromkeys(("request_seconds", "seconds", "start_seconds"), 0.0)})
    group = numbered(cell.group, number) if cell.group in restarted else cell.group
    return cell.model_copy(update={"group": group})


def _logs(folder: Path, restarted: set[str], number: int) -> Iterator[tuple[Path, Path]]:
    for group in restarted:
        for path in folder.glob(f"{group}.*"):
            if path.name.count(".") - group.count(".") <= 2:
                yield path, path.with_name(numbered(group, number) + path.name.removeprefix(group))


def _put_away(stage: Path) -> None:
    """Rename the folder of an incomplete stage, if there is one."""
    if not stage.exists():
        return
    free = (stage.with_name(f"{stage.name}.superseded-{n}") for n in range(1, 1000))
    with writing(stage):
        stage.rename(next(p for p in free if not p.exists()))
