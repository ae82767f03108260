"""A router that keeps what it was asked, what it saw of the lanes, and what it decided: as `gateway.batching.recording` does.

Lanes are seen through `SeenLane`, which notes every answer that they give. So what is replayed needs no lanes.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

from gateway.batching.checkpoint import ROUTING, freeze, own_id
from gateway.batching.forecast import Forecast
from gateway.batching.recording import Recorded, Ring
from gateway.config import Ejection
from gateway.routing.policies import Candidate, LaneView, Route, RoutingPolicy
from gateway.routing.router import Copy, Router
from gateway.types import InferRequest


class RoutingEvent(IntEnum):
    """The first of each event's values. Candidates are called by their labels. What follows:

    ROUTED    now_ns, arrival_ns, deadline_ns, rows, own id, None or who failed it and, behind it, who is full, what was seen,
              candidate, reason, eta_ns
    COPIED    now_ns, arrival_ns, deadline_ns, rows, what was seen, the copies: (candidate, why, expected_ns)
    SENT      candidate, why, expected_ns, now_ns
    RETURNED  candidate, why, expected_ns, now_ns, took_ns, ok
    EXECUTED  candidate, rows, busy_ns, expected_ns, now_ns, streamed_ns, copied, what was seen, whether it was ejected
    FAILED    candidate, now_ns, hung, whether it was ejected
    WOKEN     candidate, now_ns
    LIVES     candidate, now_ns
    EXPLAINED  now_ns, rows, what was seen
    TAUGHT    the copies of a refused request: (candidate, why, expected_ns)
    """

    ROUTED = 0
    COPIED = 1
    SENT = 2
    RETURNED = 3
    EXECUTED = 4
    FAILED = 5
    WOKEN = 6
    LIVES = 7
    EXPLAINED = 8
    TAUGHT = 9


class SeenLane:
    """A lane as routing asks it. seen: gets every answer, in order."""

    __slots__ = ("_lane", "_seen")
    NOT_KEPT = frozenset(("_lane", "_seen"))  # what it says is kept as it is said

    def __init__(self, lane: LaneView, seen: list[Any]) -> None:
        self._lane = lane
        self._seen = seen

    @property
    def available(self) -> bool:
        value = self._lane.available
        self._seen.append(value)
        return value

    @property
    def pending(self) -> int:
        value = self._lane.pending
        self._seen.append(value)
        return value

    def forecast(self, request: InferRequest, now_ns: int, *, mean: bool = False) -> Forecast:
        value = self._lane.forecast(request, now_ns, mean=mean)
        self._seen.append(value)
        return value


class SaidLane:
    """In a lane's place, says what was seen of it."""

    def __init__(self) -> None:
        self._said: list[Any] = []

    def say(self, said: Sequence[Any]) -> None:
        self._said = list(reversed(said))

    @property
    def available(self) -> bool:
        return bool(self._next())

    @property
    def pending(self) -> int:
        return int(self._next())

    def forecast(self, request: InferRequest, now_ns: int, *, mean: bool = False) -> Forecast:
        return Forecast(*self._next())

    def _next(self) -> Any:
        if not self._said:
            raise ValueError("the lanes were asked for more than was seen of them")
        return self._said.pop()


class RecordedRouter(Recorded, Router):
    """Life: as a `Router`, from its making. ring: where it records."""

    __slots__ = ("_events", "_seen", "given_up", "ring")
    WHAT = "routing is"
    NOT_KEPT = frozenset(("ring", "given_up", "_seen", "_events"))  # is no state

    def __init__(
        self, candidates: Sequence[Candidate], policy: RoutingPolicy, ejection: Ejection, slo_ns: int | None, *, ring: Ring
    ) -> None:
        self.ring = ring
        self.given_up = ""
        self._seen: list[Any] = []
        self._events = ring.events
        for candidate in candidates:
            candidate.lane = SeenLane(candidate.lane, self._seen)
        super().__init__(candidates, policy, ejection, slo_ns)
        self._begin()

    def replayed(self, said: SaidLane, told: list[tuple[Any, ...]]) -> None:
        """Ask what was said instead of lanes, and tell events to `told`. For one that was read."""
        self.ring, self._events, self._seen = None, told, []
        for candidate in self.candidates:
            candidate.lane = SeenLane(said, self._seen)

    def join(self, candidate: Candidate) -> None:
        candidate.lane = SeenLane(candidate.lane, self._seen)
        Router.join(self, candidate)
        self._begin()

    def route(
        self, request: InferRequest, now_ns: int, *, failed: Candidate | None = None, full: Sequence[Candidate] = ()
    ) -> Route:
        try:
            route = Router.route(self, request, now_ns, failed=failed, full=full)
        except BaseException:
            self._begin()  # how far it came is not known
            raise
        candidate = route.candidate
        self._events.append(
            (
                int(RoutingEvent.ROUTED),
                now_ns,
                request.arrival_ns,
                request.deadline_ns,
                request.rows,
                own_id(request),
                [failed.label, *(each.label for each in full)] if failed is not None else None,
                self._taken(),
                candidate.label if candidate is not None else None,
                route.reason,
                route.eta_ns,
            )
        )
        self._room()
        return route

    def copies(self, request: InferRequest, now_ns: int) -> Sequence[Copy]:
        copies = Router.copies(self, request, now_ns)
        if copies or self._shadows:
            kind, told = int(RoutingEvent.COPIED), _told(copies)
            self._events.append((kind, now_ns, request.arrival_ns, request.deadline_ns, request.rows, self._taken(), told))
        return copies

    def lessons(self) -> list[Copy]:
        copies = Router.lessons(self)
        if copies:
            self._events.append((int(RoutingEvent.TAUGHT), _told(copies)))
        return copies

    def sent(self, copy: Copy, now_ns: int) -> None:
        Router.sent(self, copy, now_ns)
        self._events.append((int(RoutingEvent.SENT), copy.candidate.label, copy.why, copy.expected_ns, now_ns))

    def returned(self, copy: Copy, now_ns: int, took_ns: int, *, ok: bool) -> None:
        Router.returned(self, copy, now_ns, took_ns, ok=ok)
        kind = int(RoutingEvent.RETURNED)
        self._events.append((kind, copy.candidate.label, copy.why, copy.expected_ns, now_ns, took_ns, ok))

    def executed(
        self,
        candidate: Candidate,
        rows: int,
        busy_ns: int,
        expected_ns: int,
        now_ns: int,
        *,
        streamed_ns: int = 0,
        copied: bool = False,
    ) -> bool:
        out = Router.executed(self, candidate, rows, busy_ns, expected_ns, now_ns, streamed_ns=streamed_ns, copied=copied)
        kind, seen = int(RoutingEvent.EXECUTED), self._taken()
        self._events.append((kind, candidate.label, rows, busy_ns, expected_ns, now_ns, streamed_ns, copied, seen, out))
        self._room()  # while there is one backend, as the others are missing, nothing is routed
        return out

    def failed(self, candidate: Candidate, now_ns: int, *, hung: bool) -> bool:
        out = Router.failed(self, candidate, now_ns, hung=hung)
        self._events.append((int(RoutingEvent.FAILED), candidate.label, now_ns, hung, self._taken(), out))
        self._room()
        return out

    def woken(self, candidate: Candidate, now_ns: int) -> None:
        Router.woken(self, candidate, now_ns)
        self._events.append((int(RoutingEvent.WOKEN), candidate.label, now_ns))

    def lives(self, candidate: Candidate, now_ns: int) -> None:
        Router.lives(self, candidate, now_ns)
        self._events.append((int(RoutingEvent.LIVES), candidate.label, now_ns))

    def explain(self, request: InferRequest, now_ns: int) -> dict[str, Any]:
        told = Router.explain(self, request, now_ns)
        self._events.append((int(RoutingEvent.EXPLAINED), now_ns, request.rows, self._taken()))
        self._room()
        return told

    def _taken(self) -> list[Any]:
        seen = self._seen[:]
        self._seen.clear()
        return seen

    def _frozen(self) -> Any:
        self._seen.clear()
        return freeze(self, ROUTING)


def _told(copies: Sequence[Copy]) -> list[tuple[str, str, float]]:
    return [(copy.candidate.label, copy.why, copy.expected_ns) for copy in copies]
