"""Which of several models that share a pool of workers starts the next batch: deficit round robin in worker time.

Worker time is charged, not requests or batches: a model with slow batches gets no more of the pool than one with fast batches.
A batch is charged when it starts, by its predicted time, and settled when it ends; a model that has nothing waiting keeps no
credit (Shreedhar and Varghese, "Efficient fair queueing using deficit round robin", SIGCOMM 1995), but its debt stays.
"""

from collections.abc import Collection, Hashable
from math import ceil
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

QUANTUM_NS = 10_000_000


class WorkerShare(Generic[K]):
    """Life: join and leave as models are loaded and unloaded; `first` for each free worker, then charge, and settle at the end.

    Latency bound: between two batches of a model that waits, every other model takes at most its quantum, scaled by its weight,
    plus one batch.
    """

    def __init__(self, quantum_ns: int = QUANTUM_NS) -> None:
        self._quantum_ns = quantum_ns
        self._ring: list[K] = []
        self._weights: dict[K, float] = {}
        self._credit_ns: dict[K, float] = {}
        self._at = 0

    def join(self, member: K, weight: float = 1.0) -> None:
        """weight: its part of the workers, relative to the others'."""
        if weight <= 0:
            raise ValueError(f"weight of {member!r}: expected a positive number, got {weight}")
        if member not in self._weights:
            self._ring.append(member)
            self._credit_ns[member] = 0.0
        self._weights[member] = weight

    def leave(self, member: K) -> None:
        at = self._ring.index(member)
        del self._ring[at], self._weights[member], self._credit_ns[member]
        self._at = (self._at - (at < self._at)) % max(1, len(self._ring))

    def first(self, waiting: Collection[K]) -> K | None:
        """Whose turn it is among those that wait; None if none does. Asking again gives the same answer until a charge.

        A member whose policy declines to start a batch now: ask again without it.
        """
        ring, credit = self._ring, self._credit_ns
        able = [member for member in ring if member in waiting]
        if not able:
            return None
        for member in ring:
            if member not in waiting and credit[member] > 0:
                credit[member] = 0.0
        if all(credit[member] <= 0 for member in able):
            rounds = min(ceil(-credit[member] / self._quantum(member)) or 1 for member in able)
            for member in able:
                credit[member] += rounds * self._quantum(member)
            if all(credit[member] <= 0 for member in able):
                for member in able:
                    credit[member] += self._quantum(member)
        for offset in range(len(ring)):
            member = ring[(self._at + offset) % len(ring)]
            if credit[member] > 0 and member in waiting:
                self._at = (self._at + offset) % len(ring)
                return member
        return None

    def charge(self, member: K, expected_ns: float) -> None:
        """A batch of this member has started. expected_ns: 0 if unknown, then `settle` charges all."""
        self._credit_ns[member] -= expected_ns
        if self._credit_ns[member] <= 0 and self._ring[self._at] == member:
            self._at = (self._at + 1) % len(self._ring)

    def settle(self, member: K, expected_ns: float, actual_ns: float) -> None:
        """The batch has ended. A member that has left meanwhile is forgotten."""
        if member in self._credit_ns:
            self._credit_ns[member] -= actual_ns - expected_ns

    def _quantum(self, member: K) -> float:
        return self._quantum_ns * self._weights[member]
