"""All drills, by id, in the order in which they are tried."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

from harness.drills.exchange import ExchangeDrill
from harness.drills.folders import FOLDERS
from harness.drills.handoffs import HANDOFFS
from harness.drills.model import Drill
from harness.drills.moments import MOMENTS, TWICE, moment_drills
from harness.drills.processes import PROCESSES
from harness.drills.responses import RESPONSES
from harness.errors import UsageError

EXCHANGES: tuple[ExchangeDrill, ...] = (*RESPONSES, *HANDOFFS)


def catalogue(moments: int = MOMENTS) -> tuple[Drill, ...]:
    """What each drill is and must come to; ``moments`` is how often the harness is ended at a random moment."""
    engines = (*(e.drill for e in EXCHANGES), *(p.drill for p in PROCESSES))
    return (*engines, TWICE, *moment_drills(moments), *FOLDERS)


def select(patterns: Sequence[str], moments: int = MOMENTS) -> list[Drill]:
    """Drills whose id or group matches any of the shell patterns; all when there is none. Raises UsageError when a
    pattern matches nothing."""
    known = catalogue(moments)
    for pattern in patterns:
        if not any(_matches(d, pattern) for d in known):
            raise UsageError(
                f"{pattern!r}: expected a pattern that matches the id or group of a drill, found no match; see "
                "`harness drill --list`"
            )
    return [d for d in known if not patterns or any(_matches(d, p) for p in patterns)]


def _matches(drill: Drill, pattern: str) -> bool:
    return drill.group == pattern or fnmatch.fnmatchcase(drill.id, pattern)
