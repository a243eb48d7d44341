"""``harness run --resume``: an interrupted run goes on in its folder with the cells that are not complete.

The record is opened again first, so that the run has no end and no seal while it grows. Then what the incomplete cells
answered is moved out of the lines into a file beside them: the judge sees one recording of each cell. Complete cells
are never asked again, and what was wrong with answers that were set aside stays on record and keeps the run from
passing.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from harness import provenance, redact
from harness.checks.registry import baselines_for, tripped_tests
from harness.engine.executor import Executor
from harness.errors import EXIT_REGRESSION, UsageError
from harness.history import (
    COLD,
    RESCORE,
    SECOND,
    CellRecord,
    EngineRecord,
    History,
    Resumption,
    RunRecord,
    load_history,
    write_run,
)
from harness.kinds import require_plain
from harness.lines import move_aside
from harness.matrix import CellName, EngineGroup, Plan
from harness.operations import (
    Outcome,
    Prepared,
    assess,
    engines_for,
    judge_and_report,
    load_second,
    point_to,
    prepare,
    prepared_recorder,
    second_stage,
)
from harness.parts import differing, rescored, unfinished
from harness.progress import Reporter
from harness.recorder import Recorder
from harness.runner import Runner
from harness.seal import LINES, PARQUET
from harness.storage import FolderLock, writing
from harness.strict_json import printable

_VARYING = {"memory_gib"}
"""Of the hardware: it is rounded, and kernels differ in what they keep for themselves."""


class Resumable(NamedTuple):
    """An interrupted run, and what is left of it."""

    folder: Path
    """Where the run is, not a link to it: ``latest`` may be moved meanwhile."""
    history: History
    recorded: int
    """Bytes of the lines when they were read."""
    whole: Prepared
    """What the run was prepared with, prepared again."""
    rest: Prepared
    """What still has to be asked."""

    @property
    def again(self) -> tuple[str, ...]:
        """Cells that are asked from their beginning."""
        return tuple(w.cell.id for w in self.rest.works if w.requests)


def prepare_resume(folder: Path) -> Resumable:
    """Load an interrupted run and prepare what is left. Changes nothing.

    Raises UsageError for runs that cannot be gone on with, and what ``load_history`` and ``prepare`` raise.
    """
    folder = folder.resolve()
    recorded = _size(folder / LINES)
    history = load_history(folder)
    _require_resumable(history)
    run = history.run
    scenarios = dict.fromkeys(s for c in run.cells for s in ([COLD] if c.planned else []) + list(c.scenarios))
    source = str(run.profile.get("source", run.profile["name"]))
    whole = prepare(source, [c.cell for c in run.cells], list(scenarios))
    # Of a run that came to its end, the second stage alone may be missing: its cells had their chance.
    rest = _rest(whole, history) if unfinished(run) else whole._replace(plan=Plan((), ()), works=(), lacking={})
    return Resumable(folder, history, recorded, whole, rest)


def resume(
    left: Resumable,
    engine_python: str | None,
    reporter: Reporter,
    executor: Executor | None = None,
) -> Outcome:
    """Go on with the run, judge it and write its reports.

    Raises UsageError, naming each difference, when anything is not as it was when the run began; nothing was changed
    then.
    """
    with FolderLock(left.folder):
        # The run may have lived until a moment ago, and answers that came since are not to be set aside unread.
        if _size(left.folder / LINES) != left.recorded or load_history(left.folder).run != left.history.run:
            raise UsageError(f"{left.folder}: expected the run as it was a moment ago, found it changed; try again")
        run = left.history.run
        mutants, together = run.mutants, len(run.mutants) > 1
        history = left.history
        if unfinished(run):
            recorder, environment = _recorder(left, engine_python)
            history = Runner(
                left.rest.profile,
                left.rest.plan,
                left.rest.works,
                environment,
                recorder,
                reporter,
                executor,
                mutants,
                together,
            ).run()
        point_to(left.folder, reporter)
        if not history.run.interrupted and _second_is_missing(history):
            _put_away(left.folder / SECOND)
            second_stage(left.whole, history, engine_python, reporter, mutants, together, executor)
        return Outcome(left.folder, judge_and_report(history))


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


# --- what can be gone on with ----------------------------------------------------------------------------------------


def _require_resumable(history: History) -> None:
    require_plain(history)
    folder, run = history.folder, history.run
    name = folder.name
    if run.merged is not None:
        raise UsageError(f"{folder}: expected a run that was interrupted, found one that was merged from parts")
    if name == SECOND or run.run_id != name:
        raise UsageError(
            f"{folder}: expected the folder that `harness run` made for the run, found run {run.run_id} in {name}; "
            "repetitions, tries and copies cannot be gone on with"
        )
    if not (folder / LINES).is_file():
        raise UsageError(f"{folder}: expected {LINES}, found none; restore it from a copy, or run again")
    if run.finished is not None and not run.interrupted and not _second_is_missing(history):
        raise UsageError(
            f"{folder}: expected a run that was killed or interrupted, found one that came to its end at "
            f"{run.finished}; `harness check` judges it again"
        )


def _second_is_missing(history: History) -> bool:
    """Whether a second stage is due that is not there, or not whole."""
    folder = history.folder / SECOND
    if (folder / "run.json").is_file():
        second = load_second(history)
        return second is None or bool(unfinished(second.run))
    return history.run.profile.get("judging", {}).get("tier") == "normal" and bool(
        tripped_tests(history, baselines_for(history))
    )


def _rest(whole: Prepared, history: History) -> Prepared:
    """What is left: cells that are not complete on the engines that they share with others, and re-scoring."""
    done = {c.cell for c in history.run.cells if _complete(history, c)}
    score = _to_rescore(history, done) if history.run.rescore else set()
    groups = []
    for group in whole.plan.groups:
        cells = tuple(c for c in group.cells if c.id not in done or c.id in score)
        if cells:
            groups.append(group._replace(cells=cells))
    works = tuple(
        w._replace(items=(), scripts=()) if w.cell.id in done else w
        for w in whole.works
        if w.cell.id not in done or w.cell.id in score
    )
    lacking = {cell: reason for cell, reason in whole.lacking.items() if cell not in done}
    return whole._replace(plan=Plan(_cells(groups), tuple(groups)), works=works, lacking=lacking)


def _cells(groups: list[EngineGroup]) -> tuple[Any, ...]:
    return tuple(c for g in groups for c in g.cells)


def _complete(history: History, record: CellRecord) -> bool:
    """Whether a cell went to its end and all its answers are on record: the disk may have lost some with the power."""
    answered = Counter(o.scenario for o in history.in_order(record.cell))
    planned = {COLD: record.planned, **record.scenarios}
    return record.state == "complete" and all(answered[s] >= n for s, n in planned.items())


def _to_rescore(history: History, done: set[str]) -> set[str]:
    """Plain single cells that have to re-score outputs: of variants in which cells are asked again, or whose outputs
    were not all scored."""
    from harness.rescore import Outputs

    outputs = Outputs()
    for o in history.observations:
        if o.scenario != RESCORE:
            outputs.add(o)
    scored = {(o.cell, o.key) for o in history.observations if o.scenario == RESCORE and rescored(o)}
    missing = {cell for cell, key in outputs.scored_by if (cell, key) not in scored}
    changed = {CellName.of(c.cell).reference for c in history.run.cells if c.cell not in done}
    return (missing | changed) & {c.cell for c in history.run.cells}


# --- as it was -------------------------------------------------------------------------------------------------------


def _plan_of(run: RunRecord) -> dict[str, Any]:
    return {
        c.cell: {
            "block_size": c.block_size,
            "lookahead": c.lookahead,
            "draft_tokens": c.draft_tokens,
            "route": c.route,
            "cold": c.planned,
            **c.scenarios,
        }
        for c in run.cells
    }


def _conditions(plain: Mapping[str, Any], run: RunRecord) -> dict[str, Any]:
    """What has to be the same when a run is gone on with; ``plain`` is the record as it is written."""
    return {
        "profile": plain["profile"],
        "prompts": run.prompts_sha256,
        "identities": plain["identities"],
        "versions": plain["versions"],
        "hardware": {k: v for k, v in plain["hardware"].items() if k not in _VARYING},
        "cells": _plan_of(run),
        "mutants": list(run.mutants),
        "rescore": run.rescore,
        "lacking": plain["lacking"],
    }


def require_same(earlier: RunRecord, now: RunRecord) -> None:
    """Raises UsageError that names each difference."""
    before, after = (_conditions(printable(r.model_dump(mode="json")), r) for r in (earlier, now))
    places = [text for key in before for text in differing(before[key], after[key], key)]
    if places:
        shown = "\n".join(f"  {p}" for p in places)
        raise UsageError(f"run {earlier.run_id} cannot be gone on with, because not all is as it was:\n{shown}")


# --- going on --------------------------------------------------------------------------------------------------------


def _recorder(left: Resumable, engine_python: str | None) -> tuple[Recorder, Any]:
    """A recorder that goes on with the run's record, and the environment of its engines."""
    environment = engines_for(left.whole.profile, left.whole.plan, engine_python)
    recorder = prepared_recorder(
        left.whole, environment, left.folder, left.history.run.mutants, adopt=lambda fresh: _reopen(left, fresh)
    )
    for o in load_history(left.folder).observations:
        if o.scenario != RESCORE:
            recorder.outputs.add(o)
    for cell, reason in left.rest.lacking.items():
        recorder.fail_pending([cell], "failed", reason)
    return recorder, environment


def _reopen(left: Resumable, fresh: RunRecord) -> RunRecord:
    """The run's record without its end, written before anything else is changed; the folder is ready to be gone on with
    then."""
    run, folder = left.history.run, left.folder
    require_same(run, fresh)
    again = set(left.again)
    scored = {w.cell.id for w in left.rest.works}

    def stays(cell: str, scenario: str) -> bool:
        return cell not in scored if scenario == RESCORE else cell not in again

    number = len(run.resumed) + 1
    aside = sum(not stays(o.cell, o.scenario) for o in left.history.observations)
    name = _free(folder, f"superseded-{number}")
    restarted = {g.id for g in left.rest.plan.groups}
    resumption = Resumption(
        at=provenance.now(),
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
            "engines": tuple(_renamed(e, restarted, number) for e in run.engines),
            "cells": tuple(_again(c, again, restarted, number) for c in run.cells),
            "resumed": (*run.resumed, resumption),
        }
    )
    write_run(folder, record)
    move_aside(folder / LINES, stays, folder / name, folder / _free(folder, f"torn-{number}"))
    with writing(folder):
        redact.logs(folder)
        (folder / PARQUET).unlink(missing_ok=True)
        for old, new in _logs(folder / "logs", restarted, number):
            old.rename(new)
    return record


def _found(history: History) -> tuple[str, ...]:
    """What is wrong before anything is set aside; known defects are known. Of cells that are not asked again too:
    their outputs may be re-scored again."""
    # The profile is the user's: it was loaded again, and is the same.
    judgement = assess(history.model_copy(update={"own": True})).judgement
    return tuple(
        f"{f.cell} {f.check} {f.verdict}: {f.message}" + (f" … and {f.others} more like it" if f.others else "")
        for f in judgement.findings
        if f.known is None and f.verdict.exit_code == EXIT_REGRESSION
    )


def _free(folder: Path, what: str) -> str:
    """A name beside the lines that nothing has yet."""
    names = (f"observations.{what}{mark}.jsonl" for mark in ("", *(f"-{n}" for n in range(2, 1000))))
    return next(n for n in names if not (folder / n).exists())


def _earlier(group: str, number: int) -> str:
    """What engines of a group are called that is started again."""
    return f"{group}~{number}"


def _renamed(engine: EngineRecord, restarted: set[str], number: int) -> EngineRecord:
    if engine.group not in restarted:
        return engine
    group = _earlier(engine.group, number)
    return engine.model_copy(update={"group": group, "log": group + engine.log.removeprefix(engine.group)})


def _again(cell: CellRecord, again: set[str], restarted: set[str], number: int) -> CellRecord:
    if cell.cell in again:
        clear: Mapping[str, Any] = {"state": "pending", "reason": None}
        return cell.model_copy(update={**clear, **dict.fromkeys(("request_seconds", "seconds", "start_seconds"), 0.0)})
    group = _earlier(cell.group, number) if cell.group in restarted else cell.group
    return cell.model_copy(update={"group": group})


def _logs(folder: Path, restarted: set[str], number: int) -> Iterator[tuple[Path, Path]]:
    for group in restarted:
        for path in folder.glob(f"{group}.*"):
            if path.name.count(".") - group.count(".") <= 2:
                yield path, path.with_name(_earlier(group, number) + path.name.removeprefix(group))


def _put_away(second: Path) -> None:
    """Move a second stage that is not whole out of the way."""
    if not second.exists():
        return
    free = (second.with_name(f"{SECOND}.superseded-{n}") for n in range(1, 1000))
    with writing(second):
        second.rename(next(p for p in free if not p.exists()))
