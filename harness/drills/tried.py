"""What is known of a set of drills so far."""

from __future__ import annotations

from collections.abc import Callable

from harness.drills.model import ControlRun, Ending, Result
from harness.findings import Verdict
from harness.progress import Reporter
from harness.summary import RunSummary


class Tried:
    """Results, controls and left-overs as they come; said as they come, too."""

    def __init__(self, keep: Callable[[], None] = lambda: None) -> None:
        """``keep`` is called whenever something is known that was not."""
        self._keep = keep
        self.results: list[Result] = []
        self.controls: list[ControlRun] = []
        self.left: list[str] = []

    def add(self, result: Result, reporter: Reporter) -> None:
        self.results.append(result)
        self._keep()
        words = result.reason if result.ending is Ending.SURVIVED else "; ".join(result.problems)
        reporter.line(f"{result.id}: {result.ending} ({result.verdict}, {result.seconds} s): {words[:300]}")

    def control(self, name: str, summary: RunSummary, seconds: float, reporter: Reporter) -> Verdict:
        """Take the result of a run without a fault."""
        verdict = summary.verdict
        self.controls.append(
            ControlRun(
                id=name,
                verdict=verdict,
                requests=len(summary.history.observations),
                seconds=round(seconds, 1),
                findings=tuple(f.message for f in summary.judgement.findings),
            )
        )
        reporter.line(f"control {name}: {verdict}")
        return verdict
