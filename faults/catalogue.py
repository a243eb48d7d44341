"""The catalogue of all drills, in the order in which they are tried."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

from faults.filesystem import FOLDERS
from faults.handoff_drills import HANDOFFS
from faults.kill_timing import MOMENTS, TWICE, moment_drills
from faults.model import Drill
from faults.process_drills import PROCESSES
from faults.request_drill import ExchangeDrill
from faults.response_drills import RESPONSES
from harness.errors import UsageError

EXCHANGES: tuple[ExchangeDrill, ...] = (*RESPONSES, *HANDOFFS)


def catalogue(moments: int = MOMENTS) -> tuple[Drill, ...]:
    """Return all drills; ``moments`` is how many times the harness is ended at a random moment."""
    engines = (*(e.drill for e in EXCHANGES), *(p.drill for p in PROCESSES))
    return (*engines, TWICE, *moment_drills(moments), *FOLDERS)


def select(patterns: Sequence[str], moments: int = MOMENTS) -> list[Drill]:
    """Return the drills whose id or group matches any of the shell patterns; all without a pattern.

    Raises UsageError when a pattern matches nothing.
    """
    known = catalogue(moments)
    for pattern in patterns:
        if not any(_matches(d, pattern) for d in known):
            raise UsageError(
                f"{pattern!r}: expected a pattern that matches the id or group of a fault test, found no match; see "
                "`python -m faults --list`"
            )
    return [d for d in known if not patterns or any(_matches(d, p) for p in patterns)]


def _matches(drill: Drill, pattern: str) -> bool:
    return drill.group == pattern or fnmatch.fnmatchcase(drill.id, pattern)
