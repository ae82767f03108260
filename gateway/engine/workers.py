"""k sessions of one model in parallel, each with a worker of its own (`worker`).

A session that is lost (SessionLost, what a model raises that is no Exception, a run past `hang_timeout_s`, a process that
died, whether or not it ran anything) is dropped with its worker, its batch ends with `session_lost`, and a new worker opens a
new session. It does so at once, unless the lost session had been rebuilt and never finished a run, or a rebuild fails: then
after a back-off that doubles from 0.1 s to 5 s. A thread that hangs cannot be ended: it is abandoned, and what it may still
return is ignored. Only isolation `process` gives the memory and the core back, since there the process is killed.
"""

import asyncio
import functools
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

import backends
from backends.base import BackendError, Model, ModelSpec, SpecMismatch, Tensors, words_of
from gateway.batching.batch import Batch
from gateway.clock import Clock, Timer
from gateway.config import Backend
from gateway.engine import threads
from gateway.engine.loop_runs import LoopRuns
from gateway.engine.nearness import Nearness
from gateway.engine.runner import PARTS_AHEAD, Execution, Work
from gateway.engine.session_process import ProcessModel
from gateway.engine.worker import Job, Reports, Worker
from gateway.errors import BackendFailed, BackendUnreachable, Cancelled, ConfigError, GatewayError
from gateway.process import large_pages
from gateway.process.kept_folders import let_all_go, take_named

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
# How long memory is moved to large pages, at 2 s for a gigabyte: the model is not served meanwhile.
_ENLARGE_S: Final = 2.0

W = TypeVar("W", bound=Work)

log = logging.getLogger(__name__)


class WorkerPool:
    """A `BatchRunner` over the sessions of this process."""

    cold = False

    def __init__(
        self, backend: Backend, declared: ModelSpec, *, name: str, clock: Clock, loop_runs: LoopRuns | None = None
    ) -> None:
        """declared: what the operator states of the model; empty inputs or outputs are read from the artifact.

        name: for logs and threads. loop_runs: where batches may run that are shorter than their way to a thread; None: nowhere.
        """
        self.on_change: Callable[[], None] = lambda: None
        self._backend = backend
        self._declared = declared
        self._name = name
        self._clock = clock
        self._loop_runs = loop_runs
        self._nearness: Nearness | None = None  # from open on; None: all batches go to threads
        self._model: Model | None = None
        self._loop: asyncio.AbstractEventLoop  # from open on
        self._back: threads.WayBack
        self._reports = Reports(self._ended, self._part_made, self._died)
        self._idle: list[Worker] = []
        self._busy: set[Worker] = set()
        self._started: Job | None = None  # the last that went to a thread
        self._stopped: set[Worker] = set()
        self._failed_rebuilds = 0
        self._opened_ns = 0  # that `open` took
        self._overdue: set[Worker] = set()  # lost ones in whose place a session opens for too long
        self._rebuilds: set[asyncio.Task[None]] = set()
        self._watchdog: Timer | None = None
        self._closing = False
        self._aborted = False
        self._drained = asyncio.Event()
        self._kept: list[Path] = []  # what the model reads, which nobody else is to remove meanwhile
        self._mapped: large_pages.Ranges | None = None  # before it was loaded; None: nothing is to be moved to large pages

    def __repr__(self) -> str:
        return f"<WorkerPool {self._name}: {len(self._idle)} idle, {len(self._busy)} busy, {len(self._rebuilds)} rebuilding>"

    @property
    def free_slots(self) -> int:
        return len(self._idle)

    @property
    def sessions(self) -> int:
        return len(self._idle) + len(self._busy)

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
        if self._idle or self._busy:
            return True
        overdue = bool(self._overdue) and len(self._overdue) == len(self._rebuilds)
        return not overdue and self._failed_rebuilds < _REBUILDS_BEFORE_UNAVAILABLE

    @property
    def lives(self) -> bool:
        return bool(self._idle or self._busy)

    def want(self) -> None: ...

    @property
    def cold_start_ns(self) -> None:
        return None

    def wake(self) -> None: ...

    async def open(self) -> ModelSpec:
        began_ns = self._clock.now_ns()
        self._loop = asyncio.get_running_loop()
        self._back = threads.WayBack(self._loop)
        if self._backend.isolation == "thread" and large_pages.asked():
            self._mapped = large_pages.mapped()
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
        self._opened_ns = self._clock.now_ns() - began_ns
        spec = self._model.spec
        if self._loop_runs and spec.only_computes and self._backend.on_loop and self._backend.isolation == "thread":
            self._nearness = Nearness()
        return spec

    async def settle(self) -> None:
        """Call it once after the first runs: what loading and they have mapped gets large pages, where Linux has to be asked.

        With glibc's hugetlb=1, which asks for as much, batches of minilm took 3 to 4 % less time on a CPU (onnxruntime 1.32,
        two sessions at once, 2026-11-24).
        """
        mapped, self._mapped = self._mapped, None
        if mapped is not None:
            enlarge = functools.partial(large_pages.enlarge, mapped, _ENLARGE_S)
            await threads.call(self._back, f"{self._name} settle", enlarge)

    def start(
        self, batch: W, on_done: Callable[[W, Execution], None], on_part: Callable[[W, Tensors], None] | None = None
    ) -> None:
        worker = self._idle.pop()
        self._busy.add(worker)
        now_ns = self._clock.now_ns()
        if self._nearness is not None and isinstance(batch, Batch):
            if self._nearness.near(batch.group, batch.padded_rows):
                assert self._loop_runs is not None
                worker.start_here(Job(batch, on_done, None, None, here=True), now_ns, self._loop_runs)
                return
            job = Job(batch, on_done, None, None, timed=True)
        else:
            job = Job(batch, on_done, on_part, threading.Semaphore(PARTS_AHEAD) if on_part is not None else None)
        if self._loop_runs is not None:
            self._loop_runs.beside += 1
        self._started = job
        worker.start(job, now_ns)
        if self._watchdog is None:
            self._abandon_hung()

    def try_await_begin(self, begun: Callable[[], None]) -> bool:
        job = self._started
        if job is None or job.begun or job.here or job.on_part is not None:
            return False
        job.on_begun = begun
        return not job.begun  # its thread may have looked just before

    def taken(self, batch: Work) -> None:
        worker = self._worker_of(batch)
        if worker is not None:
            worker.taken(self._clock.now_ns())

    def cancel(self, batch: Work) -> None:
        worker = self._worker_of(batch)
        if worker is not None and worker.try_cancel(self._clock.now_ns()):
            self._loop.call_later(_CANCEL_AGAIN_S, self.cancel, batch)

    def _worker_of(self, batch: Work) -> Worker | None:
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

        For what runs elsewhere, and for nobody, it waits as long as for sessions.
        Cancelled: as `abort` does, without waiting any longer.
        """
        self._closing = True
        for task in self._rebuilds:
            task.cancel()
        try:
            if self._busy:
                leave = self._clock.call_at(self._clock.now_ns() + round(_CLOSE_S * 1e9), self._leave_cancelled)
                await self._drained.wait()
                leave.cancel()
            if self._watchdog is not None:
                self._watchdog.cancel()
            self._stop_idle()
            within_s = _CLOSE_ABORTED_S if self._aborted else _CLOSE_S
            ended = [worker.ended for worker in self._stopped if not worker.ended.done()]
            if ended:
                await asyncio.wait(ended, timeout=within_s)
            if self._model is not None:
                freed = threads.call(self._back, f"{self._name} close", self._model.close)
                await asyncio.wait([freed], timeout=within_s)
                if freed.done() and (failure := freed.exception()):
                    log.warning("%s: the model did not close well: %s", self._name, failure)
        except asyncio.CancelledError:
            self.abort()
            raise
        finally:
            let_all_go(self._kept)

    @property
    def _is_elsewhere(self) -> bool:
        return self._model is not None and self._model.device.kind == "remote"

    def _leave_cancelled(self) -> None:
        """Leave what runs elsewhere for nobody to its threads, which end on their own."""
        if self._is_elsewhere:
            error = Cancelled(f"{self._name}: the model is closed, and nobody waits for the end of the run")
            for worker in [worker for worker in self._busy if worker.cancelled]:
                self._give_up(worker, self._clock.now_ns(), error)

    # the model

    async def _load(self) -> Model:
        """Raises: BackendError."""
        kind: str = self._backend.kind  # type: ignore[attr-defined]  # every kind adds its literal
        options = self._backend.options()
        self._kept += take_named(options)
        load: Callable[[], Model]
        if self._backend.isolation == "process":
            self._model = model = ProcessModel(kind, options, self._declared)  # known from now on, to be closed while it loads
            load = model.load
        else:
            load = functools.partial(backends.load, kind, options, self._declared)
        loading = threads.call(self._back, f"{self._name} load", load)
        try:
            return await asyncio.shield(loading)
        except asyncio.CancelledError:
            loading.add_done_callback(self._close_late)
            raise

    def _close_late(self, loading: "asyncio.Future[Model]") -> None:
        """Free a model that nobody waited for."""
        if loading.exception() is None:
            threads.call(self._back, f"{self._name} close", loading.result().close)

    # workers

    async def _open_worker(self, index: int, backoff_s: float = 0.0) -> Worker:
        """backoff_s: what was waited before. Raises: BackendError."""
        assert self._model is not None
        worker = Worker(index, self._name, self._back, self._clock, self._reports, backoff_s)
        opened: asyncio.Future[None] = self._loop.create_future()
        worker.open(self._model, opened)
        try:
            await opened
        except asyncio.CancelledError:
            worker.stop()
            raise
        return worker

    def _admit(self, worker: Worker) -> None:
        """Let an open worker run batches, unless its session has died meanwhile."""
        if worker.death:
            self._lose(worker)
        else:
            self._idle.append(worker)

    def _part_made(self, worker: Worker, job: Job, outputs: Tensors) -> None:
        if worker.current is job:  # else it was given up, and its batch has been answered
            worker.moved_ns = self._clock.now_ns()
            assert job.on_part is not None
            job.on_part(job.work, outputs)

    def _ended(self, worker: Worker, execution: Execution) -> None:
        if worker in self._busy:  # else it was given up, and its batch has been answered
            job = self._take_back(worker, execution)
            if job.here or job.timed:
                try:
                    self._learn(job, execution)
                except BaseException:
                    log.exception("%s: what a batch took could not be learned", self._name)
            job.on_done(job.work, execution)

    def _learn(self, job: Job, execution: Execution) -> None:
        assert self._nearness is not None
        batch: Batch = job.work
        if job.here:
            took_ns = job.cpu_ns if job.timed else execution.finished_ns - execution.started_ns
            self._nearness.ran_on_loop(batch.group, batch.padded_rows, took_ns)
        elif execution.error is None:
            self._nearness.ran_on_thread(batch.group, batch.padded_rows, job.cpu_ns)

    def _give_up(self, worker: Worker, now_ns: int, error: GatewayError, *, self_inflicted: bool = False) -> None:
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
        job = self._take_back(worker, execution)
        self._loop.call_soon(job.on_done, job.work, execution)

    def _take_back(self, worker: Worker, execution: Execution) -> Job:
        self._busy.discard(worker)
        if execution.session_lost:
            worker.proven |= execution.self_inflicted
            self._lose(worker)
        else:
            worker.proven = True
            self._failed_rebuilds = 0
            if worker.death:
                self._lose(worker)
            else:
                self._idle.append(worker)
        if self._closing and not self._busy:
            self._drained.set()
        job = worker.take()
        if self._started is job:
            self._started = None  # or its bytes would live until the next batch
        if not job.here and self._loop_runs is not None:
            self._loop_runs.beside -= 1
        return job

    def _died(self, worker: Worker, death: str) -> None:
        """The session's process has ended. If it ran something, that run ends as well, and says so."""
        worker.death = death
        worker.taken(self._clock.now_ns())  # a run that waits for its client is to find out
        if worker in self._idle:
            self._idle.remove(worker)
            log.warning("%s: session %d is lost while idle: %s", self._name, worker.index, death)
            self._lose(worker)
            self.on_change()

    def _lose(self, worker: Worker) -> None:
        """Drop a worker whose session is lost, and open another in its place."""
        worker.abandon()
        if not self._closing:
            task = self._loop.create_task(self._rebuild(worker))
            self._rebuilds.add(task)
            task.add_done_callback(self._rebuilds.discard)

    async def _rebuild(self, lost: Worker) -> None:
        backoff_s = 0.0 if lost.proven else longer_backoff(lost.backoff_s)
        await asyncio.wait([lost.ended], timeout=_FREED_S)
        limit_ns = max(round(self._backend.hang_timeout_s * 1e9), 2 * self._opened_ns)
        while True:
            await asyncio.sleep(backoff_s)
            overdue = self._clock.call_at(self._clock.now_ns() + limit_ns, functools.partial(self._open_overdue, lost))
            try:
                worker = await self._open_worker(lost.index, backoff_s)
            except BackendError as exc:
                self._failed_rebuilds += 1
                backoff_s = longer_backoff(backoff_s)
                why = words_of(exc)
                log.warning(
                    "%s: session %d could not be rebuilt, next try in %.1f s: %s", self._name, lost.index, backoff_s, why
                )
                self._tell()
                continue
            finally:
                overdue.cancel()
                self._overdue.discard(lost)
            log.info("%s: session %d is rebuilt", self._name, lost.index)
            self._failed_rebuilds = 0
            self._admit(worker)
            self._tell()
            return

    def _open_overdue(self, lost: Worker) -> None:
        self._overdue.add(lost)
        log.error("%s: session %d has not opened in time, and is waited for: its load hangs?", self._name, lost.index)
        self._tell()

    def _tell(self) -> None:
        self._loop.call_soon(self.on_change)  # not within a rebuild, which what it raises must not end

    def _stop_idle(self) -> None:
        workers, self._idle = self._idle, []
        for worker in workers:
            worker.stop()
        self._stopped.update(workers)

    # a run past the limit

    def _abandon_hung(self) -> None:
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
            # Elsewhere what was left is read on, so long that it may seem to hang.
            self._give_up(worker, now_ns, error, self_inflicted=not (worker.cancelled and self._is_elsewhere))
        if self._busy:
            oldest_ns = min(worker.active_ns(now_ns) for worker in self._busy)
            self._watchdog = self._clock.call_at(oldest_ns + limit_ns, self._abandon_hung)


def longer_backoff(backoff_s: float) -> float:
    """What to wait after one more try that failed; backoff_s: 0 before the first."""
    return min(max(2 * backoff_s, _BACKOFF_FIRST_S), _BACKOFF_MOST_S)
