"""A worker pool on real threads and processes, and batches for it."""

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

import numpy as np
import psutil

from backends.base import Device, ModelSpec, RunCancelled, Tensors
from gateway.batching.batch import Batch, Part
from gateway.clock import Clock, LoopClock
from gateway.config import Backend
from gateway.engine.runner import BatchRunner, Execution
from gateway.engine.workers import WorkerPool
from gateway.types import InferRequest, ParameterValue
from tests.simulation import SimulatedLoop

PATIENCE_S = 20.0


def batch_of(value: float, rows: int = 1, **parameters: ParameterValue) -> Batch:
    inputs = {"INPUT0": np.full((rows, 16), value, np.float32)}
    request = InferRequest("m", "1", "", inputs, rows, time.monotonic_ns(), parameters=parameters)
    part = Part(request, 0, rows)
    return Batch(parts=[part], rows=rows, padded_rows=rows, reason="full", closed_ns=time.monotonic_ns())


def pool_for(backend: Backend, clock: Clock | None = None) -> WorkerPool:
    """Not open yet. On the running loop. clock: None is the real one."""
    spec = ModelSpec("", (), (), 8)
    return WorkerPool(backend, spec, name=f"m:1/{backend.label}", clock=clock or LoopClock(asyncio.get_running_loop()))


@asynccontextmanager
async def open_pool(backend: Backend, clock: Clock | None = None) -> AsyncIterator[WorkerPool]:
    pool = pool_for(backend, clock)
    await pool.open()
    try:
        yield pool
    finally:
        await pool.close()


def start(pool: BatchRunner, batch: Batch) -> "asyncio.Future[Execution]":
    """Have a batch run now; fails where it ends twice."""
    done: asyncio.Future[Execution] = asyncio.get_running_loop().create_future()

    def ended(ended: Batch, execution: Execution) -> None:
        assert ended is batch
        done.set_result(execution)

    pool.start(batch, ended)
    return done


async def run(pool: WorkerPool, batch: Batch) -> Execution:
    return await asyncio.wait_for(start(pool, batch), _patience_s())


async def until(pool: BatchRunner, condition: Callable[[], bool]) -> None:
    """Wait until a condition holds that can only change with the pool."""
    changed = asyncio.Event()
    pool.on_change = changed.set
    while not condition():
        changed.clear()
        await asyncio.wait_for(changed.wait(), _patience_s())


async def until_true(condition: Callable[[], object]) -> None:
    """Wait for what another thread or process does."""
    until_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until_s
        await asyncio.sleep(0)  # of no time: simulated time stands still


def _patience_s() -> float | None:
    # In simulated time the loop itself notices that nothing can happen any more, and a timer would run out at once.
    return None if isinstance(asyncio.get_running_loop(), SimulatedLoop) else PATIENCE_S


async def until_free(pool: WorkerPool, slots: int) -> None:
    await until(pool, lambda: pool.free_slots >= slots)


def children() -> list[psutil.Process]:
    """The living session processes of this one."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it ends meanwhile
            if child.status() != psutil.STATUS_ZOMBIE and "gateway.engine.session_process" in child.cmdline():
                found.append(child)
    return found


class ManualClock:
    """A `Clock` that stands still until it is told to go on."""

    def __init__(self) -> None:
        self._now_ns = 1_000
        self.timers: list[ManualTimer] = []

    def now_ns(self) -> int:
        return self._now_ns

    def call_at(self, when_ns: int, callback: Callable[[], None]) -> "ManualTimer":
        self.timers.append(ManualTimer(self, when_ns, callback))
        return self.timers[-1]

    def advance(self, seconds: float) -> None:
        """Let time pass, and call back what is due by then."""
        self._now_ns += round(seconds * 1e9)
        for timer in [timer for timer in self.timers if timer.when_ns <= self._now_ns]:
            timer.cancel()
            timer.callback()


class ManualTimer:
    def __init__(self, clock: ManualClock, when_ns: int, callback: Callable[[], None]) -> None:
        self.when_ns = when_ns
        self.callback = callback
        self._clock = clock

    def cancel(self) -> None:
        if self in self._clock.timers:
            self._clock.timers.remove(self)


class FakeModel:
    """A model whose sessions do as the test says. Counts what is asked of it."""

    device = Device("cpu")
    memory_bytes = 0

    def __init__(self, *, cancellable: bool = False, mortal: bool = False) -> None:
        """cancellable, mortal: its sessions are a CancellableSession, a MortalSession."""
        self.spec = ModelSpec("fake", (), (), 8)
        self.open_faults: list[BaseException | None] = []  # of the next openings, one each
        self.openings: list[int] = []
        self.sessions: list[FakeSession] = []
        self.closed = 0
        self.on_open: Callable[[], None] = lambda: None
        self.close_fault: BaseException | None = None
        self.next_session: type[FakeSession] = CancellableFake if cancellable else MortalFake if mortal else FakeSession

    def open_session(self, index: int) -> "FakeSession":
        self.openings.append(index)
        self.on_open()
        fault = self.open_faults.pop(0) if self.open_faults else None
        if fault is not None:
            raise fault
        self.sessions.append(self.next_session(index))
        return self.sessions[-1]

    def close(self) -> None:
        self.closed += 1
        if self.close_fault is not None:
            raise self.close_fault


class FakeSession:
    """Runs end when the test ends them."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.thread = threading.current_thread()
        self.runs: list[tuple[Tensors, dict[str, object]]] = []
        self.closed = 0
        self._running = threading.Semaphore(0)
        self._ends: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def run(self, inputs: Tensors, parameters: Mapping[str, object]) -> Tensors:
        self.runs.append((inputs, dict(parameters)))
        self._running.release()
        end = self._ends.get()
        if end is not None:
            raise end
        return {"OUTPUT0": inputs["INPUT0"]}

    def end(self, fault: BaseException | None = None) -> None:
        """Have the run, or the next one, end."""
        self._ends.put(fault)

    async def until_running(self) -> None:
        assert await asyncio.to_thread(self._running.acquire, timeout=PATIENCE_S)

    def close(self) -> None:
        self.closed += 1


class CancellableFake(FakeSession):
    """deaf: so many cancellations come before the run can hear them."""

    cancels = 0
    deaf = 0

    def cancel(self) -> None:
        self.cancels += 1
        if self.cancels > self.deaf:
            self.end(RunCancelled("told to"))


class MortalFake(FakeSession):
    died: Callable[[str], None]
    kills = 0

    def watch(self, died: Callable[[str], None]) -> None:
        self.died = died

    def kill(self) -> None:
        self.kills += 1
