"""When a request would be done if it joined a lane's queue now: what routing compares lanes by.

    eta = now + wait + ahead + own

wait is the time until a worker is free, ahead the batches that would go before the request's own, own its batch with the way
there and back (the service model learns from closing to return). Batches are taken to be as large as the adaptive policy's cap.

Of a model that answers in parts own is until the first of them. What runs there, and what goes before, keeps its worker for a
whole stream: `streams`.
"""

from bisect import bisect_right
from collections.abc import Hashable
from itertools import islice
from typing import Final

import msgspec

from gateway.batching.batch import Batch
from gateway.batching.queue import LengthGroup, Queue, State
from gateway.batching.service_curve import ServiceCurve
from gateway.batching.service_model import ServiceModel
from gateway.batching.streams import Streams

CAP: Final = 0.55
"""The share of the SLO that a usual batch may take: two fit into one SLO."""
QUEUES: Final = 256
"""That are looked at, at most: what waits in others is taken to be like it."""


class Forecast(msgspec.Struct, frozen=True, array_like=True):
    """In nanoseconds. See the module.

    own_ns: what nine in ten take at most, so that a backend whose times scatter gets less to do; or the mean, if that was asked
    for. batch_ns: of a batch at the cap. workers: alive, busy or not; 0: nothing runs until one comes, which is not in wait_ns.
    known: whether the model's speed has been seen; if not, only wait_ns means something.
    """

    wait_ns: float
    ahead_ns: float
    own_ns: float
    batch_ns: float
    workers: int
    known: bool

    @property
    def total_ns(self) -> float:
        return self.wait_ns + self.ahead_ns + self.own_ns


def forecast(
    service: ServiceModel,
    state: State,
    group: Hashable,
    rows: int,
    now_ns: int,
    free_slots: int,
    slo_ns: int | None,
    *,
    streams: Streams,
    mean: bool = False,
    key: int | None = None,
) -> Forecast:
    """For a request of so many rows in a group. free_slots: batches that could start now. mean: see `Forecast`.

    streams: that have ended.
    key: its virtual deadline, where it may pass some of what waits; None: it stands last in line.
    """
    running = state.in_flight
    workers = len(running) + free_slots
    curve = _curve(service, group)
    if curve is None:
        return Forecast(first_free_ns(service, state, now_ns, free_slots, streams), 0.0, 0.0, 0.0, workers, False)
    shape, spread = curve.shape, 1.0 if mean else curve.spread
    if free_slots and not state.rows:
        level = curve.level(len(running) + 1)
        cap = _cap(curve, level, slo_ns)
        if rows <= curve.sizes[cap]:
            return Forecast(0.0, 0.0, shape[curve.at(rows)] * level * spread, shape[cap] * level, workers, True)
    else:
        level = curve.level(max(1, workers))
        cap = _cap(curve, level, slo_ns)
    batch_ns, cap_rows = shape[cap] * level, curve.sizes[cap]
    if streams.usual_ns and workers:
        ahead = state.rows if key is None else sum([queue.rows_before(key) for queue in state.queues.values()])
        rounds, place = divmod(ahead, workers)
        wait_ns, turn_ns = _free_ns(service, state, now_ns, free_slots, streams, place)
        ahead_ns = turn_ns - wait_ns + rounds * streams.usual_ns
        return Forecast(wait_ns, ahead_ns, shape[curve.at(rows)] * level * spread, batch_ns, workers, True)
    queue = state.queues.get(group)
    before = 0
    if queue is not None:
        before = queue.rows if key is None else queue.rows_before(key)
    if queue is not None and queue.alone:  # one batch for each that waits
        one = _one(queue, curve)
        batch_ns = shape[one] * level
        parts, last = divmod(rows - 1, curve.sizes[-1])
        batches, last = parts - (-before // curve.sizes[one]), last + 1
    else:
        batches = (before + rows - 1) // cap_rows
        last = before + rows - batches * cap_rows
    free = [0.0] * free_slots + sorted(_residual_ns(service, batch, now_ns) for batch in running) or [0.0]
    rounds, place = divmod(batches, len(free))
    ahead_ns = free[place] - free[0] + rounds * batch_ns
    if len(state.queues) > 1:
        ahead_ns += _others_ns(service, state, group, max(1, workers), slo_ns, key, now_ns) / len(free)
    own_ns = shape[curve.at(last)] * level * spread
    return Forecast(free[0], ahead_ns, own_ns, batch_ns, workers, True)


def first_free_ns(service: ServiceModel, state: State, now_ns: int, free_slots: int, streams: Streams) -> float:
    """When the next worker is predicted to be free, from now; 0: one is, or none is there. streams: as `forecast` has it."""
    if free_slots or not state.in_flight:
        return 0.0
    if streams.usual_ns:
        return _free_ns(service, state, now_ns, 0, streams, 0)[0]
    return min(_residual_ns(service, batch, now_ns) for batch in state.in_flight)


def _free_ns(
    service: ServiceModel, state: State, now_ns: int, free_slots: int, streams: Streams, ahead: int
) -> tuple[float, float]:
    """As `Streams.free_ns`, of all workers. A copy, whose answer nobody reads, ends with its first part."""
    ages_ns, others_ns = [], [0.0] * free_slots
    for batch in state.in_flight:
        if batch.parts[0].request.copied:
            others_ns.append(_residual_ns(service, batch, now_ns))
        else:
            ages_ns.append(now_ns - batch.closed_ns)
    return streams.free_ns(ages_ns, others_ns, ahead)


def full_row_ns(service: ServiceModel, group: Hashable, rows: int, workers: int) -> float:
    """What a row takes in a batch of so many, while all workers are busy; 0: nothing is known."""
    curve = _curve(service, group)
    return curve.expected_ns(rows, workers) / rows if curve is not None else 0.0


def _curve(service: ServiceModel, group: Hashable, nearest: dict[int, ServiceCurve] | None = None) -> ServiceCurve | None:
    """The group's own curve, else the nearest that is known: asking must not make curves, as clients choose shapes.

    nearest: by length, as found before, where many groups are asked for.
    """
    curve = service.curves.get(group)
    if curve is not None and curve.ready:
        return curve
    if isinstance(group, LengthGroup):
        length = group.length
        if nearest and length in nearest:
            return nearest[length]
        known = [(other, found) for other, found in service.curves.items() if found.ready and isinstance(other, LengthGroup)]
        if known:
            curve = min(known, key=lambda item: abs(item[0].length - length))[1]
            if nearest is not None:
                nearest[length] = curve
            return curve
    like = service.like()
    return like if like.ready else None


def _cap(curve: ServiceCurve, level: float, slo_ns: int | None) -> int:
    """Index of the usual batch in `sizes`."""
    if slo_ns is None:
        return len(curve.sizes) - 1
    return max(0, bisect_right(curve.shape, CAP * slo_ns / (level * curve.spread)) - 1)


def _one(queue: Queue, curve: ServiceCurve) -> int:
    """Index in `sizes` of one of the requests that wait there, on average."""
    return curve.at(-(-queue.rows // max(1, len(queue.entries))))


def _residual_ns(service: ServiceModel, batch: Batch, now_ns: int) -> float:
    """How long a batch will still run. One that is overdue is taken to need as long again: it may never end."""
    expected_ns: float = batch.expected_ns
    if not expected_ns:
        curve = _curve(service, batch.group)
        expected_ns = curve.expected_ns(batch.padded_rows, batch.busy) if curve is not None else 0.0
    return abs(batch.closed_ns + expected_ns - now_ns)


def _others_ns(
    service: ServiceModel, state: State, group: Hashable, busy: int, slo_ns: int | None, key: int | None, now_ns: int
) -> float:
    """Worker time of what waits in other queues, with so many workers busy. key: as `forecast` has it."""
    time_ns, looked_at = 0.0, 0
    nearest: dict[int, ServiceCurve] = {}
    for queue in islice(state.queues.values(), QUEUES):
        if queue.rows and queue.group != group:
            looked_at += queue.rows
            curve = _curve(service, queue.group, nearest)
            if curve is not None and not queue.is_hopeless(now_ns):
                level = curve.level(busy)
                cap = _one(queue, curve) if queue.alone else _cap(curve, level, slo_ns)
                rows = queue.rows if key is None else queue.rows_before(key)
                time_ns += rows * curve.shape[cap] * level / curve.sizes[cap]
    return as_all(time_ns, looked_at, state.queues.get(group), state)


def as_all(time_ns: float, looked_at: int, own: Queue | None, state: State) -> float:
    """What all rows of other queues take, where those of `QUEUES`, which were looked at, take time_ns."""
    if len(state.queues) <= QUEUES or not looked_at:
        return time_ns
    return time_ns * (state.rows - (own.rows if own is not None else 0)) / looked_at
