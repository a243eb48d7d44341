"""The recorded lines of a soak (``soak.jsonl``) and its result (``soak.json``)."""

from __future__ import annotations

from typing import Literal

from harness.history.verdict import Verdict, worst
from harness.judging.findings import Finding
from harness.util.strict import Strict

SAMPLES = "soak.jsonl"
RESULT = "soak.json"
HARNESS = "harness"
"""Name of the harness's own process among the sampled trees; the others are named after the engine's role."""


class TreeUsage(Strict):
    """A process and its descendants at one moment."""

    processes: int
    threads: int
    descriptors: int
    rss_mib: float
    """Resident memory, summed over the processes, so that shared memory counts several times."""
    pss_mib: float
    """Proportional set size, summed: shared memory is divided among the processes."""
    shm_files: int
    """Files of /dev/shm that a process has open or mapped by name, or had so at an earlier sample and still exist."""
    shm_mib: float
    """Their allocated size."""


class ResourceSample(Strict):
    """All trees at one moment."""

    kind: Literal["sample"] = "sample"
    at_s: float
    """Seconds since the soak began."""
    took_s: float
    trees: dict[str, TreeUsage]


class Sums(Strict):
    """Figures of a round, or their sums over all rounds."""

    answered: int
    """Requests that were answered."""
    broken: int
    tokens: int
    """Output tokens."""
    drafts: int
    """Drafted tokens, over the requests whose answer reports them."""
    accepted: int
    moved_bytes: int
    """Bytes that NIXL moved, by D's counters."""
    preemptions: int


COUNTED = tuple(Sums.model_fields)


class Round(Sums):
    """The result of one round, which sends every prompt once."""

    kind: Literal["round"] = "round"
    number: int
    at_s: float
    """Seconds from the start of the soak to the end of the round."""
    seconds: float
    verdict: Verdict


class Growth(Strict):
    """The development of one figure of one tree after the warm-up."""

    tree: str
    quantity: str
    unit: str
    first: float
    """Median over the first part of the window; parts are those of ``harness.lab.soak.growth``."""
    last: float
    per_hour: float | None = None
    low: float | None = None
    """Bounds of the growth per hour, each with 99 % confidence."""
    high: float | None = None
    limit: float
    """Most growth allowed: per hour for memory, in total for counts."""
    verdict: Verdict
    why: str

    @property
    def name(self) -> str:
        return f"{self.tree} {self.quantity}"


class Soak(Sums):
    """The result of a soak."""

    run_id: str
    started: str
    profile: str
    cell: str
    versions: dict[str, str | None]
    engine_flags: tuple[str, ...] = ()
    """Options of the command line that added arguments and variables to the engines."""
    minutes: float
    """Requested duration."""
    concurrency: int
    seconds: float
    """Actual duration of the load."""
    rounds: int
    verdicts: dict[str, int]
    """Rounds by verdict."""
    findings: tuple[Finding, ...] = ()
    """The first findings; ``found`` counts all."""
    found: int = 0
    samples: int
    growths: tuple[Growth, ...] = ()
    doubts: tuple[str, ...] = ()
    """Reasons why the soak cannot pass in any case: it was interrupted, an engine or the sampler died."""

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of rounds, findings and growths; at least UNKNOWN if there are doubts or gaps."""
        seen = [*map(Verdict, self.verdicts), *(f.verdict for f in self.findings), *(g.verdict for g in self.growths)]
        unjudged = not self.rounds or sum(self.verdicts.values()) != self.rounds
        if self.doubts or unjudged or not self.growths or not self.answered:
            seen.append(Verdict.UNKNOWN)
        return worst(seen)

    @property
    def acceptance(self) -> float | None:
        """Share of drafted tokens that were accepted."""
        return self.accepted / self.drafts if self.drafts else None
