"""Many judged runs as plain data: what changed slowly, and when."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from harness.history.acceptance import RequestCounts
from harness.history.verdict import Verdict
from harness.stats.binomial import exact_interval
from harness.util.text import counted, percent_range


class Answers(NamedTuple):
    """Answers whose tokens were checked, and how many of them were wrong."""

    wrong: int
    checked: int


class WrongAlone(NamedTuple):
    """Whether a run has an answer that is wrong by itself, and the chance of one in a run of right engines."""

    found: bool
    chance: float


class Engines(NamedTuple):
    """What rates are added up over: wrong answers on one kind of hardware say nothing about another."""

    vllm: str
    hardware: str
    """``CPU``, or the name of the GPU."""

    def __str__(self) -> str:
        return f"vLLM {self.vllm} on {self.hardware}"


class Recording(NamedTuple):
    """What identifies a recorded run, also as a part of a merged one."""

    run_id: str
    started: str


class TrendRun(NamedTuple):
    run_id: str
    started: str
    folder: Path
    verdict: Verdict
    cells: dict[str, Verdict]
    counts: dict[str, dict[str, RequestCounts]]
    """Cell → prompt → counts."""
    draft_tokens: dict[str, int]
    vllm: str
    answers: Mapping[str, Answers] = {}
    """By cell."""
    levels: Mapping[str, str] = {}
    """Cell → what a change of its acceptance is expected at: another vLLM, another identity, a new baseline."""
    suspects: tuple[str, ...] = ()
    """Tests that failed once and were not confirmed, each as cell and check."""
    alone: WrongAlone | None = None
    """What the gates of single answers found; None where none judged."""
    hardware: str = "CPU"
    """As in ``Engines``."""
    parts: tuple[Recording, ...] = ()
    """Of a merged run."""

    @property
    def engines(self) -> Engines:
        return Engines(self.vllm, self.hardware)

    @property
    def recording(self) -> Recording:
        return Recording(self.run_id, self.started)


class Point(NamedTuple):
    """Acceptance of a cell at one position in one run."""

    run: int
    cell: str
    position: int
    rate: float
    effect: float | None
    """Difference from the first run since the last restart, paired by prompt; None when they cannot be compared."""
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
    """Difference from ``first``."""
    first: int
    """Index of the run at which the sums began: the first one, or the first after a restart."""


class WrongAnswers(NamedTuple):
    """Wrong answers per answer checked, over all runs of the same engines."""

    engines: Engines
    what: str
    """A cell, or all P/D or single cells."""
    runs: int
    wrong: int
    checked: int

    @property
    def interval(self) -> tuple[float, float]:
        """The exact binomial interval of the rate, with 95 % confidence (Clopper and Pearson)."""
        return exact_interval(self.wrong, self.checked)

    @property
    def sentence(self) -> str:
        return (
            f"{self.wrong:,} wrong of {counted(self.checked, 'answer')} in {counted(self.runs, 'run')} "
            f"({percent_range(*self.interval)} with 95 % confidence)"
        )


class Intermittent(NamedTuple):
    """Runs of the same engines with an answer that is wrong by itself: a defect that does not come again when it is
    asked again adds up over the nights."""

    engines: Engines
    found: int
    runs: int
    chance: float
    """Largest chance of one in a run of right engines."""
    evidence: float
    """How many times more likely these runs are with a defect (``e_value``)."""

    @property
    def certain(self) -> bool:
        return self.evidence * self.chance >= 1

    @property
    def sentence(self) -> str:
        most = min(1.0, 1 / self.evidence) if self.evidence else 1.0
        verdict = "an intermittent defect" if self.certain else "not yet certain"
        return (
            f"{self.found} of {counted(self.runs, 'run')} with an answer that is wrong by itself, where right engines "
            f"have one in {round(1 / self.chance):,}; they would ever come to this with a chance of at most "
            f"{most:.2g}: {verdict}"
        )


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
    wrong_answers: tuple[WrongAnswers, ...] = ()
    suspects: tuple[tuple[str, int], ...] = ()
    """Tests that were SUSPECT in several runs, and in how many."""
    intermittent: tuple[Intermittent, ...] = ()
    """Engines with answers that are wrong by themselves."""

    @property
    def sentence(self) -> str:
        red = sum(n.verdict.exit_code != 0 for n in self.runs)
        return (
            f"{counted(len(self.runs), 'run')}, {f'{red} not passing' if red else 'all passing'}; "
            f"{counted(len(self.drifts), 'slow drift') if self.drifts else 'no slow drift'} (alarm at {self.limit:.1f} "
            f"standard errors: about one false alarm in {self.between} runs)"
        )
