"""Data model of a baseline. On disk it is two files: ``<stem>.json`` (header) and ``<stem>.csv`` (one row per prompt).

The identity does not include the topology: P/D is judged against the single engine's baseline, never against its own.
"""

from __future__ import annotations

from typing import Any

from harness.history.identity import Identity
from harness.util.strict import Strict

FORMAT = "kv-acceptance-harness/baseline/2"


class Provenance(Strict):
    """Where a baseline comes from. Differences here never prevent a comparison."""

    recorded: str
    run_id: str
    command: tuple[str, ...]
    git_commit: str | None
    versions: dict[str, str | None]
    hardware: dict[str, Any]


CLOSE_NATS = 1.0
"""Top-2 log-prob distances above this are not a near tie in any arithmetic in use."""


class Again(Strict):
    """The result of sending the same prompt to the same engine again (A/A)."""

    divergence: int | None
    """Index of the first output token that differs; None if all are equal."""
    gap: float | None
    """Top-2 log-prob distance of the reference at that token, in nats."""
    steps: int
    accepted_at: tuple[int, ...]
    """Number of steps that accepted the draft at each position."""


class Row(Strict):
    """The reference for one prompt."""

    prompt_id: str
    prompt_sha256: str
    output_ids: tuple[int, ...]
    min_top_gap: float | None
    """Smallest top-2 log-prob distance over the output, in nats."""
    accepted: tuple[int, ...]
    """Accepted drafts per verify step; empty without speculation."""
    close: tuple[tuple[int, float], ...] = ()
    """Indices of output tokens whose top two candidates were at most ``CLOSE_NATS`` apart, with that distance."""
    again: Again | None = None


class Header(Strict):
    format: str
    identity: Identity
    provenance: Provenance
    summary: dict[str, Any]
    rows_sha256: str


class Baseline(Strict):
    header: Header
    rows: tuple[Row, ...]

    def by_prompt(self) -> dict[str, Row]:
        return {r.prompt_id: r for r in self.rows}

    @property
    def noise_floor_nats(self) -> float | None:
        """Largest top-2 gap, of at most ``CLOSE_NATS``, at which two equal runs diverged; None without an A/A, 0 if
        they never diverged at such a gap."""
        again = [r.again for r in self.rows if r.again is not None]
        if not again:
            return None
        gaps = (a.gap for a in again if a.divergence is not None and a.gap is not None)
        return max((g for g in gaps if g <= CLOSE_NATS), default=0.0)
