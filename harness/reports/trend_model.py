"""Many judged runs as plain data: what changed slowly, and when."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from harness.history.acceptance import RequestCounts
from harness.history.verdict import Verdict


class TrendRun(NamedTuple):
    """One recorded run."""

    run_id: str
    started: str
    folder: Path
    verdict: Verdict
    cells: dict[str, Verdict]
    counts: dict[str, dict[str, RequestCounts]]
    """Cell → prompt → counts."""
    draft_tokens: dict[str, int]
    vllm: str


class Point(NamedTuple):
    """Acceptance of a cell at one position in one run."""

    run: int
    cell: str
    position: int
    rate: float
    effect: float | None
    """Difference from the first run, paired by prompt; None when they cannot be compared."""
    upper: float
    """CUSUM of increases, in standard errors."""
    lower: float
    """CUSUM of decreases."""


class Drift(NamedTuple):
    """A notice that acceptance of a cell at one position drifts."""

    cell: str
    position: int
    run: int
    """Index of the run in which the CUSUM exceeded the limit."""
    since: int
    """Index of the run since which the CUSUM has been growing."""
    falls: bool
    effect: float


class Trend(NamedTuple):
    """All runs in order of time, their acceptance, and the drifts."""

    runs: tuple[TrendRun, ...]
    points: tuple[Point, ...]
    drifts: tuple[Drift, ...]
    limit: float
    """CUSUM limit in standard errors."""
    between: int
    """Mean number of runs between false notices, over all series."""
    left_out: tuple[str, ...]
    """Runs that cannot be used, each with the reason."""

    @property
    def sentence(self) -> str:
        """The trend in one sentence."""
        red = sum(n.verdict.exit_code != 0 for n in self.runs)
        return (
            f"{len(self.runs)} runs, {red} of them not passing; {len(self.drifts)} notices of slow drift (limit "
            f"{self.limit:.1f} standard errors, one false notice in {self.between} runs of unchanged engines)"
        )
