"""What a replica has of the batches that ingresses wait for."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from backends.base import Tensors
from gateway.batching.leases import Lease
from gateway.cluster.channel import Answer, Running
from gateway.engine.runner import Execution
from gateway.engine.workers import WorkerPool
from gateway.errors import BackendFailed
from gateway.types import BatchTrace


@dataclass(slots=True, eq=False, kw_only=True)
class AskedBatch:
    """A batch that an ingress waits for: what a pool runs.

    part: where the parts of its answer go; None: it has none. lease: whose slot it fills. counted_ns: up to when its run is
    counted there. astray: it came by a call of Serve's, not by the channel. fault: why a part could not be sent, and the run
    was cancelled. trace: of one that is traced.
    """

    inputs: Tensors
    told: Mapping[str, object]
    on_end: Callable[[Execution], None]
    part: Answer | None
    pool: WorkerPool
    lease: Lease
    counted_ns: int
    astray: bool
    fault: BackendFailed | None = None
    trace: BatchTrace | None = None

    def concat(self, *, kept: bool = True) -> Tensors:
        return self.inputs

    def parameters(self) -> Mapping[str, object]:
        return self.told if self.trace is None else {**self.told, **(self.trace.told or {})}


@dataclass(slots=True, eq=False)
class EarlyBatch:
    """A batch that came while all sessions ran others: its slot was lost, or leased to another, while it was on its way.

    begin: runs it, once a session is free. on_end: gets how it ended, if it is not begun. running: once it is.
    """

    begin: Callable[[], Running]
    on_end: Callable[[Execution], None]
    running: Running | None = None

    def taken(self) -> None:
        if self.running is not None:
            self.running.taken()
