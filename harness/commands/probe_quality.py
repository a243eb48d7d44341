"""Measure the quality of the probe models on single cells recorded with vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from harness.baselines.build import incomplete, require_reference_run, singles
from harness.errors import UsageError
from harness.history.acceptance import pool, real_steps
from harness.history.folder import History
from harness.prompts import probe_task
from harness.util.files import write_json


def measure(history: History) -> dict[str, Any]:
    """Return exactness, top-2 gaps and acceptance per method. Raises UsageError when the run has no single cells, or
    one without answers to measure."""
    cells = singles(history)
    if not cells:
        raise UsageError(f"{history.folder}: expected single cells to measure the probes on, found none")
    out: dict[str, Any] = {
        "measured_through": {k: history.run.versions.get(k) for k in ("vllm", "vllm_build", "torch")},
        "methods": {},
    }
    for record in cells:
        out["methods"][record.cell.removeprefix("single-")] = _method(history, record.cell, record.draft_tokens)
    return out


def _method(history: History, cell: str, k: int) -> dict[str, Any]:
    legs = {p: o.final for p, o in history.of(cell).items() if o.final is not None and o.error is None}
    sent = {p: list(o.sent_ids) for p, o in history.of(cell).items()}
    right = [p for p, leg in legs.items() if list(leg.output_ids or ()) == probe_task.expected_output(sent[p])]
    gaps = np.array([g for leg in legs.values() for g in leg.top_gaps or () if g is not None])
    if not len(gaps):
        raise UsageError(
            f"{history.folder}: expected answers to the cold prompts of {cell}, with log-probs, found none; name a run "
            "that asked them, such as that of `harness run --cell 'single-*'`"
        )
    out: dict[str, Any] = {
        "prompts": len(sent),
        "exactly_right": len(right),
        "longest_prompt_right": max((len(sent[p]) for p in right), default=0),
        "output_tokens": int(sum(len(leg.output_ids or ()) for leg in legs.values())),
        "top2_gap_nats": {
            label: round(float(np.quantile(gaps, q)), 2)
            for label, q in (("min", 0.0), ("p01", 0.01), ("p10", 0.1), ("median", 0.5))
        },
    }
    if not k:
        return out
    steps = {p: s.accepted for p, leg in legs.items() if (s := real_steps(leg))}
    rates = pool(steps.values(), k)
    most = history.run.asked_for.max_tokens or 0
    forecast = {p: probe_task.forecast_acceptance(sent[p], k, most) for p in steps}
    return out | {
        "draft_steps": rates.steps,
        "acceptance": [round(r, 4) for r in rates.rates],
        "acceptance_length_pooled": round(rates.length_pooled or 0.0, 4),
        "forecast_acceptance": [round(r, 4) for r in pool(forecast.values(), k).rates],
        "prompts_as_forecast": sum(_as_forecast(list(steps[p]), forecast[p]) for p in steps),
    }


def _as_forecast(steps: list[int], forecast: list[int]) -> bool:
    """Compare step by step; the last step may accept more, since drafts past the end token cannot be forecast."""
    return len(steps) == len(forecast) and steps[:-1] == forecast[:-1] and (not steps or steps[-1] >= forecast[-1])


def write_quality(history: History, target: Path) -> dict[str, object]:
    """Measure the probe models from a recorded run and write the figures to ``target``."""
    require_reference_run(history)
    if missing := incomplete(history):
        found = "; ".join(f"{cell}: {reason}" for cell, reason in missing.items())
        raise UsageError(f"{history.folder}: expected complete single cells, found {found}; record them again")
    quality = measure(history)
    write_json(target, quality)
    return quality
