"""What the mean times of the sizes that were seen tell together, where batches scatter."""

from collections.abc import Sequence

from gateway.batching.steps import Point

Sums = tuple[float, ...]
"""Of batches: their weight, and weighted by it rows, time, rows · rows and rows · time."""


class SeenSize:
    """A size that has run. at: its place in the curve's sizes. mean_ns: at level 1. built_ns: mean when the shape was built."""

    __slots__ = ("at", "built_ns", "count", "mean_ns")

    def __init__(self, at: int, mean_ns: float, count: int) -> None:
        self.at = at
        self.mean_ns = mean_ns
        self.count = count
        self.built_ns = 0.0


def smoothed(points: Sequence[Point], weight: float) -> list[float]:
    """The times of sizes, by the line through all of them as well, which counts as so many batches of each. Rising then."""
    if len(points) < 3 or not weight:
        return [mean_ns for _, mean_ns, _ in points]
    fixed, slope = line_through(points)
    times = [(count * mean_ns + weight * (fixed + slope * rows)) / (count + weight) for rows, mean_ns, count in points]
    return _rising(times, [count for _, _, count in points])


def _rising(times: list[float], counts: list[int]) -> list[float]:
    """The nearest by least squares that never fall: of neighbours out of order, their mean."""
    pools: list[tuple[float, int, int]] = []  # time, weight, sizes
    for time_ns, weight in zip(times, counts, strict=True):
        sizes = 1
        while pools and pools[-1][0] > time_ns:
            before_ns, before, more = pools.pop()
            time_ns = (before_ns * before + time_ns * weight) / (before + weight)
            weight, sizes = weight + before, sizes + more
        pools.append((time_ns, weight, sizes))
    return [time_ns for time_ns, _, sizes in pools for _ in range(sizes)]


def sums_of(points: Sequence[tuple[int, float]]) -> Sums:
    """Of rows and time, one batch each."""
    return (
        len(points),
        sum([rows for rows, _ in points]),
        sum([time_ns for _, time_ns in points]),
        sum([rows * rows for rows, _ in points]),
        sum([rows * time_ns for rows, time_ns in points]),
    )


def line_of(sums: Sums) -> tuple[float, float]:
    """(a, b) of a + b·rows, both not below zero, by least squares; of one size alone, all in proportion."""
    weight, x, y, xx, xy = sums
    if not weight:
        return 0.0, 0.0
    spread = weight * xx - x * x
    if spread <= 1e-9 * weight * xx:
        return 0.0, y / x  # more rows may cost in proportion, never more
    slope = max(0.0, (weight * xy - x * y) / spread)
    fixed = (y - slope * x) / weight
    return (fixed, slope) if fixed >= 0 else (0.0, y / x)


def line_through(points: Sequence[Point]) -> tuple[float, float]:
    """(a, b) of a + b·rows, both not below zero, by least squares. points: rows, time and weight."""
    weight = sum([count for _, _, count in points])
    x = sum([rows * count for rows, _, count in points]) / weight
    y = sum([time_ns * count for _, time_ns, count in points]) / weight
    xx = sum([count * (rows - x) ** 2 for rows, _, count in points])
    slope = max(0.0, sum([count * (rows - x) * time_ns for rows, time_ns, count in points]) / xx)
    return (y - slope * x, slope) if y > slope * x else (0.0, y / x)
