"""A `BatchRunner` in simulated time, for tests of the lane."""

from collections.abc import Callable

from backends.base import ModelSpec, TensorSpec
from gateway.batching.batch import Batch
from gateway.errors import BackendFailed, BackendUnreachable, Cancelled
from gateway.runner import Execution, OnDone, OnPart
from tests.simulation import SimulatedClock

SPEC = ModelSpec("simulated", (TensorSpec("X", "FP32", (-1, 1)),), (TensorSpec("Y", "FP32", (-1, 1)),), max_rows=4)


class SimulatedRunner:
    """k workers that take fixed_ns + row_ns · rows and give back what they got; `faults` are consumed one per batch.

    A fault: "failed", "lost" (the session, by something outside), "killed" (the session, by the batch), or an exception, which
    `start` raises.
    """

    def __init__(self, clock: SimulatedClock, *, workers: int = 1, fixed_ns: int = 1_000_000, row_ns: int = 0) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self.slots = workers
        self.available = True
        self.cold = False
        self.cold_start_ns: int | None = None
        self.woken = 0
        self.batches: list[Batch] = []
        self.faults: list[str | BaseException] = []
        self.cancelled: list[Batch] = []
        self.closed = False
        self._clock = clock
        self._busy = 0
        self._fixed_ns = fixed_ns
        self._row_ns = row_ns

    @property
    def free_slots(self) -> int:
        return self.slots - self._busy

    def wake(self) -> None:
        self.woken += 1

    async def open(self) -> ModelSpec:
        return SPEC

    def start(self, batch: Batch, on_done: OnDone, on_part: OnPart | None = None) -> None:
        fault = self.faults.pop(0) if self.faults else ""
        if isinstance(fault, BaseException):
            raise fault
        self._busy += 1
        self.batches.append(batch)
        started_ns = self._clock.now_ns()

        def end() -> None:
            self._busy -= 1
            now_ns = self._clock.now_ns()
            if batch in self.cancelled:
                on_done(batch, Execution(started_ns, now_ns, error=Cancelled("told to")))
            elif fault:
                # As replicas have it, where nobody can tell yet whose fault it was.
                kind = BackendUnreachable if fault == "killed" else BackendFailed
                error = kind(f"told to: {fault}")
                lost = fault in ("lost", "killed")
                on_done(batch, Execution(started_ns, now_ns, error=error, session_lost=lost, self_inflicted=fault == "killed"))
            else:
                on_done(batch, Execution(started_ns, now_ns, outputs={"Y": batch.concat()["X"]}))

        self._clock.call_at(started_ns + self._fixed_ns + self._row_ns * batch.padded_rows, end)

    def cancel(self, batch: Batch) -> None:
        self.cancelled.append(batch)

    def abort(self) -> None: ...

    async def close(self) -> None:
        self.closed = True
