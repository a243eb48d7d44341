"""What to do next: show a finding again, ask again what is SUSPECT, go on with what was not recorded in full."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

from pydantic import BaseModel

from harness.history.folder import History
from harness.history.records import COLD
from harness.history.verdict import Verdict
from harness.judging.findings import Finding, Judgement
from harness.profiles.cells import CellName
from harness.profiles.recorded_profile import RecordedProfile
from harness.reports.inputs import JUDGEMENT
from harness.util.paths import REPOSITORY
from harness.util.strict import part_of
from harness.util.text import counted

_LOOKED_AT = 60
"""Most earlier runs that are read: two months of nights."""
_FAILED = (Verdict.SUSPECT, Verdict.REGRESSION)

_Place = tuple[str, str, str]
"""Cell, scenario and check."""


class _Result(BaseModel):
    check: str
    verdict: str


class _CellResults(BaseModel):
    cell: str
    scenario: str = COLD
    results: tuple[_Result, ...]


class _Judgement(BaseModel):
    """The part of a ``judgement.json`` that is needed here, as any version of the harness wrote it."""

    cells: tuple[_CellResults, ...]

    @property
    def failed(self) -> frozenset[_Place]:
        return frozenset((c.cell, c.scenario, r.check) for c in self.cells for r in c.results if r.verdict in _FAILED)


class _Run(BaseModel):
    """The part of a ``run.json`` that is needed here."""

    started: str
    profile: dict[str, Any]
    mutants: tuple[str, ...] = ()


def next_step(history: History, judgement: Judgement) -> str:
    """Return what to do next, with what earlier runs of the profile say; empty unless a test is SUSPECT."""
    suspects = [f for f in judgement.findings if f.verdict is Verdict.SUSPECT]
    if not suspects:
        return ""
    earlier = list(_earlier(history))
    repeated = [(f, runs) for f in suspects if (runs := [run for run, failed in earlier if _place(f) in failed])]
    if repeated:
        finding, runs = repeated[0]
        others = f" ({len(repeated)} tests in all)" if len(repeated) > 1 else ""
        return (
            f"{_name(finding)} failed in {len(runs)} of {len(earlier)} earlier runs beside this one, too, last in "
            f"{runs[-1]}{others}: chance alone does not repeat that; treat it as a regression"
        )
    names = [CellName.of(f.cell) for f in suspects]
    # With what they are compared with: alone, some of the tests have nothing to go by.
    wanted = dict.fromkeys(c for n in names for c in (n.id, n.single, n.reference) if history.cell(c) is not None)
    cells = [part for cell in wanted for part in ("--cell", cell)]
    again = shlex.join(["harness", "run", "--profile", _profile(history), *cells])
    before = (
        f"none of the {len(earlier)} earlier runs beside this one failed there"
        if earlier
        else "there are no earlier runs beside this one to compare with"
    )
    return (
        f"run the suspected cells again, {asked_by(history) if history.run.attached else again}: failing there in "
        f"another run is a finding; {before}"
    )


class NextStep(NamedTuple):
    """How to complete a run that was not recorded in full, as text and as a command; both empty where nothing helps."""

    words: str = ""
    command: str = ""


def go_on(history: History, judgement: Judgement) -> NextStep:
    """Return how to get the evidence that a run lacks because it was interrupted or its engines broke."""
    run = history.run
    if (
        judgement.verdict not in (Verdict.UNKNOWN, Verdict.SUSPECT)
        or run.kind != "run"
        or run.merged is not None
        or run.mutants
    ):
        return NextStep()
    left = [c.cell for c in run.cells if c.state != "complete"]
    if not left or run.attached:
        return NextStep()
    words = f"{len(left)} of {counted(len(run.cells), 'cell')} {'is' if len(left) == 1 else 'are'} not complete"
    if run.interrupted or run.finished is None:
        if history.folder.resolve().name != run.run_id:
            return NextStep(
                f"{words}; this is a copy, which cannot be resumed; go on where the run was recorded: harness run "
                f"--resume {_recorded_in(history)}"
            )
        command = shlex.join(["harness", "run", "--resume", shown_folder(history)])
        return NextStep(f"{words}; go on: {command}", command)
    if run.engine_flags and not run.engines:
        return NextStep(
            f"{words}; no engine became ready with {shlex.join(run.engine_flags)}: correct that, or leave it out"
        )
    profile = _profile(history)
    cells = [part for cell in left for part in ("--cell", cell)]
    command = shlex.join(["harness", "run", "--profile", profile, *cells, *run.engine_flags])
    return NextStep(f"{words}; once the cause is gone, ask them again: {command}", command)


def _recorded_in(history: History) -> str:
    """Return the folder that a run was recorded in, as its command named it there."""
    words = [part for word in history.run.command for part in word.split("=", 1)]
    out = next((after for word, after in pairwise(words) if word == "--out"), "reports")
    return shlex.quote(f"{out.rstrip('/')}/{history.run.run_id}")


def _profile(history: History) -> str:
    """Return the profile of a run as ``--profile`` names it."""
    return history.run.asked_for.source


def asked_by(history: History) -> str:
    """Return the command that asked servers which ran already: any other would start engines instead."""
    return shlex.join(["harness", *history.run.command[1:]])


def can_be_tried(finding: Finding) -> bool:
    """Return whether ``harness repro`` may show a finding again: missing evidence shows nothing."""
    return bool(finding.cell) and finding.verdict is not Verdict.UNKNOWN and finding.damage != "infrastructure"


def repro_line(history: History, finding: Finding) -> str:
    """Return the command that tries a finding again, with the flags that the run's engines had; of servers that ran
    already, the command that asked them."""
    if history.run.attached:
        return asked_by(history)
    return shlex.join(["harness", "repro", shown_folder(history), finding.id, *history.run.engine_flags])


def shown_folder(history: History) -> str:
    """Return the folder of a run as commands name it: from the repository, where it lies there."""
    folder = history.folder
    return str(folder.relative_to(REPOSITORY) if folder.is_relative_to(REPOSITORY) else folder)


def _name(finding: Finding) -> str:
    return f"{finding.cell} {finding.check}" + ("" if finding.scenario == COLD else f" in {finding.scenario}")


def _place(finding: Finding) -> _Place:
    return finding.cell, finding.scenario, finding.check


def _earlier(history: History) -> Iterator[tuple[str, frozenset[_Place]]]:
    """Yield the judged runs of the same profile beside this one that started before it, oldest first, with the tests
    that failed there."""
    found = []
    for folder in history.folder.resolve().parent.iterdir():
        run = None if folder.is_symlink() else part_of(folder / "run.json", _Run)
        if run is None or run.mutants or RecordedProfile(run.profile).setting("name") != history.run.asked_for.name:
            continue
        if run.started < history.run.started:
            found.append((run.started, folder))
    for _, folder in sorted(found)[-_LOOKED_AT:]:
        judged = part_of(folder / JUDGEMENT, _Judgement)
        if judged is not None:
            yield folder.name, judged.failed
