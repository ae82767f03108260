"""When a batch closes and how many rows it takes. A policy decides for one queue at a time; the batcher does the rest."""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

from gateway.batching.batch import Batch
from gateway.batching.queue import Entry, Limits, Queue, State
from gateway.batching.service_model import ServiceModel
from gateway.config import Batching


class Fill(NamedTuple):
    """Rows to take from a further queue, once `shed` of it have been answered with Overloaded."""

    queue: Queue
    rows: int
    shed: Sequence[Entry] = ()


class Decision(NamedTuple):
    """What to do with one queue.

    rows: close a batch of at most so many rows (one whole request at least); 0: wait.
    reason: why it closes; "idle" becomes "full" if the batch is as large as it may be.
    wake_at_ns: when to ask again although nothing happens. None: at the next event.
    shed: entries to answer with Overloaded; they leave the queue before the batch is formed.
    expected_ns: predicted service time of the batch; 0: unknown.
    fill: what to take from further queues, once the first has given its rows.
    """

    rows: int
    reason: str = ""
    wake_at_ns: int | None = None
    shed: Sequence[Entry] = ()
    expected_ns: int = 0
    fill: Sequence[Fill] = ()


WAIT: Final = Decision(0)


class Policy(Protocol):
    """Life: bind once, then decide whenever a worker is free and something waits; arrived and finished in between.

    by_length: whether requests of different ragged length wait in different queues, one per bucket.
    """

    by_length: bool

    @property
    def service(self) -> ServiceModel | None:
        """What it has learned of the model's speed, once bound; None: it does not learn."""
        ...

    def bind(self, limits: Limits) -> None: ...

    def arrived(self, queue: Queue, rows: int, now_ns: int) -> None:
        """A request has been pushed to the queue."""
        ...

    def decide(self, queue: Queue, state: State, now_ns: int, free_slots: int) -> Decision:
        """Decide for a queue that is not empty, with free_slots >= 1. Called again after each batch, and at any time."""
        ...

    def finished(self, batch: Batch, now_ns: int, compute_ns: int, ok: bool) -> None:
        """A batch has run. compute_ns: its execution alone, without hand-over."""
        ...


class Greedy:
    """Close what waits when a worker frees.

    Latency bound: the residual time of a batch, plus one full batch per max_rows rows that wait before, plus the own batch.
    """

    by_length = False
    service = None

    def __init__(self) -> None:
        self._decision = WAIT

    def bind(self, limits: Limits) -> None:
        self._decision = Decision(limits.max_rows, "idle")

    def arrived(self, queue: Queue, rows: int, now_ns: int) -> None: ...

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

    def bind(self, limits: Limits) -> None:
        self._max_rows = limits.max_rows

    def arrived(self, queue: Queue, rows: int, now_ns: int) -> None: ...

    def decide(self, queue: Queue, state: State, now_ns: int, free_slots: int) -> Decision:
        if queue.rows >= self._max_rows:
            return Decision(self._max_rows, "full")
        close_at_ns = queue.oldest_ns + self._max_delay_ns
        if now_ns >= close_at_ns:
            return Decision(self._max_rows, "delay")
        return Decision(0, wake_at_ns=close_at_ns)

    def finished(self, batch: Batch, now_ns: int, compute_ns: int, ok: bool) -> None: ...


def _adaptive() -> Policy:
    from gateway.batching.adaptive import Adaptive

    return Adaptive()


POLICIES: Final[dict[str, Callable[[Batching], Policy]]] = {
    "adaptive": lambda batching: _adaptive(),
    "greedy": lambda batching: Greedy(),
    "fixed": lambda batching: Fixed(round(batching.max_delay_ms * 1e6)),
}
