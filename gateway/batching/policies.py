"""The policies. A policy decides for one queue at a time; the batcher does the rest."""

from collections.abc import Callable
from typing import Final

from gateway.batching.adaptive import Adaptive
from gateway.batching.batch import Batch
from gateway.batching.policy import WAIT, Decision, Policy
from gateway.batching.queue import BatchLimits, Queue, State
from gateway.config import Batching


class Greedy:
    """Close what waits when a worker frees.

    Latency bound: the residual time of a batch, plus one full batch per max_rows rows that wait before, plus the own batch.
    """

    by_length = False
    service = None

    def __init__(self) -> None:
        self._decision = WAIT

    def bind(self, limits: BatchLimits) -> None:
        self._decision = Decision(limits.max_rows, "idle")

    def arrived(self, queue: Queue, state: State, rows: int, now_ns: int) -> None: ...

    def decide(self, queue: Queue, state: State, now_ns: int, free_slots: int) -> Decision:
        return self._decision

    def finished(self, batch: Batch, now_ns: int, compute_ns: int, ok: bool) -> None: ...


class Fixed:
    """Close at max_rows rows, or when the oldest has waited max_delay_ns, as the peers' batchers do.

    Latency bound: max_delay_ns, plus the time until a worker is free, plus the own batch; an idle worker does not shorten it.
    """

    by_length = False
    service = None

    def __init__(self, max_delay_ns: int) -> None:
        self._max_delay_ns = max_delay_ns
        self._max_rows = 1

    def bind(self, limits: BatchLimits) -> None:
        self._max_rows = limits.max_rows

    def arrived(self, queue: Queue, state: State, rows: int, now_ns: int) -> None: ...

    def decide(self, queue: Queue, state: State, now_ns: int, free_slots: int) -> Decision:
        if queue.rows >= self._max_rows or queue.alone:
            return Decision(self._max_rows, "full")
        close_at_ns = queue.oldest_ns + self._max_delay_ns
        if now_ns >= close_at_ns:
            return Decision(self._max_rows, "delay")
        return Decision(0, wake_at_ns=close_at_ns)

    def finished(self, batch: Batch, now_ns: int, compute_ns: int, ok: bool) -> None: ...


POLICIES: Final[dict[str, Callable[[Batching], Policy]]] = {
    "adaptive": lambda batching: Adaptive(),
    "greedy": lambda batching: Greedy(),
    "fixed": lambda batching: Fixed(round(batching.max_delay_ms * 1e6)),
}
