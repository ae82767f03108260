"""Charts as SVG text: what the HTML report draws, with nothing but the standard library and no script in the page.

Colours and fonts come from the page's style sheet (html.py); every mark carries a <title>, which browsers show on hovering.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise

WIDTH, HEIGHT = 560, 340
LEFT, RIGHT, TOP, BOTTOM = 62, 18, 16, 46


@dataclass(frozen=True, slots=True)
class Point:
    """One mark. solid: filled, else hollow. hint: shown on hovering."""

    x: float
    y: float
    hint: str = ""
    solid: bool = True


@dataclass(frozen=True, slots=True)
class Series:
    """Marks of one colour (index into the page's palette). joined: with a line, or as stairs if `stairs`."""

    colour: int
    points: Sequence[Point]
    joined: bool = True
    marks: bool = True
    stairs: bool = False


@dataclass(frozen=True, slots=True)
class Axis:
    """label: with its unit. log: logarithmic; values must then be above 0. zero: a linear axis begins at 0."""

    label: str
    log: bool = False
    zero: bool = True


@dataclass(frozen=True, slots=True)
class Line:
    """A horizontal reference line with a label at its left end."""

    y: float
    label: str


@dataclass(frozen=True, slots=True)
class Chart:
    """lines: references. front: points joined behind the marks, such as a Pareto front. rings: marked places with a label."""

    x: Axis
    y: Axis
    series: Sequence[Series]
    lines: Sequence[Line] = ()
    front: Sequence[Point] = ()
    rings: Sequence[Point] = field(default=())


def draw(chart: Chart) -> str:
    """The chart as an <svg> element; nothing, if there is nothing to draw."""
    points = [point for series in chart.series for point in series.points]
    if not points:
        return ""
    ys = [point.y for point in points] + [line.y for line in chart.lines]
    x = _Scale(chart.x, [point.x for point in points], LEFT, WIDTH - RIGHT)
    y = _Scale(chart.y, ys, HEIGHT - BOTTOM, TOP)
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(chart.y.label)} by {escape(chart.x.label)}">']
    parts += _grid(x, y)
    if chart.front:
        parts.append(f'<polyline class="front" points="{_path(chart.front, x, y)}"/>')
    for series in chart.series:
        parts += _series(series, x, y)
    for line in chart.lines:
        at = y(line.y)
        parts.append(f'<line class="limit" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="limit-label" x="{LEFT + 6}" y="{at - 6:.1f}">{escape(line.label)}</text>')
    for ring in chart.rings:
        parts.append(
            f'<circle class="ring" cx="{x(ring.x):.1f}" cy="{y(ring.y):.1f}" r="8"><title>{escape(ring.hint)}</title></circle>'
        )
    return "".join((*parts, "</svg>"))


@dataclass(frozen=True, slots=True)
class Bar:
    """One row of stacked bars. parts: lengths, in the order of the labels."""

    name: str
    colour: int
    parts: Sequence[float]


def stacked_bars(bars: Sequence[Bar], labels: Sequence[str], unit: str) -> str:
    """Horizontal stacked bars as an <svg> element, one row each; parts are told apart by opacity. Nothing without bars."""
    if not bars:
        return ""
    most = max(sum(bar.parts) for bar in bars) or 1.0
    row, top = 40, 26
    height = top + row * len(bars) + 6
    parts = [f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(", ".join(labels))}">']
    for index, label in enumerate(labels):
        at = 8 + 120 * index
        parts.append(f'<rect class="part{index} neutral" x="{at}" y="5" width="11" height="11" rx="2"/>')
        parts.append(f'<text x="{at + 16}" y="15">{escape(label)}</text>')
    for number, bar in enumerate(bars):
        top_y = top + row * number
        total = sum(bar.parts)
        parts.append(f'<text class="name" x="8" y="{top_y + 12}">{escape(bar.name)}</text>')
        left = 8.0
        for index, part in enumerate(bar.parts):
            width = (WIDTH - 100) * part / most
            hint = f"{bar.name}: {labels[index]} {part:.3g} {unit}"
            parts.append(
                f'<rect class="part{index} c{bar.colour}" x="{left:.1f}" y="{top_y + 17}" width="{max(width, 0.5):.1f}" '
                f'height="14"><title>{escape(hint)}</title></rect>'
            )
            left += width
        parts.append(f'<text x="{left + 6:.1f}" y="{top_y + 28}">{total:.3g} {escape(unit)}</text>')
    return "".join((*parts, "</svg>"))


class _Scale:
    """Values to pixels, with the ticks of an axis."""

    def __init__(self, axis: Axis, values: Sequence[float], start: float, end: float) -> None:
        self.axis, self._start, self._end = axis, start, end
        low, high = min(values), max(values)
        if axis.log:
            self._low, self._high = math.log10(low / 1.15), math.log10(high * 1.15)
            self.ticks = _log_ticks(self._low, self._high)
        else:
            margin = 0.08 * ((high - low) or high or 1.0)
            self._low = 0.0 if axis.zero else low - margin
            self._high = high + margin
            self.ticks = _linear_ticks(self._low, self._high)

    def __call__(self, value: float) -> float:
        place = math.log10(value) if self.axis.log else value
        return self._start + (self._end - self._start) * (place - self._low) / (self._high - self._low)


def _linear_ticks(low: float, high: float) -> list[float]:
    rough = (high - low) / 5
    power = 10 ** math.floor(math.log10(rough))
    step = next(step for step in (power, 2 * power, 2.5 * power, 5 * power, 10 * power) if step >= rough)
    return [step * n for n in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    decades = range(math.floor(low), math.ceil(high) + 1)
    for multiples in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7)):
        ticks = [m * 10.0**d for d in decades for m in multiples if low <= math.log10(m * 10.0**d) <= high]
        if len(ticks) >= 4:
            return ticks
    return _linear_ticks(10**low, 10**high)  # too narrow a range for decades


def _grid(x: _Scale, y: _Scale) -> list[str]:
    bottom = HEIGHT - BOTTOM
    parts = []
    for tick in x.ticks:
        at = x(tick)
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{bottom}"/>')
        parts.append(f'<text class="tick-x" x="{at:.1f}" y="{bottom + 16}">{_number(tick)}</text>')
    for tick in y.ticks:
        at = y(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="tick-y" x="{LEFT - 8}" y="{at + 4:.1f}">{_number(tick)}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="axis" x="{middle}" y="{HEIGHT - 8}">{escape(x.axis.label)}</text>')
    upright = (TOP + bottom) / 2
    parts.append(f'<text class="axis" transform="translate(14 {upright}) rotate(-90)">{escape(y.axis.label)}</text>')
    return parts


def _series(series: Series, x: _Scale, y: _Scale) -> list[str]:
    points = sorted(series.points, key=lambda point: point.x)
    parts = []
    if series.joined and len(points) > 1:
        shown = _stairs(points) if series.stairs else points
        parts.append(f'<polyline class="line s{series.colour}" points="{_path(shown, x, y)}"/>')
    for point in points if series.marks else ():
        kind = f"c{series.colour} s{series.colour}" if point.solid else f"hollow s{series.colour}"
        centre = f'cx="{x(point.x):.1f}" cy="{y(point.y):.1f}"'
        parts.append(f'<circle class="mark {kind}" {centre} r="4.5"><title>{escape(point.hint)}</title></circle>')
    return parts


def _stairs(points: Sequence[Point]) -> list[Point]:
    """Up at the left end of each step: the price of a rate is that of the fleet which the rate needs."""
    shown = [points[0]]
    for before, after in pairwise(points):
        shown += [Point(before.x, after.y), after]
    return shown


def _path(points: Sequence[Point], x: _Scale, y: _Scale) -> str:
    return " ".join(f"{x(point.x):.1f},{y(point.y):.1f}" for point in points)


def _number(value: float) -> str:
    if value >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value / 1e3:g}k" if value >= 1e4 else f"{value:.4g}"
