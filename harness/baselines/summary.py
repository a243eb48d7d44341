"""Headline figures of a baseline, for readers and for diffs in review."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.baselines.model import BaselineRow, noise_floor
from harness.history.acceptance import pool_counts
from harness.stats.paired import Arms, count_arms, ratio

CONFIDENCE = 0.99


def summarise(rows: Sequence[BaselineRow], k: int) -> dict[str, Any]:
    """Return counts, rates with intervals, both acceptance lengths, the design effect and the A/A differences."""
    gaps = [r.min_top_gap for r in rows if r.min_top_gap is not None]
    out: dict[str, Any] = {
        "prompts": len(rows),
        "output_tokens": sum(len(r.output_ids) for r in rows),
        "min_top_gap_nats": round(min(gaps), 3) if gaps else None,
        "again": _again(rows),
    }
    if k and rows:
        rates = pool_counts([r.counts(k) for r in rows], k)
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


def _again(rows: Sequence[BaselineRow]) -> dict[str, Any] | None:
    again = [r.again for r in rows if r.again is not None]
    if not again:
        return None
    return {
        "prompts": len(again),
        "diverged": len([a for a in again if a.divergence is not None]),
        "noise_floor_nats": noise_floor(again),
        "steps_differ": sum(
            r.again is not None and (r.again.steps, sum(r.again.accepted_at)) != (len(r.accepted), sum(r.accepted))
            for r in rows
        ),
    }


def baseline_arms(rows: Sequence[BaselineRow], k: int) -> Arms:
    """Return the reference and its repetition (A/A) as two arms with one column per draft position.

    Rows without a repetition have no trials in the second arm.
    """
    first = [(c.accepted_at, c.trials) for r in rows if (c := r.counts(k))]
    second = [(r.again.accepted_at, r.again.counts.trials) if r.again else ((0,) * k, (0,) * k) for r in rows]
    return count_arms([first, second], k)
