"""k sessions of one model in parallel, each on a thread of its own.

A worker is a thread, the session it opened, and at most one batch. The loop hands it a batch through a queue of its own; it
concatenates, runs, and posts the end back to the loop. So the loop never waits for a model, and a session is only ever used
by the thread that opened it.

A session that is lost (SessionLost, or a run past `hang_timeout_s`) is dropped with its worker, its batch ends with
`session_lost`, and a new worker opens a new session after a back-off that doubles from 0.1 s to 5 s. A thread that hangs
cannot be ended: it is abandoned, and what it may still return is ignored. Only isolation `process` gives the memory and the
core back, since there the process is killed.
"""

import asyncio
import contextlib
import functools
import logging
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Final

import backends
from backends.base import (
    DEADLINE_NS,
    BackendError,
    LoadFailed,
    Model,
    ModelSpec,
    RunCancelled,
    Session,
    SessionLost,
    SpecMismatch,
)
from gateway.batching.batch import Batch
from gateway.clock import Clock, Timer
from gateway.config import Backend
from gateway.errors import BackendFailed, BackendUnreachable, Cancelled, ConfigError, GatewayError
from gateway.runner import Execution
from gateway.session_process import ProcessModel

_BACKOFF_FIRST_S: Final = 0.1
_BACKOFF_MOST_S: Final = 5.0
# A run that does not end when told to may not have begun yet when it was: it is told again.
_CANCEL_AGAIN_S: Final = 0.02
# After this many failed rebuilds in a row with no worker left, what waits is refused rather than kept for a session that may
# never come.
_REBUILDS_BEFORE_UNAVAILABLE: Final = 3

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
        # from open on
        self._loop: asyncio.AbstractEventLoop
        self._model: Model
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()
        self._failed_rebuilds = 0
        self._rebuilds: set[asyncio.Task[None]] = set()
        self._watchdog: Timer | None = None
        self._closing = False
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
        return bool(self._idle or self._busy) or self._failed_rebuilds < _REBUILDS_BEFORE_UNAVAILABLE

    @property
    def cold_start_ns(self) -> None:
        return None

    @property
    def cold(self) -> bool:
        return False

    def wake(self) -> None: ...

    async def open(self) -> ModelSpec:
        self._loop = asyncio.get_running_loop()
        load = functools.partial(_load, self._backend, self._declared)
        try:
            self._model = await asyncio.to_thread(load)
            for index in range(self._backend.sessions):
                self._idle.append(await self._open_worker(index))
        except SpecMismatch as exc:
            await self.close()
            raise ConfigError(f"{self._name}: {exc}") from exc
        except BackendError as exc:
            await self.close()
            raise BackendFailed(f"{self._name}: failed to load: {exc}") from exc
        except asyncio.CancelledError:
            await self.close()
            raise
        return self._model.spec

    def start(self, batch: Batch, on_done: Callable[[Batch, Execution], None]) -> None:
        worker = self._idle.pop()
        self._busy.add(worker)
        worker.start(batch, on_done, self._clock.now_ns())
        if self._watchdog is None:
            self._watch()

    def cancel(self, batch: Batch) -> None:
        worker = next((worker for worker in self._busy if worker.runs(batch)), None)
        if worker is not None and worker.try_cancel():
            self._loop.call_later(_CANCEL_AGAIN_S, self.cancel, batch)

    async def close(self) -> None:
        """Wait for what runs (at most the hang timeout, by the watchdog), then free everything."""
        self._closing = True
        for task in self._rebuilds:
            task.cancel()
        if self._busy:
            await self._drained.wait()
        if self._watchdog is not None:
            self._watchdog.cancel()
        workers, self._idle = self._idle, []
        for worker in workers:
            worker.stop()
        for worker in workers:
            await asyncio.to_thread(worker.join, 5.0)
        if hasattr(self, "_model"):
            await asyncio.to_thread(self._model.close)

    # workers

    async def _open_worker(self, index: int) -> "_Worker":
        worker = _Worker(index, f"{self._name}-{index}", self._loop, self._clock, self._ended)
        opened: asyncio.Future[None] = self._loop.create_future()
        worker.open(self._model, opened)
        try:
            await opened
        except asyncio.CancelledError:
            worker.stop()
            raise
        return worker

    def _ended(self, worker: "_Worker", execution: Execution) -> None:
        if worker not in self._busy:
            return  # abandoned before: its batch has been answered
        self._busy.discard(worker)
        batch, on_done = worker.take()
        if execution.session_lost:
            worker.stop()
            self._rebuild(worker.index)
        else:
            self._failed_rebuilds = 0
            self._idle.append(worker)
        if self._closing and not self._busy:
            self._drained.set()
        on_done(batch, execution)

    def _rebuild(self, index: int) -> None:
        if self._closing:
            return
        task = self._loop.create_task(self._rebuild_worker(index))
        self._rebuilds.add(task)
        task.add_done_callback(self._rebuilds.discard)

    async def _rebuild_worker(self, index: int) -> None:
        backoff_s = _BACKOFF_FIRST_S
        while True:
            await asyncio.sleep(backoff_s)
            try:
                worker = await self._open_worker(index)
            except BackendError as exc:
                self._failed_rebuilds += 1
                backoff_s = min(2 * backoff_s, _BACKOFF_MOST_S)
                log.warning("%s: session %d could not be rebuilt, next try in %.1f s: %s", self._name, index, backoff_s, exc)
                self.on_change()
                continue
            log.info("%s: session %d is rebuilt", self._name, index)
            self._failed_rebuilds = 0
            self._idle.append(worker)
            self.on_change()
            return

    # a run past the limit

    def _watch(self) -> None:
        # One timer for the pool, armed for the oldest run: exact per batch timers would cost more than a batch.
        self._watchdog = None
        now_ns = self._clock.now_ns()
        limit_ns = round(self._backend.hang_timeout_s * 1e9)
        for worker in [worker for worker in self._busy if now_ns - worker.started_ns >= limit_ns]:
            log.error(
                "%s: session %d ran for over %g s and is abandoned", self._name, worker.index, self._backend.hang_timeout_s
            )
            worker.abandon()
            error = BackendFailed(
                f"{self._name}: the model did not return within hang_timeout_s {self._backend.hang_timeout_s:g}"
            )
            self._ended(worker, Execution(worker.started_ns, now_ns, error=error, session_lost=True))
        if self._busy:
            oldest_ns = min(worker.started_ns for worker in self._busy)
            self._watchdog = self._clock.call_at(oldest_ns + limit_ns, self._watch)


def _load(backend: Backend, declared: ModelSpec) -> Model:
    kind: str = backend.kind  # type: ignore[attr-defined]  # every kind adds its literal
    if backend.isolation == "process":
        return ProcessModel(kind, backend.options(), declared)
    return backends.load(kind, backend.options(), declared)


class _Worker:
    """One thread, its session, and at most one batch."""

    def __init__(
        self,
        index: int,
        name: str,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        ended: "Callable[[_Worker, Execution], None]",
    ) -> None:
        self.index = index
        self.started_ns = 0
        self._name = name
        self._loop = loop
        self._clock = clock
        self._post_end = functools.partial(ended, self)
        self._jobs: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._current: tuple[Batch, Callable[[Batch, Execution], None]] | None = None
        self._session: Session | None = None
        self._thread: threading.Thread

    # on the loop

    def open(self, model: Model, opened: "asyncio.Future[None]") -> None:
        # A daemon, so that a model that hangs does not keep the process from ending.
        self._thread = threading.Thread(target=self._main, args=(model, opened), name=self._name, daemon=True)
        self._thread.start()

    def start(self, batch: Batch, on_done: Callable[[Batch, Execution], None], now_ns: int) -> None:
        self.started_ns = now_ns
        self._current = (batch, on_done)
        self._jobs.put(batch)

    def runs(self, batch: Batch) -> bool:
        return self._current is not None and self._current[0] is batch

    def try_cancel(self) -> bool:
        """Ask the session to end its run. False if it cannot."""
        cancel = getattr(self._session, "cancel", None)
        if cancel is not None:
            cancel()
        return cancel is not None

    def take(self) -> tuple[Batch, Callable[[Batch, Execution], None]]:
        current, self._current = self._current, None
        assert current is not None
        return current

    def stop(self) -> None:
        """Let the thread end after what it runs."""
        self._jobs.put(None)

    def abandon(self) -> None:
        """Give the thread up; a session in a process of its own is killed, which also ends the thread."""
        self._jobs.put(None)
        if self._session is not None and hasattr(self._session, "kill"):
            self._session.kill()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    # on the worker's thread

    def _main(self, model: Model, opened: "asyncio.Future[None]") -> None:
        try:
            session = self._session = model.open_session(self.index)
        except BackendError as exc:
            self._post(_settle, opened, exc)
            return
        except Exception as exc:  # a foreign exception that slipped past the backend's seam must not hang the pool
            self._post(_settle, opened, LoadFailed(f"{type(exc).__name__}: {exc}"))
            return
        self._post(_settle, opened, None)
        while (batch := self._jobs.get()) is not None:
            execution = self._run(session, batch)
            del batch  # or its bytes would live until the next batch
            self._post(self._post_end, execution)
        with contextlib.suppress(Exception):  # the session is gone either way, and nobody is left to be told
            session.close()

    def _run(self, session: Session, batch: Batch) -> Execution:
        started_ns = self._clock.now_ns()
        error: GatewayError
        lost = False
        try:
            outputs = session.run(batch.concat(), _parameters(batch))
            return Execution(started_ns, self._clock.now_ns(), outputs=outputs)
        except SessionLost as exc:
            error, lost = BackendUnreachable(f"{self._name}: {exc}"), True
        except RunCancelled as exc:
            error = Cancelled(f"{self._name}: {exc}")
        except BackendError as exc:
            error = BackendFailed(f"{self._name}: {exc}")
        except GatewayError as exc:
            error = exc
        except MemoryError as exc:
            error, lost = BackendFailed(f"{self._name}: out of memory: {exc}"), True
        except Exception as exc:  # whatever a model raises must end in an answer
            log.exception("%s: unexpected exception of the backend", self._name)
            error = BackendFailed(f"{self._name}: {type(exc).__name__}: {exc}")
        return Execution(started_ns, self._clock.now_ns(), error=error, session_lost=lost)

    def _post(self, callback: Callable[..., object], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(callback, *args)


def _parameters(batch: Batch) -> Mapping[str, object]:
    """What the model is told beside the tensors: the requests' parameters, equal in a batch, and until when anyone waits."""
    parameters = batch.parts[0].request.parameters
    deadlines_ns = [part.request.deadline_ns for part in batch.parts]
    latest_ns = max((deadline_ns for deadline_ns in deadlines_ns if deadline_ns is not None), default=None)
    if latest_ns is None or None in deadlines_ns:
        return parameters
    return parameters | {DEADLINE_NS: latest_ns}


def _settle(future: "asyncio.Future[None]", exc: Exception | None) -> None:
    if future.done():
        return
    if exc is None:
        future.set_result(None)
    else:
        future.set_exception(exc)
