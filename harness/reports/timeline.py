"""When each group of engines was started and each cell was asked, from the times that were recorded.

Starts are recorded as durations: they are drawn before the first request of their group, and those of groups that were
never asked one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from itertools import pairwise
from typing import NamedTuple

from harness.history.folder import History
from harness.history.records import RESCORE, CellRecord
from harness.history.verdict import Verdict
from harness.util.text import counted

_IDLE_S = 30.0
"""Pauses of the whole run that are longer, as before it was resumed, are drawn with this length."""
_MOST_MARKS = 20
_WAIT_S = 1.0
"""Shortest pause between the cells of a group that is a bar of its own."""


class Bar(NamedTuple):
    """Something that took time: ``start``, ``cell`` or ``wait``; or a ``mark`` without length where a request broke."""

    kind: str
    words: str
    begin: float
    """Seconds since 1970."""
    end: float
    cell: str = ""
    verdict: Verdict | None = None


class Lane(NamedTuple):
    """One group of engines."""

    group: str
    bars: tuple[Bar, ...]


class Timeline(NamedTuple):
    lanes: tuple[Lane, ...]
    places: Mapping[float, float]
    """The place of each beginning and end, from 0 to 100."""
    total_s: float
    """Seconds from left to right, without pauses of the whole run."""

    def left(self, bar: Bar) -> float:
        return round(self.places[bar.begin], 2)

    def width(self, bar: Bar) -> float:
        return round(max(self.places[bar.end] - self.places[bar.begin], 0.15), 2)


def timeline_of(history: History, verdicts: Mapping[str, Verdict]) -> Timeline:
    """Return the lanes of a run's engines, in the order in which they were started."""
    lanes: list[Lane] = []
    cursor = _seconds(history.run.started)
    for group in dict.fromkeys(c.group for c in history.run.cells):
        bars = _asked(history, [c for c in history.run.cells if c.group == group], verdicts)
        start = sum(c.start_seconds for c in history.run.cells if c.group == group)
        begin = min((b.begin for b in bars), default=cursor + start)
        if start:
            reasons = [f": {c.reason}" for c in history.run.cells if c.group == group and c.reason and not bars]
            words = f"engines of {group} started in {start:.1f} s" if bars else f"start of {group}, {start:.1f} s"
            bars.insert(0, Bar("start", words + "".join(reasons[:1])[:300], begin - start, begin))
        if bars:
            lanes.append(Lane(group, tuple(bars)))
            cursor = max(cursor, max(b.end for b in bars) if len(bars) == 1 else cursor)
    lanes.sort(key=lambda lane: lane.bars[0].begin)
    places, total = _placed(lanes)
    return Timeline(tuple(lanes), places, total)


def _seconds(moment: str) -> float:
    try:
        return datetime.fromisoformat(moment).timestamp()
    except ValueError:
        return 0.0


def _asked(history: History, records: list[CellRecord], verdicts: Mapping[str, Verdict]) -> list[Bar]:
    bars: list[Bar] = []
    for record in records:
        rows = [o for o in history.in_order(record.cell) if o.scenario != RESCORE]
        if not rows:
            continue
        begin = min(o.started_at for o in rows)
        end = max(o.ended_at for o in rows)
        words = f"{record.cell}: {counted(len(rows), 'request')} in {end - begin:.1f} s, {record.state}"
        bars.append(Bar("cell", words, begin, end, record.cell, verdicts.get(record.cell)))
        bars += [
            Bar("mark", f"{record.cell}, {o.key}: {o.error}"[:300], o.started_at, o.started_at)
            for o in rows
            if o.error is not None
        ][:_MOST_MARKS]
    cells = sorted((b for b in bars if b.kind == "cell"), key=lambda b: b.begin)
    for before, after in pairwise(cells):
        if after.begin - before.end >= _WAIT_S:
            words = f"{after.begin - before.end:.1f} s between {before.cell} and {after.cell}"
            bars.append(Bar("wait", words, before.end, after.begin))
    return sorted(bars, key=lambda b: (b.begin, b.kind == "mark"))


def _placed(lanes: list[Lane]) -> tuple[dict[float, float], float]:
    """Return the place of every time on a line from 0 to 100 on which pauses of the whole run are cut short."""
    bars = sorted((b.begin, b.end) for lane in lanes for b in lane.bars if b.kind != "wait")
    at: dict[float, float] = {}
    busy_until, cut = (bars[0][0], 0.0) if bars else (0.0, 0.0)
    first = busy_until
    for begin, end in bars:
        cut += max(0.0, begin - busy_until - _IDLE_S)
        busy_until = max(busy_until, end)
        at[begin] = begin - first - cut
        at[end] = end - first - cut
    total = max(at.values(), default=0.0)
    return {t: 100 * v / (total or 1.0) for t, v in at.items()}, total
