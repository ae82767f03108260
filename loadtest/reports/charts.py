"""Charts as SVG text: what the HTML pages draw, with nothing but the standard library and no script in the page.

Colours and fonts come from the pages' style sheet (report.css); every mark carries a <title>, which browsers show on hovering.
A drawing is as wide as a phone's screen, so that its text stays readable there.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Final

WIDTH, HEIGHT = 460, 320
LEFT, RIGHT, TOP, BOTTOM = 60, 30, 34, 46  # LEFT: at least; more where the numbers at the axis need it
_TITLE: Final = 20  # pixels that the title of the y axis takes
LETTER, DIGIT = 6.4, 7.7  # pixels, of a usual letter and of the widest font's digits
_LEAST_GAP: Final = 12.0  # pixels between two labels at line ends
_PARTS: Final = ("queue", "compute", "overhead")  # of a request's time


@dataclass(frozen=True, slots=True)
class Point:
    """One mark. solid: filled, else hollow. hint: shown on hovering. low, high: of the interval of y; None: not known."""

    x: float
    y: float
    hint: str = ""
    solid: bool = True
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Series:
    """Marks of one colour (index into the page's palette), joined with a line, or as stairs if `stairs`.

    name: written at the right end. dashes: 0 for a whole line, 1 and 2 for broken ones. The intervals of its points are a band.
    """

    colour: int
    points: Sequence[Point]
    joined: bool = True
    marks: bool = True
    stairs: bool = False
    name: str = ""
    dashes: int = 0


@dataclass(frozen=True, slots=True)
class Axis:
    """label: with its unit. log: logarithmic; values must then be above 0.

    zero: a linear axis begins at 0. Else it does where that costs less than half of its length; where not, it is marked broken.
    """

    label: str
    log: bool = False
    zero: bool = True


@dataclass(frozen=True, slots=True)
class Line:
    """A horizontal reference line, named above the chart."""

    y: float
    label: str


@dataclass(frozen=True, slots=True)
class AxisSpan:
    """A stretch of the x axis with a label at its top, "" for none."""

    start: float
    end: float
    label: str


@dataclass(frozen=True, slots=True)
class Chart:
    """lines: one at most. front: points joined behind the marks, such as a Pareto front. rings: marked places with a label.

    diagonal: a label for the line y = x, "" for none.
    """

    x: Axis
    y: Axis
    series: Sequence[Series]
    lines: Sequence[Line] = ()
    front: Sequence[Point] = ()
    rings: Sequence[Point] = ()
    spans: Sequence[AxisSpan] = ()
    diagonal: str = ""


def draw(chart: Chart) -> str:
    """The chart as an <svg> element; nothing, if there is nothing to draw."""
    points = [point for series in chart.series for point in series.points]
    if not points:
        return ""
    bounds = [bound for point in points for bound in (point.low, point.high) if bound is not None]
    y = _Scale(chart.y, [point.y for point in points] + bounds + [line.y for line in chart.lines], HEIGHT - BOTTOM, TOP)
    longest = max((len(_number(tick)) for tick in y.ticks), default=0)
    left = max(LEFT, _TITLE + DIGIT * longest + 8)
    x = _Scale(chart.x, [point.x for point in points], left, WIDTH - RIGHT)
    label = f"{y.told} by {x.told}"
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">']
    parts += [part for span in chart.spans for part in _span(span, x)]
    parts += _grid(x, y)
    for line in chart.lines:
        at = y(line.y)
        parts.append(f'<line class="limit" x1="{left:.1f}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        # Its name stands above the frame, where no mark can lie over it.
        parts.append(f'<line class="limit" x1="{left:.1f}" x2="{left + 22:.1f}" y1="9" y2="9"/>')
        parts.append(f'<text class="limit-label" x="{left + 28:.1f}" y="13">{escape(line.label)}</text>')
    if chart.diagonal:
        parts += _diagonal(chart.diagonal, x, y)
    if len(chart.front) > 1:
        parts.append(f'<polyline class="front" points="{_path(chart.front, x, y)}"/>')
    for series in chart.series:
        parts += _series(series, x, y)
    parts += _names(chart.series, x, y)
    for ring in chart.rings:
        hint = f"<title>{escape(ring.hint)}</title>"
        parts.append(f'<circle class="ring" cx="{x(ring.x):.1f}" cy="{y(ring.y):.1f}" r="8">{hint}</circle>')
    return "".join((*parts, "</svg>"))


@dataclass(frozen=True, slots=True)
class Bar:
    """One row of stacked bars. parts: ms of each of `_PARTS`."""

    name: str
    colour: int
    parts: Sequence[float]


def stacked_bars(bars: Sequence[Bar]) -> str:
    """Horizontal stacked bars as an <svg> element, one row each; parts are told apart by opacity. Nothing without bars."""
    if not bars:
        return ""
    most = max(sum(bar.parts) for bar in bars) or 1.0
    row, top = 40, 26
    height = top + row * len(bars) + 6
    parts = [f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{", ".join(_PARTS)}">']
    for index, label in enumerate(_PARTS):
        at = 8 + 120 * index
        parts.append(f'<rect class="part{index} neutral" x="{at}" y="5" width="11" height="11" rx="2"/>')
        parts.append(f'<text x="{at + 16}" y="15">{label}</text>')
    for number, bar in enumerate(bars):
        top_y = top + row * number
        total = sum(bar.parts)
        parts.append(f'<text class="name" x="8" y="{top_y + 12}">{escape(bar.name)}</text>')
        left = 8.0
        for index, part in enumerate(bar.parts):
            width = (WIDTH - 100) * part / most
            hint = f"{bar.name}: {_PARTS[index]} {part:.3g} ms"
            parts.append(
                f'<rect class="part{index} c{bar.colour}" x="{left:.1f}" y="{top_y + 17}" width="{max(width, 0.5):.1f}" '
                f'height="14"><title>{escape(hint)}</title></rect>'
            )
            left += width
        parts.append(f'<text x="{left + 6:.1f}" y="{top_y + 28}">{total:.3g} ms</text>')
    return "".join((*parts, "</svg>"))


class _Scale:
    """Values to pixels, with the ticks of an axis."""

    def __init__(self, axis: Axis, values: Sequence[float], start: float, end: float) -> None:
        self.axis, self.start, self._end = axis, start, end
        low, high = min(values), max(values)
        if axis.log:
            self._low, self._high = math.log10(low / 1.15), math.log10(high * 1.15)
            self.ticks = _log_ticks(self._low, self._high)
        else:
            from_zero = axis.zero or low < high / 2
            margin = 0.08 * ((high - low) or abs(high) or 1.0)
            self._low = 0.0 if from_zero else low - margin
            self._high = high + (0.08 * (high or 1.0) if from_zero else margin)
            self.ticks = _linear_ticks(self._low, self._high)
        self.broken = not axis.log and self._low > 0
        self.told = axis.label + (" (log scale)" if axis.log else " (not from 0)" if self.broken else "")
        self.top = 10**self._high if axis.log else self._high
        self.bottom = 10**self._low if axis.log else self._low

    def __call__(self, value: float) -> float:
        place = math.log10(value) if self.axis.log else value
        return self.start + (self._end - self.start) * (place - self._low) / (self._high - self._low)


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
        parts.append(f'<line class="grid" x1="{x.start:.1f}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="tick-y" x="{x.start - 8:.1f}" y="{at + 4:.1f}">{_number(tick)}</text>')
    parts.append(f'<path class="frame" d="M{x.start:.1f} {TOP}V{bottom}H{WIDTH - RIGHT}"/>')
    if x.broken:
        parts.append(f'<path class="break" d="M{x.start + 8:.1f} {bottom + 5}l4 -10m4 10l4 -10"/>')
    if y.broken:
        parts.append(f'<path class="break" d="M{x.start - 5:.1f} {bottom - 8}l10 -4m-10 -4l10 -4"/>')
    middle = (x.start + WIDTH - RIGHT) / 2
    parts.append(f'<text class="axis" x="{middle:.1f}" y="{HEIGHT - 8}">{escape(x.told)}</text>')
    upright = (TOP + bottom) / 2
    parts.append(f'<text class="axis" transform="translate(13 {upright}) rotate(-90)">{escape(y.told)}</text>')
    return parts


def _span(span: AxisSpan, x: _Scale) -> list[str]:
    start, end = x(span.start), x(span.end)
    middle, anchor = (start + end) / 2, "middle"
    half = LETTER * len(span.label) / 2
    if middle + half > WIDTH - RIGHT:
        middle, anchor = WIDTH - RIGHT, "end"
    elif middle - half < x.start:
        middle, anchor = x.start + 4, "start"
    return [
        f'<rect class="axis-span" x="{start:.1f}" y="{TOP}" width="{max(end - start, 1):.1f}" '
        f'height="{HEIGHT - BOTTOM - TOP}"/>',
        f'<text class="axis-span-label" x="{middle:.1f}" y="{TOP - 5}" text-anchor="{anchor}">{escape(span.label)}</text>',
    ]


def _diagonal(label: str, x: _Scale, y: _Scale) -> list[str]:
    start, end = max(x.bottom, y.bottom), min(x.top, y.top)
    line = f'<line class="diagonal" x1="{x(start):.1f}" y1="{y(start):.1f}" x2="{x(end):.1f}" y2="{y(end):.1f}"/>'
    at = start + 0.55 * (end - start)
    room = x(at) - 8 - LETTER * len(label) > x.start  # else it stands on the other side
    place = f'x="{x(at) + (-8 if room else 8):.1f}" y="{y(at):.1f}" text-anchor="{"end" if room else "start"}"'
    return [line, f'<text class="soft-label" {place}>{escape(label)}</text>']


def _series(series: Series, x: _Scale, y: _Scale) -> list[str]:
    points = sorted(series.points, key=lambda point: point.x)
    parts = _intervals(series.colour, points, x, y)
    if series.joined and len(points) > 1:
        shown = _stairs(points) if series.stairs else points
        parts.append(f'<polyline class="line s{series.colour} dash{series.dashes}" points="{_path(shown, x, y)}"/>')
    for point in points if series.marks else ():
        kind = f"c{series.colour} s{series.colour}" if point.solid else f"hollow s{series.colour}"
        centre = f'cx="{x(point.x):.1f}" cy="{y(point.y):.1f}"'
        parts.append(f'<circle class="mark {kind}" {centre} r="4"><title>{escape(point.hint)}</title></circle>')
    return parts


def _intervals(colour: int, points: Sequence[Point], x: _Scale, y: _Scale) -> list[str]:
    """A band over the points whose interval is known, and a bar at each."""
    known = [(point.x, point.low, point.high) for point in points if point.low is not None and point.high is not None]
    if not known:
        return []
    there = " ".join(f"{x(at):.1f},{y(low):.1f}" for at, low, _ in known)
    back = " ".join(f"{x(at):.1f},{y(high):.1f}" for at, _, high in reversed(known))
    bars = (f"M{x(at):.1f} {y(low):.1f}V{y(high):.1f}" for at, low, high in known)
    return [
        f'<polygon class="band c{colour}" points="{there} {back}"/>',
        f'<path class="interval s{colour}" d="{"".join(bars)}"/>',
    ]


def _names(series: Sequence[Series], x: _Scale, y: _Scale) -> list[str]:
    """The name of each series right of its last point, pushed apart where they would lie over each other."""
    placed = [(max(one.points, key=lambda point: point.x), one) for one in series if one.name and one.points]
    ends = sorted((y(last.y) + 4, x(last.x) + 9, one.colour, one.name) for last, one in placed)
    parts: list[str] = []
    before: dict[int, float] = {}  # column of pixels -> the lowest label there
    for at_y, at_x, colour, name in ends:
        column = round(at_x / 24)
        at_y = max(at_y, before.get(column, -math.inf) + _LEAST_GAP)
        before[column] = at_y
        parts.append(f'<text class="end c{colour}" x="{at_x:.1f}" y="{at_y:.1f}">{escape(name)}</text>')
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
