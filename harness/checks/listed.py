"""Which findings of a check are listed one by one, where there is one for each of very many requests.

An engine that died leaves every request of a variant without its reference: a finding for each of a million requests
in two or three checks, 1.6 KB each, and twice that while they are written. They are all judged, located and counted.
Then, of those that nothing can tell apart but the request, the first are kept, and the first of them says how many
more there were. What is told apart is all that a verdict, a known defect or a report goes by, so none of these can
come out otherwise.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable

from harness.findings import CellVerdict, CheckResult, Finding

_ALL = 20_000
"""About as many findings of a check over all cells and scenarios are listed."""
_MOST = 100
"""Findings of a check that are listed in one cell and scenario, and ``_FEWEST`` however many of these there are. The
largest profile that is shipped asks for 52 cold prompts on a CPU."""
_FEWEST = 5
_FIGURES = re.compile(r"\d[\d.,]*|\[.*?\]|[0-9a-f]{16,}")
_SAID = 80


def most_listed(views: int) -> int:
    """How many findings of a check are listed in each of so many cells and scenarios."""
    return max(_FEWEST, min(_MOST, _ALL // max(views, 1)))


def listed(cell: CellVerdict, most: int) -> CellVerdict:
    """The verdict with at most so many findings of each check, and one of each kind at least."""
    return cell.model_copy(update={"results": tuple(_result(r, most) for r in cell.results)})


def _result(result: CheckResult, most: int) -> CheckResult:
    if len(result.findings) <= most:
        return result
    kind_of: Callable[[Finding], Hashable] = _spoken
    kinds = {kind_of(f) for f in result.findings}
    if len(kinds) > most:
        # So many sentences are not so many faults: they quote what differs by request.
        kind_of = _kind
        kinds = {kind_of(f) for f in result.findings}
    # Room for the first of each kind, whichever comes last.
    room = most - len(kinds)
    kept: list[Finding] = []
    place: dict[Hashable, int] = {}
    left: Counter[Hashable] = Counter()
    for finding in result.findings:
        kind = kind_of(finding)
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
    said = f"{left.total()} of {result.found} findings are counted and not listed, being like those that are"
    note = f"{result.note}; {said}" if result.note else said
    return result.model_copy(update={"findings": tuple(kept), "note": note})


def _kind(f: Finding) -> Hashable:
    """What verdicts, known defects (``harness.known``) and reports tell findings of a check in a cell apart by."""
    changed = tuple(map(str, f.evidence.get("changed") or ()))
    reason = str(f.evidence.get("reason", "")) if f.prompt_id is None else ""
    return (f.verdict, f.damage, f.stratum, f.prompt_id is None, f.known, changed, reason)


def _spoken(f: Finding) -> Hashable:
    """The kind, and what it says: what differs in figures alone is the same fault."""
    return (_kind(f), _FIGURES.sub("#", f.message)[:_SAID])
