"""Does again what a `RecordedBatcher` has recorded, with the same classes: the same decisions, and all that was known at each.

Every decision is compared with the recorded one. What comes out is the history of the requests and batches,
with what the service model knew when a batch was closed, which nobody had to keep.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

from gateway.batching.batch import Batch, Part
from gateway.batching.checkpoint import request_like, thaw
from gateway.batching.queue import deadline_of
from gateway.batching.recording import Event, RecordedBatcher, as_read
from gateway.errors import GatewayError
from gateway.types import InferRequest

FATES: Final = ("answered", "waiting", "running", "cancelled", "failed", "handed over")
"""What becomes of a request without an error of ours. Handed over: another backend has it."""

_KEY: Final = 8  # where the number of a shape key stands in an arrival: its own in each segment
_UNMARKED: Final = (1, None, 0, 0, "")  # rows, deadline, priority, shape key and own id of a request that is
_CLOSED_VALUES: Final = 8  # behind its reason
_ENDED_VALUES: Final = 4
_DECISIONS: Final = frozenset((Event.ADDED, Event.REFUSED, Event.STEPPED, Event.CLOSED))


@dataclass(slots=True, eq=False, kw_only=True)
class PastBatch:
    """One batch that was closed. Times: `Clock.now_ns` of the process that recorded it.

    number: a later batch may have the same. likely_ns, bound_ns: T and Q of its size as they were learned when it was closed;
    0: nothing was. requests: in its order, one for each part. begun_ns: when the first part of a stream came; None: of others,
    and if that is not known. ended_ns, compute_ns: None, while it runs; of a stream as if the first part had ended it. workers:
    that were alive when it was closed.
    """

    number: int
    closed_ns: int
    reason: str
    rows: int
    padded_rows: int
    busy: int
    workers: int
    group: Any
    likely_ns: float
    bound_ns: float
    requests: list["PastRequest"]
    begun_ns: int | None = None
    ended_ns: int | None = None
    compute_ns: int | None = None
    ok: bool = True

    @property
    def answered_ns(self) -> int | None:
        """When its answer was there, of a stream the first part; None: it is not yet."""
        return self.begun_ns if self.ended_ns is None else self.ended_ns


@dataclass(slots=True, eq=False, kw_only=True)
class PastRequest:
    """One request. limit_ns: until when its answer was worth something; NEVER: always. added_ns: None, if before the recording.

    number: what it was called in the recording; 0: nothing, so far. own_deadline_ns: what its client set. fate: one of `FATES`,
    or the class of the error that it was refused with, or given up. ended_ns: when it met its fate.
    """

    number: int
    own_id: str
    arrival_ns: int
    rows: int
    own_deadline_ns: int | None
    limit_ns: int
    priority: int
    shape_key: Any
    widths: Any
    added_ns: int | None
    reserved_ns: int = 0
    queued_rows: int = 0
    fate: str = "waiting"
    ended_ns: int | None = None
    batches: list[PastBatch] = field(default_factory=list)
    rows_left: int = 0

    @property
    def closed_ns(self) -> int | None:
        """When its last batch was closed; None: it was in none."""
        return self.batches[-1].closed_ns if self.batches else None

    @property
    def pending(self) -> bool:
        """Whether it is neither answered nor given up yet."""
        return self.fate in ("waiting", "running")

    @property
    def refused(self) -> bool:
        """Whether it was refused, or given up: so its fate is an error, whichever there are."""
        return self.fate not in FATES


@dataclass(frozen=True, slots=True)
class Difference:
    """The first event that came out otherwise. segment, event: counted from 0. Both as they are recorded."""

    segment: int
    event: int
    now_ns: int
    recorded: list[Any]
    replayed: list[Any] | str

    def __str__(self) -> str:
        kind = Event(self.recorded[0]).name.lower()
        return f"segment {self.segment}, event {self.event} ({kind}): recorded {self.recorded}, replayed {self.replayed}"


@dataclass(slots=True, kw_only=True)
class History:
    """What a replay gives. decisions: that were compared. difference: None, if all came out the same.

    requests: in order of arrival here. workers: (from when, how many could be used), as seen. absent: (from when, whether there
    was no session at all, also not lent to another process), whenever that changed. from_start: nothing was dropped before.
    end_ns: of the last event, or when it was told, if something waited or ran then. batcher: as it was in the end; None, if
    nothing was recorded.
    """

    decisions: int = 0
    difference: Difference | None = None
    requests: list[PastRequest] = field(default_factory=list)
    batches: list[PastBatch] = field(default_factory=list)
    workers: list[tuple[int, int]] = field(default_factory=list)
    absent: list[tuple[int, bool]] = field(default_factory=list)
    from_start: bool = True
    begin_ns: int = 0
    end_ns: int = 0
    batcher: RecordedBatcher | None = None

    @property
    def kept(self) -> list[PastRequest]:
        """The requests but for those that another backend has taken over."""
        return [request for request in self.requests if request.fate != "handed over"]


def replay(recorded: dict[str, Any], now_ns: int = 0) -> History:
    """recorded: what `Ring.dump` gave, packed and read again. now_ns: when it did. Raises: ValueError, if it is no dump."""
    history = History(from_start=not recorded.get("dropped"))
    replayer = _Replayer(history)
    for index, segment in enumerate(recorded["segments"]):
        replayer.segment(index, segment)
        if history.difference is not None:
            return history
    if any(request.pending for request in history.requests) or any(batch.ended_ns is None for batch in history.batches):
        history.end_ns = max(history.end_ns, now_ns)
    return history


class EventReader:
    """Tells the events of one segment, chunk by chunk; what was kept as values, one behind the other, is one again."""

    def __init__(self, reserved_ns: int) -> None:
        """As the state has it that the segment begins with."""
        self._reserved_ns = reserved_ns

    def events(self, chunk: Iterable[Any]) -> Iterator[Any]:
        values = iter(chunk)
        for value in values:
            if isinstance(value, int):
                now_ns, arrival_ns = (value, value) if value > 0 else (-value, next(values, 0))
                yield [int(Event.ADDED), 0, now_ns, self._reserved_ns, arrival_ns, *_UNMARKED]
            elif value is None:
                yield [int(Event.ENDED), *islice(values, _ENDED_VALUES)]
            elif isinstance(value, str):
                now_ns, free_slots, workers, wake_at_ns, batch, *more = islice(values, _CLOSED_VALUES)
                yield [int(Event.CLOSED), now_ns, free_slots, workers, wake_at_ns, batch, value, *more]
            elif value[0] == Event.RESERVED:
                self._reserved_ns = value[1]
            else:
                yield value


class _Known:
    """Which request is meant: by the number it has, or, where only the times were told of it, by when it came."""

    def __init__(self) -> None:
        self._named: dict[int, PastRequest] = {}
        self._unnamed: dict[int, PastRequest] = {}

    def add(self, past: PastRequest) -> None:
        if past.number:
            self._named[past.number] = past
        else:
            self._unnamed[past.arrival_ns] = past

    def find(self, number: int, arrival_ns: int) -> PastRequest | None:
        past = self._named.get(number)
        if past is not None and past.arrival_ns == arrival_ns:  # else it is over, and its number another's
            return past
        past = self._unnamed.pop(arrival_ns, None)
        if past is not None:
            past.number = number
            self._named[number] = past
        return past


class _Replayer:
    def __init__(self, history: History) -> None:
        self._history = history
        self._known = _Known()
        self._batches: dict[int, PastBatch] = {}
        # of the segment
        self._pasts: dict[InferRequest, PastRequest] = {}
        self._requests: dict[PastRequest, InferRequest] = {}
        self._running: dict[int, Batch] = {}
        self._numbers: dict[Batch, int] = {}
        self._fresh: Iterator[int] = iter(())
        self._told: list[Any] = []

    def segment(self, index: int, segment: dict[str, Any]) -> None:
        batcher, known = thaw(segment["state"])
        if not isinstance(batcher, RecordedBatcher):
            raise ValueError(f"segment {index}: expected the state of a batcher")
        history = self._history
        history.batcher = batcher
        self._pasts, self._requests, self._running, self._numbers = {}, {}, {}, {}
        self._met_before(batcher, known)
        self._told = []
        reader, told_reader = (EventReader(batcher.reserved_ns) for _ in range(2))
        events = [event for chunk in segment["chunks"] for event in reader.events(chunk)]
        ragged = any(len(event) > 10 + (event[0] == Event.REFUSED) for event in events if event[0] <= Event.REFUSED)
        batcher.replayed(self._told, self._number, ragged)
        keys = [thaw(key)[0] for key in segment["keys"]]
        for at, event in enumerate(events):
            now_ns = self._replay(batcher, event, keys)
            if not history.begin_ns:
                history.begin_ns = now_ns
            history.end_ns = max(history.end_ns, now_ns)
            again = as_read(list(told_reader.events(self._told)))
            self._told.clear()
            told: list[Any] | str = again[-1] if again else "nothing"
            expected = list(event)
            if event[0] == Event.STEPPED:
                expected[-1] = False  # what the batcher does not know
            if event[0] in (Event.ADDED, Event.REFUSED):
                expected[_KEY] = 0
            history.decisions += event[0] in _DECISIONS
            if told != expected:
                history.difference = Difference(index, at, now_ns, expected, told)
                return

    def _number(self, value: object) -> int:
        if isinstance(value, InferRequest):
            return self._pasts[value].number
        assert isinstance(value, Batch)
        number = self._numbers.get(value)
        if number is None:
            number = next(self._fresh, -1)
            self._bind(number, value)
        return number

    def _bind(self, number: int, batch: Batch) -> None:
        self._running[number] = batch
        self._numbers[batch] = number

    def _met_before(self, batcher: RecordedBatcher, known: dict[int, Any]) -> None:
        """Find what waits and runs in a state among what was seen to come; note what was not."""
        unseen: list[tuple[int, Batch]] = []
        for number, value in known.items():
            if not isinstance(value, Batch):
                continue
            self._bind(number, value)
            past = self._batches.get(number)
            if past is None or past.ended_ns is not None:
                unseen.append((number, value))
                continue
            for part, request in zip(value.parts, past.requests, strict=True):
                self._is(part.request, request)
        for number, value in known.items():
            if isinstance(value, InferRequest) and value not in self._pasts:
                found = self._known.find(number, value.arrival_ns)
                if found is None:
                    self._came(number, value, batcher, None, 0)
                else:
                    self._is(value, found)
        for number, value in unseen:
            self._close(number, value, batcher, batcher.workers)

    def _is(self, request: InferRequest, past: PastRequest) -> None:
        self._pasts[request] = past
        self._requests[past] = request

    def _replay(self, batcher: RecordedBatcher, event: list[Any], keys: list[Any]) -> int:
        """Do one event again; gives its time, or the last one's where it has none."""
        kind = event[0]
        if kind == Event.ADDED or kind == Event.REFUSED:
            _, number, now_ns, reserved_ns, arrival_ns, rows, deadline_ns, priority, key, own, *more = event
            widths = more[0] if more and isinstance(more[0], list) else None
            request = request_like(arrival_ns, rows, deadline_ns, priority, keys[key], own, widths)
            past = self._came(number, request, batcher, now_ns, reserved_ns)
            try:
                batcher.add(request, now_ns, reserved_ns)
            except GatewayError as exc:
                self._refused(past, type(exc).__name__, now_ns)
            return int(now_ns)
        if kind == Event.STEPPED or kind == Event.CLOSED:
            _, now_ns, free_slots, workers, *more = event
            absent = kind == Event.STEPPED and more[-1]
            batcher.workers = workers
            self._fresh = iter([batch[0] for batch in more[0]] if kind == Event.STEPPED else more[1:2])
            live = free_slots + len(batcher.in_flight)
            if not self._history.workers or self._history.workers[-1][1] != live:
                self._history.workers.append((now_ns, live))
            absent_before = self._history.absent[-1][1] if self._history.absent else False
            if absent != absent_before:
                self._history.absent.append((now_ns, absent))
            step = batcher.step(now_ns, free_slots)
            for request, error in step.shed:
                self._refused(self._pasts[request], type(error).__name__, now_ns)
            for batch in step.batches:
                self._close(self._numbers[batch], batch, batcher, live)
            return int(now_ns)
        if kind == Event.ENDED:
            _, number, now_ns, compute_ns, ok = event
            batcher.finished(self._running[number], now_ns, compute_ns, ok)
            self._ended(number, now_ns, compute_ns, ok)
            return int(now_ns)
        if kind == Event.BEGUN:
            _, number, now_ns = event
            batcher.begun(self._running[number], now_ns)
            self._batches[number].begun_ns = now_ns
            return int(now_ns)
        if kind == Event.CANCELLED:
            _, number, arrival_ns, now_ns, reserved_ns, failed, _ = event
            found = self._known.find(number, arrival_ns)
            if (
                found is None or found not in self._requests
            ):  # it was over when the segment began: nothing of it was left to cancel
                self._told.append((int(kind), number, arrival_ns, now_ns, reserved_ns, failed, False))
                return int(now_ns)
            batcher.cancel(self._requests[found], reserved_ns, now_ns=now_ns, failed=failed)
            if found.fate in ("waiting", "running"):
                found.fate, found.ended_ns = "failed" if failed else "cancelled", now_ns
            return int(now_ns)
        if kind == Event.RETRIED:
            _, number, arrival_ns, start, rows, now_ns = event
            found = self._known.find(number, arrival_ns)
            if found is None:
                raise ValueError(f"a retry of a request that did not come: {event}")
            found.fate, found.ended_ns = "waiting", None
            found.rows_left += rows
            batcher.retry(Part(self._requests[found], start, rows), now_ns)
            return int(now_ns)
        raise ValueError(f"an event of an unknown kind: {event}")

    def _came(
        self, number: int, request: InferRequest, batcher: RecordedBatcher, now_ns: int | None, reserved_ns: int
    ) -> PastRequest:
        past = PastRequest(
            number=number,
            own_id=request.id,
            arrival_ns=request.arrival_ns,
            rows=request.rows,
            own_deadline_ns=request.deadline_ns,
            limit_ns=deadline_of(request, batcher.slo_ns),
            priority=request.priority,
            shape_key=request.shape_key,
            widths=[(name, array.shape, array.dtype.str) for name, array in request.inputs.items()] or None,
            added_ns=now_ns,
            reserved_ns=reserved_ns,
            queued_rows=batcher.queue_rows,
            rows_left=request.rows,
        )
        self._known.add(past)
        self._is(request, past)
        self._history.requests.append(past)
        return past

    def _refused(self, past: PastRequest, error: str, now_ns: int) -> None:
        past.fate, past.ended_ns = error, now_ns

    def _close(self, number: int, batch: Batch, batcher: RecordedBatcher, workers: int) -> None:
        curve = batcher.service.curves.get(batch.group)
        likely_ns = bound_ns = 0.0
        if curve is not None and curve.ready:
            likely_ns = curve.expected_ns(batch.padded_rows, batch.busy)
            bound_ns = likely_ns * curve.spread
        requests = [self._pasts[part.request] for part in batch.parts]
        past = PastBatch(
            number=number,
            closed_ns=batch.closed_ns,
            reason=batch.reason,
            rows=batch.rows,
            padded_rows=batch.padded_rows,
            busy=batch.busy,
            workers=workers,
            group=batch.group,
            likely_ns=likely_ns,
            bound_ns=bound_ns,
            requests=requests,
            begun_ns=batcher.in_flight.get(batch),
        )
        for request in requests:
            request.batches.append(past)
            if request.fate == "waiting":
                request.fate = "running"
        self._batches[number] = past
        self._history.batches.append(past)

    def _ended(self, number: int, now_ns: int, compute_ns: int, ok: bool) -> None:
        batch = self._batches[number]
        batch.ended_ns, batch.compute_ns, batch.ok = now_ns, compute_ns, ok
        for part, request in zip(self._running[number].parts, batch.requests, strict=True):
            if not ok:
                if request.fate == "running":
                    request.fate, request.ended_ns = "failed", now_ns  # unless it is run once more
                    request.rows_left -= part.rows
                continue
            request.rows_left -= part.rows
            if request.rows_left <= 0 and request.fate == "running":
                request.fate, request.ended_ns = "answered", now_ns
