"""What a policy is asked, and what it decides: when a batch closes, and how many rows it takes."""

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

import msgspec

from gateway.batching.batch import Batch
from gateway.batching.queue import BatchLimits, Entry, Outlook, Queue, State
from gateway.batching.service_model import ServiceModel


class Fill(NamedTuple):
    """Rows to take from a further queue, once `shed` of it have been answered with Overloaded."""

    queue: Queue
    rows: int
    shed: Sequence[Entry] = ()


class Decision(msgspec.Struct, frozen=True):
    """What to do with one queue. A Struct, as a NamedTuple takes three times as long to make, and one is made for every look.

    rows: close a batch of at most so many rows (one whole request at least); 0: wait.
    reason: why it closes; "idle" becomes "full" if the batch is as large as it may be.
    wake_at_ns: when to ask again although nothing happens. None: at the next event.
    shed: entries to answer with Overloaded; they leave the queue before the batch is formed.
    expected_ns: predicted service time of the batch; 0: unknown.
    fill: what to take from further queues, once the first has given its rows.
    outlook: by which those that come until the next decision are refused at once; None: none is.
    """

    rows: int
    reason: str = ""
    wake_at_ns: int | None = None
    shed: Sequence[Entry] = ()
    expected_ns: int = 0
    fill: Sequence[Fill] = ()
    outlook: Outlook | None = None


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

    def bind(self, limits: BatchLimits) -> None: ...

    def arrived(self, queue: Queue, state: State, rows: int, now_ns: int) -> None:
        """A request has been pushed to the queue, or was refused by its outlook, which may be set here anew."""
        ...

    def decide(self, queue: Queue, state: State, now_ns: int, free_slots: int) -> Decision:
        """Decide for a queue that is not empty, with free_slots >= 1. Called again after each batch, and at any time."""
        ...

    def finished(self, batch: Batch, now_ns: int, compute_ns: int, ok: bool) -> None:
        """A batch has run. compute_ns: its execution alone, without hand-over."""
        ...
