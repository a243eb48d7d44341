"""``harness merge``: parts of one night, recorded on several machines, as one recorded run that is judged once.

Judging needs the whole family: the registered tests of the normal tier are adjusted over all cells together, and error
rates are stated for a night, not for a part of it. The second stage needs no further run: each part has made one for
the tests that its own, smaller family rejected, and Holm's procedure rejects in a part of a family, at the same level,
whatever it rejects in the whole. What the whole rejects and no part ran again is UNKNOWN, as in any run.

A whole recording is never replaced by a later one, and recordings that do not count are judged too, as if they did: a
retry fills in what is missing and gives nothing a second chance.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from harness import __version__
from harness.baseline.lookup import Lookup
from harness.checks.evidence import Evidence as Judged
from harness.checks.night import registered, run_tests
from harness.checks.registry import baselines_for, judge_cell, judging_of, views
from harness.checks.statistical import tripped
from harness.config import Profile, describe_validation_error, read_profile
from harness.errors import DataError, HarnessError, InfrastructureError, UsageError
from harness.findings import CellVerdict, Finding, Judgement, Verdict, worst
from harness.history import (
    COLD,
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
from harness.known import apply_known, load_known
from harness.matrix import Cell, CellName, all_cells, select_cells
from harness.operations import known_path, load_second
from harness.parts import (
    Evidence,
    Signature,
    commits_in,
    comparable_profile,
    contradictions,
    describe_differences,
    evidence_of,
    find_runs,
    rescored,
    signature_of,
    signature_of_night,
    unfinished,
)
from harness.prompts import load_prompts
from harness.workload import CellWork, Choice, cell_work, choose_scenarios

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
    baselines: Path | None = None
    """What recordings that do not count are judged against; None takes the profile's."""
    known: Path | None = None
    """Known defects of these recordings; None takes the profile's."""


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
    signature: Signature
    cells: tuple[Cell, ...]
    works: Mapping[str, CellWork]
    """Requests of each cell; empty where the prompts are not on this machine."""
    choice: Choice

    def asks(self, cell: Cell) -> list[str]:
        """The scenarios that a cell is to be brought into, whether its prompts are on this machine or not."""
        if cell.id in self.works:
            return list(self.works[cell.id].planned)
        scenarios = self.profile.part(cell.variant).scenarios
        return [
            s.id
            for s in scenarios
            if self.choice.wants(s.id) and (s.routed or not cell.routed) and cell.topology in s.topologies
        ]

    @property
    def identities(self) -> dict[str, dict[str, Any]]:
        """Of all parts together, in the order of one run."""
        known = {k: v for k, v in self.signature.identities.items() if v is not None}
        order = {c.name.lineup: n for n, c in enumerate(all_cells(self.profile))}
        return {k: known[k] for k in sorted(known, key=lambda k: order.get(k, len(order)))}

    @property
    def prompts_sha256(self) -> str:
        """As one run says it: of the first variant that was asked anything."""
        prompts = self.signature.prompts
        return next((prompts[p.variant] for p in self.profile.parts if p.variant in prompts), "")


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
    parts, foreign, signature = _fitting(parts)
    problems += foreign
    if problems and not wanted.keep_going:
        shown = "\n".join(f"  {p}" for p in problems)
        raise UsageError(f"{len(problems)} of the parts cannot be merged (--keep-going leaves them out):\n{shown}")
    if not parts or signature is None:
        raise InfrastructureError(
            "expected parts of a night, found none that can be used: "
            + ("; ".join(problems) or "no run in the folders")
        )
    night = _night(parts[0].run, signature, wanted)
    notices = [f"a part was left out: {p}" for p in problems]
    return _write(out, parts, night, wanted, notices)


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
    twins: dict[str, list[Path]] = {}
    for run in runs:
        try:
            history = load_history(run)
            _require_usable(history, wanted)
        except HarnessError as error:
            problems.append(str(error))
            continue
        part, why = _with_second(history)
        known = parts.setdefault(history.run.run_id, part)
        if not _is_copy(part, known):
            twins.setdefault(history.run.run_id, [known.history.folder]).append(run)
        elif known is part and why:
            problems.append(why)
    for name, places in twins.items():
        del parts[name]
        problems.append(
            f"{', '.join(map(str, places))}: expected one run of the name {name}, or copies of it, found some that "
            "differ, and nothing says which of them counts; give the right one alone"
        )
    return sorted(parts.values(), key=lambda p: (p.run.started, p.run.run_id)), problems


def _with_second(history: History) -> tuple[_Loaded, str]:
    """A run with its second stage, and why that cannot be read."""
    try:
        return _Loaded(history, load_second(history)), ""
    except HarnessError as error:
        return _Loaded(history, None), f"second stage of {history.run.run_id}: {error}"


def _is_copy(part: _Loaded, of: _Loaded) -> bool:
    """Whether two folders hold the same recording, with the same second stage."""
    if part.second is None or of.second is None:
        alike = part.second is of.second
    else:
        alike = _same_recording(part.second, of.second)
    return alike and _same_recording(part.history, of.history)


def _same_recording(first: History, second: History) -> bool:
    return first.run == second.run and first.observations == second.observations


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


def _fitting(parts: Sequence[_Loaded]) -> tuple[list[_Loaded], list[str], Signature | None]:
    """The parts that are of the same night: what most of them say counts, the earliest of equals. A sentence for each
    other one, and what the fitting ones say together."""
    if not parts:
        return [], [], None
    signatures = [signature_of(p.run) for p in parts]
    expected = signature_of_night(signatures)
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
    fitting = [p for p in fitting if p not in strangers]
    # Once more: of what is known to be the night's own.
    return fitting, problems, signature_of_night([signature_of(p.run) for p in fitting]) if fitting else None


# --- what the night should consist of --------------------------------------------------------------------------------


def _night(run: RunRecord, signature: Signature, wanted: Wanted) -> _Night:
    """Raises UsageError when the profile that was named is not the recorded one, or a pattern matches nothing."""
    if wanted.expect is None:
        profile, source = _recorded_profile(run), str(run.profile.get("source", run.profile["name"]))
    else:
        profile, source = read_profile(wanted.expect), wanted.expect
        _require_same_profile(signature, profile, wanted.expect)
    choice = choose_scenarios(profile, wanted.scenarios)
    cells = select_cells(profile, wanted.cells)
    works: dict[str, CellWork] = {}
    for part in profile.parts:
        try:
            prompts = load_prompts(part.workload.prompts)
        except DataError:
            continue
        if prompts.sha256 == signature.prompts.get(part.variant):
            works |= {c.id: cell_work(part, prompts, c, choice) for c in cells if c.variant == part.variant}
    night = _Night(profile, source, signature, (), works, choice)
    # A cell in which none of the chosen scenarios makes sense is not run.
    asked = [c for c in cells if (works[c.id].requests if c.id in works else choice.wants(COLD) or night.asks(c))]
    return night._replace(cells=tuple(asked))


def _recorded_profile(run: RunRecord) -> Profile:
    try:
        profile = Profile.model_validate({k: v for k, v in run.profile.items() if k != "source"})
        # Every part is validated, as where a profile is read.
        len(profile.written_parts)
        return profile
    except ValidationError as error:
        raise UsageError(
            f"expected the whole profile in run.json of {run.run_id}, to know which cells there should be, found one "
            f"that this version cannot read; name it with --expect PROFILE:\n{describe_validation_error(error)}"
        ) from error


def _require_same_profile(recorded: Signature, profile: Profile, source: str) -> None:
    raw = profile.model_dump(mode="json")
    named = recorded._replace(profile=comparable_profile(raw), models=commits_in(raw))
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


def _duplicates(parts: Sequence[_Loaded], chosen: Mapping[str, int], night: _Night) -> tuple[list[str], list[str]]:
    """What cells that several parts recorded say against each other, which they can only where equal runs are equal
    bit for bit; and a notice for each set of them."""
    groups: dict[tuple[int, tuple[int, ...]], list[str]] = {}
    contradicted: list[str] = []
    judging = night.profile.judging
    for cell, best in chosen.items():
        others = tuple(i for i, p in enumerate(parts) if i != best and p.history.cell(cell) is not None)
        if others:
            groups.setdefault((best, others), []).append(cell)
        for i in others if judging.tier == "bitwise" else ():
            contradicted += [
                f"{cell}: {c.differing} of {c.compared} {_requests(c.scenario)} gave other tokens or accepted drafts "
                f"in {parts[i].run.run_id} than in {parts[best].run.run_id}: equal runs differ, so it cannot pass"
                for c in contradictions(parts[best].history, parts[i].history, cell, judging.near_tie_nats)
            ]
    notices = [
        f"{', '.join(cells)}: recorded by {len(others) + 1} parts; that of {parts[best].run.run_id} counts "
        "(the most complete one, of equals the earliest)"
        for (best, others), cells in groups.items()
    ]
    if judging.tier == "bitwise":
        contradicted += _scored_differently([p.history for p in parts], judging.near_tie_nats)
    return contradicted, notices


def _requests(scenario: str) -> str:
    return "cold prompts" if scenario == COLD else f"requests of {scenario}"


def _scored_differently(histories: Sequence[History], near_tie_nats: float) -> list[str]:
    """A sentence for each plain engine of which two parts say different things about the same output."""
    said: dict[tuple[str, str], set[bool]] = {}
    for history in histories:
        for o in history.observations:
            if o.scenario == RESCORE and rescored(o) and o.final is not None:
                wrong = any(gap > near_tie_nats for gap in o.final.rescored or ())
                said.setdefault((o.cell, o.key), set()).add(wrong)
    cells = dict.fromkeys(cell for cell, _ in said)
    count = {cell: sum(c == cell and len(answers) > 1 for (c, _), answers in said.items()) for cell in cells}
    return [
        f"{cell}: {n} outputs were right in one part and wrong in another when they were re-scored: equal runs "
        "differ, so it cannot pass"
        for cell, n in count.items()
        if n
    ]


# --- recordings that do not count ------------------------------------------------------------------------------------


def _found_elsewhere(
    parts: Sequence[_Loaded], chosen: Mapping[str, int], run: RunRecord, out: Path, wanted: Wanted
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
    baselines = baselines_for(History(folder=out, run=run, observations=()), wanted.baselines)
    known = load_known(wanted.known or known_path(run.profile.get("known_defects")))
    notices = []
    for i, cells in _judged_together(histories, recorded):
        night = _in_place(histories, chosen, run, out, i, cells)
        verdicts = _judge_cells(night, parts[i].second, baselines, cells)
        judgement = Judgement(run_id=run.run_id, verdict=Verdict.UNKNOWN, cells=tuple(verdicts))
        notices += [
            f"{item.cell}: {', '.join(f'{name} {verdict}' for name, verdict in found)}"
            + (f" in {item.scenario}" if item.scenario != COLD else "")
            + f" in the recording of {parts[i].run.run_id}, which does not count; a defect that comes and goes gets no "
            "second chance, so it cannot pass"
            for item in apply_known(judgement, known, night).cells
            if (found := [(r.check, _shown(r.findings)) for r in item.results if any(map(_is_wrong, r.findings))])
        ]
    return notices


def _judged_together(
    histories: Sequence[History], recorded: Iterable[tuple[int, str]]
) -> Iterable[tuple[int, list[str]]]:
    """Recordings that can stand in one night. A whole one serves those of its part as the reference, as it did there;
    what broke is no reference of others and stands alone."""
    whole: dict[int, list[str]] = {}
    for i, cell in recorded:
        if evidence_of(histories[i], cell) is Evidence.WHOLE:
            whole.setdefault(i, []).append(cell)
        else:
            yield i, [cell]
    yield from whole.items()


def _in_place(
    histories: Sequence[History], chosen: Mapping[str, int], run: RunRecord, out: Path, part: int, cells: Sequence[str]
) -> History:
    """The night with a part's recordings of some cells, and its whole ones, in the place of those that count."""
    own = [
        c.cell
        for c in histories[part].run.cells
        if c.cell in cells or evidence_of(histories[part], c.cell) is Evidence.WHOLE
    ]
    whole = _assemble(histories, {**chosen, **dict.fromkeys(own, part)}, scores_of=part)
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
    return [judge_cell(v) for v in mine]


def _is_wrong(finding: Finding) -> bool:
    """More than missing evidence; so is a change that failed a registered test and was not run again."""
    if finding.verdict is Verdict.UNKNOWN:
        return bool(finding.evidence.get("changed"))
    return finding.verdict not in (Verdict.PASS, Verdict.KNOWN)


def _shown(findings: Iterable[Finding]) -> str:
    verdict = worst(f.verdict for f in findings if _is_wrong(f))
    return "failed once" if verdict is Verdict.UNKNOWN else verdict.value


# --- one history -----------------------------------------------------------------------------------------------------


class _Assembled(NamedTuple):
    cells: dict[str, CellRecord]
    engines: tuple[EngineRecord, ...]
    observations: tuple[Observation, ...]
    logs: tuple[tuple[Path, str], ...]
    """Log files and what they are called in the merged run."""


def _assemble(histories: Sequence[History], chosen: Mapping[str, int], scores_of: int = 0) -> _Assembled:
    """The chosen recordings as one. Groups of engines that two parts call alike get names of their own. Of an output
    that several parts re-scored, the scores of ``scores_of`` come first."""
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
    scores = _scores(sorted(histories, key=lambda h: h is not histories[scores_of]))
    return _Assembled(cells, tuple(engines), (*observations, *scores), tuple(logs))


def _logs(folder: Path, names: Mapping[str, str]) -> Iterable[tuple[Path, str]]:
    """Logs of the groups; names come from files that are there, so none leads out of the folder."""
    for path in sorted(folder.glob("*.log")):
        # The id of a group may have dots itself; what follows is the role and the suffix.
        group, *rest = path.name.rsplit(".", 2)
        if group in names and path.is_file() and not path.is_symlink():
            yield path, ".".join([names[group], *rest])


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
    return _as_planned(
        CellRecord(
            cell=cell.id,
            group=_NO_GROUP,
            block_size=night.profile.part(cell.variant).engine.block_size,
            lookahead=cell.method.lookahead,
            draft_tokens=cell.method.draft_tokens,
            route=cell.route,
            planned=0,
            state="failed",
            reason=_NO_PART,
        ),
        cell,
        night,
        like,
    )


def _as_planned(record: CellRecord, cell: Cell, night: _Night, like: Sequence[CellRecord]) -> CellRecord:
    """A cell whose part was asked for less than the night: what it was not asked is missing, and not left out. How many
    requests that is, is known where the prompts are; elsewhere it is what other cells of its kind have."""
    work = night.works.get(cell.id)
    if work is None and record.reason != _NO_PART and not record.planned and not record.scenarios:
        # It could not be asked anything, and says why.
        return record
    cold, asked = (len(work.items), work.planned) if work is not None else _as_alike(record, cell, night, like)
    had = {COLD: record.planned, **record.scenarios}
    unasked = [s for s, n in {COLD: cold, **asked}.items() if n and not had.get(s)]
    reason = f"no part was to ask it {', '.join(unasked)}" if unasked else None
    return record.model_copy(
        update={
            "planned": max(record.planned, cold),
            "scenarios": {**record.scenarios, **{s: max(n, record.scenarios.get(s, 0)) for s, n in asked.items()}},
            "reason": record.reason or reason,
        }
    )


def _as_alike(record: CellRecord, cell: Cell, night: _Night, like: Sequence[CellRecord]) -> tuple[int, dict[str, int]]:
    """Cold requests and those by scenario that a cell lacks, by what other cells of its kind have; one where none has
    any."""
    alike = [c for c in like if c.route == cell.route and CellName.of(c.cell).topology == cell.topology]
    cold = max([1, *(c.planned for c in alike)]) if night.choice.wants(COLD) and not record.planned else 0
    lacking = [s for s in night.asks(cell) if s not in record.scenarios]
    return cold, {s: max([1, *(c.scenarios.get(s, 0) for c in alike)]) for s in lacking}


def _write(out: Path, parts: Sequence[_Loaded], night: _Night, wanted: Wanted, notices: list[str]) -> History:
    histories = [p.history for p in parts]
    chosen = _choose(histories)
    whole = _assemble(histories, chosen)
    recorded = list(whole.cells.values())
    cells = [
        _as_planned(whole.cells[c.id], c, night, recorded) if c.id in whole.cells else _missing(c, night, recorded)
        for c in night.cells
    ]
    lost = [c.cell for c in cells if c.reason == _NO_PART]
    known = {c.cell for c in cells}
    cells += [record for cell, record in whole.cells.items() if cell not in known]
    run = _run_record(parts, night, out.resolve().name, cells, whole.engines).model_copy(
        update={
            "rescore": any(p.run.rescore for p in parts)
            or (night.profile.workload.rescore and any(c == CellName.of(c).reference for c in lost)),
            "interrupted": any(_cut_short(parts, i) for i in set(chosen.values())),
        }
    )
    contradicted, duplicates = _duplicates(parts, chosen, night)
    wrong = _found_elsewhere(parts, chosen, run, out, wanted)
    notices += [f"no part ran {', '.join(lost)}"] if lost else []
    notices += [*_halves(parts, chosen), *contradicted, *wrong, *duplicates, *_machines(parts), *_commits(parts)]
    merged = Merged(
        parts=tuple(_part(p, i, chosen) for i, p in enumerate(parts)),
        notices=tuple(notices),
        unsettled=bool(contradicted or wrong),
    )
    _save(out, run.model_copy(update={"merged": merged}), whole)
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
        prompts_sha256=night.prompts_sha256 or first.prompts_sha256,
        hardware=first.hardware,
        versions=first.versions,
        identities=night.identities,
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


def _commits(parts: Sequence[_Loaded]) -> list[str]:
    """Notices for parts of which nobody can say with which harness they were recorded."""
    unknown = [p.run.run_id for p in parts if p.run.git_commit is None]
    changed = [p.run.run_id for p in parts if p.run.git_commit is not None and p.run.git_dirty]
    said = {
        "recorded with an unknown commit of the harness": unknown,
        "recorded with changes that no commit of the harness has": changed,
    }
    return [f"{what}: {', '.join(names)}" for what, names in said.items() if names]


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
