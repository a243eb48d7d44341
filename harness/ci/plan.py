"""A night as steps: groups of engines, packed by expected time, each with the plain engine that its cells need."""

from __future__ import annotations

import glob
import math
import re
import shlex
from collections.abc import Sequence
from typing import Any, NamedTuple

import yaml

from harness.config import Profile, read_profile
from harness.errors import EXIT_UNKNOWN, UsageError
from harness.hub import references_of
from harness.matrix import Cell, EngineGroup, make_plan
from harness.operations import prepare
from harness.runner import expected_s
from harness.workload import CellWork

RETRY_ON = EXIT_UNKNOWN
TRIES = 2
"""A part that could not record everything is tried once more."""
SETUP_MINUTES = 20
"""For a checkout, an environment of vLLM's size, and the artifacts."""
AUDIT_COMMAND = "ci/audit.sh"
"""Known vulnerabilities of the locks: a step of its own, so that it neither hides a verdict nor is hidden by one."""
AUDIT_MINUTES = 45
SLOWER = 2
"""Machines may be so much slower than the one that the expected times are of."""
_PINNED = re.compile(r"[a-z0-9][A-Za-z0-9._/:-]*@sha256:[0-9a-f]{64}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")

EXIT_CODES = (
    "Exit codes of a part: 0 everything was recorded, whatever it says; 2 something could not be recorded (UNKNOWN),",
    "the only code that is tried once more; 64 wrong usage. Of the verdict, judged once over all parts: 0 PASS (known",
    "defects included); 1 REGRESSION, DRIFT or IMPROVED; 2 UNKNOWN or SUSPECT; 64 wrong usage. No step fails softly.",
    "See docs/ci.md.",
)


class Step(NamedTuple):
    """What one machine records."""

    name: str
    cells: tuple[Cell, ...]
    expected_s: float
    timeout_minutes: int
    """For one try."""

    @property
    def title(self) -> str:
        """The methods in words; all of it is data from the profile."""
        lineups = dict.fromkeys(c.name.lineup for c in self.cells if c.id != c.name.reference)
        return f"{self.name}: {', '.join(lineups) or ', '.join(c.id for c in self.cells)}"


class Night(NamedTuple):
    """A profile as steps, the last of which merges and judges."""

    profile: Profile
    source: str
    patterns: tuple[str, ...]
    steps: tuple[Step, ...]

    @property
    def extra(self) -> str:
        """Which of the project's locks the engines need."""
        return self.profile.engine.device

    @property
    def fetches(self) -> bool:
        """Whether models of the hub, or prompts that are made from a data set, have to be there before a part runs."""
        parts = read_profile(self.source).written_parts
        return any(references_of(p) or p.workload.recipe is not None for p in parts)

    def record_command(self, step: Step, tries: int) -> str:
        """Shell command of a part, every word quoted."""
        # A cell's id must not be read as a pattern.
        chosen = [word for c in step.cells for word in ("--cell", glob.escape(c.id))]
        return shlex.join(["ci/part.sh", step.name, str(tries), "--profile", self.source, *chosen])

    @property
    def merge_command(self) -> str:
        """Shell command of the last step."""
        chosen = [word for p in self.patterns for word in ("--cell", p)]
        return shlex.join(["ci/merge.sh", "--expect", self.source, *chosen])


def plan_night(source: str, patterns: Sequence[str] = (), minutes: int | None = None) -> Night:
    """Pack the cells of a profile into steps of about ``minutes``; None takes the longest that cannot be divided.

    The models need not be on this machine. Raises ProfileError, DataError or UsageError.
    """
    for what, text in (("--profile", source), *(("--cell", p) for p in patterns)):
        require_plain(what, text)
    prepared = prepare(source, patterns, planned=True)
    profile = prepared.profile
    works = {w.cell.id: w for w in prepared.works}
    units = [_with_reference(u, works) for u in _units(profile, works)]
    limit_s = 60 * minutes if minutes is not None else max(_seconds(profile, u, works) for u in units)
    packed: list[list[Cell]] = []
    for unit in units:
        for step in packed:
            together = _in_order({*(c.id for c in step), *(c.id for c in unit)}, works)
            if _seconds(profile, together, works) <= limit_s:
                step[:] = together
                break
        else:
            packed.append(list(unit))
    steps = tuple(_step(profile, f"part-{n}", cells, works) for n, cells in enumerate(packed, 1))
    return Night(profile, source, tuple(patterns), steps)


def _step(profile: Profile, name: str, cells: Sequence[Cell], works: dict[str, CellWork]) -> Step:
    seconds = _seconds(profile, cells, works)
    stages = profile.judging.stages if profile.judging.tier == "normal" else 1
    return Step(name, tuple(cells), seconds, math.ceil(SLOWER * stages * seconds / 60) + SETUP_MINUTES)


def _units(profile: Profile, works: dict[str, CellWork]) -> list[list[Cell]]:
    """Groups of engines that must not be parted: a pair, and the single engine of the same run that it is compared
    with."""
    units: list[tuple[set[str], list[EngineGroup]]] = []
    for group in make_plan(profile, [w.cell for w in works.values()]).groups:
        singles = {c.name.single for c in group.cells}
        touching = [u for u in units if u[0] & singles]
        units = [u for u in units if u not in touching]
        units.append((set().union(singles, *(u[0] for u in touching)), [*(g for u in touching for g in u[1]), group]))
    return [_in_order({c.id for g in groups for c in g.cells}, works) for _, groups in units]


def _with_reference(cells: Sequence[Cell], works: dict[str, CellWork]) -> list[Cell]:
    """The cells, and the plain single engine that their tokens are compared with and that re-scores them."""
    return _in_order({*(c.id for c in cells), *(c.name.reference for c in cells)} & set(works), works)


def _in_order(ids: set[str], works: dict[str, CellWork]) -> list[Cell]:
    return [w.cell for cell, w in works.items() if cell in ids]


def _seconds(profile: Profile, cells: Sequence[Cell], works: dict[str, CellWork]) -> float:
    return expected_s(make_plan(profile, cells), [works[c.id] for c in cells])


def require_plain(what: str, text: str) -> str:
    """The text, if it may stand in a pipeline. Raises UsageError for control characters and for expressions that a CI
    system would evaluate."""
    if _CONTROL.search(text) or "${{" in text:
        raise UsageError(
            f"{what}: expected a name without control characters and without '${{{{', which CI systems evaluate, found "
            f"{text!r}; rename it"
        )
    return text


def require_pinned(image: str) -> str:
    """The image, if it is pinned by digest. Raises UsageError otherwise."""
    if not _PINNED.fullmatch(image):
        raise UsageError(
            f"--image: expected an image pinned by digest (NAME@sha256: and 64 hexadecimal digits), found {image!r}; "
            "a tag can be moved"
        )
    return image


class Environments(NamedTuple):
    """Variables that ``ci/harness.sh`` and ``ci/part.sh`` read."""

    shared: dict[str, str]
    recording: dict[str, str]
    judging: dict[str, str]


def environments(night: Night, image: str | None, gpus: str | None, same_machines: bool) -> Environments:
    """Variables of all steps, of the parts, and of the verdict, which needs no GPU and, on other machines than the
    parts', no engine of theirs. Raises UsageError for an image that is not pinned, or GPUs alone."""
    fetch = {"HARNESS_FETCH": "1"} if night.fetches else {}
    if image is None:
        if gpus is not None:
            raise UsageError("--gpus: expected --image with it, found none; without an image engines see all GPUs")
        judging = {"HARNESS_EXTRA": night.extra if same_machines else "cpu"}
        return Environments({}, {"HARNESS_EXTRA": night.extra, **fetch}, judging)
    wanted = gpus or ("all" if night.extra == "gpu" else None)
    if wanted is not None and not re.fullmatch(r"all|[1-9][0-9]*", wanted):
        raise UsageError(f"--gpus: expected 'all' or a number, found {wanted!r}")
    given = {"HARNESS_GPUS": wanted} if wanted is not None else {}
    return Environments({"HARNESS_IMAGE": require_pinned(image)}, {**given, **fetch}, {})


def dump(head: Sequence[str], document: dict[str, Any]) -> str:
    """The document as YAML below comment lines."""
    body = yaml.safe_dump(document, sort_keys=False, width=10_000, allow_unicode=True)
    return "".join(f"# {line}\n" for line in head) + body


def head_of(night: Night, system: str) -> list[str]:
    """Comment lines of a generated file: what it is, how to renew it, and what exit codes mean."""
    minutes = sum(s.expected_s for s in night.steps) / 60
    return [
        f"Generated by `harness ci {system}` from profile {night.source}; change that and generate it anew.",
        f"{len(night.steps)} parts, about {minutes:.0f} minutes of machine time (what the profile expects).",
        *EXIT_CODES,
    ]
