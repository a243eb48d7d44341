"""The result of an A/A run, as written to aa.json and shown in the reports of runs beside it."""

from __future__ import annotations

from collections import Counter

from harness.errors import EXIT_PASS, EXIT_REGRESSION, EXIT_UNKNOWN
from harness.history.verdict import Verdict
from harness.stats.binomial import exact_interval
from harness.util.strict import Strict
from harness.util.text import counted


class Count(Strict):
    """Counts of one cell in one scenario over all repetitions."""

    cell: str
    scenario: str
    requests: int
    """Answered requests."""
    compared: int
    """Answered requests that could be compared with the same request of the first repetition."""
    tokens_differ: int
    steps_differ: int
    """Compared requests whose accepted counts differ from the first time, if only by one engine step."""
    findings: int
    verdicts: dict[str, int]
    """Verdict → number of repetitions."""


class AgainstItself(Strict):
    """The result of an A/A run."""

    run_id: str
    started: str
    profile: str
    versions: dict[str, str | None]
    engine_flags: tuple[str, ...] = ()
    """Options of the command line that added arguments and variables to the engines."""
    repetitions: int
    counts: tuple[Count, ...]
    seconds: float
    interrupted: bool = False

    @property
    def verdicts(self) -> int:
        """Number of verdicts of cells in scenarios, over all repetitions; without UNKNOWN where the run was
        interrupted, which is what leaves those."""
        return sum(self._verdicts().values())

    @property
    def alarms(self) -> int:
        """Number of verdicts that are false alarms: neither PASS nor a known defect of the engine."""
        return sum(n for v, n in self._verdicts().items() if v not in (Verdict.PASS, Verdict.KNOWN))

    def _verdicts(self) -> Counter[str]:
        found = sum((Counter(c.verdicts) for c in self.counts), Counter[str]())
        if self.interrupted:
            del found[Verdict.UNKNOWN]
        return found

    @property
    def alarm_bound(self) -> float:
        """Upper 95 % bound of the probability that a cell in a scenario raises a false alarm (Clopper-Pearson)."""
        return exact_interval(self.alarms, self.verdicts, 0.9)[1] if self.verdicts else 1.0

    @property
    def exit_code(self) -> int:
        """0 when no repetition had a finding or gave different tokens than the first one."""
        wrong = (Verdict.REGRESSION, Verdict.DRIFT, Verdict.IMPROVED)
        if any(c.tokens_differ or set(c.verdicts) & set(wrong) for c in self.counts):
            return EXIT_REGRESSION
        return EXIT_UNKNOWN if self.alarms or self.interrupted or not self.verdicts else EXIT_PASS

    @property
    def sentence(self) -> str:
        requests = sum(c.requests for c in self.counts)
        compared = sum(c.compared for c in self.counts)
        return (
            f"{self.repetitions} repetitions, {requests} requests, {self.verdicts} verdicts of cells in scenarios: "
            f"{counted(self.alarms, 'false alarm')} (at most {100 * self.alarm_bound:.2f} % with 95 % confidence), "
            f"{counted(sum(c.findings for c in self.counts), 'finding')}; of {compared} requests compared with their "
            f"first repetition {sum(c.tokens_differ for c in self.counts)} gave different tokens and "
            f"{sum(c.steps_differ for c in self.counts)} different accepted counts."
            + (
                " The run was interrupted: what is UNKNOWN for lack of the rest is not counted."
                if self.interrupted
                else ""
            )
            + (f" Engines under test with {' '.join(self.engine_flags)}." if self.engine_flags else "")
        )
