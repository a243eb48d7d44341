"""Small static charts as SVG in the colours of the page, which need no script, follow dark mode and print.

Series differ in colour, symbol and dashes, so that a chart can be read without colour. What a point stands for is its
tooltip.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from markupsafe import Markup

from harness.util.text import harmless

WIDTH, HEIGHT = 360, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 8, 8, 36
_SYMBOLS = (
    "M-1 0A1 1 0 1 0 1 0A1 1 0 1 0-1 0Z",
    "M-.9-.9H.9V.9H-.9Z",
    "M0-1.1L1.1.9H-1.1Z",
    "M0-1.2L1.2 0 0 1.2-1.2 0Z",
    "M0 1.1L1.1-.9H-1.1Z",
    "M-.4-1H.4V-.4H1V.4H.4V1H-.4V.4H-1V-.4H-.4Z",
)
"""Paths of radius 1."""
_HALF_DIGIT = 3.5
"""Half the width of a digit in the labels of an axis, at least."""
COLOURS = 6
DASHES = ("", "5 4", "2 3", "8 3 2 3")


class Axis(NamedTuple):
    """A linear axis from ``low`` to ``high`` with its labelled ticks."""

    title: str
    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]


def linear(title: str, values: Iterable[float], zero: bool = False) -> Axis:
    """Return an axis with round ticks around the values."""
    found = [*values, *([0.0] if zero else [])]
    low, high = min(found, default=0.0), max(found, default=1.0)
    if low == high:
        low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
    rough = (high - low) / 4
    unit = 10 ** math.floor(math.log10(rough))
    step = next(m * unit for m in (1, 2, 5, 10) if m * unit >= rough)
    first, last = math.floor(low / step), math.ceil(high / step)
    ticks = tuple((n * step, f"{n * step:g}") for n in range(first, last + 1))
    return Axis(title, first * step, last * step, ticks)


def shares(title: str) -> Axis:
    """Return an axis for shares from 0 to 1, in per cent."""
    return Axis(title, 0.0, 1.0, tuple((v, f"{100 * v:.0f} %") for v in (0.0, 0.25, 0.5, 0.75, 1.0)))


def shares_around(title: str, values: Iterable[float], least: float = 0.1) -> Axis:
    """Return an axis in per cent around shares, which is at least ``least`` long and lies within 0 to 1: rounding must
    not look like a change, nor a share of nearly nothing like much."""
    found = list(values)
    low, high = min(found, default=0.0), max(found, default=1.0)
    spare = max(0.0, least - (high - low)) / 2
    fitted = linear(title, [max(0.0, min(low - spare, 1 - least)), min(1.0, max(high + spare, least))])
    if fitted.low <= 0 and fitted.high >= 1:
        return shares(title)
    return fitted._replace(ticks=tuple((v, f"{100 * v:.0f} %") for v, _ in fitted.ticks))


def counts(title: str, most: int) -> Axis:
    """Return an axis for numbers from 0 to ``most``, at least 1, with at most six whole ticks."""
    step = next(m * 10**e for e in range(10) for m in (1, 2, 5) if m * 10**e * 5 >= most)
    return Axis(title, 0.0, float(most), tuple((float(n), str(n)) for n in range(0, most + 1, step)))


def ordinal(title: str, labels: Sequence[str], most: int = 14) -> Axis:
    """Return an axis with a place at 0, 1, 2 … for each label, of which at most about ``most`` are written."""
    every = -(-len(labels) // most) or 1
    return Axis(
        title, -0.5, max(len(labels), 1) - 0.5, tuple((float(i), t) for i, t in enumerate(labels) if i % every == 0)
    )


class Plot:
    """A chart under construction. All coordinates are those of the axes."""

    def __init__(self, x: Axis, y: Axis, series: Sequence[str], dashes: Sequence[str] = ()) -> None:
        self._x, self._y = x, y
        self._series, self._dashes = list(series), list(dashes)
        self._marks: list[Markup] = []

    def line(self, points: Sequence[tuple[float, float]], series: str, dashes: str = "", step: bool = False) -> None:
        """Draw a line of a series; ``step`` keeps each value until the next point."""
        path = ""
        for i, (x, y) in enumerate(points):
            across = f"H{self._at_x(x)}" if step and i else ""
            path += f"{across}{'L' if i else 'M'}{self._at_x(x)} {self._at_y(y)}"
        self._add(
            '<path class="line k{}" stroke-dasharray="{}" d="{}"/>',
            self._colour(series),
            self._dash(dashes) or "none",
            path,
        )

    def point(self, x: float, y: float, series: str, words: str, link: str = "", hollow: bool = False) -> None:
        """Draw a point with its tooltip, and a link to another page if there is one.

        Hollow points of later series are smaller, so that points on top of each other can be told apart.
        """
        rank = self._series.index(series)
        mark = Markup(
            '<path class="dot k{}{}" transform="translate({} {}) scale({:.1f})" d="{}"><title>{}</title></path>'
        ).format(
            self._colour(series),
            " hollow" if hollow else "",
            self._at_x(x),
            self._at_y(y),
            max(2.5, 6.5 - 1.5 * rank) if hollow else 4.5,
            _SYMBOLS[rank % len(_SYMBOLS)],
            harmless(words),
        )
        # The table beside the chart has the same links for the keyboard.
        self._marks.append(Markup('<a href="{}" tabindex="-1">{}</a>').format(link, mark) if link else mark)

    def interval(self, x: float, low: float, high: float, series: str) -> None:
        self._add(
            '<path class="line k{}" d="M{} {}V{}"/>',
            self._colour(series),
            self._at_x(x),
            self._at_y(low),
            self._at_y(high),
        )

    def box(self, kind: str, x: float, width: float, low: float, high: float) -> None:
        """Draw a box of the CSS class ``kind`` around ``x``."""
        left, right = self._at_x(x - width / 2), self._at_x(x + width / 2)
        self._add(
            '<rect class="{}" x="{}" y="{}" width="{:.1f}" height="{:.1f}"/>',
            kind,
            left,
            self._at_y(high),
            right - left,
            self._at_y(low) - self._at_y(high),
        )

    def rule(self, x: float) -> None:
        self._add('<path class="rule" d="M{} {}V{}"/>', self._at_x(x), _TOP, HEIGHT - _BOTTOM)

    @property
    def svg(self) -> Markup:
        """The chart with its legend."""
        x, y = self._x, self._y
        right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM
        grid = [
            Markup('<path class="grid" d="M{} {}H{}"/><text class="y" x="{}" y="{}">{}</text>').format(
                _LEFT, self._at_y(v), right, _LEFT - 5, self._at_y(v) + 3.5, label
            )
            for v, label in y.ticks
        ]
        grid += [
            Markup('<text class="x" x="{}" y="{}">{}</text>').format(
                self._label_x(v, label), bottom + 18, harmless(label)
            )
            for v, label in x.ticks
        ]
        titles = Markup('<text class="x" x="{}" y="{}">{}</text>').format((_LEFT + right) / 2, HEIGHT - 5, x.title)
        titles += Markup('<text class="x" transform="translate(10 {}) rotate(-90)">{}</text>').format(
            (_TOP + bottom) / 2, y.title
        )
        return Markup('<svg class="plot" viewBox="0 0 {} {}" aria-hidden="true">{}{}{}</svg>{}').format(
            WIDTH, HEIGHT, Markup().join(grid), Markup().join(self._marks), titles, self._legend()
        )

    def _legend(self) -> Markup:
        """Return what each colour, symbol and dash stands for; a series with dashes of its own is a line alone."""
        lines = {name: f"line k{self._colour(name)}" if name in self._series else "rule" for name in self._dashes}
        entries = [
            Markup('<path class="dot k{}" transform="translate(12 6) scale(4.5)" d="{}"/>').format(
                self._colour(name), _SYMBOLS[self._series.index(name) % len(_SYMBOLS)]
            )
            for name in self._series
            if name not in lines
        ]
        entries += [
            Markup('<path class="{}" style="stroke-dasharray:{}" d="M0 6H24"/>').format(
                kind, self._dash(name) or "none"
            )
            for name, kind in lines.items()
        ]
        names = [*(name for name in self._series if name not in lines), *lines]
        items = [
            Markup('<span><svg viewBox="0 0 24 12">{}</svg><bdi>{}</bdi></span>').format(mark, harmless(name))
            for mark, name in zip(entries, names, strict=True)
        ]
        return Markup('<span class="legend" aria-hidden="true">{}</span>').format(Markup().join(items))

    def _add(self, mark: str, *values: object) -> None:
        self._marks.append(Markup(mark).format(*values))

    def _colour(self, series: str) -> int:
        return self._series.index(series) % COLOURS + 1

    def _dash(self, name: str) -> str:
        return DASHES[self._dashes.index(name) % len(DASHES)] if name in self._dashes else ""

    def _at_x(self, value: float) -> float:
        share = (value - self._x.low) / (self._x.high - self._x.low)
        return round(_LEFT + share * (WIDTH - _LEFT - _RIGHT), 1)

    def _label_x(self, value: float, label: str) -> float:
        """Return the middle of a label, further to the left where the chart would end within it."""
        return min(self._at_x(value), round(WIDTH - _HALF_DIGIT * len(label), 1))

    def _at_y(self, value: float) -> float:
        share = (value - self._y.low) / (self._y.high - self._y.low)
        return round(HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM), 1)
