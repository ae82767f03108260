"""One queue and one runner of one model version on one backend: the only place where a request waits.

Life: open -> submit … -> close. Everything happens on the event loop. A lane has the requests, from their arrival to their
answer; `runs` has the batches that they are made into.

Whatever is called from here may raise whatever it likes, KeyboardInterrupt included: it is logged, costs at most the requests
it was called for, which are answered with InternalError, and the lane goes on.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from backends.base import LastPart, ModelSpec, Tensors, words_of
from gateway.batching.batch import Batch, Part
from gateway.batching.batcher import Batcher
from gateway.batching.fairness import SharedWorkers
from gateway.batching.forecast import Forecast
from gateway.batching.queue import NEVER, LengthGroup
from gateway.clock import Clock
from gateway.engine.failed_requests import fields_of
from gateway.engine.failure_log import FailureLog
from gateway.engine.killers import Killers
from gateway.engine.place import LanePlace, OnAnswer, OnAnswerPart
from gateway.engine.recorders import LaneGauges, LaneMetrics
from gateway.engine.reserve import Reserve
from gateway.engine.runner import BatchRunner, Execution
from gateway.engine.runs import LaneObserver, Runs
from gateway.engine.split_answer import SplitAnswer
from gateway.errors import (
    BackendFailed,
    BackendUnreachable,
    Cancelled,
    Code,
    DeadlineExceeded,
    GatewayError,
    InternalError,
    NotReady,
    Overloaded,
    Unavailable,
    shortened,
    shutting_down,
)
from gateway.types import InferRequest, InferResponse

_HANDED_OVER: Final = 32  # at once
_TURN_NS: Final = 4_000_000  # answers are encoded for so long in one turn of the loop, and the one that it is used up with
_REST_NS: Final = 1_000_000  # between two turns of copying what may be long
_FAULTS: Final = (Code.BACKEND_FAILED, Code.INTERNAL)  # the model's, and ours

log = logging.getLogger(__name__)


class _Waiting(msgspec.Struct, kw_only=True, eq=False):
    """One accepted request until it is answered, and its place.

    failed: a run of it has, of a part at least. split: what is done of it, if only parts are.
    batch: of a decoupled model, which has given a first part of the answer.
    """

    lane: "Lane"
    request: InferRequest
    on_answer: OnAnswer
    reserved_ns: int
    on_answer_part: OnAnswerPart | None = None
    batch: Batch | None = None
    failed: bool = False
    split: SplitAnswer | None = None

    def cancel(self) -> None:
        self.lane.cancel(self.request)

    def taken(self) -> None:
        if self.batch is not None:
            self.lane.runner.taken(self.batch)

    @property
    def ran(self) -> bool:
        # What fits into a batch never waits in part: to look through all that runs for each would make a hand-over long.
        in_parts = self.request.rows > self.lane.batcher.max_rows
        return self.failed or self.split is not None or (in_parts and self.request in _begun(self.lane))


class Lane:
    """See the module. Every accepted request is answered exactly once."""

    def __init__(
        self,
        *,
        name: str,
        spec: ModelSpec,
        batcher: Batcher,
        runner: BatchRunner,
        metrics: LaneMetrics,
        clock: Clock,
        call_soon: Callable[[Callable[[], None]], object],
        trace: bool = False,
        shared: SharedWorkers | None = None,
        share_weight: float = 1.0,
    ) -> None:
        """name: "model:version/backend", for messages. runner: open. call_soon: the loop's.

        shared: whom to ask for workers, beside the runner's own limit; None: it may use all of the runner's.
        """
        self.name = name
        self.spec = spec
        self.batcher = batcher
        self.runner = runner
        self.metrics = metrics
        self.observer: LaneObserver | None = None
        self.runs = Runs(
            self, name=name, spec=spec, batcher=batcher, runner=runner, metrics=metrics, clock=clock, call_soon=call_soon,
            trace=trace, shared=shared,
        )  # fmt: skip
        self._clock = clock
        self._call_soon = call_soon
        self._shared = shared
        self._waiting: dict[InferRequest, _Waiting] = {}
        self._left: set[InferRequest] = set()  # cancelled in this tick of the loop
        self._behind: deque[tuple[Part, Tensors]] = deque()  # done, and to be answered in the loop's next turns
        self._reserve = Reserve(batcher.slo_ns)
        self._killers = Killers()
        self._failures = FailureLog()
        self._closing = False
        self._empty = asyncio.Event()
        runner.on_change = self._runner_changed
        metrics.watch(self._gauges)
        if shared is not None:
            shared.join(self.runs, share_weight)

    def __repr__(self) -> str:
        return f"<Lane {self.name}: {len(self._waiting)} waiting, {len(self.runs.running)} batches running>"

    @property
    def available(self) -> bool:
        """Whether a request sent here can be expected to be run."""
        return not self._closing and self.runner.available

    @property
    def pending(self) -> int:
        """Requests accepted and not answered."""
        return len(self._waiting)

    def forecast(self, request: InferRequest, now_ns: int, *, mean: bool = False) -> Forecast:
        """When the request would be done, were it submitted now. mean: as `Forecast` has it."""
        # While others have all workers, one that nobody here uses still counts as alive: it waits for them.
        free_slots = self.runner.free_slots or int(not self.runs.running and self.runner.lives)
        if self._shared is None:
            return self.batcher.forecast(request, now_ns, free_slots, mean=mean)
        free_slots = min(free_slots, max(self._shared.free, int(not self.runs.running)))
        forecast = self.batcher.forecast(request, now_ns, free_slots, mean=mean)
        return msgspec.structs.replace(forecast, wait_ns=max(forecast.wait_ns, self.runs.shared_wait_ns(now_ns)))

    def submit(self, request: InferRequest, on_answer: OnAnswer, on_answer_part: OnAnswerPart | None = None) -> LanePlace:
        """Accept a request. on_answer gets its one answer or error on the loop, never within this call.

        on_answer_part: for a decoupled model, which waits when PARTS_AHEAD parts are not `taken`.

        Raises: NotReady, BackendUnreachable, Overloaded, DeadlineExceeded, InvalidArgument (more rows than the queue may hold),
        BackendFailed (it has ended a session before). Whatever it raises, the request is not here, and on_answer is not called.
        """
        if self._closing:
            raise NotReady(f"model '{request.model}' is being unloaded")
        if not self.runner.available:
            raise BackendUnreachable(f"backend {self.name} has no live session", retry_after_s=1.0)
        now_ns = request.arrival_ns if request.plain else self._clock.now_ns()
        if self._killers.any and self._killers.has(request, now_ns):
            raise BackendFailed(f"{self.name}: the same inputs have ended a session of the model less than a minute ago")
        reserved_ns = self._reserve.take_ns(request.arrival_ns) if self._reserve.most_ns else 0
        self.batcher.add(request, now_ns, reserved_ns)
        try:
            place = self._waiting[request] = _Waiting(
                lane=self, request=request, on_answer=on_answer, reserved_ns=reserved_ns, on_answer_part=on_answer_part
            )
            self.runs.arrived(request)
        except BaseException:
            self._waiting.pop(request, None)
            self.batcher.cancel(request, reserved_ns, now_ns=now_ns)
            raise
        return place

    def cancel(self, request: InferRequest) -> None:
        """Forget a request that nobody waits for any more: out of the queue now, or its result is dropped.

        A batch that nobody waits for is cancelled, once this tick of the loop is over. on_answer gets Cancelled.
        """
        if request not in self._waiting:
            return
        if not self._left:
            self._call_soon(self._cancel_batches)
        self._left.add(request)
        self._end(request, Cancelled("the client cancelled the request"))

    def _cancel_batches(self) -> None:
        """Cancel what only ran for requests that were cancelled in one tick: a client may cancel thousands at once."""
        left, self._left = self._left, set()
        for batch in list(self.runs.running):
            requests = {part.request for part in batch.parts}
            if not requests.isdisjoint(left) and self._waiting.keys().isdisjoint(requests):
                self.runs.cancel(batch)

    def hand_over(self, now_ns: int) -> None:
        """Give up what waits and will be late, as no worker frees before its deadline, to lanes that can still be in time.

        Without a live session that is all that waits.
        """
        if not self._lives:
            self._hand_over(self.batcher.due_before(NEVER + 1, _HANDED_OVER), now_ns)
            return
        waits = self.batcher.has_work
        wait_ns = max(self.batcher.wait_ns(now_ns, self.runner.free_slots), self.runs.shared_wait_ns(now_ns)) if waits else 0.0
        if wait_ns:
            self._hand_over(self.batcher.due_before(round(now_ns + wait_ns), _HANDED_OVER), now_ns, as_one=True)

    def hand_over_all(self, now_ns: int) -> None:
        """Give up all that waits, as far as other lanes can take it."""
        self._hand_over(self.batcher.due_before(NEVER + 1, self.pending), now_ns)

    def _hand_over(self, requests: list[InferRequest], now_ns: int, *, as_one: bool = False) -> None:
        """as_one: where the first cannot be taken over, neither can those behind it, and are not asked for."""
        for request in requests:
            try:
                if self._taken_over(request, now_ns):
                    self._end(request, Overloaded(f"backend {self.name} is behind its forecast"))
                elif as_one:
                    return
            except BaseException:
                log.exception("%s: a request could not be handed over", self.name)

    def _taken_over(self, request: InferRequest, now_ns: int) -> bool:
        """Whether it is another lane's now: end it here."""
        observer, waiting = self.observer, self._waiting.get(request)
        return observer is not None and waiting is not None and observer.takes_over(request, waiting.on_answer, now_ns)

    @property
    def _lives(self) -> bool:
        """Whether a session is there, or will be as soon as it is needed."""
        return bool(self.runs.running) or self.runner.lives or self.runner.cold

    def give_up(self) -> None:
        """The server ends: answer all that is here, and hand nothing over; what runs is cancelled where that can be done."""
        begun = _begun(self)
        for request, waiting in list(self._waiting.items()):
            self._end(request, shutting_down(ran=request.ran or request in begun or waiting.ran))
        for batch in list(self.runs.running):
            self.runs.cancel(batch)

    async def close(self) -> None:
        """Refuse what comes, answer what is here, then free the runner."""
        self._closing = True
        if self._waiting:
            await self._empty.wait()
        self.runs.stop_timers()
        try:
            await self.runner.close()
        finally:
            self.metrics.watch(None)
            if self._shared is not None:
                self._shared.leave(self.runs)

    def _gauges(self) -> LaneGauges:
        service, lengths = self.batcher.service, self.batcher.lengths
        learned = tuple(
            (str(group.length) if isinstance(group, LengthGroup) else "", rows, expected_s, expected_s * curve.spread)
            for group, curve in service.curves.items()
            # Of other shapes, and of lengths beyond the last bucket, there can be as many as clients think of.
            if curve.ready and (group is None or (isinstance(group, LengthGroup) and group.length in lengths))
            for rows in service.probe_rows
            for expected_s in (curve.expected_ns(rows) / 1e9,)
        )
        now_ns = self._clock.now_ns()
        oldest_ns = self.batcher.oldest_ns
        return LaneGauges(
            self.batcher.queue_rows, self.batcher.queue_requests, self.runner.sessions, len(self.runs.running),
            service_s=learned, oldest_ns=now_ns - oldest_ns if oldest_ns is not None else 0,
            running_ns=sum(now_ns - batch.closed_ns for batch in self.runs.running),
            shifts=sum(curve.resets for curve in service.curves.values()), cold_start_ns=self.runner.cold_start_ns,
        )  # fmt: skip

    def _runner_changed(self) -> None:
        if not self.runner.available:
            self.refuse_waiting(BackendUnreachable(f"backend {self.name} has no live session", retry_after_s=1.0))
        elif self._waiting and not self._lives:
            self.hand_over_all(self._clock.now_ns())
        self.runs.step()

    # what the runs tell

    def refuse_waiting(self, error: GatewayError) -> None:
        """Answer what neither runs nor has just ended."""
        begun = _begun(self)
        for request, waiting in [each for each in self._waiting.items() if each[0] not in begun]:
            self._end(request, error.after_run() if waiting.ran and isinstance(error, Unavailable) else error)

    def overdue(self, batch: Batch, parts: Sequence[Part], now_ns: int) -> list[Part]:
        """Tell those whose deadline has passed. Gives those that wait on.

        The run goes on: others may wait for it, and it cannot be known to be stuck. That of a decoupled model is cancelled.
        """
        waiting_on = []
        for part in parts:
            request = part.request
            waiting = self._waiting.get(request)
            if waiting is None or waiting.batch is not None:
                continue
            if request.deadline_ns is None or request.deadline_ns > now_ns:
                waiting_on.append(part)
                continue
            limit_ms = (request.deadline_ns - request.arrival_ns) / 1e6
            late = DeadlineExceeded(f"{self.name}: still running at the deadline, {limit_ms:.1f} ms after arrival")
            self._end(request, late)
            if self.spec.decoupled:
                self.runs.cancel(batch)
        return waiting_on

    def part_made(self, batch: Batch, outputs: Tensors) -> None:
        request = batch.parts[0].request
        if (waiting := self._waiting.get(request)) is None:
            self.runs.cancel(batch)  # again: it is over
            return
        try:
            if waiting.batch is None:
                waiting.batch = batch
                self.batcher.begun(batch, self._clock.now_ns())
            if waiting.on_answer_part is None:  # a copy, whose answer nobody reads: that it begins is all that is asked of it
                self.answer(request, None)
                self.runs.cancel(batch)
                return
            waiting.on_answer_part(_response(request, outputs))
        except BaseException:
            log.exception("%s: a part of an answer was not taken", self.name)
            self._end(request, InternalError("internal error"))
            self.runs.cancel(batch)

    def done(self, batch: Batch, pieces: list[Tensors], now_ns: int) -> None:
        """now_ns: when it had ended."""
        if self.spec.decoupled:
            self.answer(batch.parts[0].request, None)
            return
        behind = self._behind
        if behind:
            behind += [*zip(batch.parts, pieces, strict=True)]
            return
        if len(pieces) > 1:
            behind += [*zip(batch.parts[1:], pieces[1:], strict=True)]
        self._answer_part(batch.parts[0], pieces[0])
        if self._reserve.most_ns:
            try:
                self._reserve.learn(self._clock.now_ns() - now_ns)
            except BaseException:
                log.exception("%s: how long it took to answer could not be learned", self.name)
        if behind:
            self._answer_behind(now_ns)

    def _answer_behind(self, began_ns: int | None = None) -> None:
        """Answer what is done, and what has no time any more in another turn of the loop. began_ns: this one's; None: now."""
        behind, now_ns = self._behind, self._clock.now_ns
        until_ns = (began_ns or now_ns()) + _TURN_NS
        while now_ns() < until_ns:
            self._answer_part(*behind.popleft())
            if not behind:
                return
        try:
            if behind[0][0].whole:
                self._call_soon(self._answer_behind)
            else:  # where the loop went on at once, other sessions, whose threads need the interpreter, began 100 ms late
                self._clock.call_at(now_ns() + _REST_NS, self._answer_behind)
        except BaseException:
            log.exception("%s: what is done is answered at once, as another turn could not be had", self.name)
            while behind:
                self._answer_part(*behind.popleft())

    def _answer_part(self, part: Part, outputs: Tensors) -> None:
        """Answer one that is done, or do some of what that takes: then it is the first that is behind."""
        request = part.request
        try:
            if part.rows == request.rows and request in self._waiting:  # as mostly
                self.answer(request, _response(request, outputs))
            elif not self._take(part, outputs):
                self._behind.appendleft((part, outputs))
        except BaseException as exc:  # no memory for it, or an output that the model leaves out
            log.exception("%s: the outputs of a request could not be put together", self.name)
            self._end(request, BackendFailed(f"{self.name}: the outputs do not make an answer: {words_of(exc)}"))

    def _take(self, part: Part, outputs: Tensors) -> bool:
        """Of what a batch has given for some rows of a request, or for one that is over; whether that was all of it."""
        request = part.request
        waiting = self._waiting.get(request)
        if waiting is None:
            self.metrics.dropped()  # it is over: cancelled, past its deadline, or another part of it failed
            return True
        split = waiting.split = waiting.split or SplitAnswer(request.rows)
        if not split.add(part.start, part.rows, outputs):
            return False
        if (joined := split.whole()) is not None:
            self.answer(request, _response(request, {name: joined[name] for name in outputs}))
        return True

    def failed(self, batch: Batch, execution: Execution, error: GatewayError, now_ns: int) -> None:
        """Run each part once more by itself, unless it is to blame: another request, or the session, may have been."""
        lost = execution.session_lost
        alone = len(batch.parts) == 1
        if execution.self_inflicted and alone:
            try:
                self._killers.add(batch.parts[0].request, now_ns)
            except BaseException:  # no memory for a copy of its inputs
                log.exception("%s: inputs that have ended a session could not be noted", self.name)
            # Not "unreachable", which clients take for safe to send again.
            error = BackendFailed(error.message)
        for part in batch.parts:
            to_blame = alone and (not lost or execution.self_inflicted)
            try:
                if self._part_failed(part, batch, execution, error, now_ns, to_blame=to_blame):
                    self._tell(part.request, error, execution.trace, now_ns)
            except BaseException:
                log.exception("%s: a failed request could not be run again", self.name)
                self._end(part.request, error)
        if lost and self._waiting and not self._lives:
            self.hand_over_all(now_ns)

    def _part_failed(
        self, part: Part, batch: Batch, execution: Execution, error: GatewayError, now_ns: int, *, to_blame: bool
    ) -> bool:
        """Whether this was the end of the request."""
        waiting = self._waiting.get(part.request)
        if waiting is None:
            return False
        lost, answered = execution.session_lost, waiting.batch is not None  # a part of its answer has left
        ends = batch.reason == "retry" or to_blame or answered or not self.runner.available
        ends = ends or (execution.begun and part.request.of_sequence)
        waiting.failed |= execution.begun
        if ends or (lost and self._taken_over(part.request, now_ns)):
            if lost and isinstance(error, Unavailable) and waiting.ran:
                error = error.after_run()
            self._end(part.request, error, failed=True)
            return True
        self.metrics.retried()
        self.batcher.retry(part, now_ns)
        return False

    def _tell(self, request: InferRequest, error: GatewayError, trace: str, now_ns: int) -> None:
        """Leave in the log what the client is told only in short."""
        left_out = self._failures.take(now_ns) if error.code in _FAULTS else None
        if left_out is not None:
            others = f" ({left_out} failures before it are left out)" if left_out else ""
            text = "\n".join(filter(None, (error.message, trace.rstrip())))
            name, version, fields = request.model, request.version, fields_of(request, error.code)
            own_id = shortened(request.id or fields.get("request_id", ""))
            fields |= {"backend": self.name, "left_out": left_out}
            log.error("model %s version %s, request id %r%s: %s", name, version, own_id, others, text, extra={"fields": fields})

    # answering

    def _end(self, request: InferRequest, error: GatewayError, *, failed: bool = False) -> None:
        """Answer with an error; what still waits of the request is not run. failed: a run of it has."""
        try:
            if (waiting := self._waiting.get(request)) is not None:
                self.batcher.cancel(request, waiting.reserved_ns, now_ns=self._clock.now_ns(), failed=failed)
        except BaseException:
            log.exception("%s: a request could not be taken out of the queue", self.name)
        self.answer(request, error)

    def answer(self, request: InferRequest, outcome: InferResponse | GatewayError | None) -> None:
        waiting = self._waiting.pop(request, None)
        if waiting is None:
            return  # a split request, of which another part was refused before
        try:
            waiting.on_answer(outcome)
        except BaseException:
            # Whoever asked answers its client itself, whatever happens there; the others of the batch wait for theirs.
            log.exception("%s: the answer to a request was not taken", self.name)
        if self._closing and not self._waiting:
            self._empty.set()


def _begun(lane: Lane) -> set[InferRequest]:
    """Those of which something runs, or has just ended."""
    begun = {part.request for batch in lane.runs.running for part in batch.parts}
    begun.update(part.request for part in lane.runs.answering)
    begun.update(part.request for part, _ in lane._behind)
    return begun


def _response(request: InferRequest, outputs: Tensors) -> InferResponse:
    """What a client gets of a model's outputs. Raises: KeyError, for one that it asked for and the model left out."""
    last = isinstance(outputs, LastPart)
    if request.outputs:
        outputs = {output.name: outputs[output.name] for output in request.outputs}
    return InferResponse(request.model, request.version, request.id, outputs, last=last)
