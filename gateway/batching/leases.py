"""How the slots of shared backend replicas are leased to ingress processes, so that queues stay in the ingress.

A slot that any process may use would need the backend to queue; so each slot belongs to one process for a while. Splitting the
slots splits the queue, and batches with it: `share` follows the load, so that a process with no load holds no slot that another
could fill, and leaves leases where they are while they are about right, since a moved slot idles until its batch has ended.
`Leases` moves them one by one, so that there are never more leases than slots.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Final

_KEEP: Final = 0.75
# Parts follow the load of so long a time. Work that waits beside a slot that nobody uses is looked after sooner.
_WINDOW_NS: Final = 250_000_000
# So long a process may keep a slot that it does not use and others want: it may wait for more to join its batch.
_UNUSED_NS: Final = 5_000_000
# A batch that runs for so many times longer than the last one took, and a moment: no turn waits for its end.
_LASTS: Final = 2.0
# Of one that does not say that it knows what it was told, no more is expected after this: it may be frozen.
_PATIENCE_NS: Final = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Demand:
    """What one process has to do. arriving: workers its arrivals keep busy, λ·T(n)/n. waiting_ns: worker time of its queue.

    held: the slots it has.
    """

    arriving: float
    waiting_ns: float
    held: int = 0


def share(slots: int, demands: Sequence[Demand], horizon_ns: int) -> tuple[int, ...]:
    """Slots for each process, `slots` in all.

    horizon_ns: time in which a queue should be worked off, such as half the SLO. Every process that has anything to do gets one
    slot, if there are enough; if not, those with the most work do, and as work that waits grows, it becomes their turn.
    A lease moves only when it is off by more than three quarters of a slot.
    """
    work = [demand.arriving + demand.waiting_ns / horizon_ns for demand in demands]
    total = sum(work)
    if not total:
        return _spread(slots, demands)
    active = [i for i in range(len(work)) if work[i] > 0]
    given = [0] * len(work)
    if slots <= len(active):
        for i in sorted(active, key=lambda i: (-work[i], -demands[i].held, i))[:slots]:
            given[i] = 1
        return tuple(given)
    ideal = [slots * part / total for part in work]
    for i in active:
        held = demands[i].held
        given[i] = max(1, held if abs(held - ideal[i]) <= _KEEP else int(ideal[i]))
    while (left := slots - sum(given)) > 0:
        short = max(active, key=lambda i: (ideal[i] - given[i], -i))
        given[short] += min(left, max(1, int(ideal[short] - given[short])))
    while sum(given) > slots:
        over = max((i for i in active if given[i] > 1), key=lambda i: (given[i] - ideal[i], i))
        given[over] -= 1
    return tuple(given)


def _spread(slots: int, demands: Sequence[Demand]) -> tuple[int, ...]:
    """As evenly as it goes, for when nobody has anything to do."""
    each, extra = divmod(slots, len(demands))
    given = [each] * len(demands)
    for i in sorted(range(len(demands)), key=lambda i: (-demands[i].held, i))[:extra]:
        given[i] += 1
    return tuple(given)


@dataclass(slots=True, eq=False)
class Lease:
    """What one process has.

    told: how many slots it was told last, told_ns: when, number: which telling that was, known: the last one that it knows of.
    most: how many it may believe to have, until it knows. ordered: what it is told reaches it before the ends of batches that
    are told later, but for those astray. running: batches. wants: batches that wait there, as it last said. turn_ns: when it
    last was given a slot, or used one; begun_ns, ended_ns: when one of its batches last began, and ended. spent_ns: worker time
    since the last count; arriving: workers that were busy for it before that.
    """

    turn_ns: int
    _: KW_ONLY
    told: int = 0
    told_ns: int = 0
    number: int = 0
    known: int = 0
    most: int = 0
    ordered: bool = False
    running: int = 0
    astray: int = 0
    wants: float = 0.0
    begun_ns: int = 0
    ended_ns: int = 0
    spent_ns: float = 0.0
    arriving: float = 0.0

    @property
    def held(self) -> int:
        return max(self.most, self.running)

    @property
    def works(self) -> bool:
        return bool(self.wants or self.running or self.arriving)

    @property
    def waits(self) -> bool:
        """Whether it has work and no slot for it."""
        return bool(self.wants) and self.running >= self.told

    def is_stuck(self, now_ns: int) -> bool:
        """Whether it waits, and has begun nothing for a while."""
        return self.waits and now_ns - self.turn_ns >= _UNUSED_NS

    def keeps_until_ns(self, now_ns: int) -> int:
        """Until when it keeps a slot that it does not use; 0: it has none such, or has had it for long enough."""
        if self.told <= self.running:
            return 0
        knows = self.known == self.number or self.most > self.told  # what it may not know is that it has less
        until_ns = self.turn_ns + (_UNUSED_NS if knows else _PATIENCE_NS)
        return until_ns if until_ns > now_ns else 0

    def rests(self, now_ns: int) -> bool:
        """Whether it has had a slot for a while that it did not use."""
        return self.told > self.running and not self.keeps_until_ns(now_ns) and now_ns - self.ended_ns >= _UNUSED_NS


class Leases:
    """Who may use the slots of one replica: never more leases than slots, so that nothing waits there.

    A slot passes to another process once the one that had it knows, and its batch has ended. While more processes have work
    than there are slots, they go round, one batch each.

    Events tell it what happens; `deal` says whom to tell what afterwards.
    """

    def __init__(self, horizon_ns: int) -> None:
        """horizon_ns: as `share` has it."""
        self.of: dict[str, Lease] = {}
        self.horizon_ns = horizon_ns
        self._counted_ns = self._shared_ns = 0
        self._batch_ns = 1.0  # the last one took
        self._parts: Sequence[int] = ()

    def enter(self, process: str, now_ns: int) -> Lease:
        """A process that has no lease gets one, of no slot yet."""
        self._parts = ()
        lease = self.of[process] = Lease(now_ns)
        return lease

    def leave(self, process: str) -> None:
        """What it runs goes on, and is no lease's any more."""
        if self.of.pop(process, None) is not None:
            self._parts = ()

    def begin(self, process: str, wants: float, now_ns: int, *, astray: bool = False) -> Lease:
        """A process fills a slot. wants: batches that wait behind this one. Returns what `end` is to be told.

        astray: the batch came by another way than what the process is told, so its end may be there before that.
        """
        lease = self.of.get(process) or Lease(now_ns)  # of no process here: it has left
        lease.running += 1
        lease.astray += astray
        lease.wants = wants
        lease.turn_ns = lease.begun_ns = now_ns
        return lease

    def end(self, lease: Lease, took_ns: float, now_ns: int, *, astray: bool = False) -> None:
        lease.running -= 1
        lease.astray -= astray
        lease.ended_ns = now_ns
        self._batch_ns = max(1.0, took_ns)

    def know(self, process: str, number: int) -> None:
        """A process knows what it was told: all it sends from now on is within it."""
        lease = self.of.get(process)
        if lease is not None and lease.number == number:
            lease.known = number
            lease.most = lease.told

    def count_due(self, now_ns: int) -> bool:
        return now_ns - self._counted_ns >= _WINDOW_NS

    def count(self, now_ns: int) -> None:
        """Find parts anew, by what was `spent_ns` since this was called last."""
        window_ns = max(_WINDOW_NS, now_ns - self._counted_ns)
        self._counted_ns = now_ns
        for lease in self.of.values():
            lease.arriving, lease.spent_ns = lease.spent_ns / window_ns, 0.0
        self._parts = ()

    def deal(self, slots: int, busy: int, now_ns: int) -> tuple[list[str], int | None]:
        """Who is to be told what it has now, and when to deal again though nothing happens.

        slots: sessions that live. busy: those of them that run a batch, whosever it is.
        """
        leases = list(self.of.values())
        if not leases:
            return [], None
        stuck = any(lease.is_stuck(now_ns) for lease in leases)
        for lease in leases:
            if lease.rests(now_ns):
                lease.wants = 0.0  # it has what it wants, and does not use it
                if stuck:
                    lease.arriving = min(lease.arriving, lease.running)  # nor is a slot kept for it that another can fill
        if sum(max(lease.works, self._lasting(lease, now_ns)) for lease in leases) > slots:
            self._parts = ()
            parts: Sequence[int] = self._by_turns(slots, now_ns)
        else:
            parts = self._by_load(slots, now_ns)
        strangers = max(0, busy - sum(lease.running for lease in leases))
        changed = self._move(dict(zip(self.of, parts, strict=True)), slots - strangers, now_ns)
        if not any(lease.waits for lease in leases):
            return changed, None
        again = [lease.keeps_until_ns(now_ns) for lease in leases]
        again += [lease.told_ns + _PATIENCE_NS for lease in leases if lease.most > lease.told]
        if any(lease.told > lease.running for lease in leases):
            again.append(self._shared_ns + _UNUSED_NS)
            again += [(lease.turn_ns if lease.waits else lease.ended_ns) + _UNUSED_NS for lease in leases]
        return changed, min((at_ns for at_ns in again if at_ns > now_ns), default=None)

    def _lasting(self, lease: Lease, now_ns: int) -> int:
        """Batches that have run for far longer than the last one took: whose end no turn waits for."""
        return lease.running if now_ns - lease.begun_ns > _LASTS * self._batch_ns + _UNUSED_NS else 0

    def _by_load(self, slots: int, now_ns: int) -> Sequence[int]:
        leases = list(self.of.values())
        missing = any(lease.wants and not lease.told for lease in leases)
        uneven = any(lease.waits for lease in leases) and any(
            not lease.wants and lease.running < lease.told for lease in leases
        )
        known = len(self._parts) == len(leases) and sum(self._parts) == slots
        if not known or missing or (uneven and now_ns - self._shared_ns >= _UNUSED_NS):
            self._shared_ns = now_ns
            # Else what runs and waits at a moment counts for little: slots would go to and fro.
            passing = any(lease.is_stuck(now_ns) for lease in leases)
            demands = [
                Demand(max(lease.arriving, busy), lease.wants * self._batch_ns, lease.told)
                for lease in leases
                for busy in [lease.running + lease.waits if passing else lease.running if lease.wants else 0.0]
            ]
            # Who has nothing to do keeps a slot where there are twice as many as have to work, or his next request had to wait.
            work = sum(demand.arriving + demand.waiting_ns / self.horizon_ns for demand in demands)
            spare = slots - math.ceil(2 * work) if work else 0
            idle = sorted((i for i in range(len(leases)) if not leases[i].works), key=lambda i: (-leases[i].told, i))
            kept = idle[: max(0, spare)]
            parts = list(share(slots - len(kept), demands, self.horizon_ns))
            for i in kept:
                parts[i] += 1
            self._parts = parts
        return self._parts

    def _by_turns(self, slots: int, now_ns: int) -> Sequence[int]:
        """A slot each for those with work whose turn was longest ago; what is left stays with those that used it last."""
        parts = dict.fromkeys(self.of, 0)
        for lease in self.of.values():
            slots = max(0, slots - self._lasting(lease, now_ns))
        in_turn = sorted(self.of.items(), key=lambda item: (not item[1].keeps_until_ns(now_ns), item[1].turn_ns))
        for process, lease in in_turn:
            if slots and not self._lasting(lease, now_ns) and (lease.wants or lease.keeps_until_ns(now_ns)):
                parts[process] = 1
                slots -= 1
        short = [process for process, lease in in_turn if lease.wants and lease.running >= parts[process]]
        for process, lease in reversed(in_turn):
            keeps = lease.running if short and lease.rests(now_ns) else lease.told
            kept = min(slots, max(0, keeps - parts[process]))
            parts[process] += kept
            slots -= kept
        parts[short[0] if short else in_turn[-1][0]] += slots
        return list(parts.values())

    def _move(self, parts: Mapping[str, int], slots: int, now_ns: int) -> list[str]:
        changed = []
        for process, lease in self.of.items():
            if now_ns - lease.told_ns >= _PATIENCE_NS:
                lease.most = min(lease.most, lease.told)
            if parts[process] < lease.told:
                # Who has filled all it may believe to have starts nothing before it hears this.
                if lease.ordered and not lease.astray and lease.running >= lease.most:
                    lease.most = parts[process]
                lease.told = parts[process]
                changed.append(process)
        room = slots - sum(lease.held for lease in self.of.values())
        for process in sorted(self.of, key=lambda process: self.of[process].turn_ns):
            lease = self.of[process]
            part = min(parts[process], lease.held + max(0, room))
            if part > lease.told:
                room -= max(0, part - lease.held)
                lease.told = part
                lease.most = max(lease.most, part)
                lease.turn_ns = now_ns
                changed.append(process)
        for process in changed:
            self.of[process].number += 1
            self.of[process].told_ns = now_ns
        return changed
