"""Where a closed batch goes: to workers of this process, or as one frame to a replica elsewhere."""

from collections.abc import Callable, Mapping
from typing import Final, Protocol

import msgspec

from backends.base import ModelSpec, Tensors
from gateway.batching.batch import Batch
from gateway.errors import GatewayError


class _Times(msgspec.Struct, frozen=True, eq=False):
    """What may be given by position."""

    started_ns: int
    finished_ns: int


class Execution(_Times, frozen=True, kw_only=True, eq=False):
    """How one batch ended: outputs or an error, and when the model began and ended on it (`Clock.now_ns` of this process).

    session_lost: the session must be rebuilt; the same requests may well succeed on another, unless self_inflicted.
    self_inflicted: with session_lost: the run itself ended the session (it raised what is no Exception, exited, crashed by a
    signal other than SIGKILL and SIGTERM, ran out of memory, or hung past hang_timeout_s); not something from outside.
    begun: False, with session_lost: the model has certainly not got the batch.
    first_part_ns: of a decoupled model, when the first part of the answer was there, whatever came after it; its outputs are
    None, even if all went well.
    refused: the outputs were not as declared. trace: of what the model raised, for the log; empty: it raised nothing.
    """

    outputs: Tensors | None = None
    error: GatewayError | None = None
    session_lost: bool = False
    self_inflicted: bool = False
    begun: bool = True
    refused: bool = False
    trace: str = ""
    first_part_ns: int | None = None

    @property
    def streamed_ns(self) -> int:
        """How long it went on after the first part of its answer, in which it may have waited for the client."""
        return self.finished_ns - self.first_part_ns if self.first_part_ns is not None else 0


class Work(Protocol):
    """What a session runs: a batch, or what has come as one from another process."""

    def concat(self, *, kept: bool = True) -> Tensors:
        """The model's inputs, as `Session.run` takes them. On the worker's thread. Raises: whatever it likes, for this run.

        kept: what may be needed again cannot be written to; False: whoever runs it writes to none.
        """
        ...

    def parameters(self) -> Mapping[str, object]:
        """What the model is told beside them."""
        ...


PARTS_AHEAD: Final = 8
"""So many parts of an answer a session makes ahead of its client, then it waits."""

OnBatchDone = Callable[[Batch, Execution], None]
OnBatchPart = Callable[[Batch, Tensors], None]


class BatchRunner(Protocol):
    """Runs batches, several at once. All methods on the event loop's thread.

    Life: open -> start … -> close. `on_change` is set by the lane before open and called on the loop whenever free_slots or
    `available` changed for another reason than a batch of this lane ending.
    """

    on_change: Callable[[], None]

    @property
    def cold_start_ns(self) -> int | None:
        """How long its last start took, when `open` or `wake` found nothing running; None: unknown."""
        ...

    @property
    def free_slots(self) -> int:
        """How many batches may be started now."""
        ...

    @property
    def sessions(self) -> int:
        """How many live, busy or not, of those that this process counts: one that several use is counted by one of them."""
        ...

    @property
    def slots(self) -> int:
        """How many batches run at once when all is well."""
        ...

    @property
    def available(self) -> bool:
        """False while no batch can run and none is expected to soon: what waits should be refused."""
        ...

    @property
    def lives(self) -> bool:
        """Whether a session is there, be it busy, or lent to another process until this one is to `want` it."""
        ...

    def want(self) -> None:
        """Something waits, and no slot is free: have one back that was lent."""
        ...

    @property
    def cold(self) -> bool:
        """No session lives, and none comes before `wake` was called: what is started waits for a cold start."""
        ...

    def wake(self) -> None:
        """Something waits, or would: start sessions if it is cold. Does nothing if it is not, or they are being started."""
        ...

    async def open(self) -> ModelSpec:
        """Load the model. Raises: BackendFailed, BackendUnreachable; ConfigError, if the model is not as declared.

        Then, and when it is cancelled, nothing is left open.
        """
        ...

    def start(self, batch: Batch, on_done: OnBatchDone, on_part: OnBatchPart | None = None) -> None:
        """Run one batch; on_done is called exactly once, on the loop, never from within start.

        on_part: for a decoupled model: gets each part of the answer, on the loop, before on_done. It makes PARTS_AHEAD of them,
        and a further one for each that is `taken`.
        """
        ...

    def try_await_begin(self, begun: Callable[[], None]) -> bool:
        """Call back on the loop, once, when what was started last needs this process's interpreter no more, until it ends.

        False: it does not by now, or it is not known. It need not come, should the batch fail before.
        """
        ...

    def taken(self, batch: Batch) -> None:
        """A part of a batch's answer has left for its client. Does nothing once the batch has ended."""
        ...

    def cancel(self, batch: Batch) -> None:
        """Nobody waits for a batch that was started: end it early if that can be done, with the error Cancelled.

        Where it cannot, it runs to its end. on_done is called as ever.
        """
        ...

    def abort(self) -> None:
        """Give up what runs: each batch ends soon, with BackendUnreachable. `close` comes next, and then waits for no run."""
        ...

    async def close(self) -> None:
        """Wait for what runs, then free everything. Cancelled, it does as `abort` and waits no longer."""
        ...
