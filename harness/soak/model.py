"""What a soak records (``soak.jsonl``) and what it comes to (``soak.json``)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from harness.findings import Finding, Verdict, worst
from harness.strict import Strict

SAMPLES = "soak.jsonl"
RESULT = "soak.json"
HARNESS = "harness"
"""Name of the harness' own process among the trees that are sampled; the others are called by the engine's role."""


class Tree(Strict):
    """A process and all below it at one moment."""

    processes: int
    threads: int
    descriptors: int
    sockets: int
    rss_mib: float
    """Resident memory, summed over the processes: what they share counts several times."""
    pss_mib: float
    """Proportional set size, summed: what processes share is divided among them."""
    shm_files: int
    """Files of /dev/shm that a process has open or mapped, or had at an earlier sample and that still exist."""
    shm_mib: float
    """Their allocated size."""


class Sample(Strict):
    """All trees at one moment."""

    kind: Literal["sample"] = "sample"
    at_s: float
    """Seconds since the soak began."""
    took_s: float
    trees: dict[str, Tree]


class Round(Strict):
    """Every prompt once."""

    kind: Literal["round"] = "round"
    number: int
    at_s: float
    """When it was done."""
    seconds: float
    answered: int
    """Requests with an answer."""
    broken: int
    tokens: int
    """Output tokens."""
    drafts: int
    """Drafted tokens, of the requests whose answer says so."""
    accepted: int
    moved_bytes: int
    """What D's counters say that NIXL moved during the round."""
    preemptions: int
    verdict: Verdict


Line = Annotated[Sample | Round, Field(discriminator="kind")]


class Growth(Strict):
    """What became of one figure of one tree after the warm-up."""

    tree: str
    quantity: str
    unit: str
    first: float
    """Median over the first part of the window; parts are those of ``harness.soak.growth``."""
    last: float
    per_hour: float | None = None
    low: float | None = None
    """Bounds of the growth per hour, each of which holds with 99 % confidence."""
    high: float | None = None
    limit: float
    """Most growth that is allowed: per hour for memory, in all for counts."""
    verdict: Verdict
    why: str

    @property
    def name(self) -> str:
        return f"{self.tree} {self.quantity}"


class Soak(Strict):
    """The result of a soak."""

    run_id: str
    started: str
    profile: str
    cell: str
    versions: dict[str, str | None]
    minutes: float
    """Asked for."""
    concurrency: int
    seconds: float
    """Of load."""
    rounds: int
    answered: int
    broken: int
    tokens: int
    drafts: int
    accepted: int
    moved_bytes: int
    preemptions: int
    verdicts: dict[str, int]
    """Rounds by verdict."""
    findings: tuple[Finding, ...] = ()
    """The first ones; ``found`` counts all."""
    found: int = 0
    samples: int
    growths: tuple[Growth, ...] = ()
    doubts: tuple[str, ...] = ()
    """Why the soak cannot pass, whatever was seen: it was interrupted, an engine died, the sampler did."""

    @property
    def verdict(self) -> Verdict:
        """The worst of the rounds, of the findings and of the growths; UNKNOWN at least when there are doubts, nothing
        was seen, or a round has no verdict."""
        seen = [*map(Verdict, self.verdicts), *(f.verdict for f in self.findings), *(g.verdict for g in self.growths)]
        unjudged = not self.rounds or sum(self.verdicts.values()) != self.rounds
        if self.doubts or unjudged or not self.growths or not self.answered:
            seen.append(Verdict.UNKNOWN)
        return worst(seen)

    @property
    def acceptance(self) -> float | None:
        """Share of drafted tokens that were accepted."""
        return self.accepted / self.drafts if self.drafts else None
