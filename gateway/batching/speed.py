"""How fast a backend is at the moment, beside what its batches usually take: level, delay and spread.

    level    one factor per number of workers that run at once: k sessions of one device are not independent, and a device that
             throttles slows every size alike. It follows (0.1) within some ten batches, without having to see each size again.
    delay    what every batch takes longer, whatever its size: hand-overs that wait for a busy core, a far network.
    spread   the last 128 ratios of actual to predicted; Q(n) = T(n) · their 90th percentile.
    luck     how the last 24 of them are distributed.

A sudden change is put down to level and delay by the last 16 batches together, when 16 in a row were above 1.3 or below 0.77,
and whenever the spread is ranked: so a device that was slow for a while leaves no trace in what is known of its sizes.
"""

from collections import deque
from collections.abc import Callable
from enum import Enum, auto
from functools import lru_cache
from math import log
from operator import itemgetter
from typing import Final

_RATIOS: Final = 128
_QUANTILE: Final = 0.9
_LUCK: Final = 24  # ratios: what is yet to be learned after a change looks like luck, and is to be soon forgotten
_RANKED_AFTER: Final = 16  # ratios; the first ones sooner, as one batch in ten is to be slower from the start
_QUARTILES: Final = 1.35  # deviations between those of a normal distribution
_LEAST_DEVIATION: Final = 0.05
_LATEST: Final = 16
_UNUSUAL: Final = 2.0  # times the usual squared errors: what a change begins with, and must not leave
_BETTER: Final = 0.5  # of the squared errors: what a change must leave at most
_DELAYED: Final = 0.3  # of those that a level alone leaves: what a delay must leave at most
_MOSTLY: Final = 0.1  # of the squared errors: what leaves no more has explained them, however little is usual
_TOLD_APART: Final = 0.002  # how unlike in size batches are, as a share of what is possible, if they tell a level from a delay
_FITS: Final = 3

_Batches = list[tuple[float, float, float]]
"""What each takes without delay, and for each nanosecond of it, as known; and what it took."""


class Change(Enum):
    """NONE: batches take what they were expected to, within what is usual. SHAPE: what no level and no delay explains."""

    NONE = auto()
    SPEED = auto()
    SHAPE = auto()


class Speed:
    """Shared by the curves of one model's lengths; the curve of what has no length has one of its own.

    levels: by busy workers. delay_ns: at level 1. latest: the last batches, as (time at level 1 without delay, busy, actual).
    ratios: actual to predicted, of the last batches, which spread and luck are of; run: of those that a change begins with.
    deviation: of the middle half of their logarithms, so that a change does not hide itself.
    version: raised when the delay has changed.
    """

    __slots__ = ("delay_ns", "deviation", "latest", "levels", "luck", "ratios", "run", "spread", "until_ranked", "version")

    def __init__(self) -> None:
        self.levels: dict[int, float] = {}
        self.delay_ns = 0.0
        self.latest: deque[tuple[float, int, int]] = deque(maxlen=_LATEST)
        self.ratios: deque[float] = deque(maxlen=_RATIOS)
        self.run: list[float] = []
        self.spread = 1.0
        self.luck: tuple[float, ...] = (1.0,) * 9
        self.deviation = 0.0
        self.until_ranked = 0
        self.version = 0

    def level(self, busy: int) -> float:
        """How much slower than the shape it runs with so many workers busy; never seen: as with the nearest number seen."""
        levels = self.levels
        if busy in levels:
            return levels[busy]
        if not levels:
            return 1.0
        return levels[min(levels, key=lambda known: (abs(known - busy), known))]

    def rank(self) -> None:
        """Take the spread of the ratios anew, if it is time."""
        if self.until_ranked <= 0 and self.ratios:
            ratios = list(self.ratios)
            ranked = sorted(ratios)
            count = len(ranked)
            self.spread = max(1.0, ranked[min(count - 1, int(_QUANTILE * count))])
            lately = sorted(ratios[-_LUCK:])
            self.luck = _eighths(len(lately))(lately)
            if count >= 2 * _RANKED_AFTER:  # of fewer a change would hide itself, as what it has left wrong counts as usual
                self.deviation = log(ranked[count - 1 - count // 4] / ranked[count // 4]) / _QUARTILES
            self.until_ranked = min(_RANKED_AFTER, count)

    def explain(self) -> Change:
        """What the latest batches tell. If it is a change of speed, level and delay are now what explains them best."""
        if len(self.latest) < _LATEST:
            return Change.SHAPE
        unusual = _UNUSUAL * _LATEST * max(_LEAST_DEVIATION, self.deviation) ** 2
        if self._differ_less(unusual):
            return Change.NONE
        batches = [(self.levels[busy] * time_ns, self.levels[busy], float(took_ns)) for time_ns, busy, took_ns in self.latest]
        before = _errors(batches, 1.0, self.delay_ns)
        if before < unusual:
            return Change.NONE
        left, level, delay_ns = min(
            (_errors(batches, level, known), level, known)
            for known in (self.delay_ns, 0.0)
            for level in (_level(batches, known),)
        )
        both = _level_and_delay(batches)
        if both is not None and (closer := _errors(batches, *both)) < _DELAYED * left:
            left, (level, delay_ns) = closer, both
        if left > min(max(unusual, _MOSTLY * before), _BETTER * before):
            return Change.SHAPE
        self.move(level)
        if delay_ns != self.delay_ns:
            self.delay_ns = delay_ns
            self.version += 1
        return Change.SPEED

    def _differ_less(self, most: float) -> bool:
        """Whether it is plain, without logarithms, that the squared errors of the latest batches are less than that."""
        levels, delay_ns = self.levels, self.delay_ns
        for time_ns, busy, took_ns in self.latest:
            about_ns = levels[busy] * (time_ns + delay_ns)
            off = took_ns / about_ns - 1.0 if took_ns > about_ns else about_ns / took_ns - 1.0  # the logarithm's is less
            most -= off * off
        return most > 0.0

    def move(self, factor: float) -> None:
        """It has changed: every level by this factor, and how it scatters is not known."""
        for busy in self.levels:
            self.levels[busy] *= factor
        self.run.clear()
        self.ratios.clear()
        self.until_ranked = 0


@lru_cache
def _eighths(count: int) -> Callable[[list[float]], tuple[float, ...]]:
    """What takes from so many, in order, the middle of each eighth, and the last."""
    return itemgetter(*[int((i + 0.5) / 8 * count) for i in range(8)], count - 1)


def _errors(batches: _Batches, level: float, delay_ns: float) -> float:
    """Squared, as logarithms, so that too long weighs as too short; no batch's is above one."""
    return sum([min(1.0, log(took_ns / (level * (time_ns + delay_ns * scale))) ** 2) for time_ns, scale, took_ns in batches])


def _level(batches: _Batches, delay_ns: float) -> float:
    """By how much all of them are slower than known: the middle one."""
    return sorted(took_ns / (time_ns + delay_ns * scale) for time_ns, scale, took_ns in batches)[len(batches) // 2]


def _level_and_delay(batches: _Batches) -> tuple[float, float] | None:
    """By least squares of relative errors. None, if these batches do not tell them apart or tell of no delay."""
    level = delay_ns = 0.0
    about = [took_ns for _, _, took_ns in batches]
    for _ in range(_FITS):
        xx = xy = yy = xz = yz = 0.0
        for (time_ns, scale, took_ns), about_ns in zip(batches, about, strict=True):
            x, y, z = time_ns / about_ns, scale / about_ns, min(max(took_ns / about_ns, 0.5), 2.0)
            xx, xy, yy, xz, yz = xx + x * x, xy + x * y, yy + y * y, xz + x * z, yz + y * z
        told_apart = xx * yy - xy * xy
        if told_apart < _TOLD_APART * xx * yy:
            return None
        level, delay = (xz * yy - yz * xy) / told_apart, (xx * yz - xy * xz) / told_apart
        if level <= 0 or delay <= 0:
            return None
        delay_ns = delay / level
        about = [level * (time_ns + delay_ns * scale) for time_ns, scale, _ in batches]
    return level, delay_ns
