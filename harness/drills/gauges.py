"""Gauges of an engine's ``/metrics``, read often.

Line by line, since parsing the whole text takes longer than a state may last.
"""

from __future__ import annotations

import contextlib

RUNNING = "vllm:num_requests_running{"
WAITING = "vllm:num_requests_waiting{"


def above_zero(metrics: str, gauge: str) -> bool:
    """Whether any sample whose line begins so is above zero."""
    return any(_value(line) > 0 for line in metrics.splitlines() if line.startswith(gauge))


def _value(line: str) -> float:
    with contextlib.suppress(ValueError):
        return float(line.rpartition(" ")[2])
    return 0.0
