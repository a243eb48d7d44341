"""Reads ``soak.jsonl`` line by line and says what it shows."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from harness.soak.growth import judge_growth
from harness.soak.model import SAMPLES, Growth, Line, Round, Sample, Tree

_LINE: TypeAdapter[Sample | Round] = TypeAdapter(Line)
FIGURES = tuple(Tree.model_fields)


class Seen(NamedTuple):
    """What a record shows."""

    counts: dict[str, Any]
    """Fields of ``Soak``."""
    growths: tuple[Growth, ...]
    doubts: tuple[str, ...]


class Series(NamedTuple):
    """All samples, as columns."""

    times_s: array[float]
    trees: dict[str, dict[str, array[float]]]


def read_lines(folder: Path, doubts: list[str]) -> Iterator[Sample | Round]:
    """The lines of a record. One that is damaged is left out and told of in ``doubts``."""
    try:
        with (folder / SAMPLES).open(encoding="utf-8", errors="replace") as lines:
            for number, text in enumerate(lines, 1):
                try:
                    yield _LINE.validate_json(text)
                except ValidationError:
                    doubts.append(f"{SAMPLES}, line {number}: expected a sample or a round, found damaged data")
    except OSError as error:
        doubts.append(f"{SAMPLES}: cannot be read: {error.strerror}")


def judge_record(folder: Path) -> Seen:
    """Counts over all rounds, and the growth of every figure."""
    doubts: list[str] = []
    totals: Counter[str] = Counter()
    verdicts: Counter[str] = Counter()
    series = Series(array("d"), {})
    seconds = 0.0
    for line in read_lines(folder, doubts):
        seconds = max(seconds, line.at_s)
        if isinstance(line, Round):
            verdicts[line.verdict] += 1
            totals["rounds"] += 1
            for name in ("answered", "broken", "tokens", "drafts", "accepted", "moved_bytes", "preemptions"):
                totals[name] += getattr(line, name)
        else:
            totals["samples"] += 1
            if not _add(series, line):
                doubts.append(f"{SAMPLES}: expected the same trees in every sample, found others at {line.at_s:.0f} s")
    names = ("rounds", "answered", "broken", "tokens", "drafts", "accepted", "moved_bytes", "preemptions", "samples")
    counts: dict[str, Any] = {name: totals[name] for name in names}
    counts |= {"verdicts": dict(verdicts), "seconds": round(seconds, 1)}
    growths = tuple(judge_growth(series.trees, series.times_s)) if series.times_s else ()
    return Seen(counts, growths, tuple(doubts[:5]))


def _add(series: Series, sample: Sample) -> bool:
    """Whether the sample has the trees of those before it; it is left out when it has not."""
    if series.trees and set(series.trees) != set(sample.trees):
        return False
    series.times_s.append(sample.at_s)
    for name, tree in sample.trees.items():
        columns = series.trees.setdefault(name, {f: array("d") for f in FIGURES})
        for figure in FIGURES:
            columns[figure].append(getattr(tree, figure))
    return True


def read_series(folder: Path) -> Series:
    """All samples of a record, as columns."""
    series = Series(array("d"), {})
    for line in read_lines(folder, []):
        if isinstance(line, Sample):
            _add(series, line)
    return series
