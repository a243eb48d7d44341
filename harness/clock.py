"""The time of day as a label, and how a run tells what came first.

A machine's clock is set now and then, by NTP or by hand, and a run must not notice: a request that was asked 3 s after
another one was asked 3 s after it, whatever the clock says. So the clock is read once, when the process starts, and
everything later is that reading plus monotonic time. Durations are monotonic alone.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime

_EPOCH = time.time() - time.monotonic()
"""Of the monotonic clock, as the clock of the machine said when this process started."""


def now() -> float:
    """Seconds since 1970, which never jump while this process lives."""
    return _EPOCH + time.monotonic()


def utc() -> datetime:
    """The same as a date."""
    return datetime.fromtimestamp(now(), UTC)
