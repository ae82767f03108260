"""The arrivals of a recording through another batcher, with the times that batches were seen to take.

Not a replay: what is decided otherwise takes a time that nobody has measured. It takes what is usual for its size, times what
the recorded batch of that moment took of what was usual for its own.
"""

import heapq
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from gateway.batching.batch import Batch
from gateway.batching.batcher import Batcher
from gateway.batching.checkpoint import request_like
from gateway.batching.queue import NEVER
from gateway.batching.replay import PastBatch, PastRequest
from gateway.errors import GatewayError
from gateway.types import InferRequest
from gateway.why.typical import STALLED, Typical

_MOST_IDLE_TURNS: Final = 1_000  # in a row: a policy that waits sets one timer, or a few


@dataclass(frozen=True, slots=True)
class SimulatedEnds:
    """What would have become of the requests, in their order. ended_ns: None for what would not have been answered.

    left: the places of those whose clients would have left.
    """

    ended_ns: tuple[int | None, ...]
    left: frozenset[int]
    busy_ns: int
    span_ns: int

    def in_time(self, requests: Sequence[PastRequest]) -> int:
        """How many of those that stayed. What the model has failed it fails in any batch."""
        return sum(
            ended_ns is not None and ended_ns <= request.limit_ns and request.fate != "failed" and not left(request)
            for request, ended_ns in zip(requests, self.ended_ns, strict=True)
        )


@dataclass(slots=True)
class Pace:
    """How fast batches run at each moment of a recording.

    delays: (when, how much longer than usual the first batch from then on takes), ascending. without_padding: a batch takes the
    time of its own rows.
    """

    typical: Typical
    times_ns: list[int]
    factors: list[float]
    delays: list[tuple[int, int]] = field(default_factory=list)
    without_padding: bool = False
    _delayed: int = 0

    def batch_ns(self, batch: Batch, now_ns: int) -> int:
        rows = batch.rows if self.without_padding else batch.padded_rows
        factor = 1.0
        if self.times_ns:
            factor = self.factors[max(0, bisect_right(self.times_ns, now_ns) - 1)]
        taken_ns = self.typical.rows_ns(rows, batch.group) * factor
        if self._delayed < len(self.delays) and self.delays[self._delayed][0] <= now_ns:
            taken_ns += self.delays[self._delayed][1]
            self._delayed += 1
        return max(1, round(taken_ns))


def pace_of(
    batches: Sequence[PastBatch], typical: Typical, delayed: Sequence[PastBatch], end_ns: int, *, without_padding: bool = False
) -> Pace:
    """delayed: batches whose delay stays; what took as long as one that stalled and is not among them takes the usual time.
    end_ns: of the recording.
    """
    stays = set(map(id, delayed))
    times_ns, factors, delays = [], [], []
    since_ns = before_ns = closed_ns = 0
    for batch in batches:
        if batch.closed_ns > closed_ns:
            before_ns, closed_ns = closed_ns, batch.closed_ns
        # From when on it could be closed: a lane does so some 0.1 ms later, and the simulation at once.
        since_ns = min(closed_ns, max(since_ns, before_ns + 1, *map(_here, batch.requests)))
        usual_ns = typical.batch_ns(batch)
        taken_ns = _taken_ns(batch, end_ns)
        if has_stalled(batch, typical, end_ns):
            if id(batch) in stays:
                delays.append((since_ns, round(taken_ns - usual_ns)))
        elif usual_ns > 0 and batch.ok and batch.ended_ns is not None:
            times_ns.append(since_ns)
            factors.append(taken_ns / usual_ns)
    return Pace(typical, times_ns, factors, delays, without_padding)


def left(request: PastRequest) -> bool:
    """Whether its client left it before it was late. What is given up later, as by the lane at its own deadline, is a miss."""
    if request.fate != "cancelled":
        return False
    begun_ns = request.batches[-1].begun_ns if request.batches else None
    return (request.ended_ns or 0) < request.limit_ns or (begun_ns is not None and begun_ns <= request.limit_ns)


def has_stalled(batch: PastBatch, typical: Typical, end_ns: int) -> bool:
    """Whether a batch took far longer than is usual for its size, or has by the end of the recording."""
    usual_ns = typical.batch_ns(batch)
    return usual_ns > 0 and _taken_ns(batch, end_ns) > STALLED * usual_ns


def simulate(
    batcher: Batcher, requests: Sequence[PastRequest], pace: Pace, workers: Sequence[tuple[int, int]], until_ns: int
) -> SimulatedEnds:
    """requests: in order of arrival here. workers: (from when, how many are alive), ascending. until_ns: of the recording.

    Clients leave when they left. What is not done long after the end is taken to be refused.
    Raises: ValueError, if the times are such that nothing comes to pass.
    """
    ended: list[int | None] = [None] * len(requests)
    index: dict[InferRequest, int] = {}
    rows_left: dict[InferRequest, int] = {}
    running: list[tuple[int, int, Batch, int]] = []
    leavers = [
        (past.ended_ns, at) for at, past in enumerate(requests) if past.fate == "cancelled" and past.ended_ns is not None
    ]
    leavers.sort()
    have_left: set[int] = set()
    here: dict[int, InferRequest] = {}
    changes = list(workers)
    live = changes[0][1] if changes else 1
    upcoming = change = gone = started = busy_ns = idle = 0
    state: tuple[int, ...] = ()
    count = len(requests)
    wake_ns = NEVER
    begin_ns = _here(requests[0]) if requests else 0
    last_ns = until_ns + 2 * max(1_000_000_000, until_ns - begin_ns)
    now_ns = begin_ns
    while upcoming < count or running or index:
        now_ns = min(
            _here(requests[upcoming]) if upcoming < count else NEVER,
            running[0][0] if running else NEVER,
            changes[change][0] if change < len(changes) else NEVER,
            leavers[gone][0] if gone < len(leavers) else NEVER,
            wake_ns,
        )
        if now_ns > last_ns:
            break
        before, state = state, (upcoming, change, gone, started, len(running), len(index))
        idle = idle + 1 if state == before else 0
        if idle > _MOST_IDLE_TURNS:
            raise ValueError(f"nothing comes to pass at {now_ns}, by the times of its events")
        while change < len(changes) and changes[change][0] <= now_ns:
            live = changes[change][1]
            change += 1
        while running and running[0][0] <= now_ns:
            _, _, batch, taken_ns = heapq.heappop(running)
            batcher.finished(batch, now_ns, taken_ns, True)
            for part in batch.parts:
                request = part.request
                rows_left[request] -= part.rows
                if rows_left[request] <= 0 and request in index:
                    ended[index.pop(request)] = now_ns
        while upcoming < count and _here(requests[upcoming]) <= now_ns:
            past = requests[upcoming]
            request = _again(past)
            try:
                batcher.add(request, now_ns, past.reserved_ns)
                index[request] = upcoming
                here[upcoming] = request
                rows_left[request] = past.rows
            except GatewayError:
                pass
            upcoming += 1
        while gone < len(leavers) and leavers[gone][0] <= now_ns:
            at = leavers[gone][1]
            leaver = here.get(at)  # None: it was refused
            if leaver is not None and index.pop(leaver, None) is not None:
                batcher.cancel(leaver, requests[at].reserved_ns)
                have_left.add(at)
            gone += 1
        free = max(0, live - len(running))
        batcher.workers = max(1, live)
        step = batcher.step(now_ns, free)
        wake_ns = NEVER if step.wake_at_ns is None else max(step.wake_at_ns, now_ns + 1)
        for request, _ in step.shed:
            index.pop(request, None)
        for batch in step.batches:
            taken_ns = pace.batch_ns(batch, now_ns)
            busy_ns += taken_ns
            started += 1
            heapq.heappush(running, (now_ns + taken_ns, started, batch, taken_ns))
    return SimulatedEnds(tuple(ended), frozenset(have_left), busy_ns, max(1, until_ns - begin_ns))


def _taken_ns(batch: PastBatch, end_ns: int) -> int:
    """How long it took, or at least takes: end_ns is when it had not ended yet."""
    return (batch.answered_ns or end_ns) - batch.closed_ns


def _here(request: PastRequest) -> int:
    """When it came to the batcher."""
    return request.added_ns if request.added_ns is not None else request.arrival_ns


def _again(past: PastRequest) -> InferRequest:
    return request_like(
        past.arrival_ns, past.rows, past.own_deadline_ns, past.priority, past.shape_key, past.own_id, past.widths
    )
