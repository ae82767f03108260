"""Who gets a request, of those that are fit for it: the rule, and the rules it is measured against."""

import random
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from math import inf
from typing import Final, Protocol

import msgspec

from gateway.batching.forecast import Forecast
from gateway.batching.queue import NEVER
from gateway.config import Routing
from gateway.routing.health import Health
from gateway.types import InferRequest

# Without any deadline a backend is passed over once a request would take longer there than so many of its usual batches: one
# that runs, and its own.
_SPILL_BATCHES: Final = 2.0
_AVERAGE: Final = 0.1
_MOST_CREDIT: Final = 2.0  # shares that could not be given are not made up for
_COLD_START_NS: Final = 10_000_000_000


class LaneView(Protocol):
    """What routing asks of a lane."""

    @property
    def available(self) -> bool: ...

    @property
    def pending(self) -> int: ...

    def forecast(self, request: InferRequest, now_ns: int, *, mean: bool = False) -> Forecast:
        """mean: what the request's own batch takes is told as the mean, and not as what nine in ten take."""
        ...


@dataclass(slots=True, eq=False)
class Candidate:
    """One backend of a model, as routing knows it.

    worker_usd_per_hour: of one session. equivalents: labels of those whose requests it may take over. to_zero: what is sent to
    it keeps sessions there that would end.
    doubted: found idle, cheaper, and too slow by what was learned: worth checking.
    """

    label: str
    lane: LaneView
    health: Health
    worker_usd_per_hour: float = 0.0
    _: KW_ONLY
    canary_share: float | None = None
    shadow_share: float | None = None
    equivalents: frozenset[str] = frozenset()
    cold_start_ns: int | None = None  # as configured
    to_zero: bool = False
    # learned: per execution, averaged; 0: none yet, and the price is that of a request alone as far as that is known
    busy_ns: float = 0.0
    streamed_ns: float = 0.0  # of busy_ns, after the first part of an answer in parts
    rows: float = 0.0
    alone_row_ns: float = inf
    used_ns: int | None = None  # when it last ran requests of callers, or was first looked at
    # copies
    copy_out: bool = False
    next_copy_ns: int = 0
    next_copy_cost: float = 0.0  # once all have cost so much, one may be sent to see whether the price still holds
    doubted: bool = False
    credit: float = 0.0  # requests of its share that are due
    # since no session lives, and one is wanted; how long the last start took
    cold_since_ns: int | None = None
    learned_cold_ns: int | None = None

    def due(self, share: float) -> bool:
        """Count one more request of which it gets a share; True: it is to get this one, which takes `credit` down by one."""
        self.credit = min(self.credit + share, _MOST_CREDIT)
        return self.credit >= 1.0 - 1e-9  # ten times 0.1 is a little less than one

    @property
    def usd_per_row(self) -> float:
        """The marginal price of a row: what a session costs while it runs the usual batch, divided by its rows."""
        row_ns = self.busy_ns / self.rows if self.rows else self.alone_row_ns
        return self.worker_usd_per_hour / 3600e9 * row_ns if row_ns < inf else inf

    def executed(self, rows: int, busy_ns: int, streamed_ns: int = 0) -> None:
        if not self.rows:
            self.rows, self.busy_ns, self.streamed_ns = float(rows), float(busy_ns), float(streamed_ns)
        self.rows += _AVERAGE * (rows - self.rows)
        self.busy_ns += _AVERAGE * (busy_ns - self.busy_ns)
        if self.streamed_ns or streamed_ns:
            self.streamed_ns += _AVERAGE * (streamed_ns - self.streamed_ns)

    def repriced(self, busy_ns: float) -> None:
        """Though unused, it would run the usual batch in busy_ns, or to the first part, by what is known of its speed now."""
        self.busy_ns += _AVERAGE * (busy_ns + self.streamed_ns - self.busy_ns)

    def woken(self, now_ns: int) -> None:
        """Something waits for a first session. What follows while none lives changes nothing."""
        if self.cold_since_ns is None:
            self.cold_since_ns = now_ns

    def lives(self, now_ns: int) -> None:
        """A session lives."""
        if self.cold_since_ns is not None:
            self.learned_cold_ns = now_ns - self.cold_since_ns
            self.cold_since_ns = None

    def start_ns(self, workers: int, now_ns: int) -> float:
        """How long until a first session lives, if none does; what is overdue is taken to need as long again."""
        if workers:
            self.lives(now_ns)
            return 0.0
        expected_ns = self.cold_start_ns or self.learned_cold_ns or _COLD_START_NS
        if self.cold_since_ns is None:
            return expected_ns
        return abs(self.cold_since_ns + expected_ns - now_ns)


class Route(msgspec.Struct, frozen=True):
    """candidate: None sheds the request. eta_ns: from now, of the candidate, or the least there was; inf: unknown.

    reason: cheapest (first in order of price), spill (not the first, the first in time), fastest (the least eta, as none is
    comfortably in time), idle (nor in time by what was learned, but with nothing to do), unknown (its speed is not known yet),
    canary, panic (all are ejected); late and down (shed); or the policy's name.
    """

    candidate: Candidate | None
    reason: str
    eta_ns: float = inf


class RoutingPolicy(Protocol):
    def choose(self, usable: Sequence[Candidate], request: InferRequest, now_ns: int, deadline_ns: int) -> Route:
        """usable: not empty, in order of price. deadline_ns: NEVER, if there is none."""
        ...


class Cheapest:
    """The first in order of price that will be done within spill_share of the time there is; else the least eta; else shed.

    One without a session is taken where none with one is in time, or, without any deadline, where the least eta is its own.

    Half of the time and not more: at 0.85 the queue of a cheap backend is so long that what spills is late wherever it goes,
    and stays so (metastable).
    """

    __slots__ = ("_slo_ns", "_spill_share")

    def __init__(self, slo_ns: int | None, spill_share: float) -> None:
        """spill_share: 0: nobody is taken before all have been looked at."""
        self._slo_ns = slo_ns
        self._spill_share = spill_share

    def choose(self, usable: Sequence[Candidate], request: InferRequest, now_ns: int, deadline_ns: int) -> Route:
        limit_ns: float | None = None
        if not self._spill_share:
            limit_ns = -1.0
        elif deadline_ns != NEVER:
            left_ns = deadline_ns - now_ns
            limit_ns = self._spill_share * (left_ns if self._slo_ns is None else min(self._slo_ns, left_ns))
        best: Candidate | None = None
        least_ns = inf
        cold: Route | None = None  # the first comfortably in time without a session, else the least eta
        unknown: list[Candidate] = []
        for candidate in usable:
            told = candidate.lane.forecast(request, now_ns)
            workers = told.workers
            if workers and not told.known:
                unknown.append(candidate)
                continue
            total_ns = told.wait_ns + told.ahead_ns + told.own_ns
            if not workers or candidate.cold_since_ns is not None:
                total_ns += candidate.start_ns(workers, now_ns)
            if total_ns <= (_SPILL_BATCHES * told.batch_ns if limit_ns is None else limit_ns):
                route = Route(candidate, "cheapest" if candidate is usable[0] else "spill", total_ns)
                if workers:
                    return route
                if cold is None or cold.reason == "fastest":
                    cold = route
            elif not workers:
                if cold is None or (cold.reason == "fastest" and total_ns < cold.eta_ns):
                    cold = Route(candidate, "fastest", total_ns)
            else:
                if not candidate.lane.pending:
                    candidate.doubted = True
                if total_ns < least_ns:
                    best, least_ns = candidate, total_ns
        sooner = cold is not None and deadline_ns == NEVER and cold.eta_ns < least_ns
        if best is not None and not sooner and now_ns + least_ns <= deadline_ns:
            return Route(best, "fastest", least_ns)
        # Unknown ones learn from copies; callers' requests go there only if nothing else is left.
        idle = [candidate for candidate in unknown if not candidate.lane.pending] if best or cold else unknown
        if idle:
            return Route(min(idle, key=_pending), "unknown")
        if cold is not None and now_ns + cold.eta_ns <= deadline_ns:
            return cold
        return Route(None, "late", least_ns if cold is None else min(least_ns, cold.eta_ns))


class LeastEta:
    """The candidate predicted to be done first, at any price; shed if even that is too late."""

    __slots__ = ("_rule",)

    def __init__(self) -> None:
        self._rule = Cheapest(None, 0.0)

    def choose(self, usable: Sequence[Candidate], request: InferRequest, now_ns: int, deadline_ns: int) -> Route:
        return self._rule.choose(usable, request, now_ns, deadline_ns)


class ShortestQueue:
    """The candidate with the fewest unanswered requests, as Envoy's least request over all."""

    def choose(self, usable: Sequence[Candidate], request: InferRequest, now_ns: int, deadline_ns: int) -> Route:
        return Route(min(usable, key=_pending), "shortest_queue")


class PowerOfTwo:
    """The one of two random candidates with fewer unanswered requests: Ray Serve's default."""

    __slots__ = ("_random",)

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choose(self, usable: Sequence[Candidate], request: InferRequest, now_ns: int, deadline_ns: int) -> Route:
        pair = usable if len(usable) == 1 else self._random.sample(usable, 2)
        return Route(min(pair, key=_pending), "power_of_two")


@dataclass(slots=True)
class RoundRobin:
    """Each in turn."""

    _turn: int = field(default=0)

    def choose(self, usable: Sequence[Candidate], request: InferRequest, now_ns: int, deadline_ns: int) -> Route:
        turn = sorted(usable, key=lambda candidate: candidate.label)
        self._turn += 1
        return Route(turn[self._turn % len(turn)], "round_robin")


# (settings, SLO, seed) -> policy
POLICIES: Final[dict[str, Callable[[Routing, int | None, int], RoutingPolicy]]] = {
    "cheapest": lambda routing, slo_ns, seed: Cheapest(slo_ns, routing.spill_share * _jitter(seed)),
    "least_eta": lambda routing, slo_ns, seed: LeastEta(),
    "shortest_queue": lambda routing, slo_ns, seed: ShortestQueue(),
    "power_of_two": lambda routing, slo_ns, seed: PowerOfTwo(seed),
    "round_robin": lambda routing, slo_ns, seed: RoundRobin(),
}


def _jitter(seed: int) -> float:
    """Ingress processes do not see each other's queues: unlike limits keep them from changing over at the same moment."""
    return random.Random(seed).uniform(0.9, 1.0)


def _pending(candidate: Candidate) -> int:
    return candidate.lane.pending
