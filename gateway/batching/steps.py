"""Steps in which a model pads rows inside: told by what its batches took, of all sizes together.

Theory of operation. Steps are a hypothesis: t = a + b·padded(rows). Its misfit, the squares of relative errors over what they
may be by scatter, is held against that of t = a + b·rows, with one row on the line or apart. So one batch beyond a step tells
of all steps. They are believed only if they explain clearly more than either line, and then until the line does: most models
are smooth.
"""

from collections.abc import Callable, Iterator, Sequence
from math import log, sqrt
from typing import Final, NamedTuple

TILES: Final = (2, 4, 8, 16, 32, 64)
LEAST_SIZES: Final = 4
_MISFIT: Final = 0.05  # by how much, as a share, a size usually is off what is right
_UNKNOWN: Final = 0.1  # the scatter of batches, while it is not known
_CLEAR: Final = 9.0  # by how much the misfit must be less than that of a line: three standard deviations
_AFTER: Final = 64  # batches, until it is looked for steps again; of fewer, whenever they have doubled
_AGAIN: Final = 3  # runs before traffic of sizes that had run, from which their scatter is known
_JUMP: Final = 1.2  # times what the line through one row and the most tells of two: they are padded

Point = tuple[int, float, int]
"""Rows, what they took in the mean, of how many batches."""


class Steps(NamedTuple):
    """tile: rows are padded to a multiple of it; 0: to a power of two. lone: but one row is not."""

    tile: int
    lone: bool

    def padded(self, rows: int) -> int:
        """What so many rows are padded to."""
        if not self.tile:
            return 1 << (rows - 1).bit_length()
        return 1 if rows == 1 and self.lone else -(-rows // self.tile) * self.tile


class Finder:
    """Looks for steps in what one curve learns. steps: which are believed; None: none are.

    batches: of the curve; who observes them counts them. due_at: so many, until it is time to look again.
    """

    __slots__ = ("_again", "batches", "due_at", "steps")

    def __init__(self) -> None:
        self.steps: Steps | None = None
        self._again = 0, 0.0  # runs of sizes that had run; squares of what they were off by, as logarithms
        self.batches = 0
        self.due_at = 1

    def ran_again(self, time_ns: float, mean_ns: float, count: int) -> None:
        """Learn how runs before traffic scatter. mean_ns, count: of the size's runs before."""
        often, squares = self._again
        self._again = often + 1, squares + log(time_ns / mean_ns) ** 2 * count / (count + 1)

    def put_off(self) -> None:
        """Be due again once there are twice as many batches, or `_AFTER` more."""
        self.due_at += min(self.batches, _AFTER)

    def look(self, points: Sequence[Point], deviation: float) -> bool:
        """Whether other steps are believed than before. points: ascending. deviation: of log t; 0: unknown."""
        often, squares = self._again
        if not deviation:
            deviation = sqrt(squares / often) if often >= _AGAIN else _UNKNOWN
        before = self.steps
        self.steps = _found(points, deviation, before)
        return self.steps != before


def telling(points: Sequence[Point]) -> tuple[int, ...]:
    """The sizes to be run to see whether a jump between one and two rows is a step, some again, to see how runs scatter.

    points: of one row, of two and of the most.
    """
    (_, one_ns, _), (_, two_ns, _), (most, most_ns, _) = points
    row_ns = (most_ns - one_ns) / (most - 1)
    if row_ns <= 0 or two_ns < _JUMP * (one_ns + row_ns):
        return ()
    tile = min(TILES, key=lambda each: abs(one_ns + (each - 1) * row_ns - two_ns))
    return tuple(rows for rows in (2, tile, tile + 1, 2 * tile, tile, tile + 1) if rows <= most) if tile < most else ()


def pooled(points: Sequence[Point], steps: Steps) -> list[Point]:
    """One for each step, at what it is padded to: its sizes take the same."""
    pools: dict[int, tuple[float, int]] = {}
    for rows, time_ns, count in points:
        total_ns, before = pools.get(steps.padded(rows), (0.0, 0))
        pools[steps.padded(rows)] = total_ns + count * time_ns, before + count
    return [(rows, total_ns / count, count) for rows, (total_ns, count) in pools.items()]


def _found(points: Sequence[Point], deviation: float, known: Steps | None) -> Steps | None:
    if len(points) < LEAST_SIZES:
        return None
    weighed = [(rows, 1.0 / time_ns, 1.0 / (deviation**2 / count + _MISFIT**2)) for rows, time_ns, count in points]
    line = min(_misfit(weighed, int), _misfit([each for each in weighed if each[0] > 1], int))
    if known is not None and _clearer(line, weighed, known) > -_CLEAR:
        return known
    if line < _CLEAR:
        return None
    clear, steps = max((_clearer(line, weighed, each), each) for each in _hypotheses(points[-1][0]))
    return steps if clear > _CLEAR else None


def _clearer(line: float, weighed: Sequence[tuple[int, float, float]], steps: Steps) -> float:
    """By how much less the misfit of steps is than that of the line, in what is usual of one size."""
    left = _misfit(weighed, steps.padded)
    return (line - left) / max(1.0, left / (len(weighed) - 2))


def _hypotheses(most: int) -> Iterator[Steps]:
    yield Steps(0, True)
    for tile in TILES:
        if tile < most:
            yield Steps(tile, True)
            yield Steps(tile, False)


def _misfit(weighed: Sequence[tuple[int, float, float]], padded: Callable[[int], int]) -> float:
    """What the best of t = a + b·padded(rows) leaves, neither below zero. weighed: rows, 1/time and weight."""
    total = uu = uv = vv = u = v = 0.0
    for rows, per_ns, weight in weighed:
        one, slope = weight * per_ns, padded(rows) * per_ns
        total += weight
        u += one
        uu += one * per_ns
        uv += one * slope
        v += weight * slope
        vv += weight * slope * slope
    apart = uu * vv - uv * uv
    if apart > 1e-9 * uu * vv:
        fixed, row = (u * vv - v * uv) / apart, (v * uu - u * uv) / apart
        if fixed >= 0 and row >= 0:
            return max(0.0, total - fixed * u - row * v)
    return max(0.0, total - max(u * u / uu, v * v / vv))
