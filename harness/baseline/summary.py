"""Headline figures of a baseline, for people and for a diff in review."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.acceptance import pool
from harness.baseline.model import CLOSE_NATS, Row
from harness.stats.paired import Arms, count_arms, ratio

CONFIDENCE = 0.99


def summarise(rows: Sequence[Row], k: int) -> dict[str, Any]:
    """Counts, rates with intervals, both acceptance lengths, design effect and what two equal runs differ by."""
    gaps = [r.min_top_gap for r in rows if r.min_top_gap is not None]
    out: dict[str, Any] = {
        "prompts": len(rows),
        "output_tokens": sum(len(r.output_ids) for r in rows),
        "min_top_gap_nats": round(min(gaps), 3) if gaps else None,
        "again": _again(rows),
    }
    if k and rows:
        rates = pool([r.accepted for r in rows], k)
        arms = baseline_arms(rows, k)
        by_position = [ratio(arms.hits[0][:, p], arms.trials[0][:, p], CONFIDENCE) for p in range(k)]
        out |= {
            "steps": rates.steps,
            "rates": [round(v, 4) for v in rates.rates],
            "rates_interval_99": [[round(r.low, 4), round(r.high, 4)] for r in by_position],
            "design_effect": round(by_position[0].design_effect, 2),
            "acceptance_length_pooled": round(rates.length_pooled or 0.0, 4),
            "acceptance_length_per_prompt": round(rates.length_per_prompt or 0.0, 4),
        }
    return out


def _again(rows: Sequence[Row]) -> dict[str, Any] | None:
    again = [r.again for r in rows if r.again is not None]
    if not again:
        return None
    parted = [a for a in again if a.divergence is not None]
    return {
        "prompts": len(again),
        "diverged": len(parted),
        "noise_floor_nats": max((a.gap for a in parted if a.gap is not None and a.gap <= CLOSE_NATS), default=0.0),
        "steps_differ": sum(
            r.again is not None and (r.again.steps, sum(r.again.accepted_at)) != (len(r.accepted), sum(r.accepted))
            for r in rows
        ),
    }


def baseline_arms(rows: Sequence[Row], k: int) -> Arms:
    """The reference and, where the engine was asked twice, the repetition, as two arms with a column per position;
    rows that were not repeated have no trials in the second arm."""
    first = [counts(r.accepted, k) for r in rows]
    second = [(r.again.accepted_at, r.again.steps) if r.again else ((0,) * k, 0) for r in rows]
    return count_arms([first, second], k)


def counts(accepted: Sequence[int], k: int) -> tuple[tuple[int, ...], int]:
    """(steps that accepted the draft at each position, steps)."""
    return tuple(sum(a > p for a in accepted) for p in range(k)), len(accepted)
