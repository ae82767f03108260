"""A batcher that keeps what it was asked and what it decided, in bounded memory, so that `replay` can do it all again.

What decides is a pure function of (state, event, now). So a recording is a state and the events after it: `Segment`. A `Ring`
has several, and drops the oldest whole. On the way of a request there is a number per arrival, and some values per batch, in
no tuple: of hundreds of models there would be tens of thousands, for the garbage collector to go through. They are packed by
the hundred, which takes a tenth of their memory; by the five hundred it takes more time, as what waits to be packed takes the
place of other things in the processor's caches.

An event that changes nothing (no worker is free, as many live as before, nothing is late) is left out. Objects are called by
their `id`, which is theirs while they live; requests also by when they arrived, which says enough of nearly all.
"""

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from enum import IntEnum
from typing import Any, ClassVar, Final

import msgspec

from gateway.batching.adaptive import Adaptive
from gateway.batching.batch import Batch, Part
from gateway.batching.batcher import NOTHING, Batcher, Shed, Step
from gateway.batching.checkpoint import freeze, learn_attributes, own_id, widths_of
from gateway.batching.policies import POLICIES
from gateway.batching.policy import Policy
from gateway.batching.queue import NEVER
from gateway.batching.streams import Streams
from gateway.batching.telling import NOWHERE
from gateway.config import Batching, Ragged
from gateway.errors import GatewayError
from gateway.types import InferRequest

FORMAT: Final = 22
"""Of what `Ring.dump` gives; another number is read by another release."""

_PACKED: Final = 128  # values and events at once
_SEGMENTS: Final = 8  # that a ring holds at least
_SHORT: Final = 512  # requests that wait: with more of them a state is dear to keep, and a segment may grow to twice its length

log = logging.getLogger(__name__)


class Event(IntEnum):
    """The first of each event's values. An arrival of which nothing but its times is to be told, as of nearly all, is no event,
    but a number between them, arrival_ns, or two, if it was added later: -now_ns, arrival_ns; unless one that arrived at the
    same time or later was told of before, be it the same one at its first stay here. CLOSED and ENDED stand between them in the
    same way, the first begun by its batch's reason, the second by None. What follows:

    ADDED    request, now_ns, reserved_ns, arrival_ns, rows, deadline_ns, priority, key, own id[, widths]
    REFUSED  the same, and the error's class
    STEPPED  now_ns, free_slots, workers, batches, shed, wake_at_ns, whether no session is there at all
             a batch: itself, reason, rows, expected_ns, arrival_ns of the first in it. shed: (arrival_ns, the error's class)
    ENDED    batch, now_ns, compute_ns, ok
    CANCELLED  request, arrival_ns, now_ns, reserved_ns, whether a run of it has failed, and nothing was ever dispatched
    RETRIED  request, arrival_ns, first row, rows, now_ns
    CLOSED   now_ns, free_slots, workers, wake_at_ns, and of a batch itself, rows, expected_ns, arrival_ns of the first in it:
             STEPPED, as it mostly is, with this batch alone
    RESERVED  reserved_ns, of all arrivals behind it; of those that no such event is before, the state has it
    BEGUN    batch, now_ns: the first part of a stream is there
    """

    ADDED = 0
    REFUSED = 1
    STEPPED = 2
    ENDED = 3
    CANCELLED = 4
    RETRIED = 5
    CLOSED = 6
    RESERVED = 7
    BEGUN = 8


_ADDED: Final = int(Event.ADDED)
_REFUSED: Final = int(Event.REFUSED)
_STEPPED: Final = int(Event.STEPPED)
# What every request and batch passes. CPython 3.11 finds a function of this module, or a local, several times faster than an
# attribute of a class, or one of an object that it calls at once.
_step: Final = Batcher.step
_finished: Final = Batcher.finished


class Segment(msgspec.Struct):
    """A state, and the events after it. keys: the shape keys that they name by position. All as `freeze` gives it."""

    state: msgspec.Raw
    keys: list[Any]
    chunks: list[msgspec.Raw]


class LaneSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How one backend of a model batches, and what it costs: all that a batcher like it is made of.

    model_rows: the most rows that the model takes in one run; 0: it has no batch dimension. max_rows: as batches are limited
    to. sessions: that run batches when all is well. session_usd_per_hour: of each; 0: no price is known. lent: other processes
    use the sessions as well, one after the other; which has one while nothing is decided here is not recorded.
    """

    label: str = ""
    policy: str = "adaptive"
    max_delay_ms: float = 5.0
    max_rows: int = 1
    model_rows: int = 1
    row_sizes: tuple[int, ...] = ()
    sessions: int = 1
    max_queue_rows: int = 4096
    slo_ns: int | None = None
    ragged: dict[str, Any] | None = None
    session_usd_per_hour: float = 0.0
    decoupled: bool = False
    lent: bool = False

    def batcher(self, ring: "Ring | None" = None) -> Batcher:
        """A batcher that has learned nothing. ring: where it records; None: nowhere."""
        policy = POLICIES[self.policy](Batching(policy=self.policy, max_delay_ms=self.max_delay_ms))  # type: ignore[arg-type]
        settings: dict[str, Any] = {
            "max_rows": self.max_rows,
            "row_sizes": self.row_sizes,
            "workers": self.sessions,
            "max_queue_rows": self.max_queue_rows,
            "slo_ns": self.slo_ns,
            "ragged": Ragged.model_validate(self.ragged) if self.ragged else None,
        }
        return RecordedBatcher(policy, ring=ring, **settings) if ring is not None else Batcher(policy, **settings)


class Ring:
    """The last events of one batcher, in at most so many bytes."""

    def __init__(self, most_bytes: int, settings: LaneSettings | None = None) -> None:
        """settings: of the lane, if it is one's."""
        self.settings = settings
        self.most_bytes = most_bytes
        self.dropped = 0  # segments
        self.events: list[Any] = []  # not packed yet
        self.keys: dict[Hashable, int] = {}  # of the last segment
        self._segments: deque[Segment] = deque()
        self._bytes: deque[int] = deque()  # of each
        self._all_bytes = 0
        self._long_bytes = 0  # of a segment: at least two thirds of it are events, or states would take all the room
        self._encode = msgspec.msgpack.Encoder().encode

    def __repr__(self) -> str:
        return f"Ring({self._all_bytes} bytes in {len(self._segments)} segments, {self.dropped} dropped)"

    @property
    def full(self) -> bool:
        """Whether the last segment has its length."""
        return self._bytes[-1] >= self._long_bytes

    @property
    def overfull(self) -> bool:
        return self._bytes[-1] >= 2 * self._long_bytes

    def begin(self, state: Any) -> None:
        """Begin a segment.

        Raises: ValueError, if the state alone takes over an eighth of the room.
        """
        self.pack()
        self.keys.clear()
        packed = self._encode(state)
        if len(packed) * _SEGMENTS > self.most_bytes:
            raise ValueError(f"a state of {len(packed)} bytes is too much for {self.most_bytes}: raise batching.record_mib")
        self._long_bytes = max(self.most_bytes // _SEGMENTS, 3 * len(packed))
        self._segments.append(Segment(msgspec.Raw(packed), [], []))
        self._bytes.append(0)
        self._grow(len(packed))
        self.key(None)

    def key(self, shape_key: Hashable) -> int:
        """Number a shape key that is new to the segment."""
        number = self.keys[shape_key] = len(self.keys)
        frozen = freeze(shape_key)
        self._segments[-1].keys.append(frozen)
        self._grow(len(self._encode(frozen)))
        return number

    def pack(self) -> None:
        if not self.events:
            return
        packed = self._encode(self.events)
        self.events.clear()
        self._segments[-1].chunks.append(msgspec.Raw(packed))
        self._grow(len(packed))

    def _grow(self, size: int) -> None:
        """The last segment has so many bytes more. Where all are too many, the oldest go."""
        self._bytes[-1] += size
        self._all_bytes += size
        while self._all_bytes > self.most_bytes and len(self._segments) > 1:
            self._segments.popleft()
            self._all_bytes -= self._bytes.popleft()
            self.dropped += 1

    def dump(self) -> dict[str, Any]:
        """All that is here, as msgpack can hold it."""
        if self._segments:
            self.pack()
        settings = {} if self.settings is None else {"settings": self.settings}
        return {**settings, "dropped": self.dropped, "segments": list(self._segments)}


class Recorded(ABC):
    """What decides, and tells a ring. Where that cannot keep it, nothing is kept any more, and requests go on.

    Whatever comes again and again is followed by `_room`, or the events that are not packed yet would know no bound.
    """

    __slots__ = ()
    WHAT: ClassVar[str]  # is recorded, in the log's words
    ring: Ring | None
    given_up: str  # why nothing is kept any more; empty: it is
    _events: list[Any]

    @abstractmethod
    def _frozen(self) -> Any:
        """What a segment begins with, as `freeze` gives it."""

    def _is_long(self, ring: Ring) -> bool:
        """Whether the last segment has its length."""
        return ring.full

    def _room(self) -> None:
        """Pack what there is, if it is much, and begin anew where a segment is long enough."""
        ring = self.ring
        if ring is None or len(ring.events) < _PACKED:
            return
        try:
            ring.pack()
        except Exception as exc:
            self._give_up(exc)
            return
        if self._is_long(ring):
            self._begin()

    def _begin(self) -> None:
        ring = self.ring
        if ring is None:
            return
        try:
            ring.begin(self._frozen())
            self._events = ring.events  # type: ignore[misc]  # who inherits has the attribute, in a slot or else
        except Exception as exc:
            self._give_up(exc)

    def _give_up(self, exc: Exception) -> None:
        self.given_up = f"{type(exc).__name__}: {exc}"  # type: ignore[misc]  # as `_events`
        log.warning("%s no longer recorded: %s", self.WHAT, self.given_up)
        self.ring, self._events = None, NOWHERE  # type: ignore[misc]


class RecordedBatcher(Recorded, Batcher):
    """Life: as a `Batcher`; `record` once it has learned what is to be learned before traffic. Until then nothing is kept."""

    WHAT = "decisions are"
    # Is no state.
    NOT_KEPT = frozenset(
        ("ring", "given_up", "streams", "_widths_of", "_deciding", "_events", "_number", "_lives", "_told_ns", "_told_workers")
    )

    def __init__(self, policy: Policy, *, ring: Ring, ragged: Ragged | None = None, **settings: Any) -> None:
        super().__init__(policy, ragged=ragged, **settings)
        self.ring = ring
        self.given_up = ""
        self._widths_of = ragged
        self._deciding = False
        self._events = NOWHERE
        self._lives: Callable[[], bool] = _always
        self._told_ns = 0  # arrivals after this one can be told of by their times alone
        self._told_workers = 0  # by which arrivals are decided on, too

    @property
    def in_flight(self) -> Mapping[Batch, int | None]:
        """Batches that run, and when the first part of a stream came."""
        return self._state.in_flight

    def record(self, lives: Callable[[], bool] | None = None) -> None:
        """Begin, with what it knows now.

        lives: whether a session is there, be it busy, or lent to another process; asked where none can be used here.
        """
        self._lives = lives or _always
        if self.ring is not None and self.ring.settings is not None:
            twin = self.ring.settings.batcher(Ring(0))
            learn_attributes(twin, twin.policy, twin.service)
        self._begin()

    def replayed(self, events: list[Any], number: Callable[[object], int], ragged: bool) -> None:
        """Tell its events to a list, with the numbers that objects had. For one that was read."""
        self.ring = None
        self._events, self._number, self._deciding, self._lives = events, number, False, _always
        self._told_workers = self._state.workers
        self._told_ns = NEVER  # each with its number, or with 0
        self.streams = Streams()
        self._widths_of = self._ragged if ragged else None

    def _added(self, request: InferRequest, now_ns: int, reserved_ns: int) -> None:
        arrival_ns = request.arrival_ns
        if request.unmarked and self._widths_of is None and arrival_ns > self._told_ns:
            self._events += (-now_ns, arrival_ns)
            self._told_ns = arrival_ns
        else:
            self._events.append(self._arrival(_ADDED, request, now_ns, reserved_ns))

    def _refused(self, request: InferRequest, now_ns: int, reserved_ns: int, error: GatewayError) -> GatewayError:
        self._events.append((*self._arrival(_REFUSED, request, now_ns, reserved_ns), type(error).__name__))
        self._told_ns = max(self._told_ns, request.arrival_ns)
        self._room()
        return error

    def _reserves(self, reserved_ns: int) -> None:
        self._events.append((int(Event.RESERVED), reserved_ns))

    def cancel(self, request: InferRequest, reserved_ns: int = 0, *, now_ns: int = 0, failed: bool = False) -> bool:
        undone = Batcher.cancel(self, request, reserved_ns)
        if not self._deciding:
            self._events.append(
                (int(Event.CANCELLED), self._number(request), request.arrival_ns, now_ns, reserved_ns, failed, undone)
            )
            self._told_ns = max(self._told_ns, request.arrival_ns)
            self._room()  # clients may come and go for as long as one batch runs
        return undone

    def begun(self, batch: Batch, now_ns: int) -> None:
        self._state.in_flight[batch] = now_ns
        self._events.append((int(Event.BEGUN), self._number(batch), now_ns))

    def retry(self, part: Part, now_ns: int) -> None:
        Batcher.retry(self, part, now_ns)
        request = part.request
        self._events.append((int(Event.RETRIED), self._number(request), request.arrival_ns, part.start, part.rows, now_ns))

    def step(self, now_ns: int, free_slots: int) -> Step:
        expires_ns = self._expires_ns
        try:
            step = _step(self, now_ns, free_slots)
        except BaseException:
            self._begin()  # what it had decided until then is not known
            raise
        state = self._state
        if step is NOTHING and state.workers == self._told_workers:
            return step
        batches, shed, wake_at_ns = step.batches, step.shed, step.wake_at_ns
        number, events = self._number, self._events
        if len(batches) == 1 and not shed:
            # Without a call of `_told`: every batch would pay for it.
            batch = batches[0]
            self._told_workers = workers = state.workers
            events += (
                batch.reason, now_ns, free_slots, workers, wake_at_ns, number(batch), batch.rows, batch.expected_ns,
                batch.parts[0].request.arrival_ns,
            )  # fmt: skip
            if len(events) >= _PACKED:
                self._room()
            return step
        # Without a free slot nothing is decided; but where nothing runs either, that is worth knowing.
        undecided = not batches and not shed and not free_slots and self._expires_ns == expires_ns and state.in_flight
        if undecided and state.workers == self._told_workers:
            return step
        self._told_workers = state.workers
        events.append(
            (
                _STEPPED,
                now_ns,
                free_slots,
                state.workers,
                [_told(batch, number) for batch in batches],
                [(request.arrival_ns, type(error).__name__) for request, error in shed],
                wake_at_ns,
                not free_slots and not state.in_flight and not self._lives(),
            )
        )
        if len(events) >= _PACKED:
            self._room()
        return step

    def finished(self, batch: Batch, now_ns: int, compute_ns: int, ok: bool) -> None:
        _finished(self, batch, now_ns, compute_ns, ok)
        number = self._number
        events = self._events
        events += (None, number(batch), now_ns, compute_ns, ok)

    def _displace(self, request: InferRequest, rows: int) -> bool:
        self._deciding = True  # what it cancels now, it will cancel again
        try:
            return Batcher._displace(self, request, rows)
        finally:
            self._deciding = False

    def _expire(self, now_ns: int, shed: list[Shed]) -> None:
        self._deciding = True
        try:
            Batcher._expire(self, now_ns, shed)
        finally:
            self._deciding = False

    def _arrival(self, kind: int, request: InferRequest, now_ns: int, reserved_ns: int) -> tuple[Any, ...]:
        own, shape_key = request.id, request.shape_key
        arrival = (
            kind,
            self._number(request),
            now_ns,
            reserved_ns,
            request.arrival_ns,
            request.rows,
            request.deadline_ns,
            request.priority,
            0 if shape_key is None else self._key(shape_key),
            own_id(request) if own else own,
        )
        return arrival if self._widths_of is None else (*arrival, widths_of(request, self._widths_of))

    def _key(self, shape_key: Hashable) -> int:
        ring = self.ring
        if ring is None or self._events is NOWHERE:
            return 0
        known = ring.keys.get(shape_key)
        return ring.key(shape_key) if known is None else known

    def _frozen(self) -> Any:
        if isinstance(self._policy, Adaptive):
            self._policy.settle()
        self._told_workers = self._state.workers
        return freeze(self)

    def _is_long(self, ring: Ring) -> bool:
        return ring.full and (self.queue_requests < _SHORT or ring.overfull)


def as_read(events: Any) -> Any:
    """As they are once they were packed and read."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(events))


def ring_of(batcher: Batcher) -> Ring | None:
    """What a batcher's decisions are recorded in; None: they are not."""
    return batcher.ring if isinstance(batcher, RecordedBatcher) else None


def given_up(decides: object) -> str:
    """Why the decisions of a batcher or a router are recorded no more; empty: they are, or never were."""
    return decides.given_up if isinstance(decides, Recorded) else ""


def _always() -> bool:
    return True


def _told(batch: Batch, number: Callable[[object], int]) -> tuple[Any, ...]:
    # What more there is to a batch follows from this and from what was known before it.
    return number(batch), batch.reason, batch.rows, batch.expected_ns, batch.parts[0].request.arrival_ns
