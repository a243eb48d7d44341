"""Value types of the registered hypothesis tests and their results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from harness.judging.checks.asked_again import NOT_ASKED, AskedAgain
from harness.judging.checks.traces import RunRounding
from harness.judging.detection import Detectable, Sample
from harness.profiles.model import Judging
from harness.stats.paired import Difference
from harness.stats.spread import Spread

TestName = Literal[
    "survival",
    "rescored",
    "logprobs-single",
    "acceptance-baseline",
    "acceptance-cold",
    "acceptance-single",
    "first-step",
    "pooled",
    "acceptance-pooled",
]
"""In the order of the reports."""
YES_OR_NO: tuple[TestName, ...] = ("survival", "rescored", "first-step", "pooled")
"""Tests in which a prompt is right or wrong, at least in some columns."""


def required(name: TestName, judging: Judging) -> tuple[float | None, float | None]:
    """Return the change in percentage points that a test must be able to see, over all prompts and in each stratum."""
    if name == "pooled":
        return judging.must_detect_points, None
    if name in YES_OR_NO:
        return judging.must_detect_alone_points, None
    return judging.must_detect_points, judging.must_detect_stratum_points


class RegisteredTest(NamedTuple):
    """A test that was announced before the run: its cell, scenario and name."""

    cell: str
    scenario: str
    name: TestName

    def __str__(self) -> str:
        return f"{self.cell}@{self.scenario}::{self.name}"


class Column(NamedTuple):
    difference: Difference
    adjusted: float
    """p-value, adjusted for the number of columns in this test (maxT)."""


class Tested(NamedTuple):
    """The result of one registered test."""

    id: RegisteredTest
    p: float | None
    """None if the test could not be computed; ``problem`` says why."""
    adjusted: float | None = None
    """Holm-adjusted p-value; the test rejects if it is at most the stage's alpha."""
    columns: tuple[Column, ...] = ()
    sample: Sample = Sample(0, 0)
    """The prompts that were compared, and the texts that they were made of."""
    problem: str = ""
    seen: Detectable | None = None
    """What it would have detected over all prompts."""
    seen_in_stratum: Detectable | None = None
    """The same for the least sensitive stratum; None without strata."""
    quiet: bool = True
    """Whether the baseline's two equal runs (A/A) pass the same test."""
    note: str = ""
    spread: Spread | None = None
    """How much the requests differ from their twins, of a test of acceptance in one cell."""
    widest: tuple[str, ...] = ()
    """The prompts of those that differ most."""


class Hits(NamedTuple):
    """What one cell contributes to a column of the pooled test."""

    ours: int
    """Wrong answers of the cell."""
    theirs: int
    """Wrong answers of what it is compared with: its single engine, or in a scenario its own cold answers."""
    prompts: tuple[str, ...]
    """The first requests to which only the cell gave a wrong answer."""


class Pooled(NamedTuple):
    """The result of a test of many cells together: all P/D cells against their single engines, or all cells in one
    scenario against their own cold answers."""

    tested: Tested
    cells: Mapping[str, Mapping[str, Hits]]
    """By cell and column."""
    alpha: float
    """Its level."""


class PooledDrafts(NamedTuple):
    """The result of the test of the drafts of all P/D cells together."""

    tested: Tested
    cells: Mapping[str, Mapping[str, tuple[float, float]]]
    """Rates of the single engine and of the cell, by cell and column."""
    alpha: float


class Results(NamedTuple):
    """The results of all registered tests of a run, and what its single answers are judged by; empty in the bitwise
    tier."""

    first: Mapping[RegisteredTest, Tested] = {}
    second: Mapping[RegisteredTest, Tested] | None = None
    """Results of the second stage, for the tests that failed the first; None without a second stage."""
    pooled: Mapping[str, Pooled] = {}
    """By scenario; cold, there is none if no P/D cell has its single engine in the run."""
    drafts: PooledDrafts | None = None
    """The drafts of all P/D cells together, cold; None if there are too few cells."""
    roundings: Mapping[str, RunRounding | str] = {}
    """How log-probs are rounded, by the id of the plain engine, or why that cannot be told."""
    requests: int = 0
    """Requests of the run that drafted, which share the level of their gate."""
    again: AskedAgain = NOT_ASKED
    """What came of the single answers that were asked again."""
