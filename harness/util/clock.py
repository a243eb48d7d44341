"""A wall clock that never jumps while the process lives.

The machine's clock may be set during a run, by NTP or by hand, which must not change the recorded order of events. So
it is read once, when the process starts, and every later time is that reading plus monotonic time. Durations use
monotonic time alone.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime

_EPOCH = time.time() - time.monotonic()
"""Wall time at which the monotonic clock was zero, as read when this process started."""


def now() -> float:
    """Return the seconds since 1970; they never jump while this process lives."""
    return _EPOCH + time.monotonic()


def utc() -> datetime:
    """Return ``now`` as a datetime in UTC."""
    return datetime.fromtimestamp(now(), UTC)
