"""One worker: a thread, the session it opened, and at most one batch.

The loop hands it work through a queue of its own; it concatenates, runs, and posts the end back to the loop. So the loop never
waits for a model, and a session is only ever used by the thread that opened it. What is shorter than this way, and only
computes, runs on the loop (`loop_runs`), while the thread waits.

A decoupled model gives an answer in parts. Each is posted to the loop when it is there, and the worker asks its session for the
next while no more than PARTS_AHEAD are on their way to the client: else it waits, and its session with it.
"""

import asyncio
import contextlib
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, cast

import msgspec

from backends.base import (
    BackendError,
    InputRefused,
    Model,
    OutputsRefused,
    RunCancelled,
    Session,
    SessionLost,
    StreamingSession,
    Tensors,
    trace_of,
    words_of,
)
from backends.early_failure import EarlyFailure
from gateway.clock import Clock
from gateway.engine import threads
from gateway.engine.loop_runs import LoopRuns
from gateway.engine.runner import Execution, Work
from gateway.errors import (
    AlreadyExists,
    BackendFailed,
    BackendUnreachable,
    Cancelled,
    GatewayError,
    InvalidArgument,
    Limited,
    NotFound,
    Unsupported,
    UnsupportedMediaType,
    without_folders,
)

_REFUSALS: Final[dict[str, type[GatewayError]]] = {
    error.code.value: error
    for error in (
        InvalidArgument, UnsupportedMediaType, NotFound, AlreadyExists, Unsupported, Cancelled, Limited,
        BackendUnreachable,
    )
}  # fmt: skip

log = logging.getLogger(__name__)


class _ToRun(msgspec.Struct, eq=False):
    """What may be given by position."""

    work: Any
    on_done: Callable[..., None]
    on_part: Callable[..., None] | None
    more: threading.Semaphore | None


class Job(_ToRun, kw_only=True, eq=False):
    """Work that a worker has. on_part: None, unless the model is decoupled. first_part_ns: as of its `Execution`.

    more: parts that may be made. waits: for the client to take what it was given. timed: cpu_ns is wanted, which the thread
    that runs it takes for it. here: it runs on the loop. begun: the session has its inputs, and needs the interpreter no more,
    unless it is in Python. on_begun: to be called on the loop when this is so.
    """

    cancelled: bool = False
    waits: bool = False
    first_part_ns: int | None = None
    timed: bool = False
    here: bool = False
    cpu_ns: int = 0
    begun: bool = False
    on_begun: Callable[[], None] | None = None

    def taken(self) -> None:
        if self.more is not None:
            self.more.release()

    def cancel(self) -> None:
        """Want no more parts."""
        self.cancelled = True
        self.taken()

    def wants_part(self) -> bool:
        """Wait until one more may be made; False: none will be wanted. On the worker's thread."""
        assert self.more is not None
        if not self.more.acquire(blocking=False):
            self.waits = True
            self.more.acquire()
            self.waits = False
        return not self.cancelled


@dataclass(frozen=True, slots=True)
class Reports:
    """What a worker tells, on the loop: a batch has ended; a part of its answer is there; the session's process has ended."""

    ended: "Callable[[Worker, Execution], None]"
    part_made: "Callable[[Worker, Job, Tensors], None]"
    died: "Callable[[Worker, str], None]"


class Worker:
    """See the module."""

    def __init__(self, index: int, name: str, back: threads.WayBack, clock: Clock, reports: Reports, backoff_s: float) -> None:
        """name: for logs and the thread. backoff_s: what was waited before the session is opened. On the running loop."""
        self.index = index
        self.started_ns = 0
        self.moved_ns = 0  # when the last part of an answer was there
        self.current: Job | None = None
        self.proven = False  # it has finished a run, or was ended by one: it is not the session that is at fault
        self.backoff_s = backoff_s
        self.death = ""  # how the session's process ended; empty: it lives
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # when the session, once open, is closed
        self._name = name
        self._thread_name = f"{name}-{index}"
        self._back = back
        self._clock = clock
        self._ended = functools.partial(reports.ended, self)
        self._part_made = functools.partial(reports.part_made, self)
        self._died = functools.partial(reports.died, self)
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._session: Session | None = None
        self._may_write = True  # to what it is given

    # on the loop

    def open(self, model: Model, opened: "asyncio.Future[None]") -> None:
        threads.start(self._thread_name, functools.partial(self._main, model, opened), opened)

    def start(self, job: Job, now_ns: int) -> None:
        self.started_ns = self.moved_ns = now_ns
        self.current = job
        self._jobs.put(job)

    def start_here(self, job: Job, now_ns: int, loop_runs: LoopRuns) -> None:
        """Run it on the loop, soon."""
        self.started_ns = self.moved_ns = now_ns
        self.current = job
        loop_runs.put(functools.partial(self._run_here, job, loop_runs))

    def _run_here(self, job: Job, loop_runs: LoopRuns) -> None:
        if self.current is not job:
            return  # it was given up, and has been answered
        assert self._session is not None
        job.timed = loop_runs.beside > 0
        self._ended(self._run_timed(self._session, job) if job.timed else self._run(self._session, job))

    def runs(self, batch: Work) -> bool:
        return self.current is not None and self.current.work is batch

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits for what it runs."""
        return self.current is not None and self.current.cancelled

    def active_ns(self, now_ns: int) -> int:
        """Since when the session has been at what it does now; one that waits for a client does nothing."""
        return now_ns if self.current is not None and self.current.waits else self.moved_ns

    def taken(self, now_ns: int) -> None:
        if self.current is not None:
            self._move(self.current, now_ns)
            self.current.taken()

    def try_cancel(self, now_ns: int) -> bool:
        """Ask the session to end its run. False if it cannot: parts are then made no more, once it gives the next."""
        if self.current is not None:
            self._move(self.current, now_ns)
            self.current.cancel()
        cancel = getattr(self._session, "cancel", None)
        if cancel is None:
            return False
        cancel()
        return True

    def _move(self, job: Job, now_ns: int) -> None:
        if job.waits:  # it goes on now
            self.moved_ns = now_ns

    def take(self) -> Job:
        current, self.current = self.current, None
        assert current is not None
        return current

    def stop(self) -> None:
        """Let the thread end after what it runs."""
        self._jobs.put(None)

    def abandon(self) -> None:
        """Give the thread up; a session in a process of its own is killed, which also ends the thread."""
        self.stop()
        if self.current is not None:
            self.current.cancel()
        kill = getattr(self._session, "kill", None)  # of a MortalSession
        if kill is not None:
            kill()

    # on its own thread

    def _main(self, model: Model, opened: "asyncio.Future[None]") -> None:
        back = self._back
        try:
            session = self._session = model.open_session(self.index)
            self._may_write = not model.spec.only_computes
        except BaseException as exc:  # also what slipped past the backend's seam: it must not hang the pool
            back.fail(opened, exc)
            return
        watch = getattr(session, "watch", None)  # of a MortalSession
        if watch is not None:
            watch(functools.partial(back.post, self._died))
        back.settle(opened, None)
        while (job := self._jobs.get()) is not None:
            execution = self._run_timed(session, job) if job.timed else self._run(session, job)
            del job  # or its bytes would live until the next batch
            back.post(self._ended, execution)
            del execution
        try:
            session.close()
        except BaseException as exc:  # the session is gone either way
            log.warning("%s: its session did not close well: %s", self._thread_name, words_of(exc))
        back.settle(self.ended, None)

    def _run_timed(self, session: Session, job: Job) -> Execution:
        began_ns = time.thread_time_ns()
        execution = self._run(session, job)
        job.cpu_ns = time.thread_time_ns() - began_ns
        return execution

    def _run(self, session: Session, job: Job) -> Execution:
        started_ns = self._clock.now_ns()
        work = job.work
        error: GatewayError
        lost = own = refused = False
        begun = True
        try:
            if job.on_part is not None:
                self._stream(session, job)
                return Execution(started_ns, self._clock.now_ns(), first_part_ns=job.first_part_ns)
            inputs, parameters = work.concat(kept=self._may_write), work.parameters()
            job.begun = True  # before on_begun is looked at: the loop sets that, and looks at this
            if job.on_begun is not None:
                self._back.post(job.on_begun)
            outputs = session.run(inputs, parameters)
            return Execution(started_ns, self._clock.now_ns(), outputs=outputs)
        except SessionLost as exc:
            lost, own = True, exc.self_inflicted
            begun = exc.begun or job.first_part_ns is not None
            error, trace = (
                (BackendFailed if own else BackendUnreachable)(f"{self._name}: {words_of(exc, traced=True)}"),
                trace_of(exc),
            )
        except RunCancelled as exc:
            error, trace = Cancelled(f"{self._name}: {words_of(exc, traced=True)}"), ""
        except BackendError as exc:
            refused = isinstance(exc, OutputsRefused)
            error, trace = _error_of(exc, self._name), trace_of(exc)
        except GatewayError as exc:
            trace = trace_of(exc)
            error = exc.without_frames()
        except Exception as exc:  # whatever a model raises must end in an answer
            lost = own = isinstance(exc, MemoryError)
            error, trace = BackendFailed(f"{self._name}: {words_of(exc, traced=True)}"), trace_of(exc)
        except BaseException as exc:  # SystemExit, KeyboardInterrupt and the like are meant to end all: they end the session
            lost = own = True
            words = f"{self._name}: the model raised {words_of(exc, traced=True)}, which ends its session"
            error, trace = BackendFailed(words), trace_of(exc)
        return Execution(
            started_ns,
            self._clock.now_ns(),
            error=error,
            session_lost=lost,
            self_inflicted=own,
            begun=begun,
            refused=refused,
            trace=trace,
            first_part_ns=job.first_part_ns,
        )

    def _stream(self, session: Session, job: Job) -> None:
        """Have an answer given in parts. Raises: RunCancelled, and what the session does."""
        stream = cast(StreamingSession, session).stream(job.work.concat(), job.work.parameters())
        with contextlib.closing(stream) as parts:
            while job.wants_part():
                outputs = next(parts, None)
                if outputs is None:
                    return
                if isinstance(outputs, EarlyFailure):
                    error = _error_of(outputs.error, self._name)
                    job.cancelled = True  # nobody waits for its end
                    self._back.post(self._part_made, job, EarlyFailure(error, job.first_part_ns))
                    next(parts, None)
                    try:
                        raise outputs.error
                    finally:
                        del outputs  # or its error's frames would hold it
                job.first_part_ns = job.first_part_ns or self._clock.now_ns()
                self._back.post(self._part_made, job, outputs)
        raise RunCancelled("nobody waits for the rest of the answer")


def _error_of(exc: Exception, name: str) -> GatewayError:
    """What a run that failed is to whoever asked: the model's fault, or his own."""
    text = f"{name}: {words_of(exc, traced=True)}"
    if isinstance(exc, InputRefused):
        return _REFUSALS[exc.code](without_folders(text))
    return BackendFailed(text)
