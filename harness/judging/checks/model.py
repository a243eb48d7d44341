"""Value types of the registered hypothesis tests and their results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from harness.stats.paired import Difference

TestName = Literal["survival", "hard-divergence", "rescored", "acceptance-baseline", "acceptance-single", "first-step"]
"""In the order of the reports."""


class RegisteredTest(NamedTuple):
    """A test that was announced before the run: its cell, scenario and name."""

    cell: str
    scenario: str
    name: TestName

    def __str__(self) -> str:
        return f"{self.cell}@{self.scenario}::{self.name}"


class Column(NamedTuple):
    """The result of one column of a test."""

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
    prompts: int = 0
    problem: str = ""
    detectable: float | None = None
    """Smallest change over all prompts, as a fraction, that is detected with the profile's power."""
    detectable_stratum: float | None = None
    """The same for the least sensitive stratum."""
    quiet: bool = True
    """Whether the baseline's two equal runs (A/A) pass the same test."""
    note: str = ""


class Results(NamedTuple):
    """The results of all registered tests of a run. Empty in the bitwise tier."""

    first: Mapping[RegisteredTest, Tested] = {}
    second: Mapping[RegisteredTest, Tested] | None = None
    """Results of the second stage, for the tests that failed the first; None without a second stage."""
