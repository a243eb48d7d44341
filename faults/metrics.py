"""Read gauges from an engine's ``/metrics``.

Line by line, because parsing the whole text may take longer than the state lasts.
"""

from __future__ import annotations

import contextlib

RUNNING = "vllm:num_requests_running{"
WAITING = "vllm:num_requests_waiting{"


def above_zero(metrics: str, gauge: str) -> bool:
    """Return whether any sample whose line begins with ``gauge`` is above zero."""
    return any(_value(line) > 0 for line in metrics.splitlines() if line.startswith(gauge))


def _value(line: str) -> float:
    with contextlib.suppress(ValueError):
        return float(line.rpartition(" ")[2])
    return 0.0
