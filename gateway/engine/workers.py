"""k sessions of one model in parallel, each on a thread of its own.

A worker is a thread, the session it opened, and at most one batch. The loop hands it a batch through a queue of its own; it
concatenates, runs, and posts the end back to the loop. So the loop never waits for a model, and a session is only ever used
by the thread that opened it.

A session that is lost (SessionLost, what a model raises that is no Exception, a run past `hang_timeout_s`, a process that
died, whether or not it ran anything) is dropped with its worker, its batch ends with `session_lost`, and a new worker opens a
new session. It does so at once, unless the lost session had been rebuilt and never finished a run, or a rebuild fails: then
after a back-off that doubles from 0.1 s to 5 s. A thread that hangs cannot be ended: it is abandoned, and what it may still
return is ignored. Only isolation `process` gives the memory and the core back, since there the process is killed.

A decoupled model gives an answer in parts. Each is posted to the loop when it is there, and the worker asks its session for the
next while no more than PARTS_AHEAD are on their way to the client: else it waits, and its session with it.

Whatever may hang runs on daemon threads: the loop's own executor would keep the process from ending.
"""

import asyncio
import contextlib
import functools
import logging
import os
import queue
import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

import backends
from backends.base import (
    BackendError,
    LoadFailed,
    Model,
    ModelSpec,
    OutputsRefused,
    RunCancelled,
    Session,
    SessionLost,
    SpecMismatch,
    StreamingSession,
    Tensors,
    trace_of,
    words_of,
)
from gateway.clock import Clock, Timer
from gateway.config import Backend
from gateway.engine.runner import PARTS_AHEAD, Execution, Work
from gateway.engine.session_process import ProcessModel
from gateway.errors import BackendFailed, BackendUnreachable, Cancelled, ConfigError, GatewayError

_BACKOFF_FIRST_S: Final = 0.1
_BACKOFF_MOST_S: Final = 5.0
# A run that does not end when told to may not have begun yet when it was: it is told again.
_CANCEL_AGAIN_S: Final = 0.02
# After this many failed rebuilds in a row with no worker left, what waits is refused rather than kept for a session that may
# never come.
_REBUILDS_BEFORE_UNAVAILABLE: Final = 3
# How long a rebuild waits for the lost session to free what it held: not for ever, since it may hang.
_FREED_S: Final = 0.1
# How long closing waits for sessions, and then for the model, to free what they hold; and after `abort`.
_CLOSE_S: Final = 7.0
_CLOSE_ABORTED_S: Final = 0.5

T = TypeVar("T")
W = TypeVar("W", bound=Work)

log = logging.getLogger(__name__)


class WorkerPool:
    """A `BatchRunner` over the sessions of this process."""

    def __init__(self, backend: Backend, declared: ModelSpec, *, name: str, clock: Clock) -> None:
        """declared: what the operator states of the model; empty inputs or outputs are read from the artifact.

        name: for logs and threads.
        """
        self.on_change: Callable[[], None] = lambda: None
        self._backend = backend
        self._declared = declared
        self._name = name
        self._clock = clock
        self._model: Model | None = None
        self._loop: asyncio.AbstractEventLoop  # from open on
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()
        self._stopped: set[_Worker] = set()
        self._failed_rebuilds = 0
        self._rebuilds: set[asyncio.Task[None]] = set()
        self._watchdog: Timer | None = None
        self._closing = False
        self._aborted = False
        self._drained = asyncio.Event()

    def __repr__(self) -> str:
        return f"<WorkerPool {self._name}: {len(self._idle)} idle, {len(self._busy)} busy, {len(self._rebuilds)} rebuilding>"

    @property
    def free_slots(self) -> int:
        return len(self._idle)

    @property
    def slots(self) -> int:
        return self._backend.sessions

    @property
    def busy(self) -> int:
        """Workers that run a batch now."""
        return len(self._busy)

    @property
    def available(self) -> bool:
        if self._aborted:
            return False
        return bool(self._idle or self._busy) or self._failed_rebuilds < _REBUILDS_BEFORE_UNAVAILABLE

    @property
    def lives(self) -> bool:
        return bool(self._idle or self._busy)

    def want(self) -> None: ...

    @property
    def cold_start_ns(self) -> None:
        return None

    @property
    def cold(self) -> bool:
        return False

    def wake(self) -> None: ...

    async def open(self) -> ModelSpec:
        self._loop = asyncio.get_running_loop()
        try:
            self._model = await self._load()
            for index in range(self._backend.sessions):
                self._admit(await self._open_worker(index))
        except SpecMismatch as exc:
            await self.close()
            raise ConfigError(f"{self._name}: {words_of(exc)}") from exc
        except BackendError as exc:
            await self.close()
            raise BackendFailed(f"{self._name}: failed to load: {words_of(exc)}") from exc
        except asyncio.CancelledError:
            await self.close()
            raise
        return self._model.spec

    def start(
        self, batch: W, on_done: Callable[[W, Execution], None], on_part: Callable[[W, Tensors], None] | None = None
    ) -> None:
        worker = self._idle.pop()
        self._busy.add(worker)
        worker.start(_Run(batch, on_done, on_part), self._clock.now_ns())
        if self._watchdog is None:
            self._watch()

    def taken(self, batch: Work) -> None:
        worker = self._worker_of(batch)
        if worker is not None:
            worker.taken(self._clock.now_ns())

    def cancel(self, batch: Work) -> None:
        worker = self._worker_of(batch)
        if worker is not None and worker.try_cancel(self._clock.now_ns()):
            self._loop.call_later(_CANCEL_AGAIN_S, self.cancel, batch)

    def _worker_of(self, batch: Work) -> "_Worker | None":
        return next((worker for worker in self._busy if worker.runs(batch)), None)

    def abort(self) -> None:
        """Give up what runs and what loads. Sessions in processes are killed; threads are left to themselves.

        The batches end soon, with BackendUnreachable. `close` comes next, and is prompt then.
        """
        self._closing = self._aborted = True
        for task in self._rebuilds:
            task.cancel()
        now_ns = self._clock.now_ns()
        for worker in list(self._busy):
            error = BackendUnreachable(f"{self._name}: the gateway ends before the model has returned")
            self._give_up(worker, now_ns, error)
        self._stop_idle()
        if isinstance(self._model, ProcessModel):
            self._model.close()

    async def close(self) -> None:
        """Wait for what runs (at most the hang timeout, by the watchdog), then free everything.

        Cancelled: as `abort` does, without waiting any longer.
        """
        self._closing = True
        for task in self._rebuilds:
            task.cancel()
        try:
            if self._busy:
                await self._drained.wait()
            if self._watchdog is not None:
                self._watchdog.cancel()
            self._stop_idle()
            within_s = _CLOSE_ABORTED_S if self._aborted else _CLOSE_S
            ended = [worker.ended for worker in self._stopped if not worker.ended.done()]
            if ended:
                await asyncio.wait(ended, timeout=within_s)
            if self._model is not None:
                freed = _on_thread(self._loop, f"{self._name} close", self._model.close)
                await asyncio.wait([freed], timeout=within_s)
                if freed.done() and (failure := freed.exception()):
                    log.warning("%s: the model did not close well: %s", self._name, failure)
        except asyncio.CancelledError:
            self.abort()
            raise

    # the model

    async def _load(self) -> Model:
        """Raises: BackendError."""
        kind: str = self._backend.kind  # type: ignore[attr-defined]  # every kind adds its literal
        options = self._backend.options()
        load: Callable[[], Model]
        if self._backend.isolation == "process":
            self._model = model = ProcessModel(kind, options, self._declared)  # known from now on, to be closed while it loads
            load = model.load
        else:
            load = functools.partial(backends.load, kind, options, self._declared)
        loading = _on_thread(self._loop, f"{self._name} load", load)
        try:
            return await asyncio.shield(loading)
        except asyncio.CancelledError:
            loading.add_done_callback(self._close_late)
            raise

    def _close_late(self, loading: "asyncio.Future[Model]") -> None:
        """Free a model that nobody waited for."""
        if loading.exception() is None:
            _on_thread(self._loop, f"{self._name} close", loading.result().close)

    # workers

    async def _open_worker(self, index: int, backoff_s: float = 0.0) -> "_Worker":
        """backoff_s: what was waited before. Raises: BackendError."""
        assert self._model is not None
        worker = _Worker(index, self._name, self._loop, self._clock, self._ended, self._part_made, self._died, backoff_s)
        opened: asyncio.Future[None] = self._loop.create_future()
        worker.open(self._model, opened)
        try:
            await opened
        except asyncio.CancelledError:
            worker.stop()
            raise
        return worker

    def _admit(self, worker: "_Worker") -> None:
        """Let an open worker run batches, unless its session has died meanwhile."""
        if worker.death:
            self._lose(worker)
        else:
            self._idle.append(worker)

    def _part_made(self, worker: "_Worker", run: "_Run", outputs: Tensors) -> None:
        if worker.current is run:  # else it was given up, and its batch has been answered
            worker.moved_ns = self._clock.now_ns()
            assert run.on_part is not None
            run.on_part(run.work, outputs)

    def _ended(self, worker: "_Worker", execution: Execution) -> None:
        if worker in self._busy:  # else it was given up, and its batch has been answered
            run = self._take_back(worker, execution)
            run.on_done(run.work, execution)

    def _give_up(self, worker: "_Worker", now_ns: int, error: GatewayError, *, self_inflicted: bool = False) -> None:
        """End the batch of a worker that may not return. What its callback raises hurts nobody else."""
        assert worker.current is not None
        execution = Execution(
            worker.started_ns,
            now_ns,
            error=error,
            session_lost=True,
            self_inflicted=self_inflicted,
            first_part_ns=worker.current.first_part_ns,
        )
        run = self._take_back(worker, execution)
        self._loop.call_soon(run.on_done, run.work, execution)

    def _take_back(self, worker: "_Worker", execution: Execution) -> "_Run":
        self._busy.discard(worker)
        if execution.session_lost:
            worker.proven |= execution.self_inflicted
            self._lose(worker)
        else:
            worker.proven = True
            self._failed_rebuilds = 0
            self._admit(worker)
        if self._closing and not self._busy:
            self._drained.set()
        return worker.take()

    def _died(self, worker: "_Worker", death: str) -> None:
        """The session's process has ended. If it ran something, that run ends as well, and says so."""
        worker.death = death
        worker.taken(self._clock.now_ns())  # a run that waits for its client is to find out
        if worker in self._idle:
            self._idle.remove(worker)
            log.warning("%s: session %d is lost while idle: %s", self._name, worker.index, death)
            self._lose(worker)
            self.on_change()

    def _lose(self, worker: "_Worker") -> None:
        """Drop a worker whose session is lost, and open another in its place."""
        worker.abandon()
        if not self._closing:
            task = self._loop.create_task(self._rebuild(worker))
            self._rebuilds.add(task)
            task.add_done_callback(self._rebuilds.discard)

    async def _rebuild(self, lost: "_Worker") -> None:
        backoff_s = 0.0 if lost.proven else _longer(lost.backoff_s)
        await asyncio.wait([lost.ended], timeout=_FREED_S)
        while True:
            await asyncio.sleep(backoff_s)
            try:
                worker = await self._open_worker(lost.index, backoff_s)
            except BackendError as exc:
                self._failed_rebuilds += 1
                backoff_s = _longer(backoff_s)
                why = words_of(exc)
                log.warning(
                    "%s: session %d could not be rebuilt, next try in %.1f s: %s", self._name, lost.index, backoff_s, why
                )
                self._tell()
                continue
            log.info("%s: session %d is rebuilt", self._name, lost.index)
            self._failed_rebuilds = 0
            self._admit(worker)
            self._tell()
            return

    def _tell(self) -> None:
        self._loop.call_soon(self.on_change)  # not within a rebuild, which what it raises must not end

    def _stop_idle(self) -> None:
        workers, self._idle = self._idle, []
        for worker in workers:
            worker.stop()
        self._stopped.update(workers)

    # a run past the limit

    def _watch(self) -> None:
        # One timer for the pool, armed for the oldest run: exact per batch timers would cost more than a batch.
        self._watchdog = None
        now_ns = self._clock.now_ns()
        limit_ns = round(self._backend.hang_timeout_s * 1e9)
        for worker in [worker for worker in self._busy if now_ns - worker.active_ns(now_ns) >= limit_ns]:
            log.error(
                "%s: session %d ran for over %g s and is abandoned", self._name, worker.index, self._backend.hang_timeout_s
            )
            error = BackendFailed(
                f"{self._name}: the model did not return within hang_timeout_s {self._backend.hang_timeout_s:g}"
            )
            self._give_up(worker, now_ns, error, self_inflicted=True)
        if self._busy:
            oldest_ns = min(worker.active_ns(now_ns) for worker in self._busy)
            self._watchdog = self._clock.call_at(oldest_ns + limit_ns, self._watch)


def _longer(backoff_s: float) -> float:
    return min(max(2 * backoff_s, _BACKOFF_FIRST_S), _BACKOFF_MOST_S)


def _on_thread(loop: asyncio.AbstractEventLoop, name: str, function: Callable[[], T]) -> "asyncio.Future[T]":
    """Call a model's function on a daemon thread. The future raises: BackendError, whatever the function raises.

    Of all else, a future does not take StopIteration, and an await hands on as its own what is no Exception.
    """
    future: asyncio.Future[T] = loop.create_future()
    pid = os.getpid()

    def main() -> None:
        try:
            settle = functools.partial(_settle, future, function())
        except BackendError as exc:
            settle = functools.partial(_fail, future, exc)
        except BaseException as exc:
            settle = functools.partial(_fail, future, LoadFailed(words_of(exc)))
        _post(loop, pid, settle)

    try:
        threading.Thread(target=main, name=name, daemon=True).start()
    except RuntimeError as exc:  # there are too many
        future.set_exception(LoadFailed(words_of(exc)))
    return future


class _Run:
    """Work that a worker has. on_part: None, unless the model is decoupled. first_part_ns: as of its `Execution`."""

    __slots__ = ("_more", "cancelled", "first_part_ns", "on_done", "on_part", "waits", "work")

    def __init__(self, work: W, on_done: Callable[[W, Execution], None], on_part: Callable[[W, Tensors], None] | None) -> None:
        self.work: Any = work
        self.on_done: Callable[..., None] = on_done
        self.on_part: Callable[..., None] | None = on_part
        self.cancelled = False
        self.first_part_ns: int | None = None
        self.waits = False  # for the client to take what it was given
        self._more = threading.Semaphore(PARTS_AHEAD) if on_part is not None else None

    def taken(self) -> None:
        if self._more is not None:
            self._more.release()

    def cancel(self) -> None:
        """Want no more parts."""
        self.cancelled = True
        self.taken()

    def wants_part(self) -> bool:
        """Wait until one more may be made; False: none will be wanted. On the worker's thread."""
        assert self._more is not None
        if not self._more.acquire(blocking=False):
            self.waits = True
            self._more.acquire()
            self.waits = False
        return not self.cancelled


class _Worker:
    """One thread, its session, and at most one batch."""

    def __init__(
        self,
        index: int,
        name: str,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        ended: "Callable[[_Worker, Execution], None]",
        part_made: "Callable[[_Worker, _Run, Tensors], None]",
        died: "Callable[[_Worker, str], None]",
        backoff_s: float,
    ) -> None:
        """ended, part_made, died: called on the loop, when a batch has ended, a part of its answer is there, and when the
        session's process has ended.

        backoff_s: what was waited before the session is opened.
        """
        self.index = index
        self.started_ns = 0
        self.moved_ns = 0  # when the last part of an answer was there
        self.current: _Run | None = None
        self.proven = False  # it has finished a run, or was ended by one: it is not the session that is at fault
        self.backoff_s = backoff_s
        self.death = ""  # how the session's process ended; empty: it lives
        self.ended: asyncio.Future[None] = loop.create_future()  # done when the session, once open, is closed
        self._name = name
        self._thread_name = f"{name}-{index}"
        self._loop = loop
        self._pid = os.getpid()
        self._clock = clock
        self._post_end = functools.partial(ended, self)
        self._post_part = functools.partial(part_made, self)
        self._died = functools.partial(died, self)
        self._jobs: queue.SimpleQueue[_Run | None] = queue.SimpleQueue()
        self._session: Session | None = None

    # on the loop

    def open(self, model: Model, opened: "asyncio.Future[None]") -> None:
        try:
            threading.Thread(target=self._main, args=(model, opened), name=self._thread_name, daemon=True).start()
        except RuntimeError as exc:  # there are too many
            opened.set_exception(LoadFailed(words_of(exc)))

    def start(self, run: _Run, now_ns: int) -> None:
        self.started_ns = self.moved_ns = now_ns
        self.current = run
        self._jobs.put(run)

    def runs(self, batch: Work) -> bool:
        return self.current is not None and self.current.work is batch

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

    def _move(self, run: _Run, now_ns: int) -> None:
        if run.waits:  # it goes on now
            self.moved_ns = now_ns

    def take(self) -> _Run:
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
        kill = getattr(self._session, "kill", None)
        if kill is not None:
            kill()

    # on the worker's thread

    def _main(self, model: Model, opened: "asyncio.Future[None]") -> None:
        try:
            session = self._session = model.open_session(self.index)
        except BaseException as exc:  # also what slipped past the backend's seam: it must not hang the pool
            self._post(_fail, opened, exc if isinstance(exc, BackendError) else LoadFailed(words_of(exc)))
            return
        watch = getattr(session, "watch", None)
        if watch is not None:
            watch(functools.partial(self._post, self._died))
        self._post(_settle, opened, None)
        while (run := self._jobs.get()) is not None:
            execution = self._run(session, run)
            del run  # or its bytes would live until the next batch
            self._post(self._post_end, execution)
            del execution
        try:
            session.close()
        except BaseException as exc:  # the session is gone either way
            log.warning("%s: its session did not close well: %s", self._thread_name, words_of(exc))
        self._post(_settle, self.ended, None)

    def _run(self, session: Session, run: _Run) -> Execution:
        started_ns = self._clock.now_ns()
        work = run.work
        error: GatewayError
        lost = own = refused = False
        try:
            if run.on_part is not None:
                self._stream(session, run)
                return Execution(started_ns, self._clock.now_ns(), first_part_ns=run.first_part_ns)
            outputs = session.run(work.concat(), work.parameters())
            return Execution(started_ns, self._clock.now_ns(), outputs=outputs)
        except SessionLost as exc:
            lost, own = True, exc.self_inflicted
            error, trace = (
                (BackendFailed if own else BackendUnreachable)(f"{self._name}: {words_of(exc, traced=True)}"),
                trace_of(exc),
            )
        except RunCancelled as exc:
            error, trace = Cancelled(f"{self._name}: {words_of(exc, traced=True)}"), ""
        except BackendError as exc:
            refused = isinstance(exc, OutputsRefused)
            error, trace = BackendFailed(f"{self._name}: {words_of(exc, traced=True)}"), trace_of(exc)
        except GatewayError as exc:
            error, trace = exc, trace_of(exc)
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
            refused=refused,
            trace=trace,
            first_part_ns=run.first_part_ns,
        )

    def _stream(self, session: Session, run: _Run) -> None:
        """Have an answer given in parts. Raises: RunCancelled, and what the session does."""
        stream = cast(StreamingSession, session).stream(run.work.concat(), run.work.parameters())
        with contextlib.closing(stream) as parts:
            while run.wants_part():
                outputs = next(parts, None)
                if outputs is None:
                    return
                run.first_part_ns = run.first_part_ns or self._clock.now_ns()
                self._post(self._post_part, run, outputs)
        raise RunCancelled("nobody waits for the rest of the answer")

    def _post(self, callback: Callable[..., object], *args: object) -> None:
        _post(self._loop, self._pid, callback, *args)


def _post(loop: asyncio.AbstractEventLoop, pid: int, callback: Callable[..., object], *args: object) -> None:
    """Have the loop call back, from a thread on which a model's code has run. pid: of the gateway."""
    if os.getpid() != pid:
        os._exit(1)  # the model forked, and this is the copy, cut off here: only the original answers
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(callback, *args)


def _settle(future: "asyncio.Future[T]", result: T) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: "asyncio.Future[T]", exc: Exception) -> None:
    if not future.done():
        future.set_exception(exc)
