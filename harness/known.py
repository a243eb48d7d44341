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

from harness.config import describe_validation_error
from harness.errors import DataError
from harness.findings import CellVerdict, CheckResult, DamageClass, Finding, Judgement, Verdict, worst
from harness.history import History
from harness.strict import Strict


class KnownDefect(Strict):
    """One entry of ``known-defects.yaml``."""

    id: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    classes: tuple[DamageClass, ...] = Field(min_length=1)
    """Classes of damage that the defect shows as."""
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
            and (finding.stratum is None or _any(finding.stratum, self.strata))
            and _any(finding.check, self.checks)
        )


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
    """Load the file. None when there is none. Raises DataError naming the damage: a broken list must not silently
    let findings through or fail them."""
    if path is None or not path.is_file():
        return None
    try:
        text = path.read_text(encoding="utf-8")
        raw = yaml.safe_load(text)
        places = _lines(yaml.compose(text))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"known defects {path}: expected YAML, but it cannot be read: {reason}") from error
    try:
        file = _File.model_validate(raw if raw is not None else {})
    except ValidationError as error:
        raise DataError(f"known defects {path} is not valid:\n{describe_validation_error(error)}") from error
    ids = [d.id for d in file.defects]
    if len(set(ids)) != len(ids):
        raise DataError(f"known defects {path}: expected distinct ids, found one twice")
    return KnownDefects(path, tuple(Entry(d, *places[i]) for i, d in enumerate(file.defects)))


def _lines(root: Any) -> list[tuple[int, int]]:
    """First and last line of each entry, counted from 1."""
    for key, value in getattr(root, "value", ()):
        if getattr(key, "value", None) == "defects" and isinstance(value, yaml.SequenceNode):
            starts = [item.start_mark.line + 1 for item in value.value]
            return [(a, max(a, item.end_mark.line)) for a, item in zip(starts, value.value, strict=True)]
    return []


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
            if any(_fits(entry.defect, f) for f in judgement.findings):
                notices.append(
                    f"known defect {entry.defect.id} expired on {entry.defect.expires}: its findings fail the run "
                    f"again; renew it in {known.path.name}, line {entry.first_line}, or have it mended"
                )
            continue
        valid.append(entry)
    cells = tuple(_cell(c, valid) for c in judgement.cells)
    for entry in valid:
        notices += _entry_notices(entry, judgement, cells, known.path.name)
    verdict = worst([*(c.verdict for c in cells), *([Verdict.UNKNOWN] if history.run.interrupted else [])])
    return judgement.model_copy(update={"cells": cells, "verdict": verdict, "notices": (*judgement.notices, *notices)})


def _day(text: str) -> date:
    return datetime.fromisoformat(text).date()


def _fits(defect: KnownDefect, finding: Finding) -> bool:
    return finding.damage in defect.classes and finding.verdict is not Verdict.PASS and defect.covers_place(finding)


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
        yield f"KNOWN {defect.id}: {len(mine)} findings, until {defect.expires}: {defect.reason} ({defect.link})"
        wider = sorted(
            {
                f"{f.cell}" + (f" in {f.scenario}" if f.scenario != "cold" else "")
                for f in findings
                if f.known is None and f.damage in defect.classes and f.verdict.exit_code != 0
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


def _judged(cell: CellVerdict) -> bool:
    return cell.verdict is not Verdict.UNKNOWN


def _any(text: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(text, p) for p in patterns)
