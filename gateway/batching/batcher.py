"""The queue of one lane and the one place where its requests become batches.

Theory of operation. Requests that may share a batch (equal shape keys) wait in one `Queue`, ordered by deadline. `step` first
answers what is too late, then runs retries alone, then asks the policy queue by queue, the most urgent first, until no worker
is free or the policy waits. The batcher keeps what must hold under every policy: limits, order, splitting of large requests,
expiry, cancellation; the policy only says when and how many.

A batch closes on an arrival or when a worker frees; `Step.wake_at_ns` serves the rest: a policy that holds, and the deadline of
what waits. Nothing here waits or reads a clock.
"""

from collections import deque
from collections.abc import Callable, Collection, Hashable, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple

import msgspec

from gateway.batching.alone import close_alone
from gateway.batching.batch import Batch, Padding, Part
from gateway.batching.forecast import Forecast, first_free_ns, forecast, full_row_ns
from gateway.batching.groups import Groups
from gateway.batching.overload import refused_ns, unless_refused
from gateway.batching.policy import Decision, Policy
from gateway.batching.queue import (
    NEVER,
    PATIENCE_NS,
    BatchLimits,
    Entry,
    LengthGroup,
    Queue,
    State,
    class_of,
    deadline_of,
    virtual_deadline,
)
from gateway.batching.refusals import displaced, hopeless, no_room, too_large, too_late
from gateway.batching.service_model import ServiceModel
from gateway.batching.streams import Streams
from gateway.batching.telling import NOWHERE, Untold
from gateway.config import Ragged
from gateway.errors import GatewayError
from gateway.types import InferRequest


class Shed(NamedTuple):
    """A request that is answered with an error, and not run."""

    request: InferRequest
    error: GatewayError


class Step(msgspec.Struct):
    """What the lane does next.

    batches: to run, at most as many as slots were free. shed: requests to answer with their error, each once; none of their
    rows will be dispatched any more, though parts of a large one may be running.
    wake_at_ns: call step again then, if no arrival and no freed slot came before; calling earlier is harmless, so a timer
    that is already set earlier can stay. None: no timer is needed.
    """

    batches: Sequence[Batch]
    shed: Sequence[Shed]
    wake_at_ns: int | None


_LOOKED_AT: Final = 1024  # queues, for those that are asked at once: 32 of 32, 8 of 128
_ASKED: Final = 4  # at least
_NONE: Final[Sequence[Any]] = []  # of all steps that have none: two lists anew take longer than the step itself
NOTHING: Final = Step(_NONE, _NONE, None)


class Batcher(Untold):
    """Forms the batches of one lane. Every request added leaves exactly once: in batches, shed, or cancelled.

    Life: add and cancel as they come; step after arrivals, when a slot frees and at wake_at_ns; finished for every batch that
    step returned, whatever became of it. max_rows: of a batch; a request of more runs in parts.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        max_rows: int,
        row_sizes: tuple[int, ...] = (),
        workers: int = 1,
        max_queue_rows: int = 4096,
        slo_ns: int | None = None,
        ragged: Ragged | None = None,
    ) -> None:
        """max_rows: 0 for a model without a batch dimension, whose requests run one by one. slo_ns: None: none is promised."""
        self._policy = policy
        self._batched = max_rows > 0
        self.max_rows = max(1, min(max_rows, row_sizes[-1]) if row_sizes else max_rows)
        self._max_queue_rows = max_queue_rows
        # One request never takes all the room that others need.
        self._max_request_rows = max(self.max_rows, max_queue_rows // 2)
        self._slo_ns = slo_ns
        self._ragged = ragged
        self._limits = BatchLimits(self.max_rows, row_sizes, slo_ns)
        self._groups = Groups(ragged, by_length=policy.by_length)
        self._by_length = self._groups.by_length
        policy.bind(self._limits)
        self._own_service = None if policy.service else ServiceModel(self.max_rows, row_sizes)
        self._state = State(workers)
        self._sequence = 0
        self._expires_ns = NEVER  # nothing that waits expires before; raised to what does once that has passed
        self._retries: deque[Part] = deque()
        self._displaced: list[Shed] = []  # by requests of higher classes; not answered yet
        self._events = NOWHERE  # gets what is to be recorded of arrivals
        self._number: Callable[[object], int] = id  # by which they are known there
        self.streams = Streams()  # that have ended, which `finished` is told of as of their first parts
        self._row_ns = 0.0  # service time per row, averaged; 0: nothing has run yet

    def __repr__(self) -> str:
        return f"Batcher(requests={self._state.requests}, rows={self._state.rows}, in_flight={len(self._state.in_flight)})"

    @property
    def slo_ns(self) -> int | None:
        """What is promised; None: nothing."""
        return self._slo_ns

    @property
    def policy(self) -> Policy:
        """What decides, with what it has learned."""
        return self._policy

    @property
    def service(self) -> ServiceModel:
        """What was learned of the backend's speed."""
        service = self._own_service or self._policy.service
        assert service is not None
        return service

    @property
    def lengths(self) -> tuple[int, ...]:
        """The buckets of ragged lengths, by their upper edges. Beyond the last, each length that comes is one of its own."""
        return self._groups.lengths

    @property
    def probe_rows(self) -> tuple[int, ...]:
        """The sizes to run before traffic: of one shape the second as well, which tells whether rows are padded in steps."""
        ends = self.service.probe_rows
        return ends if self._by_length or len(self.service.sizes) < 3 else (*ends, self.service.sizes[1])

    def probe(self, request: InferRequest, now_ns: int) -> Batch:
        """A batch of this request alone, to be run before traffic: it passes the queue by, and `finished` need not know."""
        rows = request.rows if self._batched else 1
        return Batch(
            parts=[Part(request, 0, rows)], rows=rows, padded_rows=self._limits.padded(rows), reason="probe", closed_ns=now_ns,
            group=self._groups.of(request), ragged=self._ragged, batched=self._batched,
        )  # fmt: skip

    @property
    def reserved_ns(self) -> int:
        """Of the SLO of the last request that was added."""
        return self._state.reserved_ns

    @property
    def queue_rows(self) -> int:
        """Rows that wait, retries not counted."""
        return self._state.rows

    @property
    def queue_requests(self) -> int:
        """Requests of which something waits, retries not counted."""
        return self._state.requests

    @property
    def has_work(self) -> bool:
        """Whether anything waits to be run or answered."""
        return bool(self._state.requests or self._retries or self._displaced)

    @property
    def oldest_ns(self) -> int | None:
        """Arrival of the oldest request that waits."""
        return self._state.oldest_ns if self._state.requests else None

    @property
    def workers(self) -> int:
        """Workers that are alive, busy or not."""
        return self._state.workers

    @workers.setter
    def workers(self, workers: int) -> None:
        self._state.workers = workers

    def add(self, request: InferRequest, now_ns: int, reserved_ns: int = 0) -> None:
        """Let a validated request wait. reserved_ns: what answering takes of the SLO after the batch.

        now_ns: of a plain request, its arrival_ns.
        If the queue has no room for it, whole requests of lower classes make room: the next step has them shed.
        Raises: Overloaded, if they would not do or it would be late; DeadlineExceeded; TooLarge, for too many rows in one.
        """
        rows, most = request.rows if self._batched else 1, self._max_queue_rows
        if rows > self._max_request_rows:
            raise self._refused(request, now_ns, reserved_ns, too_large(request, rows, self._max_request_rows, most))
        state = self._state
        slo_ns = self._slo_ns
        # The shortest way for what nearly all are: without a deadline of their own, alike in shape, and of the default class.
        if request.deadline_ns is not None:
            key = deadline_ns = deadline_of(request, slo_ns, reserved_ns)
        elif slo_ns is not None:
            key = deadline_ns = request.arrival_ns + slo_ns - reserved_ns
        else:
            key, deadline_ns = request.arrival_ns + PATIENCE_NS, NEVER  # as `virtual_deadline` has it
        if deadline_ns < now_ns:
            raise self._refused(request, now_ns, reserved_ns, too_late(request, deadline_ns, now_ns))
        if state.rows + rows > most and state.rows and not self._displace(request, rows):
            error = no_room(request, state.rows, rows, most, self._retry_after_s())
            raise self._refused(request, now_ns, reserved_ns, error)
        group = self._groups.of(request) if self._by_length else request.shape_key
        queue = state.queues.get(group)
        if queue is None:
            queue = state.new_queue(group)
        if request.priority:
            key = state.classed(request, deadline_ns, now_ns)
        outlook = queue.outlook
        if outlook is not None and (late_ns := refused_ns(outlook, queue, state, rows, key, deadline_ns, now_ns)):
            self._policy.arrived(queue, state, rows, now_ns)
            raise self._refused(request, now_ns, reserved_ns, hopeless(request, late_ns / 1e9))
        self._sequence = sequence = self._sequence + 1
        queue.push(key, sequence, deadline_ns, rows, request)
        if deadline_ns < self._expires_ns:
            self._expires_ns = deadline_ns
        state.rows += rows
        if reserved_ns != state.reserved_ns:
            state.reserved_ns = reserved_ns
            self._reserves(reserved_ns)
        state.requests += 1
        self._policy.arrived(queue, state, rows, now_ns)
        if (events := self._events) is not NOWHERE:  # here, as a call where it is recorded would cost as much as all the rest
            if request.plain:
                events.append(now_ns)
            else:
                self._added(request, now_ns, reserved_ns)

    def has_room(self, request: InferRequest) -> bool:
        """Whether the queue could take it, be it in the place of others of lower classes."""
        state, rows = self._state, request.rows if self._batched else 1
        over = state.rows + rows - self._max_queue_rows
        fits = over <= 0 or not state.rows or bool(state.whole_below(class_of(request), over, self._batched))
        return fits and rows <= self._max_request_rows

    def cancel(self, request: InferRequest, reserved_ns: int = 0, *, now_ns: int = 0, failed: bool = False) -> bool:
        """Take what still waits of a request out of the queue. True if nothing of it was ever dispatched.

        reserved_ns: as it was added. now_ns, and failed (a run of it has, be it one that goes on): for the recording alone.
        """
        key = virtual_deadline(request, deadline_of(request, self._slo_ns, reserved_ns))
        rows = self._state.remove(self._groups.of(request), request, None if request.rows > self.max_rows else key)
        if not rows and self._displaced:
            kept_out = [refused for refused in self._displaced if refused.request is not request]
            if len(kept_out) < len(self._displaced):
                self._displaced = kept_out
                return True
        if self._retries:
            kept = [part for part in self._retries if part.request is not request]
            if len(kept) < len(self._retries):
                self._retries = deque(kept)
                return False
        return rows == (request.rows if self._batched else 1)

    def retry(self, part: Part, now_ns: int) -> None:
        """Run a part of a failed batch again: alone, and before all that waits."""
        self._retries.append(part)
        self._expires_ns = min(self._expires_ns, deadline_of(part.request, self._slo_ns))

    def step(self, now_ns: int, free_slots: int) -> Step:
        """Decide what runs now. free_slots: batches that can start at once."""
        state = self._state
        decision: Decision | None = None
        if not (self._retries or self._displaced):
            if not state.requests:
                return NOTHING
            expires_ns = self._expires_ns
            if free_slots <= 0 and expires_ns >= now_ns:  # as below, in the shortest way for what nearly always is
                return Step(_NONE, _NONE, expires_ns + 1 if expires_ns < NEVER else None)
            if len(state.queues) == 1 and expires_ns >= now_ns:
                (queue,) = state.queues.values()
                decision = self._policy.decide(queue, state, now_ns, free_slots)
                if state.requests == 1 and self._ragged is None:
                    batch = close_alone(queue, state, self._limits, decision, now_ns, self._batched)
                    if batch is not None:
                        self._expires_ns = NEVER
                        return Step([batch], _NONE, None)
                if not (decision.rows or decision.shed or decision.fill):
                    queue.outlook = decision.outlook
                    wake_at_ns = decision.wake_at_ns
                    if wake_at_ns is None or wake_at_ns > expires_ns:
                        wake_at_ns = expires_ns + 1
                    return Step(_NONE, _NONE, wake_at_ns if wake_at_ns < NEVER else None)
        batches: list[Batch] = []
        shed, self._displaced = self._displaced, []
        if self._expires_ns < now_ns:
            self._expire(now_ns, shed)
        wake_at_ns = NEVER
        try:
            while self._retries and free_slots > len(batches):
                self._run_retry(now_ns, batches)
            free_slots -= len(batches)
            while free_slots > 0 and state.requests:
                wake_at_ns = self._close_one(now_ns, free_slots, batches, shed, decision)
                decision = None
                if wake_at_ns:
                    break
                free_slots -= 1
        except BaseException:
            for batch in batches:  # of a policy that failed: nobody will run them
                state.in_flight.pop(batch, None)
            raise
        if not state.requests and not self._retries:
            self._expires_ns = NEVER
            return Step(batches, shed, None)
        if not wake_at_ns or wake_at_ns > self._expires_ns:
            wake_at_ns = self._expires_ns + 1
        return Step(batches, shed, wake_at_ns if wake_at_ns < NEVER else None)

    def _close_one(self, now_ns: int, free_slots: int, batches: list[Batch], shed: list[Shed], made: Decision | None) -> int:
        """Close a batch of the most urgent queue that has one. 0: there was one; else when to ask again. made: on the only."""
        state, told, more_wait = self._state, len(shed), False
        waiting: Collection[Queue] = state.queues.values()
        if len(waiting) > 1:
            waiting, more_wait = _most_urgent(waiting, self._own_service is None)
        wake_at_ns = NEVER
        for queue in waiting:
            if not queue.entries:  # they were shed with another's
                continue
            decision = made or self._policy.decide(queue, state, now_ns, free_slots)
            queue.outlook = decision.outlook
            if decision.shed:
                self._shed(queue, decision.shed, now_ns, shed)
            for more in decision.fill:
                self._shed(more.queue, more.shed, now_ns, shed)
            if (decision.rows and queue.entries) or any(more.rows for more in decision.fill):
                self._close(queue, decision, now_ns, batches)
                return 0
            ask_at_ns = decision.wake_at_ns
            if ask_at_ns is not None and ask_at_ns < wake_at_ns:
                wake_at_ns = ask_at_ns
        return now_ns + 1 if more_wait and len(shed) > told else wake_at_ns

    def finished(self, batch: Batch, now_ns: int, compute_ns: int, ok: bool) -> None:
        """Take a batch off the running ones. compute_ns: execution alone; ok: False if it failed or was lost."""
        self._state.in_flight.pop(batch, None)
        if ok:
            row_ns, before_ns = compute_ns / batch.rows, self._row_ns
            self._row_ns = before_ns + 0.1 * (row_ns - before_ns) if before_ns else row_ns
            if self._own_service is not None:
                self._own_service.observe(batch.group, batch.padded_rows, batch.busy, max(compute_ns, now_ns - batch.closed_ns))
        self._policy.finished(batch, now_ns, compute_ns, ok)

    def forecast(self, request: InferRequest, now_ns: int, free_slots: int, *, mean: bool = False) -> Forecast:
        """When the request would be done, were it added now. free_slots: batches that could start now. mean: see `Forecast`."""
        state, group, slo_ns, rows = self._state, self._groups.of(request), self._slo_ns, request.rows if self._batched else 1
        mixed = state.requests and now_ns < state.mixed_until_ns  # of several classes: it may pass some of them
        key = virtual_deadline(request, deadline_of(request, slo_ns, state.reserved_ns)) if mixed else None
        told = forecast(self.service, state, group, rows, now_ns, free_slots, slo_ns, streams=self.streams, mean=mean, key=key)
        return unless_refused(told, state, group, request, rows, slo_ns, now_ns)

    def wait_ns(self, now_ns: int, free_slots: int) -> float:
        """How long until a worker is predicted to be free; 0: one is, or none lives."""
        return first_free_ns(self.service, self._state, now_ns, free_slots, self.streams)

    def due_before(self, when_ns: int, most: int) -> list[InferRequest]:
        """Requests that wait whole, and whose deadline is before when_ns: at most so many, retries first."""
        found = [
            part.request
            for part in islice(self._retries, most)
            if (part.whole or not self._batched) and deadline_of(part.request, self._slo_ns) < when_ns
        ]
        return found + self._state.whole_before(when_ns, most - len(found), self._batched)

    def _expire(self, now_ns: int, shed: list[Shed]) -> None:
        for _, _, deadline_ns, _, request in self._state.take_expired(now_ns):
            shed.append(Shed(request, too_late(request, deadline_ns, now_ns)))
        told = {request for request, _ in shed} if self._retries else ()
        for request in {part.request: None for part in self._retries}:
            deadline_ns = deadline_of(request, self._slo_ns)
            if deadline_ns < now_ns or request in told:  # as other rows of it waited, for less: see `deadline_of`
                self.cancel(request)
                if request not in told:
                    shed.append(Shed(request, too_late(request, deadline_ns, now_ns)))
        self._expires_ns = self._state.least_deadline_ns
        self._expires_ns = min([self._expires_ns, *[deadline_of(part.request, self._slo_ns) for part in self._retries]])

    def _shed(self, queue: Queue, entries: Sequence[Entry], now_ns: int, shed: list[Shed]) -> None:
        retry_after_s = self._retry_after_s()
        for entry in self._state.unbegun(queue, entries, now_ns):
            self._state.drop(queue, entry)
            shed.append(Shed(entry[4], hopeless(entry[4], retry_after_s, begun=self._batched and entry[3] < entry[4].rows)))

    def _displace(self, request: InferRequest, rows: int) -> bool:
        """Make room for so many rows of a request among those of lower classes, first where it is last in line.

        What has begun to run stays. False: there are too few, and they stay.
        """
        priority = class_of(request)
        given_up = self._state.whole_below(priority, self._state.rows + rows - self._max_queue_rows, self._batched)
        retry_after_s = self._retry_after_s()
        for entry in given_up:
            self._state.drop(self._state.queues[self._groups.of(entry[4])], entry)
            self._displaced.append(Shed(entry[4], displaced(entry[4], retry_after_s)))
        return bool(given_up)

    def _run_retry(self, now_ns: int, batches: list[Batch]) -> None:
        part = self._retries.popleft()
        self._dispatch([part], part.rows, "retry", now_ns, self._groups.of(part.request), 0, batches)

    def _close(self, queue: Queue, decision: Decision, now_ns: int, batches: list[Batch]) -> None:
        parts: list[Part] = []
        limit = min(decision.rows, queue.entries[0][3]) if queue.alone else decision.rows  # not every policy knows
        reason, fill, most = decision.reason, decision.fill, self.max_rows
        padding = None if self._ragged is None or self._by_length else Padding(self._ragged, parts)
        rows = self._take(queue, limit if limit < most else most, parts, padding, now_ns) if limit else 0
        group = queue.group if rows else next(more.queue.group for more in fill if more.rows)
        for more in [each for each in fill if each.rows]:
            padding = padding or (None if self._ragged is None else Padding(self._ragged, parts))
            rows += self._take(more.queue, min(more.rows, most - rows), parts, padding, now_ns)
            other = more.queue.group
            if isinstance(group, LengthGroup) and isinstance(other, LengthGroup) and group.length < other.length:
                group = other  # the longest: what the model will see
        self._state.rows -= rows
        reason = "full" if rows >= most and reason == "idle" else reason
        self._dispatch(parts, rows, reason, now_ns, group, decision.expected_ns, batches)

    def _take(self, queue: Queue, limit: int, parts: list[Part], padding: Padding | None, now_ns: int) -> int:
        """Move requests from the front into parts, `limit` rows at most; but one whole request if there are no parts yet."""
        entries, state = queue.entries, self._state
        if queue.rows == len(entries) and self._batched and padding is None:  # one row each, as mostly
            taken = queue.pop_many(limit) if len(entries) > 1 else (queue.pop(),)
            parts += [Part(entry[4], entry[4].rows - 1, 1) for entry in taken]
            state.requests -= len(taken)
            return len(taken)
        rows = 0
        while entries and rows < limit:
            _, _, _, waiting, request = entries[0]
            start, rest = request.rows - waiting if self._batched else 0, waiting
            if rows + waiting > limit:
                if waiting > self.max_rows or start:
                    rest = limit - rows  # larger than a batch: its parts fill what is left of batches
                elif parts:
                    break
            if padding is not None and not padding.takes(request, rest):
                break
            if rest == waiting:
                queue.pop()
                state.requests -= 1
            else:
                self._sequence += 1  # what is left of a large one lets those pass that came meanwhile, until its last batch
                yields = waiting - rest > self.max_rows and state.requests > 1
                row_ns = full_row_ns(self.service, queue.group, self.max_rows, state.workers) or self._row_ns
                queue.take_rows(rest, (state.behind(entries[0], now_ns, row_ns), self._sequence) if yields else None)
            parts.append(Part(request, start, rest))
            rows += rest
        return rows

    def _dispatch(
        self, parts: list[Part], rows: int, reason: str, now_ns: int, group: Hashable, expected_ns: int, batches: list[Batch]
    ) -> None:
        limits, in_flight = self._limits, self._state.in_flight
        batch = Batch(
            parts=parts, rows=rows, padded_rows=limits.padded(rows) if limits.row_sizes else rows, reason=reason,
            closed_ns=now_ns, group=group, left_rows=self._state.rows, expected_ns=expected_ns, ragged=self._ragged,
            batched=self._batched, busy=len(in_flight) + 1,
        )  # fmt: skip
        in_flight[batch] = None
        batches.append(batch)

    def _retry_after_s(self) -> float | None:
        """The time in which what waits now will have been served."""
        return self._state.served_ns(self._row_ns) / 1e9 if self._row_ns else None


def _most_urgent(queues: Collection[Queue], learns: bool) -> tuple[Sequence[Queue], bool]:
    """Those that are asked at once, in order, and whether more wait. learns: of a policy that does.

    Such a policy looks at many queues to decide on one. So where many wait, others on the event loop have their turn between
    decisions that shed; and while the most urgent are held, so are the others.
    """
    waiting = sorted([queue for queue in queues if queue.entries], key=_urgency)
    most = max(_ASKED, _LOOKED_AT // max(1, len(waiting))) if learns else len(waiting)
    return waiting[:most], len(waiting) > most


def _urgency(queue: Queue) -> tuple[int, int]:
    return queue.entries[0][:2]
