"""How long a batch takes, learned while serving: T(n) expected and Q(n) for one batch in ten to exceed, in nanoseconds.

Theory of operation. One `ServiceCurve` per input bucket; those of one model's lengths share a `Surface`, t(rows, length), which
predicts what a bucket has not seen itself. Two things are learned apart, as one changes slowly and the other fast:

  shape    per padded size an exponentially weighted mean (0.03), and where batches scatter the line through all sizes' means
           as well: or a size that had bad luck once is not run again, nor any above it. Sizes between seen ones are
           interpolated, those beyond follow the surface, or the least-squares line a + b·n; then made monotone. Where
           rows are padded in steps inside the model, all this is of steps in place of sizes: `steps`.
  speed    how much slower it is at the moment, and how it scatters: `speed`.

A change that level and delay do not explain is one of shape, which is learned anew then. Single outliers are clipped at 2·T,
but never before a size has been seen twice: that would poison the fit.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np

from gateway.batching.smoothing import SeenSize, Sums, line_of, line_through, smoothed, sums_of
from gateway.batching.speed import Change
from gateway.batching.steps import LEAST_SIZES, Finder, Point, Steps, pooled, telling
from gateway.batching.surface import Surface

_RATE: Final = 0.1
_QUIET: Final = 0.1  # deviation at which a level follows batches half as fast: what they scatter would make it wander
_SHAPE_RATE: Final = 0.03
_SHAPE_COUNT: Final = 33  # batches of a size until when its mean is the plain one
_SURFACE_WEIGHT: Final = 4  # batches that the surface counts for beside the first of a size, and less from then on
_SURFACE_COUNT: Final = 8  # of them, until when it counts for something
_MISFIT: Final = 0.1  # by how much, as a share, a size usually is off the line through all sizes
_FORGET: Final = 0.98
_DRIFT_RUN: Final = 16
_DRIFT_ABOVE: Final = 1.3
_DRIFT_BELOW: Final = 0.77
_CLIP: Final = 2.0
_LEAST_OF_SHAPE: Final = 0.1  # of what a batch was to take without delay: what it took without, at least
_ALL_SIZES_UP_TO: Final = 128
# Tables are built again when a size's mean has moved by this share, with the next ranking of the ratios; by the other, at once.
# To build them takes 20 µs, and of a noisy model every second batch would move one by a hundredth.
_REFRESH_AT: Final = 0.01
_REFRESH_AT_ONCE: Final = 0.05
_FORMAT: Final = 1


def size_grid(max_rows: int, row_sizes: tuple[int, ...] = ()) -> tuple[int, ...]:
    """The batch sizes worth telling apart, ascending: all that run, or all up to 128 and then in steps of a sixteenth."""
    if row_sizes:
        return tuple(size for size in row_sizes if size <= max_rows) or row_sizes[:1]
    sizes = list(range(1, min(max_rows, _ALL_SIZES_UP_TO) + 1))
    while sizes[-1] < max_rows:
        sizes.append(min(max_rows, sizes[-1] + sizes[-1] // 16))
    return tuple(sizes)


@lru_cache
def _grid(sizes: tuple[int, ...], steps: Steps | None = None) -> np.ndarray:
    return np.array(sizes if steps is None else [steps.padded(size) for size in sizes], np.float64)


class ServiceCurve:
    """T and Q of one input bucket.

    shape: T by size at level 1, rising; times `level(busy)` it is T, and that times `spread` Q. rates: by size, the most rows
    per nanosecond that any size up to it reaches at level 1, rising. line_ns: (a, b) of t = a + b·rows at level 1. These
    sequences run parallel to `sizes`; they are replaced, not changed, when it learns.

    shares: other lengths teach it, too, so that `current` is to be asked before it is read.

    Life: `probe` at load, `observe` for every batch. Before the first of either, `ready` is False and T is 0; unless it shares
    a surface that has learned from other lengths.
    """

    __slots__ = ("_finder", "_length", "_seen", "_speed", "_stale", "_sums", "_surface", "_version", "line_ns",
                 "rates", "ready", "resets", "shape", "shares", "sizes", "spread")  # fmt: skip

    def __init__(self, sizes: tuple[int, ...], length: int = 0, surface: Surface | None = None) -> None:
        """length: of its bucket. surface: which it shares; None: none."""
        self.sizes = sizes
        self._length = length
        self.shares = length > 0
        self._surface = surface or Surface()
        self._speed = self._surface.speed
        self._version = 0, 0
        self._seen: dict[int, SeenSize] = {}
        self._sums: Sums = (0.0,) * 5
        self._stale = True
        self._finder = Finder()
        self.ready = False
        self.shape: tuple[float, ...] = (0.0,) * len(sizes)
        self.rates: tuple[float, ...] = (0.0,) * len(sizes)
        self.line_ns = (0.0, 0.0)
        self.spread = 1.0
        self.resets = 0
        self.current()

    def current(self) -> "ServiceCurve":
        """Itself, by what other lengths have taught meanwhile."""
        if self._length:
            self.spread = self._speed.spread
            if self._version != (self._surface.version, self._speed.version):
                self._stale = True
                self._refresh()
        return self

    def level(self, busy: int) -> float:
        """As `Speed.level`."""
        levels = self._speed.levels
        return levels[busy] if busy in levels else self._speed.level(busy)

    @property
    def luck(self) -> tuple[float, ...]:
        """What batches took lately, as shares of T: eight equally likely ones, the least first, and the longest of all."""
        return self._speed.luck

    @property
    def seen(self) -> bool:
        """Whether it has batches of its own."""
        return bool(self._seen)

    @property
    def fleeting(self) -> bool:
        """Whether it has hardly more than one batch of its own: so many of its size, beside what was borrowed."""
        return all(seen.count <= 2 for seen in self._seen.values())

    @property
    def steps(self) -> Steps | None:
        """In which rows are padded inside the model; None: in none, as far as is known."""
        return self._surface.steps if self._length else self._finder.steps

    @property
    def telling_rows(self) -> tuple[int, ...]:
        """The sizes whose runs, beside those of one row, two and the most, tell whether rows are padded in steps."""
        points = self._points()
        return telling(points) if len(points) == 3 and (points[0][0], points[1][0], self.sizes[2]) == (1, 2, 3) else ()

    @property
    def ratios(self) -> Sequence[float]:
        """What the last batches took, as shares of what was expected."""
        return self._speed.ratios

    def at(self, rows: int) -> int:
        """The index in `sizes` of the smallest that holds `rows`; the last if none does."""
        index = bisect_left(self.sizes, rows)
        return index if index < len(self.sizes) else index - 1

    def expected_ns(self, rows: int, busy: int = 1) -> float:
        """T(rows)."""
        return self.shape[self.at(rows)] * self.level(busy)

    def surface_ns(self, rows: int, busy: int) -> float:
        """T(rows) as all lengths together tell it: less exact than one's own, but without the luck of few. 0: unknown."""
        if not self._length:
            return 0.0
        return (self._surface.time_ns(rows, self._length) + self._speed.delay_ns) * self.level(busy)

    @property
    def pools(self) -> bool:
        """Whether all lengths together are what to compare times by that differ by little."""
        return bool(self._length) and self._surface.settled

    def pooled(self, busy: int) -> Callable[[int], float]:
        """What to compare times by that differ by little, by rows: as all lengths together tell it, once they do; else T(rows).

        It holds until the curve learns.
        """
        level = self.level(busy)
        if self.pools:
            return self._surface.times(self._length, self._speed.delay_ns, level)
        shape, at = self.shape, self.at
        return lambda rows: shape[at(rows)] * level

    def probe(self, rows: int, times_ns: list[int]) -> None:
        """Learn from runs at one size before traffic; the first is the warm-up and counts only if it is the only one."""
        for time_ns in times_ns[1:] or times_ns:
            seen = self._seen.get(rows)
            if seen is not None:
                self._finder.ran_again(max(time_ns, 1), seen.mean_ns, seen.count)
            self._learn(rows, seen, float(max(time_ns, 1)))
        self._find_steps()
        self._refresh()

    def observe(self, rows: int, busy: int, time_ns: int) -> None:
        """Learn from a batch of so many padded rows that began with so many workers busy, itself included."""
        length, surface = self._length, self._surface
        if length:
            self.current()
        speed = self._speed
        levels = speed.levels
        if time_ns < 1:  # a clock may not have moved while it ran
            time_ns = 1
        if not self.ready:
            level = levels[busy] = self.level(busy)
            self._learn(rows, None, time_ns / level)
            self._refresh()
            return
        level = levels[busy] if busy in levels else self.level(busy)
        seen = self._seen.get(rows)
        at_level_one = self.shape[seen.at if seen is not None else self.at(rows)]
        clipped = ratio = time_ns / (at_level_one * level) if at_level_one > 0 else 1.0
        known = seen is not None and seen.count >= 2  # of a size hardly seen the prediction may be what is wrong
        if not length or surface.tells:
            speed.ratios.append(ratio)
        if surface.settled if length else known:
            speed.latest.append((at_level_one - speed.delay_ns, busy, time_ns))
        if known:
            if ratio > _CLIP:
                clipped = _CLIP
            off = speed.deviation / _QUIET
            levels[busy] = level * (1.0 + _RATE / (1.0 + off * off) * (clipped - 1.0))
        elif busy not in levels:
            levels[busy] = level
        moved = self._learn(rows, seen, clipped * at_level_one)
        finder = self._finder
        finder.batches = batches = finder.batches + 1
        if batches >= finder.due_at:
            finder.put_off()
            self._find_steps()
        if ratio > _DRIFT_ABOVE or ratio < _DRIFT_BELOW:
            self._watch_drift(ratio)
        elif speed.run:
            speed.run.clear()
        speed.until_ranked = until_ranked = speed.until_ranked - 1
        if until_ranked <= 0:
            self._explain()
            self._refresh()
        elif moved:
            self._refresh()

    def doubt(self) -> None:
        """Let the next batch of each size count as much as all before it: it is tried whether they still tell the truth."""
        for seen in self._seen.values():
            seen.count = 1
        self._stale = True

    def borrow(self, other: "ServiceCurve") -> None:
        """Start from the curve of another shape; the first batches of one's own correct it."""
        sizes, delay_ns = other.sizes, other._speed.delay_ns
        self._seen = {rows: SeenSize(at, other.shape[at] - delay_ns, 1) for at, rows in enumerate(sizes) if rows in other._seen}
        for at in (0, -1):
            self._seen.setdefault(sizes[at], SeenSize(at % len(sizes), other.shape[at] - delay_ns, 1))
        fixed, slope = other.line_ns
        fixed -= delay_ns
        points = [(rows, fixed + slope * rows) for rows in self._seen]
        self._sums = sums_of(points)
        self._speed.levels.update(other._speed.levels)
        self._speed.delay_ns = delay_ns
        self._stale = True
        self._refresh()

    def to_dict(self) -> dict[str, Any]:
        """All that is worth keeping between restarts, as JSON can hold it."""
        return {
            "format": _FORMAT,
            "means": [[rows, seen.mean_ns, seen.count] for rows, seen in self._seen.items()],
            "sums": list(self._sums),
            "levels": [[busy, level] for busy, level in self._speed.levels.items()],
            "delay_ns": self._speed.delay_ns,
            "ratios": [round(ratio, 4) for ratio in self._speed.ratios],
        }

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Take over what `to_dict` gave. Raises: ValueError, if it is something else; then nothing has changed."""
        try:
            known = kept["format"] == _FORMAT
            seen = {int(rows): SeenSize(self.at(int(rows)), float(mean), int(count)) for rows, mean, count in kept["means"]}
            weight, x, y, xx, xy = (float(value) for value in kept["sums"])
            levels = {int(busy): float(level) for busy, level in kept["levels"]}
            delay_ns = float(kept.get("delay_ns", 0.0))
            ratios = [float(ratio) for ratio in kept["ratios"]]
        except (KeyError, TypeError, ValueError) as exc:
            raise ValueError(f"not a service curve: {exc!r}") from exc
        if not known:
            raise ValueError(f"not a service curve of format {_FORMAT}: {kept['format']!r}")
        means = [size.mean_ns for size in seen.values()]
        if not means or min(means) <= 0 or min(levels.values(), default=1.0) <= 0 or delay_ns < 0:
            raise ValueError("not a service curve: its numbers are out of range")
        surface, speed = self._surface, self._speed
        factor = 1.0
        if self._length:
            if speed.levels and levels:  # which stay as they are: only together with them do means say anything
                busy = min(levels)
                factor = levels[busy] / self.level(busy)
            for rows, size in seen.items():
                size.mean_ns *= factor
                if not surface.restored:
                    surface.learn(rows, self._length, size.mean_ns, size.mean_ns, min(size.count, _SHAPE_COUNT))
            speed.levels = {busy: level / factor for busy, level in levels.items()} | speed.levels
        else:
            speed.levels = levels
        speed.delay_ns = max(speed.delay_ns, delay_ns * factor)
        self._seen, self._sums = seen, (weight, x, y * factor, xx, xy * factor)
        speed.ratios.clear()
        speed.ratios.extend(ratios)
        self._stale = True
        speed.until_ranked = 0
        speed.rank()
        self._finder = Finder()
        self._find_steps()
        self._refresh()

    def _learn(self, rows: int, seen: SeenSize | None, at_level_one: float) -> bool:
        """Whether the tables are to be built again at once."""
        speed = self._speed
        delay_ns, share = speed.delay_ns, 1.0
        if delay_ns:
            shape_ns = self.shape[self.at(rows)] - delay_ns
            at_level_one = max(at_level_one - delay_ns, _LEAST_OF_SHAPE * shape_ns)
            share = (shape_ns / (shape_ns + delay_ns)) ** 2  # what scatters is mostly the delay
        if seen is None:
            seen = self._seen[rows] = SeenSize(self.at(rows), at_level_one, 0)
        if speed.run and seen.count >= _SURFACE_COUNT:
            share /= 1 + len(speed.run)  # the more in a row are off, the less it is this size
        if self._length:
            about_ns = self.shape[seen.at] - delay_ns if self.ready else at_level_one
            self._surface.learn(rows, self._length, at_level_one, about_ns, share)
        seen.count = count = seen.count + 1
        before_ns, built_ns = seen.mean_ns, seen.built_ns
        rate = _SHAPE_RATE if count > _SHAPE_COUNT else 1.0 / count
        seen.mean_ns = mean_ns = before_ns + share * rate * (at_level_one - before_ns)
        moved_ns = mean_ns - built_ns if mean_ns > built_ns else built_ns - mean_ns
        if moved_ns > _REFRESH_AT * built_ns:
            self._stale = True
        weight, x, y, xx, xy = self._sums
        forget, rows_share = _FORGET if share == 1.0 else 1.0 - share * (1.0 - _FORGET), share * rows
        self._sums = (
            weight * forget + share,
            x * forget + rows_share,
            y * forget + share * at_level_one,
            xx * forget + rows_share * rows,
            xy * forget + rows_share * at_level_one,
        )
        return moved_ns > _REFRESH_AT_ONCE * built_ns

    def _watch_drift(self, ratio: float) -> None:
        run = self._speed.run
        if run and (run[0] > 1.0) != (ratio > 1.0):
            run.clear()
        run.append(ratio)
        if len(run) == _DRIFT_RUN:
            change = self._explain()
            if change is not Change.SPEED:
                self._speed.move(sorted(run)[_DRIFT_RUN // 2])
                self.resets += 1
            if change is Change.SHAPE:
                for seen in self._seen.values():
                    seen.count = 2  # learn it anew, from here

    def _explain(self) -> Change:
        change = self._speed.explain()
        if change is Change.SPEED:
            self._stale = True
            self.resets += 1
        return change

    def _shared_ns(self, mean_ns: float, count: int, surface_ns: float) -> float:
        """Of a size that was seen, by the surface as well while that was not often."""
        weight = max(0.0, _SURFACE_WEIGHT * (1 - (count - 1) / _SURFACE_COUNT))
        return (count * mean_ns + weight * surface_ns) / (count + weight)

    def _points(self) -> list[Point]:
        """Of the sizes that were seen, ascending."""
        return [(rows, one.mean_ns, min(one.count, _SHAPE_COUNT)) for rows, one in sorted(self._seen.items())]

    def _find_steps(self) -> None:
        if self.sizes[2:3] != (3,):  # compiled sizes run as they are
            return
        finder, surface = self._finder, self._surface
        if not self._length:
            self._stale |= finder.look(self._points(), self._speed.deviation)
        elif (surface.steps is not None or not surface.settled) and len(self._seen) >= LEAST_SIZES:
            finder.steps, points = surface.steps, self._points()
            if finder.look(points, self._speed.deviation):
                surface.begin(finder.steps, points, self._length)
                self._stale = True

    def _refresh(self) -> None:
        self._speed.rank()
        self.spread = self._speed.spread
        shared = bool(self._length) and self._surface.ready
        if not self._stale or not (self._seen or shared):
            return
        self._stale = False
        self.ready = True
        self._version = self._surface.version, self._speed.version
        steps, points, surface = self.steps, self._points(), self._surface
        grid = _grid(self.sizes, steps)
        if steps is not None:
            points = pooled(points, steps)
        if shared:
            fixed, slope = surface.line_ns(self._length)
        else:
            fixed, slope = line_of(self._sums) if steps is None else line_through(points)
        about = np.array([*map(surface.times(self._length), self.sizes)]) if shared else fixed + slope * grid
        delay_ns = self._speed.delay_ns
        self.line_ns = fixed + delay_ns, slope
        seen = [rows for rows, _, _ in points]
        if shared:
            times = [self._shared_ns(mean_ns, count, float(about[self.at(rows)])) for rows, mean_ns, count in points]
            if not seen:
                seen, times = [self.sizes[0]], [float(about[0])]
            dearer = sum(times) / float(sum(about[self.at(rows)] for rows in seen))
            self.line_ns = fixed * dearer + delay_ns, slope * dearer
        else:
            times = smoothed(points, (self._speed.deviation / _MISFIT) ** 2)
        first, last = (max(about[self.at(rows)], 1.0) for rows in (seen[0], seen[-1]))
        below, up_to = np.searchsorted(grid, seen[0]), np.searchsorted(grid, seen[-1], side="right")
        times_ns = np.interp(grid, seen, times)
        times_ns[:below] = times[0] * about[:below] / first
        times_ns[up_to:] = times[-1] * about[up_to:] / last
        rising_ns = np.maximum.accumulate(times_ns + delay_ns)
        self.shape = tuple(rising_ns.tolist())
        self.rates = tuple(np.maximum.accumulate(_grid(self.sizes) / rising_ns).tolist())
        for one in self._seen.values():
            one.built_ns = one.mean_ns
