"""How long batches usually took, whatever went wrong with some: what a batch that took longer is measured by."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from statistics import median
from typing import Any, Final

import numpy as np

from gateway.batching.replay import PastBatch
from gateway.batching.service_curve import ServiceCurve
from gateway.batching.service_model import ServiceModel

_ENOUGH: Final = 5  # batches of a size, whose median is not moved by one that went wrong
_OUTLIER: Final = 1.5
_ROUNDS: Final = 6

_ALL: Final = "all"  # no group: those are None and tuples

STALLED: Final = 2.0
"""Times what is usual, a batch has stalled."""


class Typical:
    """t(rows) in nanoseconds, by median over a recording, for each group of requests that may share a batch."""

    def __init__(self, batches: Sequence[PastBatch], learned: ServiceModel) -> None:
        times: dict[Any, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        for batch in batches:
            if batch.ok and batch.answered_ns is not None:
                taken_ns = max(1.0, float(batch.answered_ns - batch.closed_ns))
                times[batch.group][batch.padded_rows].append(taken_ns)
                times[_ALL][batch.padded_rows].append(taken_ns)
        curves = learned.curves
        self._groups = {
            group: _Sizes(of_group, curves.get(group))
            for group, of_group in times.items()
            if group is not _ALL and sum(map(len, of_group.values())) >= _ENOUGH
        }
        self._groups[_ALL] = _Sizes(times[_ALL], learned.like())

    def rows_ns(self, rows: int, group: Hashable = None) -> float:
        """Of a batch of so many padded rows. group: of its queue; one that is not known is like all together. 0: unknown."""
        return self._groups.get(group, self._groups[_ALL]).rows_ns(rows)

    def batch_ns(self, batch: PastBatch) -> float:
        """What such a batch usually takes. Of a group that was hardly seen, what was learned before; 0: nothing was."""
        if batch.group in self._groups or len(self._groups) == 1:
            return self.rows_ns(batch.padded_rows, batch.group)
        return batch.likely_ns


class _Sizes:
    """Of one group. Sizes seen often have their own time; between them it is linear; beyond them it follows the line through
    all batches that are not far above it. Where that does not rise, or one size alone was seen, it follows what the service
    model had learned; where that is nothing, it stays, or is in proportion.
    """

    def __init__(self, times: Mapping[int, Sequence[float]], learned: ServiceCurve | None) -> None:
        self._learned = learned if learned is not None and learned.ready else None
        self._line = _line(times)
        often = {rows: float(median(taken)) for rows, taken in times.items() if len(taken) >= _ENOUGH}
        self._sizes = sorted(often)
        self._times = [often[rows] for rows in self._sizes]

    def rows_ns(self, rows: int) -> float:
        sizes, times = self._sizes, self._times
        if sizes and sizes[0] <= rows <= sizes[-1]:
            right = bisect_left(sizes, rows)
            if sizes[right] == rows:
                return times[right]
            share = (rows - sizes[right - 1]) / (sizes[right] - sizes[right - 1])
            return times[right - 1] + share * (times[right] - times[right - 1])
        if not sizes:
            learned_ns = self._learned_ns(rows)
            return learned_ns or (self._line[0] + self._line[1] * rows if self._line is not None else 0.0)
        near, near_ns = (sizes[0], times[0]) if rows < sizes[0] else (sizes[-1], times[-1])
        if self._line is not None and self._line[1] > 0:
            fixed, slope = self._line
            return near_ns * (fixed + slope * rows) / (fixed + slope * near)
        here, there = self._learned_ns(rows), self._learned_ns(near)
        if here and there:
            return near_ns * here / there
        return near_ns if self._line is not None else near_ns * max(1.0, rows / near)

    def _learned_ns(self, rows: int) -> float:
        curve = self._learned
        if curve is None:
            return 0.0
        fixed, slope = curve.line_ns
        if rows > curve.sizes[-1] and fixed + slope:
            return curve.expected_ns(rows) * (fixed + slope * rows) / (fixed + slope * curve.sizes[-1])
        return curve.expected_ns(rows)


def _line(times: Mapping[int, Sequence[float]]) -> tuple[float, float] | None:
    """(a, b) of t = a + b·rows, both at least 0, over what is not far above it; None, if one size or none was seen."""
    rows = np.array([size for size, taken in times.items() for _ in taken], dtype=float)
    taken = np.array([time_ns for of_size in times.values() for time_ns in of_size])
    keep = np.ones(len(rows), dtype=bool)
    fixed = slope = 0.0
    for _ in range(_ROUNDS):
        if len(set(rows[keep])) < 2:
            return None
        slope, fixed = (float(value) for value in np.polyfit(rows[keep], taken[keep], 1))
        if slope < 0 or fixed < 0:
            slope = max(0.0, slope)
            fixed = float(np.median(taken[keep])) if not slope else 0.0
            slope = slope if not fixed else 0.0
        fitted = np.maximum(fixed + slope * rows, 1.0)
        kept = taken <= _OUTLIER * fitted * max(1.0, float(np.median(taken[keep] / fitted[keep])))
        if (kept == keep).all():
            break
        keep = kept
    return fixed, slope
