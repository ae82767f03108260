"""Overload: which batch gets most done in time, and which arrivals will be in none.

Theory of operation. A batch of n rows that is closed when its first has r·T(n) left has those that came within D - r·T(n). The
larger r, the more of it is in time whatever luck its run has, but the fewer rows there are to take. `plan` weighs both over the
luck that batches had: of the margins r that were seen, with the largest n that each lets be collected or the next size, which
is then not full, the one with most rows in time per worker time. While more comes than that, an arrival that finds all workers
busy is refused at once if those that wait fill the batches that could be in time for it, or if the next comes too late for it
(`missing_ns`). Who is let in by that may still be shed, as the batches that run are taken to be lucky. While little more comes
than can be served, one may wait who has no place: some go in a larger batch than was planned, and few are shed. That the next
batch may be smaller, as fewer come than are planned for, is not counted on: who was let in for that was mostly shed, and nobody
gained.
"""

from bisect import bisect_left
from collections.abc import Hashable, Iterator
from heapq import heapify, heapreplace
from itertools import islice
from math import ceil, log, log2, sqrt
from typing import Final, NamedTuple

import msgspec

from gateway.batching.forecast import QUEUES, Forecast, as_all
from gateway.batching.inflow import ARRIVALS, Inflow, View
from gateway.batching.joining import Moment, joined
from gateway.batching.queue import NEVER, Expected, LengthGroup, Outlook, Queue, State, deadline_of, virtual_deadline
from gateway.batching.service_curve import ServiceCurve
from gateway.types import InferRequest

STALE_NS: Final = 1_000_000_000  # after which what was told of a queue may hold no more
_BETWEEN_DOUBTS_NS: Final = 2_000_000_000  # of all queues, at least
_BETWEEN_DOUBTS: Final = 20  # times what the last is expected to take: all take a twentieth of one worker
OVERLOADED: Final = 1 + 2 / sqrt(ARRIVALS)  # times what the workers can do: more than the measured rate may be off by
_LOOKAHEAD_BATCHES: Final = 64
_LEVEL: Final = 0.99  # of margins that are worth the same within this share, the largest: what is taken is then in time
_CHOOSY: Final = 1.5  # eighths of the luck of batches that are not waited for, whenever twice as many come
_MEDIAN: Final = 4  # eighths


class Plan(NamedTuple):
    """Batches of sizes[at] rows, whose first has margin times what it is expected to take."""

    at: int
    margin: float


def plan(curve: ServiceCurve, level: float, rate: float, slo_ns: int) -> Plan:
    """rate: rows per nanosecond."""
    luck = curve.luck
    even = luck[:-1]
    best, found = -1.0, Plan(0, luck[0])
    for margin in dict.fromkeys(luck):
        low = collected(curve, rate, slo_ns, margin * level)
        for at in (low, low + 1) if low + 1 < len(curve.sizes) else (low,):
            time_ns = curve.shape[at] * level
            come = rate * time_ns
            rows = _taken(curve.sizes[at], rate * slo_ns - margin * come)
            # Who has less left than the luck of a batch takes is late: who came in the first (luck - margin)·T of the time.
            in_time = sum([min(rows, max(0.0, rows - come * (each - margin))) for each in even]) / (len(even) * time_ns)
            if in_time >= _LEVEL * best:
                best, found = max(best, in_time), Plan(at, margin)
    return found


def collected(curve: ServiceCurve, rate: float, slo_ns: int, quantile: float) -> int:
    """Index of the largest n with n <= rate·(slo - shape(n)·quantile); 0 if there is none."""
    sizes, shape = curve.sizes, curve.shape
    low, high = 0, len(sizes) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if sizes[middle] <= rate * (slo_ns - shape[middle] * quantile):
            low = middle
        else:
            high = middle - 1
    return low


def usual_at(queue: Queue, stream: Inflow, rate: float, slo_ns: int, quantile: float) -> int:
    """As `collected`; of a queue whose requests share no batch, the index of one request."""
    curve = stream.curve
    return curve.at(ceil(stream.lone_rows)) if queue.alone else collected(curve, rate, slo_ns, quantile)


def outlook(
    curve: ServiceCurve, level: float, planned: Plan, workers: int, crowd: float, now_ns: int, *, together: bool = False
) -> Outlook:
    """crowd: times what the workers can do, that comes."""
    rows = curve.sizes[planned.at]
    # The more ask for one place, the less is lost if one does not wait for a worker that frees sooner than most do.
    choosy = min(_MEDIAN, int(_CHOOSY * log2(crowd)))
    pace = Expected(curve, level, planned.margin)
    full_ns = curve.shape[planned.at] * level
    return Outlook(
        workers=workers,
        rows=rows,
        spare=0 if choosy else 1,
        busy=curve.luck[choosy],
        full_ns=full_ns,
        due_ns=planned.margin * full_ns,
        least_ns=planned.margin * curve.shape[curve.at(max(1, int(rows - sqrt(rows))))] * level,
        pace=pace,
        together=together,
        stale_ns=now_ns + STALE_NS,
    )


def in_stance(view: View, slo_ns: int) -> Outlook | None:
    """What becomes of those that come, in a stance that lets a batch wait for what can be collected. None: all may wait."""
    at = collected(view.curve, view.rate, slo_ns, view.quantile)
    crowd = view.rate / view.curve.rates[at] * view.level / view.workers
    if crowd <= OVERLOADED:
        return None
    return outlook(view.curve, view.level, Plan(at, view.margin), view.workers, crowd, view.now_ns)


def refused_ns(ahead: Outlook, queue: Queue, state: State, rows: int, key: int, deadline_ns: int, now_ns: int) -> float:
    """By how much a request that comes would be late, at the least; 0: it may wait, be it to see whether it is in time.

    What is taken by those that only seem late is lost to others. So however many the queues, few are let in for that.
    """
    late_ns = missing_ns(ahead, queue, state, rows, key, deadline_ns, now_ns)
    if late_ns and _doubtful(ahead, queue, state, now_ns):
        batches = max(1.0, rows / ahead.pace.curve.sizes[-1])
        state.doubt_ns = now_ns + max(_BETWEEN_DOUBTS_NS, round(_BETWEEN_DOUBTS * batches * ahead.pace.expected_ns(rows)))
        return 0.0
    return late_ns


def _doubtful(ahead: Outlook, queue: Queue, state: State, now_ns: int) -> bool:
    """Whether one may wait although it seems late: what was told of an empty queue is decided on anew only if one does."""
    return not queue.entries and now_ns >= ahead.stale_ns and now_ns >= state.doubt_ns


def missing_ns(ahead: Outlook, queue: Queue, state: State, own: int, key: int, deadline_ns: int, now_ns: int) -> float:
    """By how much a request of `own` rows with this virtual deadline would be late, at the least; 0: it may be in time.

    Only one that stands last in line is refused: others may take the place of those behind them.
    """
    entries, running = queue.entries, state.in_flight
    if len(running) < ahead.workers or (entries and entries[-1][0] > key):
        return 0.0
    several = len(state.queues) > 1 or (queue.alone and queue.group not in state.queues)
    if several and not ahead.together:
        return _missing_among(ahead, queue, state, own, deadline_ns, now_ns)
    rows, busy, due_ns = ahead.rows, ahead.busy, ahead.due_ns
    waiting = state.rows - ahead.spare
    if len(running) == 1:  # in the shortest way: it is asked for each that is refused
        (batch,) = running
        free = [batch.closed_ns + busy * batch.expected_ns]
    else:
        free = sorted([batch.closed_ns + busy * batch.expected_ns for batch in running])
    soonest_ns = free[0] if free[0] > now_ns else now_ns
    if waiting >= rows:
        # Who stands first but will have too little left makes room.
        late_ns = soonest_ns + due_ns
        for each in state.queues.values() if several else (queue,):
            for entry in each.entries:
                if waiting < rows or entry[2] >= (
                    late_ns if entry[3] <= rows else soonest_ns + ahead.pace.alone_ns(entry[3], ahead.workers)
                ):
                    break
                waiting -= entry[3]
    before = waiting // rows
    if before:
        rounds, place = divmod(before, len(free))
        soonest_ns = max(now_ns, free[place]) + rounds * ahead.full_ns
    if several or now_ns < state.mixed_until_ns:
        due_ns = ahead.least_ns  # the batch may be without the longest, or smaller, as lower classes make room
    if own > rows:
        due_ns = ahead.pace.alone_ns(own, ahead.workers)
    late_ns = soonest_ns + due_ns - deadline_ns
    return late_ns if late_ns > 0.0 else 0.0


def _missing_among(ahead: Outlook, queue: Queue, state: State, own_rows: int, deadline_ns: int, now_ns: int) -> float:
    """As `missing_ns`, where others have queues of their own: by when all that waits would be done, one length after the other.

    Or lengths padded to the longest, in one batch for each shape. Who would lengthen that must still let the first be in time.
    """
    if not queue.entries and now_ns + ahead.pace.margin * ahead.pace.expected_ns(1) > deadline_ns:
        return 0.0  # late whatever waits, by what was learned; one of them is to be there when it is tried whether that holds
    running = state.in_flight
    workers = len(running)
    soonest_ns = max(now_ns, min([batch.closed_ns + ahead.busy * batch.expected_ns for batch in running]))
    before, rest = divmod(queue.rows, ahead.rows)
    own = _Shape(queue.group, ahead, queue.rows, before * ahead.full_ns)
    first_ns = queue.entries[0][2] if queue.entries else deadline_ns
    others: dict[Hashable, _Shape] = {}
    others_ns = 0.0  # of those that share no batch, and are due before the batch that this one joins
    turn_ns = deadline_ns if queue.alone or not rest else queue.entries[-min(rest, len(queue.entries))][0]
    looked_at = queue.rows
    for other in islice(state.queues.values(), QUEUES):
        theirs = other.outlook
        if other is queue or not other.entries:
            continue
        looked_at += other.rows
        if theirs is None:
            continue
        _, _, last_ns, last_rows, _ = other.entries[-1]
        # Mostly even a whole batch would be in time, so that there is no need to ask.
        if (last_ns < now_ns + theirs.due_ns or last_rows > theirs.rows) and other.is_hopeless(now_ns):
            continue
        batches, more = divmod(other.rows, theirs.rows)
        apart_ns = batches * theirs.full_ns + (theirs.pace.expected_ns(more) if more else 0.0)
        if joined(other.group, own.group):
            own.add(other.group, theirs, other.rows, apart_ns)
            first_ns = min(first_ns, other.entries[0][2])
            continue
        if other.alone:
            others_ns += apart_ns * bisect_left(other.entries, (turn_ns,)) / len(other.entries)
            continue
        key = other.group.shape_key if isinstance(other.group, LengthGroup) else other.group
        if key in others:
            others[key].add(other.group, theirs, other.rows, apart_ns)
        else:
            others[key] = _Shape(other.group, theirs, other.rows, apart_ns)
    others_ns += sum([min(shape.apart_ns, shape.together_ns) for shape in others.values()])
    soonest_ns += as_all(others_ns, looked_at - queue.rows, queue, state) / workers
    most = own.longest.pace.curve.sizes[-1]
    come = own_rows if own_rows > most else 1
    end_ns = soonest_ns + own.apart_ns / workers + ahead.pace.alone_ns(rest + come, workers)
    batches, more = divmod(own.rows, most)
    together_ns = soonest_ns + own.longest.pace.alone_ns(more + come, workers)
    if not queue.alone and (own.longest is not ahead or together_ns <= first_ns):
        end_ns = min(end_ns, together_ns + own.full_ns(batches) / workers)
    return max(0.0, end_ns - deadline_ns)


class _Shape:
    """What waits of the lengths that may share a batch. apart_ns: what it takes with a batch of its own for each length."""

    __slots__ = ("apart_ns", "group", "longest", "rows")

    def __init__(self, group: Hashable, longest: Outlook, rows: int, apart_ns: float) -> None:
        self.group = group
        self.longest = longest
        self.rows = rows
        self.apart_ns = apart_ns

    def add(self, group: Hashable, ahead: Outlook, rows: int, apart_ns: float) -> None:
        """Another length of it."""
        if group > self.group:  # type: ignore[operator]  # both are LengthGroups of one shape key
            self.group, self.longest = group, ahead
        self.rows += rows
        self.apart_ns += apart_ns

    def full_ns(self, batches: int) -> float:
        """So many, as large as may be, padded to the longest."""
        return batches * self.longest.pace.expected_ns(self.longest.pace.curve.sizes[-1])

    @property
    def together_ns(self) -> float:
        """All of it, padded to the longest."""
        batches, rest = divmod(self.rows, self.longest.pace.curve.sizes[-1])
        return self.full_ns(batches) + (self.longest.pace.expected_ns(rest) if rest else 0.0)


def feasible(queue: Queue, skip: int, index: int, cap: int, view: Moment, state: State, free_slots: int) -> bool:
    """Whether all that waits will be in time if `sizes[index]` rows go now and the rest in batches of the cap."""
    sizes, shape = view.curve.sizes, view.curve.shape
    last = len(sizes) - 1
    free = [max(view.now_ns, batch.closed_ns + batch.expected_ns) for batch in state.in_flight]
    free += [view.now_ns] * (free_slots - 1)
    free.append(view.now_ns + round(shape[index] * view.level))
    heapify(free)
    for deadline_ns, rows in _heads(queue, skip, sizes[index], sizes[cap]):
        time_ns = shape[min(bisect_left(sizes, rows), last)]
        if free[0] + time_ns * view.quantile > deadline_ns:
            return False
        heapreplace(free, free[0] + round(time_ns * view.level))
    return True


def unless_refused(
    told: Forecast, state: State, group: Hashable, request: InferRequest, rows: int, slo_ns: int | None, now_ns: int
) -> Forecast:
    """The forecast of a request, which is late if it would be refused on arrival."""
    queue = state.queues.get(group)
    if queue is None:
        queue = Queue(group, state.new_alone)  # as it would get
    if queue.outlook is None:
        return told
    deadline_ns = deadline_of(request, slo_ns, state.reserved_ns)
    key = virtual_deadline(request, deadline_ns)
    late_ns = missing_ns(queue.outlook, queue, state, rows, key, deadline_ns, now_ns)
    if not late_ns or _doubtful(queue.outlook, queue, state, now_ns):
        return told
    ahead_ns = max(told.ahead_ns, deadline_ns + late_ns - now_ns - told.wait_ns - told.own_ns)
    return msgspec.structs.replace(told, ahead_ns=ahead_ns)


def _taken(rows: int, mean: float) -> float:
    """About what a batch of at most `rows` gets if `mean` come by chance; as many: 0.4 standard deviations less than all."""
    if mean <= 0:
        return 0.0
    sharp = -log(2) / log(1 - 0.4 / sqrt(rows))
    return float(rows * mean / (rows**sharp + mean**sharp) ** (1 / sharp))


def _heads(queue: Queue, skip: int, rows: int, cap: int) -> Iterator[tuple[int, int]]:
    """The batches that would follow: deadline of the first and rows of each.

    skip: entries that are shed. rows: of the batch that goes now. cap: of the batches after it.
    """
    entries = queue.entries
    count = len(entries)
    if queue.rows == count:  # one row each, as mostly: no need to look at those in between
        at = skip + rows
        for _ in range(_LOOKAHEAD_BATCHES):
            if at >= count:
                return
            yield entries[at][2], min(cap, count - at)
            at += cap
        return
    gathered, limit, deadline_ns, batches = 0, rows, NEVER, 0
    for entry in islice(entries, skip, None):
        if gathered and gathered + entry[3] > limit:
            if batches:
                yield deadline_ns, gathered
            batches += 1
            if batches > _LOOKAHEAD_BATCHES:
                return
            gathered, limit, deadline_ns = 0, cap, entry[2]
        gathered += entry[3]
    if batches:
        yield deadline_ns, gathered
