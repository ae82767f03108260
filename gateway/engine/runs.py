"""The batches of one lane: when they begin, whose deadlines pass meanwhile, and what is learned when they end.

Arrivals of one loop tick are stepped together at its end, so that requests that came in one read share a batch; ends of batches
step at once, so that a free worker never idles for a tick.

Whatever is called from here may raise whatever it likes, as in `lane`.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final, Protocol, cast

import msgspec

from backends.base import ModelSpec, Tensors, trace_of, words_of
from backends.early_failure import EarlyFailure
from gateway.batching.batch import Batch, Part
from gateway.batching.batcher import Batcher
from gateway.batching.fairness import SharedWorkers
from gateway.clock import Clock, Timer
from gateway.engine.place import OnAnswer
from gateway.engine.recorders import LaneMetrics
from gateway.engine.runner import BatchRunner, Execution
from gateway.errors import BackendFailed, Cancelled, GatewayError, InternalError
from gateway.tracing.batches import batch_begun, batch_ended
from gateway.types import InferRequest, InferResponse

_AS_MANY_AS_CAN: Final = 1 << 30
_LONG_NS: Final = 2_000_000  # from a batch's closing to its end: so long that its answers may wait for the next to begin
_ANSWERED_WITHIN_NS: Final = 1_000_000  # of the end, even if the next has not begun

log = logging.getLogger(__name__)
trace_log = logging.getLogger("gateway.trace")


class LaneObserver(Protocol):
    """Who routes between this lane and others."""

    def executed(self, batch: Batch, execution: Execution, now_ns: int, failed: bool) -> None:
        """A batch ended, or has failed early; its requests are answered, or run once more, after this."""
        ...

    def cancelled(self, batch: Batch, now_ns: int) -> None:
        """A batch was ended early, as nobody waited for it any more."""
        ...

    def takes_over(self, request: InferRequest, on_answer: OnAnswer, now_ns: int) -> bool:
        """Whether another lane has taken a request that cannot be served here, or not without running it again.

        on_answer: as it was submitted. If so, it is to get the request's end here, which is not the caller's answer, at once.
        """
        ...


class Requests(Protocol):
    """Those that the batches are made of, until each has its answer: a lane."""

    observer: LaneObserver | None

    @property
    def pending(self) -> int:
        """How many have none yet."""
        ...

    def answer(self, request: InferRequest, outcome: InferResponse | GatewayError | None) -> None: ...

    def refuse_waiting(self, error: GatewayError) -> None:
        """Answer those that have not begun."""
        ...

    def overdue(self, batch: Batch, parts: Sequence[Part], now_ns: int) -> list[Part]:
        """Answer those whose deadline has passed while their batch runs. Gives those that are still to be looked after."""
        ...

    def part_made(self, batch: Batch, outputs: Tensors) -> None:
        """A part of the answer to a batch's one request is there."""
        ...

    def done(self, batch: Batch, pieces: list[Tensors], now_ns: int) -> None:
        """A batch has ended well. pieces: the outputs of each of its parts."""
        ...

    def failed(self, batch: Batch, execution: Execution, error: GatewayError, now_ns: int) -> None: ...


class Runs:
    """See the module. `SharedWorkers` knows a lane by this. On the event loop's thread.

    running: the batches that do. answering: the requests of those that have just ended well, and are not answered yet.
    """

    def __init__(
        self,
        requests: Requests,
        *,
        name: str,
        spec: ModelSpec,
        batcher: Batcher,
        runner: BatchRunner,
        metrics: LaneMetrics,
        clock: Clock,
        call_soon: Callable[[Callable[[], None]], object],
        trace: bool,
        shared: SharedWorkers | None,
    ) -> None:
        """All but the first as `Lane` has them."""
        self.running: set[Batch] = set()
        self.answering: list[Part] = []
        self._requests = requests
        self._name = name
        self._spec = spec
        self._open_outputs = tuple(each.name for each in spec.outputs if len(each.shape) > 1 and each.shape[1] == -1)
        self._order: tuple[str, ...] = ()
        self._on_part = self._part_made if spec.decoupled else None
        self._batcher = batcher
        self.runner = runner
        self._metrics = metrics
        self._clock = clock
        self._call_soon = call_soon
        self._trace = trace
        self._shared = shared
        self._step_due = False
        self._timer: Timer | None = None
        self._timer_at_ns = 0
        self._have_deadlines = False  # a request has come that brought its own
        self._have_traces = False  # one that is traced may be among what waits
        self._overdue_timer: Timer | None = None
        self._overdue_at_ns = 0
        self._done: list[tuple[Batch, list[Tensors], int]] = []  # ended well, and when: to be answered
        self._answer_timer: Timer | None = None
        self._failed_early: set[Batch] = set()  # that still run

    def __repr__(self) -> str:
        return f"<Runs of {self._name}: {len(self.running)} running>"

    @property
    def wants_worker(self) -> bool:
        """Whether something waits and a session is free."""
        return self._batcher.has_work and self.runner.free_slots > 0

    @property
    def undecided(self) -> bool:
        """Whether it is to step again at once: the batcher looks at many queues in parts."""
        return self._timer is not None and self._timer_at_ns <= self._clock.now_ns() + 1

    def free_ns(self, now_ns: int) -> float:
        """How long until the first of its workers is predicted to be free: streams as the batcher knows them."""
        return self._batcher.wait_ns(now_ns, 0)

    def shared_wait_ns(self, now_ns: int) -> float:
        """How long until one of the workers that it shares is predicted to be free; 0: one is, or it shares none."""
        return self._shared.wait_ns(now_ns) if self._shared is not None else 0.0

    def arrived(self, request: InferRequest) -> None:
        """A request waits: look at it once this tick of the loop is over."""
        if request.deadline_ns is not None:
            self._have_deadlines = True
        if request.trace is not None:
            self._have_traces = True
        if not self._step_due:
            self._call_soon(self.step)
            self._step_due = True

    def answer_in(self, order: tuple[str, ...]) -> None:
        """Give outputs in this order, by their names: the runner has another."""
        self._order = order

    def _part_made(self, batch: Batch, outputs: Tensors) -> None:
        if isinstance(outputs, EarlyFailure):  # the session is taken until the run ends, which has nobody to tell then
            now_ns, error = self._clock.now_ns(), cast(GatewayError, outputs.error)
            execution = Execution(batch.closed_ns, now_ns, error=error, first_part_ns=outputs.first_part_ns)
            observer = self._requests.observer
            if observer is not None and _failed(execution, error):
                self._failed_early.add(batch)
                _tell(observer, batch, execution, now_ns, failed=True)
            self._requests.failed(batch, execution, error, now_ns)
        else:
            self._requests.part_made(batch, self._in_order(outputs) if self._order else outputs)

    def _in_order(self, outputs: Tensors) -> Tensors:
        return type(outputs)((name, outputs[name]) for name in self._order)  # the last part stays one

    def stop_timers(self) -> None:
        for timer in (self._timer, self._overdue_timer, self._answer_timer):
            if timer is not None:
                timer.cancel()

    def cancel(self, batch: Batch) -> None:
        try:
            self.runner.cancel(batch)
        except BaseException:
            log.exception("%s: a run could not be cancelled", self._name)

    # beginning

    def step(self) -> None:
        """Look at what waits, now."""
        self._step_due = False
        try:
            if self._shared is None:
                self.start_batches(_AS_MANY_AS_CAN)
            else:
                self._shared.ask(self, self._clock.now_ns())
        except BaseException:
            log.exception("%s: what waits could not be looked at", self._name)

    def start_batches(self, workers: int) -> Sequence[Batch]:
        """Answer what is too late and start what the policy decides on, at most so many batches."""
        now_ns = self._clock.now_ns()
        runner, batcher = self.runner, self._batcher
        free_slots = runner.free_slots
        batcher.workers = free_slots + len(self.running) or 1  # sessions are lost and rebuilt, replicas come and go
        try:
            step = batcher.step(now_ns, free_slots if free_slots < workers else workers)
        except BaseException:
            log.exception("%s: the batching policy failed, what waits is refused", self._name)
            self._requests.refuse_waiting(InternalError(f"{self._name}: internal error while a batch was formed"))
            return []
        batches, wake_at_ns = step.batches, step.wake_at_ns
        for request, error in step.shed:
            self._requests.answer(request, error)
        for batch in batches:
            self._start(batch, now_ns)
        if self._have_traces:
            self._have_traces = batcher.has_work
        # A timer that is set earlier may stay: a step too early is harmless, and setting one costs more.
        if wake_at_ns is not None and (self._timer is None or wake_at_ns < self._timer_at_ns):
            if self._timer is not None:
                self._timer.cancel()
            self._timer_at_ns = wake_at_ns
            self._timer = self._clock.call_at(wake_at_ns, self._woken)
        if runner.cold and self._requests.pending:
            runner.wake()
        elif not runner.free_slots and batcher.has_work:
            runner.want()
        return batches

    def _start(self, batch: Batch, now_ns: int) -> None:
        self.running.add(batch)
        try:
            if self._spec.requests_apart:
                batch.apart = True
            if self._have_traces:
                batch_begun(batch, self._spec.reads_parameters)
            self.runner.start(batch, self._ended, self._on_part)
        except BaseException:
            log.exception("%s: a batch could not be started", self._name)
            error = InternalError(f"{self._name}: internal error while a batch was started")
            self._call_soon(partial(self._ended, batch, Execution(now_ns, now_ns, error=error)))
        if self._have_deadlines:
            try:
                self._expect_deadlines(batch.parts)
            except BaseException:
                log.exception("%s: the deadlines of a batch could not be looked after", self._name)

    def _woken(self) -> None:
        self._timer = None
        self.step()

    # deadlines that pass during a run: those that pass before are the batcher's

    def _expect_deadlines(self, parts: Iterable[Part]) -> None:
        deadlines_ns = [part.request.deadline_ns for part in parts if part.request.deadline_ns is not None]
        if not deadlines_ns:
            return
        first_ns = min(deadlines_ns)
        if self._overdue_timer is not None:
            if self._overdue_at_ns <= first_ns:
                return
            self._overdue_timer.cancel()
        self._overdue_at_ns = first_ns
        self._overdue_timer = self._clock.call_at(first_ns, self._deadline_passed)

    def _deadline_passed(self) -> None:
        self._overdue_timer = None
        now_ns = self._clock.now_ns()
        self._expect_deadlines(
            [part for batch in list(self.running) for part in self._requests.overdue(batch, batch.parts, now_ns)]
        )

    # ending

    def _ended(self, batch: Batch, execution: Execution) -> None:
        self.running.discard(batch)
        now_ns = self._clock.now_ns()
        error = execution.error
        pieces: list[Tensors] = []
        if execution.outputs is not None:
            try:
                outputs = self._in_order(execution.outputs) if self._order else execution.outputs
                pieces = batch.split(outputs, self._open_outputs)
            except GatewayError as exc:
                error = exc.without_frames()  # its frames hold the batch, and this one the error
            except BaseException as exc:
                error = BackendFailed(f"{self._name}: outputs do not fit the batch: {words_of(exc)}")
                execution = msgspec.structs.replace(execution, trace=trace_of(exc))
        try:
            self._learn(batch, execution, error, now_ns)
        except BaseException:
            log.exception("%s: the end of a batch could not be accounted for", self._name)
        if error is not None:
            if batch.trace is not None:  # its requests may be run again
                self._have_traces = True
            try:
                self._requests.failed(batch, execution, error, now_ns)
            except BaseException:
                log.exception("%s: what becomes of a failed batch could not be decided", self._name)
                self._answer_all(batch, error)
            self.step()
            return
        # Before the answers are encoded and written: the worker computes the next batch meanwhile.
        self._done.append((batch, pieces, now_ns))
        self.answering += batch.parts
        if self._batcher.has_work or self._shared is not None:  # as mostly nothing waits, where few ask
            self.step()
            try:
                if now_ns - batch.closed_ns > _LONG_NS and self.runner.try_await_begin(self._answer):
                    if self._answer_timer is None:
                        self._answer_timer = self._clock.call_at(now_ns + _ANSWERED_WITHIN_NS, self._answer)
                    return
            except BaseException:
                log.exception("%s: the next batch could not be waited for", self._name)
        self._answer()

    def _answer(self) -> None:
        """Answer the requests of batches that have ended well."""
        if self._answer_timer is not None:
            self._answer_timer.cancel()
            self._answer_timer = None
        done, self._done = self._done, []
        for batch, pieces, now_ns in done:
            try:
                self._requests.done(batch, pieces, now_ns)
            except BaseException:
                log.exception("%s: a batch could not be answered", self._name)
                self._answer_all(batch, InternalError(f"{self._name}: internal error while a batch was answered"))
        self.answering = []

    def _answer_all(self, batch: Batch, error: GatewayError) -> None:
        for part in batch.parts:
            self._requests.answer(part.request, error)

    def _learn(self, batch: Batch, execution: Execution, error: GatewayError | None, now_ns: int) -> None:
        """Tell all who keep account of batches; first those of whose workers it was one."""
        told = bool(self._failed_early) and batch in self._failed_early
        if told:
            self._failed_early.remove(batch)
        if self._shared is not None:
            self._shared.ended(batch, now_ns)
        # What is promised of a decoupled model is the first part.
        streamed_ns = 0 if execution.first_part_ns is None else execution.streamed_ns
        computed_ns = execution.finished_ns - streamed_ns - execution.started_ns
        failed = error is not None and _failed(execution, error)
        self._batcher.finished(batch, now_ns - streamed_ns, computed_ns, not failed)
        if execution.first_part_ns is not None and not failed and not batch.parts[0].request.copied:
            self._batcher.streams.ended(now_ns - batch.closed_ns)
        self._metrics.batch_done(batch, execution, now_ns, failed=error is not None)
        observer = self._requests.observer
        if observer is not None and (not told or execution.session_lost):
            _tell(observer, batch, execution, now_ns, failed=failed)
        if batch.trace is not None:
            batch_ended(batch.trace, batch, self._name, execution.started_ns, execution.finished_ns, now_ns, error)
        if self._trace:
            trace_log.info(
                "%s %s started_ms=%.3f computed_ms=%.3f returned_ms=%.3f error=%s",
                self._name,
                batch,
                (execution.started_ns - batch.closed_ns) / 1e6,
                (execution.finished_ns - execution.started_ns) / 1e6,
                (now_ns - execution.finished_ns) / 1e6,
                error,
            )


def _tell(observer: LaneObserver, batch: Batch, execution: Execution, now_ns: int, *, failed: bool) -> None:
    if failed and isinstance(execution.error, Cancelled):
        observer.cancelled(batch, now_ns)
    else:
        observer.executed(batch, execution, now_ns, failed=failed)


def _failed(execution: Execution, error: GatewayError) -> bool:
    """error: of the run, or of what it gave. A stream that is left once it has begun went well as far as it went."""
    return not (isinstance(error, Cancelled) and execution.first_part_ns is not None)
