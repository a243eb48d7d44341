"""The list of known defects (expected failures) that a profile names: its format and loader."""

from __future__ import annotations

import fnmatch
import hashlib
from collections.abc import Iterable
from datetime import date, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import yaml
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version
from pydantic import Field, ValidationError, field_validator, model_validator

from harness.errors import DataError
from harness.util import clock, yaml_io
from harness.util.invalid_data import describe_validation_error
from harness.util.strict import Strict

MOST_DAYS = 120
"""Most days from the day on which an entry was added, or last renewed, to its expiry."""

_NEEDED = {
    "checks": "the checks whose findings it covers, such as [tokens-baseline]",
    "at_most": "the most findings that it covers in one cell and scenario",
    "added": f"the day on which it was added or last renewed; it expires at most {MOST_DAYS} days later",
}
"""Keys that narrow an entry and have no default, each with what is expected."""


class FindingLocation(Protocol):
    """The location of a finding, which is all that an entry needs to know about it."""

    @property
    def cell(self) -> str: ...
    @property
    def scenario(self) -> str: ...
    @property
    def stratum(self) -> str | None: ...
    @property
    def prompt_id(self) -> str | None: ...
    @property
    def check(self) -> str: ...
    @property
    def changed(self) -> tuple[str, ...]: ...
    @property
    def last_step(self) -> bool: ...
    @property
    def runs_on(self) -> bool: ...
    @property
    def lone_tokens(self) -> bool: ...
    @property
    def tokens_from_end(self) -> int | None: ...


class KnownDefect(Strict):
    """One entry of ``known-defects.yaml``."""

    id: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    classes: tuple[Literal["input", "target-kv", "drafter-kv", "drafter-input", "sampler", "no-answer"], ...] = Field(
        min_length=1
    )
    """Classes of damage that the defect causes. Missing evidence and broken engines cannot be known defects."""
    cells: tuple[str, ...] = Field(min_length=1)
    """Shell patterns of cells."""
    scenarios: tuple[str, ...] = ("*",)
    strata: tuple[str, ...] = ("*",)
    prompts: tuple[str, ...] = ("*",)
    """Shell patterns of prompts, where only some lengths show it."""
    checks: tuple[str, ...] = Field(min_length=1)
    at_most: int = Field(ge=1)
    """Most findings that it covers in one cell and scenario; where more fit, it covers none of them."""
    at_least: int = Field(1, ge=1)
    """Fewest findings that it explains in one cell and scenario: fewer are a change, and covered by nothing."""
    alike: bool = False
    """Whether it covers only answers in which P/D says the same as the single engine of its method."""
    runs_on: bool = False
    """Whether it covers only answers that are right up to the last token, and then go on."""
    lone_tokens: bool = False
    """Whether it covers only KV that differs at single tokens, none next to another, as at the ends of chunks."""
    last_tokens: int = Field(0, ge=0)
    """If not 0, it covers only KV that differs among so many tokens at the end of a prompt."""
    answers_alone: bool = False
    """Whether it covers only KV of answers, none of a prompt."""
    beside_full_context: bool = False
    """Whether it covers only answers, or those that they are compared with, that were under way together with a request
    that came to the end of its context."""
    improbable: bool = False
    """Whether it covers only answers that go wrong in a verify step, with a token that their engine rules out: it was
    drawn from another distribution than the request asked for."""
    untested: bool = False
    """Whether these states say nothing of the engines where the defect shows: the headline counts them."""
    sometimes: bool = False
    """Whether it need not show where it is looked for, so that a run in which it does not says nothing of it."""
    mistakes: tuple[str, ...] = ()
    """If there are any, it covers only hand-offs in which a router did this (``lost NAME`` for a parameter)."""
    parameters: tuple[str, ...] = ()
    """If there are any, it covers only requests with one of these parameters."""
    last_step: bool = False
    """Whether it covers only answers after a hand-off that differ in their last verify step alone, which looks past the
    end token."""
    vllm: str
    """Affected versions of vLLM, as a specifier, e.g. ``>=0.32,<0.33``."""
    devices: tuple[Literal["cpu", "gpu"], ...] = ("cpu", "gpu")
    model_runners: tuple[Literal["V1", "V2"], ...] = ("V1", "V2")
    link: str = Field(pattern=r"^https?://")
    reported: bool = True
    """Whether the link names this defect; otherwise nobody has, as far as is known, and it leads to the nearest."""
    reason: str = Field(min_length=10)
    added: date
    """Day on which the entry was added or last renewed. The limit of its life counts from here, not from the day on
    which it is read, so that a list that was valid once stays valid and old runs are judged as before."""
    expires: date

    @model_validator(mode="before")
    @classmethod
    def _narrowed(cls, raw: Any) -> Any:
        # A key that is unknown is perhaps the one that is missing, and is said with all that are.
        if isinstance(raw, dict) and raw.keys() <= cls.model_fields.keys():
            for key, expected in _NEEDED.items():
                if key not in raw:
                    raise ValueError(f"expected the key {key!r} ({expected}), found none; add it")
        return raw

    @model_validator(mode="after")
    def _bounded(self) -> KnownDefect:
        if self.at_least > self.at_most:
            raise ValueError(
                f"expected at_least ({self.at_least}) to be no more than at_most ({self.at_most}); correct one of them"
            )
        return self

    @model_validator(mode="after")
    def _narrow(self) -> KnownDefect:
        if all(_everything(p) for p in (self.cells, self.scenarios, self.checks)):
            raise ValueError(
                "the entry covers all cells, scenarios and checks; say where the defect shows, by at least one of "
                "the three"
            )
        days = (self.expires - self.added).days
        if not 0 <= days <= MOST_DAYS:
            raise ValueError(
                f"it expires {days} days after it was added ({self.added} to {self.expires}), and at most "
                f"{MOST_DAYS} are allowed; choose an earlier day, and renew the entry then"
            )
        return self

    @field_validator("vllm")
    @classmethod
    def _specifier(cls, value: str) -> str:
        try:
            SpecifierSet(value)
        except InvalidSpecifier as error:
            raise ValueError(f"expected versions like '>=0.32,<0.33' ({error})") from error
        return value

    def covers_run(self, version: str | None, device: str) -> bool:
        """Return whether the run's vLLM and device are affected."""
        try:
            return device in self.devices and SpecifierSet(self.vllm).contains(Version(version or ""), prereleases=True)
        except InvalidVersion:
            return False

    def classes_apart(self, found: Iterable[str]) -> bool:
        """Return whether none of these classes of a finding is one that the defect causes."""
        return {*self.classes}.isdisjoint(found)

    def covers_place(self, finding: FindingLocation) -> bool:
        return (
            matches_any(finding.cell, self.cells)
            and matches_any(finding.scenario, self.scenarios)
            and self._covers_strata(finding)
            and ("*" in self.prompts or matches_any(finding.prompt_id or "", self.prompts))
            and matches_any(finding.check, self.checks)
            and (finding.last_step or not self.last_step)
            and (finding.lone_tokens or not self.lone_tokens)
            and self._covers_tokens(finding.tokens_from_end)
            and (finding.runs_on or not self.runs_on)
        )

    def _covers_tokens(self, from_end: int | None) -> bool:
        if not self.last_tokens and not self.answers_alone:
            return True
        return from_end is not None and from_end <= self.last_tokens

    def _covers_strata(self, finding: FindingLocation) -> bool:
        if "*" in self.strata:
            return True
        if finding.stratum is not None:
            return matches_any(finding.stratum, self.strata)
        # Findings of registered tests name the columns that changed, as stratum@position; "all" is every stratum.
        changed = {column.partition("@")[0] for column in finding.changed}
        return bool(changed) and all(matches_any(name, self.strata) for name in changed)


def _everything(patterns: Iterable[str]) -> bool:
    """Return whether a pattern holds no name at all, only wildcards."""
    return any(not any(c.isalnum() for c in p) for p in patterns)


class _DefectsFile(Strict):
    format: Literal[1]
    defects: tuple[KnownDefect, ...] = ()


class Entry(NamedTuple):
    """A known defect and its lines in the file."""

    defect: KnownDefect
    first_line: int
    last_line: int


class KnownDefects(NamedTuple):
    """The entries of a list of known defects."""

    path: Path
    entries: tuple[Entry, ...]
    sha256: str = ""


def load_known(path: Path | None) -> KnownDefects | None:
    """Load the list, or return None without a path. Raises DataError naming the damage: a list that is broken or
    missing must neither excuse findings nor fail them silently."""
    if path is None:
        return None
    try:
        text = yaml_io.text_of(path)
        file, places = _parsed(text)
    except FileNotFoundError as error:
        raise DataError(
            f"expected failures {path}: there is no such file, which the profile or --known names; restore it, "
            "correct the path, or take known_defects out of the profile"
        ) from error
    except ValidationError as error:
        words = describe_validation_error(error, yaml_io.parse(text))
        raise DataError(f"expected failures {path} is not valid:\n{words}") from error
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"expected failures {path}: expected YAML, but it cannot be read: {reason}") from error
    ids = [d.id for d in file.defects]
    if len(set(ids)) != len(ids):
        raise DataError(f"expected failures {path}: an id stands there twice; rename one")
    # Somewhere east of UTC the next day has begun.
    tomorrow = clock.utc().date() + timedelta(1)
    for defect in file.defects:
        if defect.added > tomorrow:
            raise DataError(
                f"expected failures {path}: {defect.id} was added on {defect.added}, which is after today "
                f"({tomorrow - timedelta(1)}); correct `added`, or this machine's clock"
            )
    if len(places) != len(file.defects):
        raise DataError(
            f"expected failures {path}: the key 'defects' stands there several times; put all entries under one"
        )
    entries = tuple(Entry(d, *place) for d, place in zip(file.defects, places, strict=True))
    return KnownDefects(path, entries, hashlib.sha256(text.encode()).hexdigest())


@lru_cache(maxsize=4)
def _parsed(text: str) -> tuple[_DefectsFile, tuple[tuple[int, int], ...]]:
    """Return a list and the first and last line of each entry, counted from 1. Raises ValueError and ValidationError.
    Many runs are judged with one list."""
    return _DefectsFile.model_validate(yaml_io.parse(text)), _lines(yaml_io.nodes(text))


def _lines(root: yaml.Node | None) -> tuple[tuple[int, int], ...]:
    if not isinstance(root, yaml.MappingNode):
        return ()
    items = [
        item
        for key, value in root.value
        if getattr(key, "value", None) == "defects" and isinstance(value, yaml.SequenceNode)
        for item in value.value
    ]
    return tuple((i.start_mark.line + 1, max(i.start_mark.line + 1, i.end_mark.line)) for i in items)


def matches_any(text: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(text, p) for p in patterns)
