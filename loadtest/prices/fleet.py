"""The cheapest fleet for a rate: how many instances of which kinds.

Partial fleets grow kind by kind, those that cost most per rate first; what each lacks is filled with the kind that costs least.
One is dropped where another carries as much for no more, or where even fractions of what may still be added would make it cost
as much as the best whole fleet so far. Of what is left those that promise most are kept. That is all, and the answer exact, but
in questions of tens of kinds and hundreds of instances, whose answer may be a little dearer than the cheapest.

No solver does it: HiGHS, in scipy, writes to standard output, where a report may be on its way.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from loadtest.prices.costs import autoscaling_invocations_per_minute, replicas_for
from loadtest.wording import rate

HEADROOM: Final = 0.7  # of max_rps: what the loss of an instance or a burst may take before the SLO breaks
_EQUAL: Final = 1e-9  # rates and prices that differ by no larger share are the same: floating point
_NARROW: Final = 100  # partial fleets at a time in a first search: what it finds keeps the next one short
_WIDE: Final = 5000  # in that, which is exact where no more may be the cheapest


@dataclass(frozen=True, slots=True)
class FleetOption:
    """One kind of instance that may be in the fleet.

    max_count: of all options of one pool ("": none but itself) together; None means any number can be had.
    """

    name: str
    usd_per_hour: float
    max_rps: float
    max_count: int | None = None
    pool: str = ""


@dataclass(frozen=True, slots=True)
class Fleet:
    """counts: options that are in it -> how many. capacity_rps: what it serves within the SLO, headroom not taken off.

    autoscaling_per_minute: option -> invocations per instance and minute to scale at.
    """

    counts: dict[str, int]
    usd_per_hour: float
    capacity_rps: float
    target_rps: float
    headroom: float
    autoscaling_per_minute: dict[str, float]


class NoFleet(Exception):
    """The options cannot carry the target rate."""


def cheapest_fleet(options: Sequence[FleetOption], target_rps: float, *, headroom: float = HEADROOM) -> Fleet:
    """Minimise the hourly price of whole instances that carry target_rps at `headroom` of their measured capacity.

    Mixes are considered: a large and a small instance may together be cheaper than two large ones.
    Raises: NoFleet, if the options (their max_count) cannot carry the rate.
    """
    if not options:
        raise NoFleet("no candidate meets the SLO: there is nothing to build a fleet of")
    useful = _useful(options)
    kinds = _Kinds.of(useful, target_rps, headroom)
    found = kinds.cheapest()
    if found is None:
        ends = rate(kinds.most_rps())
        raise NoFleet(f"{target_rps:g} requests/s cannot be carried: the options end at {ends}; raise `max_count`")
    counts = {option.name: int(count) for option, count in zip(useful, found, strict=True) if count}
    mix = [(option, counts[option.name]) for option in options if option.name in counts]
    return Fleet(
        counts={option.name: count for option, count in mix},
        usd_per_hour=sum(option.usd_per_hour * count for option, count in mix),
        capacity_rps=sum(option.max_rps * count for option, count in mix),
        target_rps=target_rps,
        headroom=headroom,
        autoscaling_per_minute={option.name: autoscaling_invocations_per_minute(option.max_rps) for option, _ in mix},
    )


def _useful(options: Sequence[FleetOption]) -> list[FleetOption]:
    """Without those in whose place one or more of another carry as much for no more."""
    kept: list[FleetOption] = []
    for option in sorted(options, key=lambda each: (each.usd_per_hour, -each.max_rps)):
        for other in kept:
            pooled = bool(option.pool) and other.pool == option.pool
            count = int(option.usd_per_hour / other.usd_per_hour * (1 + _EQUAL)) if other.max_count is None else int(pooled)
            if count * other.max_rps >= option.max_rps:
                break
        else:
            kept.append(option)
    return kept


@dataclass(frozen=True, slots=True)
class _Kinds:
    """The options as arrays, (kinds,). A fleet is a row of counts, (kinds,); several are (fleets, kinds).

    rps: what one carries. most: of one kind, as many as may be of use. pool: the number of its pool. cap: of the whole pool;
    infinite without a limit. needed_rps: what a fleet must carry.
    """

    usd: np.ndarray
    rps: np.ndarray
    most: np.ndarray
    pool: np.ndarray
    cap: np.ndarray
    needed_rps: float

    @classmethod
    def of(cls, options: Sequence[FleetOption], target_rps: float, headroom: float) -> "_Kinds":
        alone = [replicas_for(target_rps, option.max_rps, headroom) for option in options]
        cap = np.array([math.inf if option.max_count is None else option.max_count for option in options])
        numbers = {pool: number for number, pool in enumerate({option.pool or option.name for option in options})}
        return cls(
            usd=np.array([option.usd_per_hour for option in options]),
            rps=np.array([option.max_rps * headroom for option in options]),
            most=np.minimum(alone, cap),
            pool=np.array([numbers[option.pool or option.name] for option in options]),
            cap=cap,
            needed_rps=target_rps * (1 - _EQUAL),
        )

    def most_rps(self) -> float:
        """What all that can be had carry, each pool as the fastest of it."""
        return float(sum((self.rps * self.most)[self.pool == pool].max() for pool in set(self.pool.tolist())))

    def cheapest(self) -> np.ndarray | None:
        """None if all that can be had do not carry what is needed."""
        per_rps = self.usd / self.rps
        fills = [fleet for order in (per_rps, -self.rps) if (fleet := self._filled(np.argsort(order))) is not None]
        if not fills:
            return None
        best = min(fills, key=lambda fleet: float(fleet @ self.usd))
        # Pool by pool, the dearest first.
        least = {pool: min(per_rps[self.pool == pool]) for pool in set(self.pool.tolist())}
        order = sorted(range(len(per_rps)), key=lambda kind: (-least[self.pool[kind]], self.pool[kind], -per_rps[kind]))
        for width in (_NARROW, _WIDE):
            best = self._grown(order, best, width)
        return best

    def _grown(self, order: Sequence[int], best: np.ndarray, width: int) -> np.ndarray:
        """The cheapest fleet found, or the best again. width: so many partial fleets are kept, those that promise most."""
        fleets = np.zeros((1, len(order)))
        best = self._completed(fleets, order[-1], best)
        for place, kind in enumerate(order[:-1]):
            for count in self._steps(kind, best):
                more = fleets[self._used(fleets, kind) + count <= self.cap[kind]]
                more[:, kind] += count
                best = self._completed(more, order[-1], best)
                fleets = self._undominated(np.concatenate([fleets, more]), kind)
                least = self._least_usd(fleets, order[place:])
                fleets = fleets[np.argsort(least)[: np.count_nonzero(least < self._enough(best))][:width]]
        return best

    def _used(self, fleets: np.ndarray, kind: int) -> np.ndarray:
        """Instances of the kind's pool, (fleets,)."""
        return np.asarray(fleets[:, self.pool == self.pool[kind]].sum(axis=1))

    def _filled(self, order: np.ndarray) -> np.ndarray | None:
        """As many of each as it takes, in this order; None if they do not carry what is needed."""
        fleet = np.zeros((1, len(order)))
        for kind in order:
            left_rps = self.needed_rps - fleet[0] @ self.rps
            fleet[0, kind] = min(max(0, math.ceil(left_rps / self.rps[kind])), self.cap[kind] - self._used(fleet, kind)[0])
        return fleet[0] if fleet[0] @ self.rps >= self.needed_rps else None

    def _steps(self, kind: int, best: np.ndarray) -> Iterator[int]:
        """Counts whose sums are all numbers of this kind that may be in a cheaper fleet."""
        one = np.eye(len(self.usd))[[kind]]
        left, count = int(self.most[kind]), 1
        while left > 0 and self._least_usd(min(count, left) * one, range(len(self.usd)))[0] < self._enough(best):
            yield min(count, left)
            left, count = left - count, 2 * count

    def _least_usd(self, fleets: np.ndarray, kinds: Sequence[int]) -> np.ndarray:
        """What they would cost, completed with fractions of these kinds, (fleets,); infinite where those do not suffice."""
        rest = sorted(kinds, key=lambda kind: float(self.usd[kind] / self.rps[kind]))
        carried, costs = (np.append(0, np.cumsum((each * self.most)[rest])) for each in (self.rps, self.usd))
        return np.asarray(fleets @ self.usd + np.interp(self.needed_rps - fleets @ self.rps, carried, costs, right=math.inf))

    def _enough(self, best: np.ndarray) -> float:
        """What is cheaper than the best costs less than this."""
        return float(best @ self.usd) * (1 - _EQUAL)

    def _undominated(self, fleets: np.ndarray, kind: int) -> np.ndarray:
        """Without those beside which another carries as much for no more, with as many of the kind's pool."""
        if len(fleets) < 2:
            return fleets
        used = self._used(fleets, kind) if math.isfinite(self.cap[kind]) else np.zeros(len(fleets))
        rps, usd = (np.round(fleets @ (each / each.max()), 12) for each in (self.rps, self.usd))
        order = np.lexsort((-rps, usd, used))
        rps, used = rps[order], used[order]
        rows = used * (2 * rps.max() + 1) + rps  # rises from one number used to the next: one pass for all
        return np.asarray(fleets[order[np.append(True, rows[1:] > np.maximum.accumulate(rows)[:-1])]])

    def _completed(self, fleets: np.ndarray, kind: int, best: np.ndarray) -> np.ndarray:
        """The cheapest of these, each completed with this kind, and of the best."""
        full = fleets.copy()
        full[:, kind] += np.maximum(0, np.ceil((self.needed_rps - fleets @ self.rps) / self.rps[kind]))
        full = full[self._used(full, kind) <= self.cap[kind]]
        usd = full @ self.usd
        return np.asarray(full[np.argmin(usd)]) if len(full) and usd.min() < self._enough(best) else best
