"""Limits how many findings of a check are listed, since a dead engine can cause one per request in a large run.

All findings are judged, located and counted first. Then, of findings that differ only in their request, the first few
are kept, and the first of those carries the number left out. Everything that verdicts, known defects and reports
depend on distinguishes findings here, so their results do not change. What known defects look at, the answer itself
among it, is asked of them (``Covering``).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable

from harness.judging.findings import CellVerdict, CheckResult, Finding

Covering = Callable[[Finding], Hashable]
"""Tells by which known defects a finding may be covered."""


def by_none(_: Finding) -> Hashable:
    """Stands for no list of known defects."""
    return ()


_ALL = 20_000
"""Approximate limit of listed findings per check, over all cells and scenarios."""
_MOST = 100
"""Upper limit of listed findings per check in one cell and scenario."""
_FEWEST = 5
"""Lower limit of the same, however many cells and scenarios there are."""
_FIGURES = re.compile(r"\d[\d.,]*|\[.*?\]|[0-9a-f]{16,}")
_COMPARED = 80
"""Characters of a message that distinguish kinds of findings."""


def most_listed(views: int) -> int:
    """Return how many findings of a check to list in each of ``views`` cells and scenarios."""
    return max(_FEWEST, min(_MOST, _ALL // max(views, 1)))


def listed(cell: CellVerdict, most: int, covering: Covering = by_none) -> CellVerdict:
    """Return the verdict with at most ``most`` findings of each check, but at least one of each kind."""
    return cell.model_copy(update={"results": tuple(_result(r, most, covering) for r in cell.results)})


def _result(result: CheckResult, most: int, covering: Covering) -> CheckResult:
    if len(result.findings) <= most:
        return result
    covered = [covering(f) for f in result.findings]
    kinds: list[Hashable] = [(_kind_and_message(f), by) for f, by in zip(result.findings, covered, strict=True)]
    if len({*kinds}) > most:
        # Too many kinds: the messages quote what differs by request.
        kinds = [(_kind(f), by) for f, by in zip(result.findings, covered, strict=True)]
    # Reserve room for the first finding of each kind.
    room = most - len({*kinds})
    kept: list[Finding] = []
    place: dict[Hashable, int] = {}
    left: Counter[Hashable] = Counter()
    for finding, kind in zip(result.findings, kinds, strict=True):
        if kind not in place:
            place[kind] = len(kept)
        elif room > 0:
            room -= 1
        else:
            left[kind] += 1
            continue
        kept.append(finding)
    if not left:
        return result
    for kind, count in left.items():
        first = kept[place[kind]]
        kept[place[kind]] = first.model_copy(update={"others": first.others + count})
    omitted = f"{left.total()} of {result.found} findings are counted but not listed, because listed ones are like them"
    note = f"{result.note}; {omitted}" if result.note else omitted
    return result.model_copy(update={"findings": tuple(kept), "note": note})


def _kind(f: Finding) -> Hashable:
    """Return what distinguishes findings of a check in a cell for verdicts, known defects and reports."""
    reason = f.reason if f.prompt_id is None else ""
    return (f.verdict, f.damage, f.stratum, f.prompt_id is None, f.known, f.changed, reason)


def _kind_and_message(f: Finding) -> Hashable:
    """Return the kind together with the message, in which differing figures are ignored."""
    return (_kind(f), _FIGURES.sub("#", f.message)[:_COMPARED])
