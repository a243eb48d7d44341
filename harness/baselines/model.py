"""Data model of a baseline. On disk it is two files: ``<stem>.json`` (header) and ``<stem>.csv`` (one row per prompt).

The identity does not include the topology: P/D is judged against the single engine's baseline, never against its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

import numpy as np
from pydantic import SerializerFunctionWrapHandler, model_serializer

from harness.history.acceptance import RequestCounts, Steps, counts_of_steps
from harness.history.identity import Identity
from harness.history.rounding import Rounding
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

NOISE_QUANTILE = 0.95
"""Quantile of the A/A's gaps that is the noise floor: unlike their maximum, it does not grow with their number."""


class Again(Strict):
    """The result of sending the same prompt to the same engine again (A/A)."""

    divergence: int | None
    """Index of the first output token that differs; None if all are equal."""
    gap: float | None
    """Top-2 log-prob distance of the reference at that token, in nats."""
    token: int | None = None
    """What the repetition said there; None if its output ended."""
    steps: int
    accepted_at: tuple[int, ...]
    """Number of steps that accepted the draft at each position."""
    drafted_at: tuple[int, ...] = ()
    """Number of steps with a draft at each position, for a method that drafts up to k; empty: all steps."""

    @property
    def counts(self) -> RequestCounts:
        return RequestCounts(self.steps, self.accepted_at, "per-request", self.drafted_at or None)


class BaselineRow(Strict):
    """The reference for one prompt."""

    prompt_id: str
    prompt_sha256: str
    output_ids: tuple[int, ...]
    min_top_gap: float | None
    """Smallest top-2 log-prob distance over the output, in nats."""
    accepted: tuple[int, ...]
    """Accepted drafts per verify step; empty without speculation."""
    drafted: tuple[int, ...] = ()
    """Drafts per verify step, for a method that drafts up to k; empty where every step drafts k."""
    close: tuple[tuple[int, float], ...] = ()
    """Indices of output tokens whose top two candidates were at most ``CLOSE_NATS`` apart, with that distance."""
    runner_ups: tuple[tuple[int, int], ...] = ()
    """Indices of the tokens in ``close`` whose second-best token is known, with that token."""
    gaps: tuple[float | None, ...] = ()
    """Top-2 log-prob distance of every output token, in nats; empty where the baseline does not carry them."""
    logprobs: tuple[float | None, ...] = ()
    """Log-prob of every output token; empty where the baseline does not carry them, as of earlier versions."""
    again: Again | None = None

    @property
    def answer(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """What the engine answered: tokens, and accepted drafts and drafts of each step."""
        return self.output_ids, self.accepted, self.drafted

    @property
    def steps(self) -> Steps:
        """The verify steps of the reference."""
        return Steps.recorded(self.accepted, self.drafted, len(self.output_ids))

    def counts(self, k: int) -> RequestCounts:
        """Return the acceptance counts of the reference, for k draft positions."""
        return counts_of_steps(self.accepted, self.drafted or None, k)

    def near_tie(self, at: int, token: int | None, bound_nats: float) -> bool:
        """Return whether another output that has ``token`` at index ``at`` parts there by no more than rounding.

        It must be the runner-up. Where the engine did not tell which token that is, or the A/A's output ended there,
        any token counts, so that a run and the A/A are judged alike.
        """
        if not any(index == at and gap <= bound_nats for index, gap in self.close):
            return False
        told = self.again is None or self.again.divergence is None or self.again.token is not None
        second = dict(self.runner_ups).get(at) if told else None
        return second in (None, token)


class Header(Strict):
    format: str
    identity: Identity
    provenance: Provenance
    summary: dict[str, Any]
    rows_sha256: str
    rounding: Rounding | None = None
    """How the engine rounds, as it was measured when this was recorded; None in baselines of earlier versions."""

    @model_serializer(mode="wrap")
    def _as_before(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what earlier versions had not, so that their hashes stay as they are."""
        raw: dict[str, Any] = handler(self)
        return {k: v for k, v in raw.items() if k != "rounding" or v is not None}


class Baseline(Strict):
    header: Header
    rows: tuple[BaselineRow, ...]

    def by_prompt(self) -> dict[str, BaselineRow]:
        """Return the rows by prompt; the result is shared, and not to be changed."""
        return self._by_prompt

    @cached_property
    def _by_prompt(self) -> dict[str, BaselineRow]:
        return {r.prompt_id: r for r in self.rows}

    @property
    def outputs(self) -> dict[str, tuple[int, ...]]:
        """The recorded output of each prompt."""
        return {r.prompt_id: r.output_ids for r in self.rows}

    @property
    def noise_floor_nats(self) -> float | None:
        """Top-2 gap up to which equal runs part (``noise_floor``); None without an A/A."""
        again = [r.again for r in self.rows if r.again is not None]
        return noise_floor(again) if again else None


def noise_floor(again: Iterable[Again]) -> float:
    """Return the ``NOISE_QUANTILE`` of the top-2 gaps, of at most ``CLOSE_NATS``, at which equal runs parted, in nats.

    0 if they never parted at such a gap.
    """
    gaps = [a.gap for a in again if a.divergence is not None and a.gap is not None and a.gap <= CLOSE_NATS]
    return float(np.quantile(gaps, NOISE_QUANTILE)) if gaps else 0.0
