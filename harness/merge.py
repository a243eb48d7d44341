"""``harness merge``: parts of one night, recorded on several machines, as one recorded run that is judged once.

Judging needs the whole family: the registered tests of the normal tier are adjusted over all cells together, and error
rates are stated for a night, not for a part of it. The second stage needs no further run: each part has made one for
the tests that its own, smaller family rejected, and Holm's procedure rejects in a part of a family, at the same level,
whatever it rejects in the whole. What the whole rejects and no part ran again is UNKNOWN, as in any run.

A recording that holds evidence is never replaced by a later one: a retry fills in what is missing and gives nothing a
second chance.
"""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from harness import __version__
from harness.acceptance import real_steps
from harness.config import Profile, describe_validation_error, read_profile
from harness.errors import DataError, HarnessError, InfrastructureError, UsageError
from harness.history import (
    RESCORE,
    SCHEMA,
    SECOND,
    CellRecord,
    EngineRecord,
    History,
    HistoryWriter,
    Merged,
    Observation,
    Part,
    RunRecord,
    load_history,
    write_parquet,
    write_run,
)
from harness.matrix import Cell, CellName, all_cells, select_cells
from harness.operations import load_second
from harness.parts import (
    Evidence,
    describe_differences,
    evidence_of,
    find_runs,
    rescored,
    signature_of,
    unfinished,
    without_paths,
)
from harness.prompts import load_prompts
from harness.workload import CellWork, cell_work, choose_scenarios

_NO_PART = "no part ran it"
_NO_GROUP = "(no part)"


class Wanted(NamedTuple):
    """What a night should consist of, and what is tolerated of its parts."""

    expect: str | None = None
    """Profile whose matrix the parts should make up, and whose baselines judge it; None takes the recorded one."""
    cells: Sequence[str] = ()
    """Shell patterns of the cells that were to run; none takes all."""
    scenarios: Sequence[str] = ()
    armed: bool = False
    """Take parts with defects put in on purpose."""
    keep_going: bool = False
    """Leave out parts that do not fit or cannot be read, and take interrupted ones as far as they got."""


class _Loaded(NamedTuple):
    history: History
    second: History | None

    @property
    def run(self) -> RunRecord:
        return self.history.run


class _Night(NamedTuple):
    """The matrix that the parts should make up."""

    profile: Profile
    source: str
    cells: tuple[Cell, ...]
    works: Mapping[str, CellWork]
    """Requests of each cell; empty where the prompts are not on this machine."""


def merge(folders: Sequence[Path], out: Path, wanted: Wanted | None = None) -> History:
    """Merge recorded runs into a new run folder ``out`` and load it. Nothing is judged.

    Raises UsageError when a part cannot be taken, or does not fit the others or the profile that was named, and
    InfrastructureError when none is left; nothing is written then.
    """
    wanted = wanted or Wanted()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(
            f"--out {out}: expected no such folder yet, or an empty one, found something there; name another"
        )
    parts, problems = _load(folders, wanted)
    parts, foreign = _fitting(parts)
    problems += foreign
    if problems and not wanted.keep_going:
        shown = "\n".join(f"  {p}" for p in problems)
        raise UsageError(f"{len(problems)} of the parts cannot be merged (--keep-going leaves them out):\n{shown}")
    if not parts:
        raise InfrastructureError(
            "expected parts of a night, found none that can be used: "
            + ("; ".join(problems) or "no run in the folders")
        )
    night = _night(parts[0].run, wanted)
    notices = [f"a part was left out: {p}" for p in problems]
    return _write(out, parts, night, notices)


# --- parts -----------------------------------------------------------------------------------------------------------


def _load(folders: Sequence[Path], wanted: Wanted) -> tuple[list[_Loaded], list[str]]:
    """The parts in the order in which they began, each run once, and a sentence for each that cannot be taken."""
    parts: dict[str, _Loaded] = {}
    problems: list[str] = []
    runs: list[Path] = []
    for folder in folders:
        try:
            runs += find_runs(folder)
        except HarnessError as error:
            problems.append(str(error))
    for run in runs:
        try:
            history = load_history(run)
            _require_usable(history, wanted)
            parts.setdefault(history.run.run_id, _Loaded(history, None))
        except HarnessError as error:
            problems.append(str(error))
    for name, part in parts.items():
        try:
            parts[name] = part._replace(second=load_second(part.history))
        except HarnessError as error:
            problems.append(f"second stage of {name}: {error}")
    return sorted(parts.values(), key=lambda p: (p.run.started, p.run.run_id)), problems


def _require_usable(history: History, wanted: Wanted) -> None:
    run = history.run
    why = unfinished(run)
    if why and not wanted.keep_going:
        raise UsageError(f"{history.folder}: expected a run that came to its end, found one that {why}; run it again")
    if run.merged is not None:
        raise UsageError(f"{history.folder}: expected a recorded run, found one that was merged; give its parts")
    armed = dict.fromkeys((*run.mutants, *(m for e in run.engines for m in e.mutants)))
    if armed and not wanted.armed:
        raise UsageError(
            f"{history.folder}: expected engines as they are, found mutant {', '.join(armed)} armed; --armed takes it"
        )
    names = [c.cell for c in run.cells]
    if len(set(names)) != len(names):
        raise DataError(
            f"{history.folder}: expected each cell once in run.json, found one twice: the record is damaged"
        )


def _fitting(parts: Sequence[_Loaded]) -> tuple[list[_Loaded], list[str]]:
    """The parts that are of the same night: what most of them say counts, the earliest of equals. And a sentence for
    each other one."""
    if not parts:
        return [], []
    signatures = [signature_of(p.run) for p in parts]
    count = Counter(map(repr, signatures))
    expected = max(signatures, key=lambda s: count[repr(s)])
    fitting, problems = [], []
    for part, found in zip(parts, signatures, strict=True):
        differences = describe_differences(expected, found)
        if differences:
            problems.append(
                f"{part.history.folder}: expected a part of the same night as the others, found another "
                f"({differences}); record it with the same profile, models, vLLM and kind of machine"
            )
        else:
            fitting.append(part)
    first = next((p.run.git_commit for p in fitting if p.run.git_commit), None)
    strangers = [p for p in fitting if p.run.git_commit not in (None, first)]
    problems += [
        f"{p.history.folder}: expected the harness's commit of the parts before it, {first}, found {p.run.git_commit}; "
        "record all parts from one checkout"
        for p in strangers
    ]
    return [p for p in fitting if p not in strangers], problems


# --- what the night should consist of --------------------------------------------------------------------------------


def _night(run: RunRecord, wanted: Wanted) -> _Night:
    """Raises UsageError when the profile that was named is not the recorded one, or a pattern matches nothing."""
    if wanted.expect is None:
        profile, source = _recorded_profile(run), str(run.profile.get("source", run.profile["name"]))
    else:
        profile, source = read_profile(wanted.expect), wanted.expect
        _require_same_profile(run, profile, wanted.expect)
    choice = choose_scenarios(profile, wanted.scenarios)
    cells = select_cells(profile, wanted.cells)
    works: dict[str, CellWork] = {}
    for part in profile.parts:
        try:
            prompts = load_prompts(part.workload.prompts)
        except DataError:
            continue
        if prompts.sha256 == _prompts_of(run, part.variant):
            works |= {c.id: cell_work(part, prompts, c, choice) for c in cells if c.variant == part.variant}
    # A cell in which none of the chosen scenarios makes sense is not run.
    cells = [c for c in cells if c.id not in works or works[c.id].requests]
    return _Night(profile, source, tuple(cells), works)


def _recorded_profile(run: RunRecord) -> Profile:
    try:
        return Profile.model_validate({k: v for k, v in run.profile.items() if k != "source"})
    except ValidationError as error:
        raise UsageError(
            f"expected the whole profile in run.json of {run.run_id}, to know which cells there should be, found one "
            f"that this version cannot read; name it with --expect PROFILE:\n{describe_validation_error(error)}"
        ) from error


def _require_same_profile(run: RunRecord, profile: Profile, source: str) -> None:
    recorded = signature_of(run)
    named = recorded._replace(profile=without_paths(profile.model_dump(mode="json")))
    differences = describe_differences(named, recorded)
    if differences:
        raise UsageError(
            f"--expect {source}: expected parts of this profile, found parts of another ({differences}); name the "
            "profile that they were recorded with"
        )


# --- choosing --------------------------------------------------------------------------------------------------------


def _choose(histories: Sequence[History], preferred: Mapping[str, int] | None = None) -> dict[str, int]:
    """Which history's recording of each cell counts: the preferred one where it has the cell; else the most complete,
    and of equals the earliest."""
    out: dict[str, int] = {}
    for cell in dict.fromkeys(c.cell for h in histories for c in h.run.cells):
        having = [i for i, h in enumerate(histories) if h.cell(cell) is not None]
        favourite = (preferred or {}).get(cell)
        best = max(having, key=lambda i: (evidence_of(histories[i], cell), -i))
        out[cell] = favourite if favourite in having else best
    return out


def _duplicates(parts: Sequence[_Loaded], chosen: Mapping[str, int], bitwise: bool) -> tuple[list[str], bool]:
    """A notice for cells that several parts recorded, and whether their recordings contradict each other, which they
    can only where equal runs are equal bit for bit."""
    groups: dict[tuple[int, tuple[int, ...]], list[str]] = {}
    contradictions: list[str] = []
    for cell, best in chosen.items():
        others = tuple(i for i, p in enumerate(parts) if i != best and p.history.cell(cell) is not None)
        if others:
            groups.setdefault((best, others), []).append(cell)
        for i in others:
            compared, differ = _compared(parts[best].history, parts[i].history, cell)
            if differ and bitwise:
                contradictions.append(
                    f"{cell}: {differ} of {compared} cold prompts gave other tokens or accepted drafts in "
                    f"{parts[i].run.run_id} than in {parts[best].run.run_id}: equal runs differ, so it cannot pass"
                )
    notices = [
        f"{', '.join(cells)}: recorded by {len(others) + 1} parts; that of {parts[best].run.run_id} counts "
        "(the most complete one, of equals the earliest)"
        for (best, others), cells in groups.items()
    ]
    return [*contradictions, *notices], bool(contradictions)


def _compared(first: History, second: History, cell: str) -> tuple[int, int]:
    """(cold prompts that both recordings of a cell answered, those with other tokens or accepted drafts)."""
    mine, theirs = first.of(cell), second.of(cell)
    both = [(mine[k], theirs[k]) for k in mine if k in theirs and _said(mine[k]) and _said(theirs[k])]
    return len(both), sum(_said(a) != _said(b) for a, b in both)


def _said(o: Observation) -> tuple[object, ...] | None:
    leg = o.final
    if o.error is not None or leg is None or leg.output_ids is None:
        return None
    steps = real_steps(leg)
    return (leg.output_ids, steps.accepted if steps is not None else None)


# --- one history -----------------------------------------------------------------------------------------------------


class _Assembled(NamedTuple):
    cells: dict[str, CellRecord]
    engines: tuple[EngineRecord, ...]
    observations: tuple[Observation, ...]
    logs: tuple[tuple[Path, str], ...]
    """Log files and what they are called in the merged run."""


def _assemble(histories: Sequence[History], chosen: Mapping[str, int]) -> _Assembled:
    """The chosen recordings as one. Groups of engines that two parts call alike get names of their own."""
    cells: dict[str, CellRecord] = {}
    engines: list[EngineRecord] = []
    logs: list[tuple[Path, str]] = []
    taken: set[str] = set()
    for i, history in enumerate(histories):
        mine = [c for c in history.run.cells if chosen.get(c.cell) == i]
        names = {g: g if g not in taken else f"{g}~{i + 1}" for g in dict.fromkeys(c.group for c in mine)}
        taken.update(names.values())
        cells |= {c.cell: c.model_copy(update={"group": names[c.group]}) for c in mine}
        for engine in history.run.engines:
            if engine.group in names:
                group = names[engine.group]
                log = group + engine.log.removeprefix(engine.group)
                engines.append(engine.model_copy(update={"group": group, "log": log}))
        logs += _logs(history.folder / "logs", names)
    observations = [
        o for i, h in enumerate(histories) for o in h.observations if o.scenario != RESCORE and chosen.get(o.cell) == i
    ]
    return _Assembled(cells, tuple(engines), (*observations, *_scores(histories)), tuple(logs))


def _prompts_of(run: RunRecord, variant: str) -> str:
    """Hash of the prompts that the cells of a variant were sent."""
    mine = (i for lineup, i in run.identities.items() if CellName.of_lineup(lineup).variant == variant)
    return str(next(mine, {}).get("prompts_sha256", run.prompts_sha256))


def _logs(folder: Path, names: Mapping[str, str]) -> Iterable[tuple[Path, str]]:
    """Logs of the groups; names come from files that are there, so none leads out of the folder."""
    for path in sorted(folder.glob("*.log")):
        # The id of a group may have dots itself; what follows is the role and the suffix.
        group, *rest = path.name.rsplit(".", 2)
        if group in names and path.is_file() and not path.is_symlink():
            yield path, ".".join([names[group], *rest])


def _scorers(cells: Iterable[str]) -> bool:
    """Whether a plain engine that re-scores outputs is among the cells."""
    return any(c == CellName.of(c).reference for c in cells)


def _scores(histories: Sequence[History]) -> list[Observation]:
    """Each distinct output's re-scoring, as one run has it: of several the first that was answered."""
    kept: dict[tuple[str, str], Observation] = {}
    for history in histories:
        for o in history.observations:
            key = (o.cell, o.key)
            if o.scenario == RESCORE and (key not in kept or (rescored(o) and not rescored(kept[key]))):
                kept[key] = o
    return [o.model_copy(update={"sequence": number}) for number, o in enumerate(kept.values())]


def _missing(cell: Cell, night: _Night, like: Sequence[CellRecord]) -> CellRecord:
    """The record of a cell that no part ran, with what it was to be asked as far as that is known."""
    work = night.works.get(cell.id)
    alike = [c for c in like if c.route == cell.route and CellName.of(c.cell).topology == cell.topology]
    scenarios = work.planned if work is not None else {s: n for c in alike for s, n in c.scenarios.items()}
    return CellRecord(
        cell=cell.id,
        group=_NO_GROUP,
        block_size=night.profile.part(cell.variant).engine.block_size,
        lookahead=cell.method.lookahead,
        draft_tokens=cell.method.draft_tokens,
        route=cell.route,
        planned=len(work.items) if work is not None else max((c.planned for c in alike), default=0),
        scenarios=scenarios,
        state="failed",
        reason=_NO_PART,
    )


def _as_planned(record: CellRecord, work: CellWork | None) -> CellRecord:
    """A cell whose part was asked for less than the night: what it was not asked is missing, and not left out."""
    if work is None:
        return record
    asked = {s: max(n, record.scenarios.get(s, 0)) for s, n in work.planned.items()}
    return record.model_copy(
        update={"planned": max(record.planned, len(work.items)), "scenarios": {**record.scenarios, **asked}}
    )


def _write(out: Path, parts: Sequence[_Loaded], night: _Night, notices: list[str]) -> History:
    histories = [p.history for p in parts]
    chosen = _choose(histories)
    whole = _assemble(histories, chosen)
    bitwise = night.profile.judging.tier == "bitwise"
    duplicates, contradicted = _duplicates(parts, chosen, bitwise)
    cells = [
        _as_planned(whole.cells[c.id], night.works.get(c.id))
        if c.id in whole.cells
        else _missing(c, night, list(whole.cells.values()))
        for c in night.cells
    ]
    lost = [c.cell for c in cells if c.reason == _NO_PART]
    known = {c.cell for c in cells}
    cells += [record for cell, record in whole.cells.items() if cell not in known]
    if lost:
        notices.append(f"no part ran {', '.join(lost)}")
    notices += _halves(parts, chosen) + duplicates + _machines(parts)
    run = _run_record(parts, night, out.resolve().name, cells, whole.engines).model_copy(
        update={
            "rescore": any(p.run.rescore for p in parts)
            or (night.profile.workload.rescore and any(c == CellName.of(c).reference for c in lost)),
            "interrupted": any(_cut_short(parts, i) for i in set(chosen.values())),
            "merged": Merged(
                parts=tuple(_part(p, i, chosen) for i, p in enumerate(parts)),
                notices=tuple(notices),
                unsettled=contradicted,
            ),
        }
    )
    _save(out, run, whole)
    _write_second(out / SECOND, parts, night, chosen)
    return load_history(out)


def _write_second(folder: Path, parts: Sequence[_Loaded], night: _Night, chosen: Mapping[str, int]) -> None:
    """The second stages of the parts as one: for each cell that of the part whose first stage counts."""
    having = [(i, p.second) for i, p in enumerate(parts) if p.second is not None]
    if not having:
        return
    histories = [second for _, second in having]
    place = {number: at for at, (number, _) in enumerate(having)}
    picked = _choose(histories, {cell: place[i] for cell, i in chosen.items() if i in place})
    whole = _assemble(histories, picked)
    order = {c.id: n for n, c in enumerate(all_cells(night.profile))}
    cells = sorted(whole.cells.values(), key=lambda c: order.get(c.cell, len(order)))
    sources = [_Loaded(h, None) for h in histories]
    run = _run_record(sources, night, SECOND, cells, whole.engines)
    _save(folder, run.model_copy(update={"rescore": any(h.run.rescore for h in histories)}), whole)


def _run_record(
    parts: Sequence[_Loaded], night: _Night, run_id: str, cells: Sequence[CellRecord], engines: tuple[EngineRecord, ...]
) -> RunRecord:
    first, runs = parts[0].run, [p.run for p in parts]
    ends = [r.finished for r in runs if r.finished is not None]
    return RunRecord(
        schema_version=SCHEMA,
        run_id=run_id,
        harness_version=__version__,
        started=min(r.started for r in runs),
        finished=max(ends, default=None),
        command=tuple(sys.argv),
        git_commit=next((r.git_commit for r in runs if r.git_commit), None),
        git_dirty=next((r.git_dirty for r in runs if r.git_dirty), first.git_dirty),
        profile={**night.profile.model_dump(mode="json"), "source": night.source},
        prompts_sha256=first.prompts_sha256,
        hardware=first.hardware,
        versions=first.versions,
        identities=first.identities,
        engines=engines,
        cells=tuple(cells),
        seconds={
            key: round(sum(r.seconds.get(key, 0.0) for r in runs), 3)
            for key in dict.fromkeys(k for r in runs for k in r.seconds)
        },
        mutants=first.mutants,
        lacking={k: v for r in runs for k, v in r.lacking.items()},
    )


def _part(part: _Loaded, number: int, chosen: Mapping[str, int]) -> Part:
    run = part.run
    return Part(
        run_id=run.run_id,
        started=run.started,
        finished=run.finished,
        command=run.command,
        git_commit=run.git_commit,
        git_dirty=run.git_dirty,
        hardware=run.hardware,
        seconds=run.seconds,
        cells={c.cell: c.state for c in run.cells},
        counted=tuple(c.cell for c in run.cells if chosen.get(c.cell) == number),
        second_stage=part.second is not None,
    )


def _cut_short(parts: Sequence[_Loaded], number: int) -> bool:
    """Whether a part did not come to its end, and no other one that did recorded all its cells wholly."""
    part = parts[number]
    if not unfinished(part.run):
        return False
    ended = [p.history for p in parts if not unfinished(p.run)]
    return any(all(evidence_of(h, c.cell) < Evidence.WHOLE for h in ended) for c in part.run.cells)


def _halves(parts: Sequence[_Loaded], chosen: Mapping[str, int]) -> list[str]:
    """A notice for each part that did not come to its end, or whose last line was cut off."""
    out = []
    for i, part in enumerate(parts):
        why = unfinished(part.run) or ("lost its last observation, which was cut off" if part.history.torn_line else "")
        if why:
            counted = [c for c, n in chosen.items() if n == i]
            out.append(f"part {part.run.run_id} {why}; judged from it: {', '.join(counted) or 'nothing'}")
    return out


def _machines(parts: Sequence[_Loaded]) -> list[str]:
    kinds = dict.fromkeys(str(p.run.hardware.get("processor")) for p in parts)
    return [f"the parts ran on different processors: {', '.join(kinds)}"] if len(kinds) > 1 else []


def _save(folder: Path, run: RunRecord, whole: _Assembled) -> None:
    with HistoryWriter(folder) as writer:
        for observation in whole.observations:
            writer.append(observation)
    for source, name in whole.logs:
        target = folder / "logs" / name
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(source, target)
    if whole.observations:
        write_parquet(folder, whole.observations)
    # Last: a folder without it is no run.
    write_run(folder, run)
