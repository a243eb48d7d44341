"""Known defects: findings that are reported already, so that they neither keep a night red nor are forgotten.

An entry names what it covers (class, cells, scenarios, strata, checks, versions), a link, a reason and an expiry date.
A finding that fits is shown as KNOWN, never as PASS and never hidden, and does not fail the run. It fails again when
the entry has expired, and everything that the entry does not cover fails as before. An entry that matches nothing any
more is reported as fixed, with the lines to delete. Dates and versions are those of the run, so that judging again
later gives the same answer.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from datetime import date, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version
from pydantic import Field, ValidationError, field_validator

from harness import strict_yaml
from harness.config import describe_validation_error
from harness.errors import EXIT_REGRESSION, DataError
from harness.findings import CellVerdict, CheckResult, Finding, Judgement, Verdict, how_many, worst
from harness.history import History
from harness.strict import Strict


class KnownDefect(Strict):
    """One entry of ``known-defects.yaml``."""

    id: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    classes: tuple[Literal["input", "target-kv", "drafter-kv", "sampler"], ...] = Field(min_length=1)
    """Classes of damage that the defect shows as. Missing evidence and broken engines cannot be known defects."""
    cells: tuple[str, ...] = Field(min_length=1)
    """Shell patterns of cells."""
    scenarios: tuple[str, ...] = ("*",)
    strata: tuple[str, ...] = ("*",)
    checks: tuple[str, ...] = ("*",)
    vllm: str
    """Versions of vLLM that have it, as a specifier, e.g. ``>=0.32,<0.33``."""
    devices: tuple[Literal["cpu", "gpu"], ...] = ("cpu", "gpu")
    link: str = Field(pattern=r"^https?://")
    reason: str = Field(min_length=10)
    expires: date

    @field_validator("vllm")
    @classmethod
    def _specifier(cls, value: str) -> str:
        try:
            SpecifierSet(value)
        except InvalidSpecifier as error:
            raise ValueError(f"expected versions like '>=0.32,<0.33' ({error})") from error
        return value

    def covers_run(self, version: str | None, device: str) -> bool:
        """Whether the run's vLLM and device are among those that have the defect."""
        try:
            return device in self.devices and SpecifierSet(self.vllm).contains(Version(version or ""), prereleases=True)
        except InvalidVersion:
            return False

    def covers_place(self, finding: Finding) -> bool:
        return (
            _any(finding.cell, self.cells)
            and _any(finding.scenario, self.scenarios)
            and self._covers_strata(finding)
            and _any(finding.check, self.checks)
        )

    def _covers_strata(self, finding: Finding) -> bool:
        if "*" in self.strata:
            return True
        if finding.stratum is not None:
            return _any(finding.stratum, self.strata)
        # Findings of registered tests name the columns that changed, as stratum@position; "all" is every stratum.
        changed = {str(column).partition("@")[0] for column in finding.evidence.get("changed", ())}
        return bool(changed) and all(_any(name, self.strata) for name in changed)


class _File(Strict):
    format: Literal[1]
    defects: tuple[KnownDefect, ...] = ()


class Entry(NamedTuple):
    """A known defect and the lines of the file that it takes."""

    defect: KnownDefect
    first_line: int
    last_line: int


class KnownDefects(NamedTuple):
    path: Path
    entries: tuple[Entry, ...]


def load_known(path: Path | None) -> KnownDefects | None:
    """Load the file; None without a path. Raises DataError naming the damage: a broken or misspelt list must not
    silently let findings through or fail them."""
    if path is None:
        return None
    try:
        text, raw = strict_yaml.load(path)
        places = _lines(yaml.compose(text, Loader=yaml.SafeLoader))
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"known defects {path}: expected YAML, but it cannot be read: {reason}") from error
    try:
        file = _File.model_validate(raw)
    except ValidationError as error:
        raise DataError(f"known defects {path} is not valid:\n{describe_validation_error(error)}") from error
    ids = [d.id for d in file.defects]
    if len(set(ids)) != len(ids):
        raise DataError(f"known defects {path}: expected distinct ids, found one twice")
    if len(places) != len(file.defects):
        raise DataError(f"known defects {path}: expected the key 'defects' once, found it more often")
    return KnownDefects(path, tuple(Entry(d, *place) for d, place in zip(file.defects, places, strict=True)))


def _lines(root: Any) -> list[tuple[int, int]]:
    """First and last line of each entry, counted from 1."""
    if not isinstance(root, yaml.MappingNode):
        return []
    items = [
        item
        for key, value in root.value
        if getattr(key, "value", None) == "defects" and isinstance(value, yaml.SequenceNode)
        for item in value.value
    ]
    return [(i.start_mark.line + 1, max(i.start_mark.line + 1, i.end_mark.line)) for i in items]


def apply_known(judgement: Judgement, known: KnownDefects | None, history: History) -> Judgement:
    """The judgement with findings that fit an entry shown as KNOWN, and notices on entries that expired, are too
    narrow or match nothing."""
    if known is None or not known.entries or judgement.mutants:
        # A defect that was put in on purpose is not the one that is known.
        return judgement
    version = history.run.versions.get("vllm")
    device = str(history.run.profile.get("engine", {}).get("device", "cpu"))
    valid, notices = [], []
    for entry in known.entries:
        if not entry.defect.covers_run(version, device):
            continue
        if _day(history.run.started) > entry.defect.expires:
            again = any(_fits(entry.defect, f) for f in judgement.findings)
            notices.append(
                f"known defect {entry.defect.id} expired on {entry.defect.expires}: "
                + (
                    "its findings fail the run again; renew it in "
                    if again
                    else "it matches nothing here; delete it from "
                )
                + f"{known.path.name}, line {entry.first_line}"
            )
            continue
        valid.append(entry)
    cells = tuple(_cell(c, valid) for c in judgement.cells)
    for entry in valid:
        notices += _entry_notices(entry, judgement, cells, known.path.name)
    verdict = worst([*(c.verdict for c in cells), *history.run.at_best])
    return judgement.model_copy(update={"cells": cells, "verdict": verdict, "notices": (*judgement.notices, *notices)})


def _day(text: str) -> date:
    try:
        return datetime.fromisoformat(text).date()
    except ValueError as error:
        raise DataError(
            f"run.json: started: expected a date and a time, found {text!r}: the record is damaged"
        ) from error


def _fits(defect: KnownDefect, finding: Finding) -> bool:
    certain = finding.verdict not in (Verdict.PASS, Verdict.UNKNOWN)
    return certain and finding.damage in defect.classes and defect.covers_place(finding)


def _cell(cell: CellVerdict, entries: Iterable[Entry]) -> CellVerdict:
    results = tuple(_result(r, list(entries)) for r in cell.results)
    if results == cell.results:
        return cell
    return cell.model_copy(update={"results": results, "verdict": worst(r.verdict for r in results)})


def _result(result: CheckResult, entries: list[Entry]) -> CheckResult:
    if not result.findings:
        return result
    found = []
    for finding in result.findings:
        entry = next((e for e in entries if _fits(e.defect, finding)), None)
        if entry is not None:
            finding = finding.model_copy(
                update={"verdict": Verdict.KNOWN, "known": entry.defect.id, "link": entry.defect.link}
            )
        found.append(finding)
    return result.model_copy(update={"findings": tuple(found), "verdict": worst(f.verdict for f in found)})


def _entry_notices(entry: Entry, before: Judgement, after: Iterable[CellVerdict], name: str) -> Iterable[str]:
    defect = entry.defect
    findings = [f for c in after for r in c.results for f in r.findings]
    mine = [f for f in findings if f.known == defect.id]
    lines = f"lines {entry.first_line} to {entry.last_line} of {name}"
    if mine:
        yield f"KNOWN {defect.id}: {how_many(mine)} findings, until {defect.expires}: {defect.reason} ({defect.link})"
        wider = sorted(
            {
                f"{f.cell}" + (f" in {f.scenario}" if f.scenario != "cold" else "")
                for f in findings
                if f.known is None and f.verdict.exit_code == EXIT_REGRESSION and _near(defect, f)
            }
        )
        if wider:
            yield f"known defect {defect.id} may be wider than its entry ({lines}): also {', '.join(wider)}"
        return
    looked_at = [
        c for c in before.cells if _any(c.cell, defect.cells) and _any(c.scenario, defect.scenarios) and _judged(c)
    ]
    if looked_at:
        yield (
            f"known defect {defect.id} matched nothing in {len(looked_at)} cells that it names: fixed? Then delete "
            f"{lines}"
        )


def _near(defect: KnownDefect, finding: Finding) -> bool:
    """Whether an uncovered finding may be the same defect elsewhere: the same class, or the same cell and scenario."""
    place = _any(finding.cell, defect.cells) and _any(finding.scenario, defect.scenarios)
    return finding.damage in defect.classes or place


def _judged(cell: CellVerdict) -> bool:
    return cell.verdict is not Verdict.UNKNOWN


def _any(text: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(text, p) for p in patterns)
