"""Which of several models that share a pool of workers starts the next batch: deficit round robin in worker time.

Worker time is charged, not requests or batches: a model with slow batches gets no more of the pool than one with fast batches.
A batch is charged when it starts, by its predicted time, and settled when it ends; what runs for longer, as a stream does, is
charged on. A model that has nothing waiting keeps no credit (Shreedhar and Varghese, "Efficient fair queueing using deficit
round robin", SIGCOMM 1995), and its debt is paid off round by round as of those that wait. So who uses less than its part need
not wait again for what it once took.
"""

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Final, Generic, Protocol, TypeVar

from gateway.batching.batch import Batch

K = TypeVar("K", bound=Hashable)

QUANTUM_NS: Final = 10_000_000


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
            if all(credit[member] + rounds * self._quantum(member) <= 0 for member in able):
                rounds += 1
            for member in ring:
                paid = credit[member] + rounds * self._quantum(member)
                credit[member] = paid if member in waiting else min(paid, 0.0)
        for offset in range(len(ring)):
            member = ring[(self._at + offset) % len(ring)]
            if credit[member] > 0 and member in waiting:
                self._at = (self._at + offset) % len(ring)
                return member
        return None

    def charge(self, member: K, time_ns: float) -> None:
        """A batch of this member has started. time_ns: as expected; 0 if unknown, then `settle` charges all."""
        self._credit_ns[member] -= time_ns
        if self._credit_ns[member] <= 0 and self._ring[self._at] == member:
            self._at = (self._at + 1) % len(self._ring)

    def settle(self, member: K, expected_ns: float, actual_ns: float) -> None:
        """The batch has ended. A member that has left meanwhile is forgotten."""
        if member in self._credit_ns:
            self.charge(member, actual_ns - expected_ns)

    def _quantum(self, member: K) -> float:
        return self._quantum_ns * self._weights[member]


class Sharer(Hashable, Protocol):
    """A lane that takes its workers from a `SharedWorkers`."""

    @property
    def wants_worker(self) -> bool:
        """Whether something waits that it could run if it were given a worker; its policy may still decline."""
        ...

    @property
    def undecided(self) -> bool:
        """Whether, as it was last to start some, it has looked at a part of what waits alone: it asks again at once."""
        ...

    def start_batches(self, workers: int) -> Sequence[Batch]:
        """Start at most so many batches now, and answer what is too late; gives what was started."""
        ...

    def free_ns(self, now_ns: int) -> float:
        """How long until the first of the workers that it has is predicted to be free."""
        ...


@dataclass(slots=True)
class _Charged:
    """A batch that runs. ns: of its time, so far."""

    member: Sharer
    ns: float

    def settle(self, share: WorkerShare[Sharer], taken_ns: float) -> None:
        share.settle(self.member, self.ns, taken_ns)
        self.ns = taken_ns


class SharedWorkers:
    """So many batches run at once over all lanes that share, and `WorkerShare` says whose turn it is.

    Life: join; then `ask` whenever the lane would step, `ended` for every batch that start_batches gave; leave. No worker idles
    while a lane that has joined wants it, and a lane that wants one gets its turn as `WorkerShare` bounds it.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._share: WorkerShare[Sharer] = WorkerShare()
        self._members: list[Sharer] = []
        self._running: dict[Batch, _Charged] = {}

    def __repr__(self) -> str:
        return f"<SharedWorkers {len(self._running)} of {self.workers} busy, {len(self._members)} lanes>"

    @property
    def free(self) -> int:
        return self.workers - len(self._running)

    def wait_ns(self, now_ns: int) -> float:
        """How long until a worker is predicted to be free, whoever gets it then."""
        if self.free:
            return 0.0
        return min(member.free_ns(now_ns) for member in {charged.member for charged in self._running.values()})

    def join(self, member: Sharer, weight: float) -> None:
        self._members.append(member)
        self._share.join(member, weight)

    def leave(self, member: Sharer) -> None:
        """Once all its batches have ended."""
        self._members.remove(member)
        self._share.leave(member)

    def ask(self, asking: Sharer, now_ns: int) -> None:
        """Something has changed for this lane: deal the free workers out. It steps once at least, be it with no worker."""
        for batch, charged in self._running.items():  # a stream may go on for minutes, and a batch for longer than was expected
            charged.settle(self._share, max(charged.ns, now_ns - batch.closed_ns))
        wanting = {member for member in self._members if member.wants_worker}
        stepped = set()
        while wanting and self.free:
            member = self._share.first(wanting)
            assert member is not None  # all that want have joined
            offered = max(1, self.free // len(wanting))
            batches = member.start_batches(offered)
            stepped.add(member)
            if not batches and member.undecided:
                break  # its turn is not given to another, for as long as that one's batch takes
            for batch in batches:
                self._running[batch] = _Charged(member, batch.expected_ns)
                self._share.charge(member, batch.expected_ns)
            if len(batches) < offered or not member.wants_worker:
                wanting.discard(member)
        if asking not in stepped:
            asking.start_batches(0)

    def ended(self, batch: Batch, now_ns: int) -> None:
        """Its worker is free again; to be followed by `ask`."""
        charged = self._running.pop(batch, None)
        if charged is not None:
            charged.settle(self._share, now_ns - batch.closed_ns)
