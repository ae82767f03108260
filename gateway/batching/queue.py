"""What waits: one queue per group of requests that may share a batch, in the order of their deadlines.

A deque kept sorted: arrivals with one SLO come in order and are appended; only a mix of deadlines or priorities inserts.
Unlike a heap it can be walked in order, which the adaptive policy's lookahead does, and nothing stays in it once removed.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import chain, islice
from typing import Final, NamedTuple, Protocol

import msgspec

from gateway.batching.batch import Batch
from gateway.types import ALONE, InferRequest

NEVER: Final = 1 << 62
"""The deadline of a request that has none."""

# (virtual deadline, sequence number, deadline, rows that still wait, request). A plain tuple: it is made and compared once
# per request, in C (a NamedTuple costs 0.25 µs more to make, CPython 3.11, 2 GHz Xeon).
Entry = tuple[int, int, int, int, InferRequest]

PATIENCE_NS: Final = 1_000_000_000
"""Virtual time to deadline of a request without one, so that requests with deadlines cannot starve it."""

_DEFAULT_PRIORITY: Final = 2
LOWEST_PRIORITY: Final = 4
MOST_WEIGHT: Final = 1 << (LOWEST_PRIORITY - _DEFAULT_PRIORITY)
"""Times the time to the deadline: that of the lowest class in `virtual_deadline`."""
_MIXED_NS: Final = 1_000_000_000  # for so long more of another class are expected
_EMPTY_QUEUES_KEPT: Final = 64
_LAST: Final = 4  # in line, that are looked at to know of all
_UNSURE: Final = 1.2  # times what rows are expected to take: what they may take, with what comes meanwhile


def deadline_of(request: InferRequest, slo_ns: int | None, reserved_ns: int = 0) -> int:
    """The first of arrival + SLO, less what is reserved of it, and the client's own deadline; `NEVER` if there is neither.

    reserved_ns: what answering takes of the SLO after the batch. Of who comes t later it is at most t / MOST_WEIGHT more: else
    he would be before those of his class that came earlier.
    """
    own = request.deadline_ns
    if slo_ns is None:
        return NEVER if own is None else own
    promised = request.arrival_ns + slo_ns - reserved_ns
    return promised if own is None or promised < own else own


def class_of(request: InferRequest) -> int:
    """1, the highest, to 4."""
    return min(request.priority, LOWEST_PRIORITY) or _DEFAULT_PRIORITY


def virtual_deadline(request: InferRequest, deadline_ns: int) -> int:
    """What the queue is ordered by: arrival + weight · (deadline - arrival).

    Weights by priority: 1 -> 1/2, 2 (and 0, the default) -> 1, 3 -> 2, 4 and above -> 4. Time passes for every class, so none
    starves.
    """
    arrival = request.arrival_ns
    if deadline_ns == NEVER:
        deadline_ns = arrival + PATIENCE_NS
    if not request.priority:  # as mostly
        return deadline_ns
    priority = class_of(request)
    if priority == _DEFAULT_PRIORITY:
        return deadline_ns
    span = max(deadline_ns - arrival, 0)
    if priority < _DEFAULT_PRIORITY:
        return arrival + span // 2
    return arrival + (span << (priority - _DEFAULT_PRIORITY))


class LengthGroup(NamedTuple):
    """A group of requests whose ragged length falls into one bucket. length: the bucket's upper edge."""

    shape_key: Hashable
    length: int


def shares_none(group: Hashable) -> bool:
    """Whether its requests share no batch."""
    key = group.shape_key if isinstance(group, LengthGroup) else group
    return isinstance(key, tuple) and ALONE in key


class Curve(Protocol):
    """What is looked at of a service curve, which see."""

    sizes: tuple[int, ...]
    shape: tuple[float, ...]

    def at(self, rows: int) -> int: ...


class Expected(NamedTuple):
    """What rows take, by a curve at a level. margin: times that, before the deadline of its first, a batch must start."""

    curve: Curve
    level: float
    margin: float

    def expected_ns(self, rows: int) -> float:
        """T(rows)."""
        return self.curve.shape[self.curve.at(rows)] * self.level

    def alone_ns(self, rows: int, workers: int) -> float:
        """Until a request of so many rows, were it alone, would be done: more than a batch takes turns of all workers."""
        curve = self.curve
        turns, last = divmod(rows - 1, workers * curve.sizes[-1])
        full = min(1.0, self.margin) * curve.shape[-1]
        return (turns * full + self.margin * curve.shape[curve.at(last + 1)]) * self.level


class Outlook(msgspec.Struct, kw_only=True):
    """What becomes of those that come while all workers are busy, under overload.

    workers: that are alive. rows: of a batch. spare: that may wait beyond whole batches. busy: share of its expected time that
    one that runs takes at the least. full_ns: expected of one of `rows`. due_ns: so long before the deadline of its first that
    must start; least_ns: the same of one that may be smaller. together: whether all queues stand in one line. stale_ns: when it
    may no longer hold of an empty queue.
    """

    workers: int
    rows: int
    spare: int
    busy: float
    full_ns: float
    due_ns: float
    least_ns: float
    pace: Expected
    together: bool
    stale_ns: int


class Queue:
    """The waiting requests of one group, by virtual deadline; first come, first served among equals.

    alone: they share no batch. outlook: by the last decision, or by what has come since; None: all may wait.
    """

    __slots__ = ("_in_order", "_low_ns", "_lowest", "_plain", "alone", "entries", "group", "outlook", "rows")

    def __init__(self, group: Hashable, new_alone: Outlook | None = None) -> None:
        """new_alone: the outlook, if it is alone."""
        self.group = group
        self.alone = group is not None and shares_none(group)
        self.entries: deque[Entry] = deque()
        self.rows = 0
        self.outlook = new_alone if self.alone else None
        self._in_order = True  # entries stand as they arrived, so the first is the oldest
        self._plain = True  # entries stand in the order of their own deadlines: all have one, and are of the default class
        self._low_ns = NEVER  # no deadline of a lower class, which may stand behind later ones, is before this
        self._lowest = _DEFAULT_PRIORITY  # nothing that waits is of a class below it

    def __repr__(self) -> str:
        return f"Queue(group={self.group!r}, requests={len(self.entries)}, rows={self.rows})"

    @classmethod
    def joined(cls, group: Hashable, queues: Collection["Queue"]) -> "Queue":
        """All that waits in these queues, in one line. group: what it is to be known by."""
        line = cls(group)
        entries = list(chain.from_iterable([queue.entries for queue in queues]))
        entries.sort()
        line.entries = deque(entries)
        line.rows = sum([queue.rows for queue in queues])
        line._in_order = False
        line._low_ns = min([queue._low_ns for queue in queues])
        return line

    def push(self, key: int, sequence: int, deadline_ns: int, rows: int, request: InferRequest) -> None:
        """Add what `Entry` says."""
        entries = self.entries
        entry = (key, sequence, deadline_ns, rows, request)
        if not entries:
            if not (self._plain and self._in_order):  # what stood here before says nothing of what will
                self._in_order = self._plain = True
                self._low_ns = NEVER
                self._lowest = _DEFAULT_PRIORITY
            entries.append(entry)
        elif entries[-1] < entry:
            entries.append(entry)
        else:
            self._in_order = False
            insort(entries, entry)
        self.rows += rows
        if key != deadline_ns:
            self._plain = False
            lowest = class_of(request) if request.priority else _DEFAULT_PRIORITY
            if lowest > self._lowest:
                self._lowest = lowest
            if key > deadline_ns and deadline_ns < self._low_ns:
                self._low_ns = deadline_ns
        elif self._lowest < _DEFAULT_PRIORITY:
            self._lowest = _DEFAULT_PRIORITY

    def pop(self) -> Entry:
        """Take the first."""
        entry = self.entries.popleft()
        self.rows -= entry[3]
        return entry

    def pop_many(self, requests: int) -> list[Entry]:
        """Take so many from the front, or all."""
        entries = self.entries
        if requests < len(entries):
            popleft = entries.popleft
            taken = [popleft() for _ in range(requests)]
            self.rows -= sum([entry[3] for entry in taken])
            return taken
        taken = list(entries)
        entries.clear()
        self.rows = 0
        return taken

    def take_rows(self, rows: int, place: tuple[int, int] | None = None) -> None:
        """Take rows off the first, of which some stay: as the first, or further back.

        place: their key, no lower than it was, and sequence number.
        """
        key, sequence, deadline_ns, waiting, request = self.entries[0]
        if place is None:
            self.entries[0] = (key, sequence, deadline_ns, waiting - rows, request)
            self.rows -= rows
        else:
            self.pop()
            self.push(*place, deadline_ns, waiting - rows, request)
            self._in_order = False

    def put_last(self, entry: Entry) -> None:
        """Let all that wait pass an entry that is in the queue."""
        key = self.entries[-1][0] + 1
        self.remove_entry(entry)
        self.push(key, *entry[1:])
        self._in_order = False

    def last_before(self, key: int, least: int) -> int:
        """The key of the last with no higher one; `least`, if that is higher, or none is there."""
        at = bisect_left(self.entries, (key + 1,))
        return max(least, self.entries[at - 1][0]) if at else least

    def remove(self, request: InferRequest, key: int | None) -> int:
        """Take out a request, given its virtual deadline. Returns the rows that waited; 0: it is not here.

        key: None, if it may have been put further back since.
        """
        entries = self.entries
        if key is None:
            found = next((at for at, entry in enumerate(entries) if entry[4] is request), None)
            if found is None:
                return 0
            entry = entries[found]
            self._delete(found, entry)
            return entry[3]
        at = bisect_left(entries, (key,))
        while at < len(entries) and entries[at][0] == key:
            entry = entries[at]
            if entry[4] is request:
                self._delete(at, entry)
                return entry[3]
            at += 1
        return 0

    def remove_entry(self, entry: Entry) -> None:
        """Take out an entry that is in the queue."""
        self._delete(bisect_left(self.entries, entry[:2]), entry)

    def below(self, priority: int) -> Iterator[Entry]:
        """Those of a lower class than that, the last in line first. Looks at none if it is known that there is none."""
        if self._lowest <= priority:
            return
        found = False
        for entry in reversed(self.entries):
            if class_of(entry[4]) > priority:
                found = True
                yield entry
        if not found:
            self._lowest = priority

    def rows_before(self, key: int) -> int:
        """Rows of those that one with this virtual deadline would stand behind."""
        entries = self.entries
        if not entries or entries[-1][0] <= key:
            return self.rows
        first = bisect_left(entries, (key + 1,))
        return first if self.rows == len(entries) else sum([entry[3] for entry in islice(entries, first)])

    def expired(self, now_ns: int) -> list[Entry]:
        """Take out those whose deadline has passed."""
        entries = self.entries
        late: list[Entry] = []
        if self._plain:
            while entries and entries[0][2] < now_ns:
                late.append(self.pop())
            return late
        late += [entry for entry in entries if entry[2] < now_ns]
        for entry in late:
            self.remove_entry(entry)
        if self._low_ns < now_ns:
            self._low_ns = min((entry[2] for entry in entries if entry[0] > entry[2]), default=NEVER)
        return late

    @property
    def least_deadline_ns(self) -> int:
        """When the first of those that wait will expire; `NEVER` if nothing does."""
        if not self.entries:
            return NEVER
        return self.entries[0][2] if self._plain else min([entry[2] for entry in self.entries])

    @property
    def has_lower_class(self) -> bool:
        """Whether deadlines may stand in the queue behind later ones."""
        return self._low_ns != NEVER

    def is_hopeless(self, now_ns: int) -> bool:
        """Whether by what was told of it all that waits, and something does, would be late even alone: so it will be shed.

        False too, if the last few in line leave it open: others may have later deadlines, or fewer rows.
        """
        ahead = self.outlook
        if ahead is None:
            return False
        pace, workers = ahead.pace, ahead.workers
        least_ns = now_ns + pace.alone_ns(1, workers)
        for entry in islice(reversed(self.entries), _LAST):
            if self._plain and entry[2] < least_ns:  # so are all before it
                return True
            if now_ns + pace.alone_ns(entry[3], workers) <= entry[2]:
                return False
        return len(self.entries) <= _LAST

    @property
    def oldest_ns(self) -> int:
        """The earliest arrival; `NEVER` if nothing waits."""
        if not self.entries:
            return NEVER
        if self._in_order:
            return self.entries[0][4].arrival_ns
        return min(entry[4].arrival_ns for entry in self.entries)

    def _delete(self, at: int, entry: Entry) -> None:
        del self.entries[at]
        self.rows -= entry[3]


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What a policy must keep to. max_rows: of one batch. row_sizes: the only sizes that run, ascending; empty: any."""

    max_rows: int
    row_sizes: tuple[int, ...] = ()
    slo_ns: int | None = None

    def padded(self, rows: int) -> int:
        """The rows that run when `rows` are in the batch."""
        for size in self.row_sizes:
            if rows <= size:
                return size
        return rows


class State:
    """What a policy may look at: all queues of the lane and the batches that run. reserved_ns: of the last request's SLO.

    rows, requests: what waits in the queues. Who changes a queue by itself keeps them true.
    mixed_until_ns: so long, requests of other classes than the default count as coming.
    doubt_ns: not before: the next that seems late and is let in to see whether it is.
    new_alone: what a new queue begins with, if it is alone: the outlook by the last decision on such a one.
    """

    __slots__ = ("doubt_ns", "in_flight", "mixed_until_ns", "new_alone", "queues", "requests", "reserved_ns", "rows", "workers")

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.queues: dict[Hashable, Queue] = {}
        self.in_flight: dict[Batch, int | None] = {}  # and when the first part of a stream came, if that is recorded
        self.rows = 0
        self.requests = 0
        self.reserved_ns = 0
        self.mixed_until_ns = 0
        self.doubt_ns = 0
        self.new_alone: Outlook | None = None

    def new_queue(self, group: Hashable) -> Queue:
        queues = self.queues
        if len(queues) >= _EMPTY_QUEUES_KEPT:  # clients choose shapes, and could choose many
            for key in [key for key, queue in queues.items() if not queue.entries]:
                del queues[key]
        queue = queues[group] = Queue(group, self.new_alone)
        return queue

    def classed(self, request: InferRequest, deadline_ns: int, now_ns: int) -> int:
        """The virtual deadline of one that comes. Of another class than the default, more are expected from now on."""
        key = virtual_deadline(request, deadline_ns)
        if key != deadline_ns:
            self.mixed_until_ns = now_ns + _MIXED_NS
        return key

    def remove(self, group: Hashable, request: InferRequest, key: int | None) -> int:
        """As `Queue.remove`."""
        queue = self.queues.get(group)
        rows = queue.remove(request, key) if queue is not None else 0
        if rows:
            self.rows -= rows
            self.requests -= 1
        return rows

    def drop(self, queue: Queue, entry: Entry) -> None:
        """Take out an entry that is in this queue."""
        if queue.entries[0] is entry:
            queue.pop()
        else:
            queue.remove_entry(entry)
        self.rows -= entry[3]
        self.requests -= 1

    def unbegun(self, queue: Queue, hopeless: Sequence[Entry], now_ns: int) -> Sequence[Entry]:
        """Of entries of this queue those of which no part has begun just now, or is tried. The others let all pass that wait.

        What becomes of the rest is seen once that has run; what is closed before then was decided on without it.
        """
        begun = [entry for entry in hopeless if self._begins(entry, now_ns)]
        for entry in begun:
            queue.put_last(entry)
        return [entry for entry in hopeless if entry not in begun] if begun else hopeless

    def _begins(self, entry: Entry, now_ns: int) -> bool:
        rows, request = entry[3:]
        return rows < request.rows and any(
            part.request is request
            for batch in self.in_flight
            if batch.closed_ns == now_ns or batch.reason == "probe"
            for part in batch.parts
        )

    def take_expired(self, now_ns: int) -> list[Entry]:
        """Take out those whose deadline has passed."""
        late = [entry for queue in self.queues.values() if queue.entries for entry in queue.expired(now_ns)]
        self.rows -= sum(entry[3] for entry in late)
        self.requests -= len(late)
        return late

    def below(self, priority: int) -> Iterator[Entry]:
        """Those of a lower class than that, the last in line first."""
        return merge(*(queue.below(priority) for queue in self.queues.values()), reverse=True)

    def whole_below(self, priority: int, rows: int, batched: bool) -> list[Entry]:
        """Of those, as few as have so many rows, and none that has begun to run; empty: there are too few."""
        found: list[Entry] = []
        for entry in self.below(priority):
            if entry[3] == entry[4].rows or not batched:
                found.append(entry)
                rows -= entry[3]
                if rows <= 0:
                    return found
        return []

    def served_ns(self, row_ns: float) -> float:
        """The time in which what waits now will have been served. row_ns: what a row takes."""
        return self.rows * row_ns / max(1, self.workers)

    def behind(self, entry: Entry, now_ns: int, row_ns: float) -> int:
        """The key by which the rest of a request lets those pass that wait, but none that comes later: else it might never end.

        Not those that it would stand before, did it come now: lower classes, and those with more time. And nobody, if it would
        be late for them and is in time without: of what comes later, some will stand before it. row_ns: of a full batch.
        """
        key, _, deadline_ns, rows, request = entry
        left_ns = deadline_ns - now_ns
        if _UNSURE * rows * row_ns / max(1, self.workers) <= left_ns < _UNSURE * self.served_ns(row_ns):
            return key
        anew = virtual_deadline(request, deadline_ns) + now_ns - request.arrival_ns
        for queue in self.queues.values():
            key = queue.last_before(anew, key)
        return key

    def whole_before(self, when_ns: int, most: int, batched: bool) -> list[InferRequest]:
        """Those whose deadline is before that, at most so many, and none that has begun to run."""
        found: list[InferRequest] = []
        for queue in self.queues.values():
            for _, _, deadline_ns, rows, request in queue.entries:
                if deadline_ns >= when_ns or len(found) >= most:
                    break
                if rows == request.rows or not batched:
                    found.append(request)
        return found

    @property
    def least_deadline_ns(self) -> int:
        """When the first of those that wait will expire; `NEVER` if nothing does."""
        return min([queue.least_deadline_ns for queue in self.queues.values()], default=NEVER)

    @property
    def oldest_ns(self) -> int:
        """The earliest arrival; `NEVER` if nothing waits."""
        return min([queue.oldest_ns for queue in self.queues.values()], default=NEVER)
