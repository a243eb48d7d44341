"""The results of a set of drills so far."""

from __future__ import annotations

from collections.abc import Callable

from faults.model import ControlRun, Ending, Result
from harness.history.verdict import Verdict
from harness.reports.summary import RunSummary
from harness.util.progress import Reporter


class Tried:
    """Collects results, controls and leftovers, and reports each as it comes."""

    def __init__(self, keep: Callable[[], None] = lambda: None) -> None:
        """``keep`` is called after every change, to store what is known."""
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
        """Add the result of a run without a fault, and return its verdict."""
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
