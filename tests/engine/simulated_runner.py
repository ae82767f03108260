"""A `BatchRunner` in simulated time, for tests of the lane."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from backends.base import ModelSpec, TensorSpec
from backends.early_failure import EarlyFailure
from gateway.batching.batch import Batch
from gateway.engine.runner import PARTS_AHEAD, Execution, OnBatchDone, OnBatchPart
from gateway.errors import BackendFailed, BackendUnreachable, Cancelled, GatewayError
from tests.simulation import SimulatedClock

SPEC = ModelSpec("simulated", (TensorSpec("X", "FP32", (-1, 1)),), (TensorSpec("Y", "FP32", (-1, 1)),), max_rows=4)
IN_PARTS = replace(SPEC, decoupled=True)


class SimulatedRunner:
    """k workers that take fixed_ns + row_ns · rows and give back what they got; `faults` are consumed one per batch.

    A fault: "failed", "lost" or "gone" (the session, by something outside; the latter as a backend tells it), "unbegun" (as
    gone, but before the batch had begun), "killed" (the session, by the batch), or an exception, which `start` raises.
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
        self.begins_ns: int | None = None  # after its start a batch needs the interpreter no more; None: nobody is told
        self.closed = False
        self._clock = clock
        self._busy = 0
        self._fixed_ns = fixed_ns
        self._row_ns = row_ns

    @property
    def sessions(self) -> int:
        return self.slots

    @property
    def free_slots(self) -> int:
        return self.slots - self._busy

    @property
    def lives(self) -> bool:
        return self.slots > 0

    def want(self) -> None: ...

    def try_await_begin(self, begun: Callable[[], None]) -> bool:
        if self.begins_ns is None:
            return False
        self._clock.call_at(self._clock.now_ns() + self.begins_ns, begun)
        return True

    def wake(self) -> None:
        self.woken += 1

    async def open(self) -> ModelSpec:
        return SPEC

    def start(self, batch: Batch, on_done: OnBatchDone, on_part: OnBatchPart | None = None) -> None:
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
                kind = BackendUnreachable if fault in ("gone", "unbegun", "killed") else BackendFailed
                execution = Execution(
                    started_ns, now_ns, error=kind(f"told to: {fault}"), session_lost=fault != "failed",
                    self_inflicted=fault == "killed", begun=fault != "unbegun",
                )  # fmt: skip
                on_done(batch, execution)
            else:
                on_done(batch, Execution(started_ns, now_ns, outputs={"Y": batch.concat()["X"]}))

        self._clock.call_at(started_ns + self._fixed_ns + self._row_ns * batch.padded_rows, end)

    def taken(self, batch: Batch) -> None: ...

    def cancel(self, batch: Batch) -> None:
        self.cancelled.append(batch)

    def abort(self) -> None: ...

    async def close(self) -> None:
        self.closed = True


class StreamingRunner(SimulatedRunner):
    """Its model gives `parts` parts, one every part_ns, each the number of the part; the first after fixed_ns.

    A fault's number is the parts that come before it: "lost 3". One that is "early" is told 100 ms before its run ends.
    """

    def __init__(self, clock: SimulatedClock, *, parts: int = 3, part_ns: int = 1_000_000, **runner: int) -> None:
        super().__init__(clock, **runner)
        self.made: dict[Batch, int] = {}
        self.taken_of: dict[Batch, int] = {}
        self.cancel_fault: BaseException | None = None
        self._parts = parts
        self._part_ns = part_ns

    async def open(self) -> ModelSpec:
        return IN_PARTS

    def start(self, batch: Batch, on_done: OnBatchDone, on_part: OnBatchPart | None = None) -> None:
        assert on_part is not None
        fault, _, after = (str(self.faults.pop(0)) if self.faults else "").partition(" ")
        self._busy += 1
        self.batches.append(batch)
        self.made[batch] = self.taken_of[batch] = 0
        started_ns = self._clock.now_ns()
        first_ns: int | None = None

        def end(error: GatewayError | None, *, lost: bool = False, own: bool = False) -> None:
            self._busy -= 1
            now_ns = self._clock.now_ns()
            execution = Execution(
                started_ns, now_ns, error=error, session_lost=lost, self_inflicted=own, first_part_ns=first_ns
            )
            on_done(batch, execution)

        def move() -> None:
            nonlocal first_ns
            made = self.made[batch]
            if batch in self.cancelled:
                end(Cancelled("told to"))
            elif fault == "early" and made == int(after or 0):
                error = BackendFailed("told to: early")
                on_part(batch, EarlyFailure(error, first_ns))
                self._clock.call_at(self._clock.now_ns() + 100_000_000, lambda: end(error))
            elif fault and made == int(after or 0):
                kind = BackendUnreachable if fault == "lost" else BackendFailed
                end(kind(f"told to: {fault}"), lost=fault in ("lost", "killed"), own=fault == "killed")
            elif made == self._parts:
                end(None)
            else:
                if made - self.taken_of[batch] < PARTS_AHEAD:
                    first_ns = first_ns or self._clock.now_ns()
                    self.made[batch] += 1
                    on_part(batch, {"Y": np.full((1, 1), made, np.float32)})
                self._clock.call_at(self._clock.now_ns() + self._part_ns, move)

        self._clock.call_at(started_ns + self._fixed_ns, move)

    def taken(self, batch: Batch) -> None:
        self.taken_of[batch] += 1

    def cancel(self, batch: Batch) -> None:
        if self.cancel_fault is not None:
            fault, self.cancel_fault = self.cancel_fault, None
            raise fault
        super().cancel(batch)
