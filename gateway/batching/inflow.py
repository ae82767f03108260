"""What the adaptive policy knows of the requests of its queues, and what one decision looks at."""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Collection, Hashable, Iterable, Mapping
from math import ceil
from typing import Final

import msgspec

from gateway.batching.joining import joined
from gateway.batching.policy import WAIT
from gateway.batching.queue import Entry, Expected, Queue
from gateway.batching.service_curve import ServiceCurve
from gateway.batching.service_model import ServiceModel

ARRIVALS: Final = 128
_TOLD_APART: Final = 256  # groups
UTILISATION_AT_LEAST: Final = 0.7
UTILISATION: Final = 0.9
CAP_AT_MOST: Final = 0.85  # of the SLO, that a batch takes to sustain the rate
_LATEST: Final = 8  # of them
_AT_EASE: Final = 6.0  # lone requests that fit into the SLO: then a worker may be busy all the time
_QUIET: Final = 0.35  # in place of UTILISATION_AT_LEAST, where a batch takes what it is expected to
_SCATTER: Final = 2.5  # more of that by the spread beyond 1: as much as UTILISATION_AT_LEAST from a spread of 1.14 on
_SAME: Final = 1.02
_NEARLY: Final = 0.95  # of what the most productive size does in a time: as good as all


class Held(msgspec.Struct, frozen=True):
    """A batch that waits: nothing to decide before it has the rows, the time has come, or first or workers change.

    view: set if rule H holds it, which each arrival puts anew.
    """

    first: Entry | None
    rows: int
    until_ns: int
    busy: int
    view: "View | None" = None

    def keeps(self, queue: Queue, busy: int, now_ns: int) -> bool:
        """Whether it waits on."""
        return self.first is queue.entries[0] and now_ns < self.until_ns and queue.rows < self.rows and busy == self.busy


NOT_HELD: Final = Held(None, 0, 0, 0)


class Inflow:
    """The requests of one queue: how fast they come and how long they take.

    arrivals: the last so many, as (when, rows that had come before). came_rows: all that have come. lone: the last decision on
    a request alone, taken again while it is expected to take the same time, lone_ns. learned_ns: when the last batch ended.
    margin: under overload, what takes the place of the curve's spread; 0: there is none. usual: index of the batch that is
    collected, beside other queues. own: whether the curve is taught by it alone; else it is what the group is taken to be like.
    """

    __slots__ = ("arrivals", "came_rows", "curve", "held", "learned_ns", "lone", "lone_ns", "margin", "own", "usual")

    def __init__(self, curve: ServiceCurve) -> None:
        self.curve = curve
        self.own = False
        self.held = NOT_HELD
        self.lone = WAIT
        self.lone_ns = 0.0
        self.learned_ns = 0
        self.margin = 0.0
        self.usual = -1
        self.arrivals: deque[tuple[int, int]] = deque(maxlen=ARRIVALS)
        self.came_rows = 0

    def came(self, rows: int, now_ns: int) -> None:
        """Count an arrival."""
        before = self.came_rows
        self.arrivals.append((now_ns, before))
        self.came_rows = before + rows

    def like(self) -> "Inflow":
        """Another that has seen the same."""
        found = Inflow(self.curve)
        found.arrivals, found.came_rows, found.usual = self.arrivals.copy(), self.came_rows, self.usual
        found.own = True
        return found

    def rate(self, now_ns: int) -> float:
        """Rows per nanosecond over the last arrivals, the current gap included; or as few as the latest of them say."""
        arrivals = self.arrivals
        count = len(arrivals)
        if not count:
            return 0.0
        first_ns, before = arrivals[0]
        span: float = now_ns - first_ns
        if span <= 0:
            return 0.0
        if count > _LATEST:
            # After a flood the rate is soon a small one. Of steady arrivals so few come so slowly once in a hundred times.
            lately = (now_ns - arrivals[-_LATEST][0]) * count / (2 * _LATEST)
            if lately > span:
                span = lately
        return (self.came_rows - before) / span

    def alone(self, now_ns: int, busy: int) -> float:
        """Workers this stream would keep busy if each request ran by itself. busy: as `ServiceCurve.expected_ns` has it."""
        arrivals = self.arrivals
        if not arrivals:
            return 0.0
        rows = self.lone_rows
        return self.rate(now_ns) * self.curve.expected_ns(ceil(rows), busy) / rows

    @property
    def lone_rows(self) -> float:
        """On average, of a batch of one request."""
        arrivals = self.arrivals
        return min((self.came_rows - arrivals[0][1]) / len(arrivals), self.curve.sizes[-1]) if arrivals else 1.0

    def work(self, now_ns: int) -> float:
        """Workers this stream keeps busy in its usual batches; in full ones, while these are not known."""
        rate = self.curve.rates[self.usual]
        return self.rate(now_ns) / rate if rate > 0 else 0.0


class Inflows:
    """The requests of all queues, by group. Clients choose shapes and parameters, and with them groups, as many as they like.

    So a number of groups is told apart, and one that waits stays so. What comes of others meanwhile is one inflow, `rest`: a
    decision looks at no more than these.
    """

    __slots__ = ("_service", "_unknown", "by_group", "rest")

    def __init__(self, service: ServiceModel) -> None:
        self._service = service
        self._unknown = ServiceCurve(service.sizes)
        self.by_group: dict[Hashable, Inflow] = {}
        self.rest = Inflow(self._unknown)

    def of(self, group: Hashable) -> Inflow:
        return self.by_group.get(group) or self.rest

    def curve(self, group: Hashable) -> ServiceCurve:
        """By which other groups are compared with it; not ready, if it is not told apart."""
        stream = self.by_group.get(group)
        return stream.curve.current() if stream is not None else self._unknown

    def began(self, group: Hashable, queues: Mapping[Hashable, Queue]) -> Inflow:
        """Of a group that comes and is not told apart: from now on it is, if there is one that does not wait to give way."""
        by_group = self.by_group
        if len(by_group) >= _TOLD_APART:
            idle = [known for known in by_group if known not in queues or not queues[known].entries]
            if not idle:
                self.rest.curve = self._service.like()
                return self.rest
            del by_group[min(idle, key=lambda known: by_group[known].arrivals[-1][0])]
        stream = by_group[group] = Inflow(self._service.known(group))
        stream.own = stream.curve is self._service.curves.get(group)
        return stream

    def decided(self, group: Hashable) -> Inflow:
        """Of a group that is decided on, with what is known of it by now."""
        stream = self.of(group)
        if not stream.own:
            stream.curve = self._service.known(group)
        return stream

    def learn(self, group: Hashable, rows: int, busy: int, time_ns: int) -> Inflow:
        """As `ServiceCurve.observe`, from a batch of this group."""
        curve, stream = self._service.observe(group, rows, busy, time_ns), self.of(group)
        if stream is not self.rest:
            stream.curve, stream.own = curve, True
        return stream

    def apart(self, queues: Mapping[Hashable, Queue]) -> Collection[Hashable]:
        """The groups of all queues; of those that are not told apart, one."""
        if self.tells(queues):
            return queues.keys()
        by_group = self.by_group
        found = [group for group in by_group if group in queues]
        found.append(next(group for group in queues if group not in by_group))
        return found

    def longest(self, groups: Iterable[Hashable]) -> ServiceCurve | None:
        """The curve of the longest of these, if they may share a batch."""
        longest: Hashable = None
        for group in groups:
            if longest is None:
                longest = group
            elif not joined(group, longest):
                return None
            elif group > longest:  # type: ignore[operator]  # both are LengthGroups of one shape key
                longest = group
        return self.curve(longest)

    def tells(self, queues: Mapping[Hashable, Queue]) -> bool:
        """Whether it tells all of them apart."""
        return self.by_group.keys() >= queues.keys()

    def rate(self, groups: Iterable[Hashable], now_ns: int) -> float:
        """Rows per nanosecond of all these."""
        return sum([self.of(group).rate(now_ns) for group in groups])


class View:
    """What one decision looks at: a queue's curve at the moment's speed. margin: Q(n) = T(n) · margin. lone_ns: T(1).

    most_ns: that Q(1) is at most, if T(1) is not more.
    """

    __slots__ = ("busy", "curve", "level", "lone_ns", "margin", "now_ns", "quantile", "rate", "shape", "sizes", "workers")

    def __init__(self, stream: Inflow, busy: int, now_ns: int, free_slots: int, most_ns: float | None = None) -> None:
        self.curve = curve = stream.curve
        self.now_ns = now_ns
        self.sizes = curve.sizes
        self.shape = curve.shape
        self.busy = busy
        self.workers = busy + free_slots
        self.rate = stream.rate(now_ns)
        self.level = level = curve.level(busy + 1)  # T = shape · level
        self.lone_ns = lone_ns = curve.shape[0] * level
        margin = stream.margin or curve.spread
        if most_ns is not None and lone_ns * margin > most_ns:
            margin = min(margin, max(1.0, most_ns / lone_ns))
        self.margin = margin
        self.quantile = level * margin  # Q = shape · quantile

    def expected_ns(self, rows: float) -> float:
        """T(rows)."""
        sizes = self.sizes
        return (self.shape[bisect_left(sizes, rows)] if rows < sizes[-1] else self.shape[-1]) * self.level

    def alone_ns(self, rows: int, margin: float) -> float:
        """As `Expected.alone_ns`."""
        if rows > self.sizes[-1]:
            return Expected(self.curve, self.level, margin).alone_ns(rows, self.workers)
        return self.shape[bisect_left(self.sizes, rows)] * self.level * margin

    def fits(self, time_ns: float) -> int:
        """Index of the largest size with Q <= time_ns; -1: none."""
        return bisect_right(self.shape, time_ns / self.quantile) - 1

    def as_long(self, index: int) -> int:
        """Index of the largest size that takes as long: in steps of padding more rows cost nothing."""
        return bisect_right(self.shape, _SAME * self.shape[index]) - 1

    def sustains(self, share: float, slo_ns: int | None) -> int:
        """Index of the smallest size that keeps up with the arrivals on a share of the workers; beyond the last: none does."""
        level = self.level if self.workers == self.busy + 1 else self.curve.level(self.workers)
        busy = UTILISATION
        if slo_ns is not None and self.workers > 1:
            # Who finds all workers busy waits for one, and has little time for that: so they are to be busy less, by larger
            # batches. But who is held for these until the last moment is late if the batch then has bad luck.
            ease = slo_ns / (_AT_EASE * self.lone_ns)
            if ease < busy:
                least = _QUIET + _SCATTER * (self.curve.spread - 1)
                busy = max(ease, min(UTILISATION_AT_LEAST, least))
        rate = self.rate * level / (busy * self.workers * share)
        rates = self.curve.rates
        # Without an SLO the queue may grow, and with it the batches: the largest are not run for the error of a rate.
        return bisect_left(rates, rate if slo_ns is not None else min(rate, _NEARLY * rates[-1]))
