"""How the slots of shared backend replicas are leased to ingress processes, so that queues stay in the ingress.

A slot that any process may use would need the backend to queue; so each slot belongs to one process for a while. Splitting the
slots splits the queue, and batches with it: `share` follows the load, so that a process with no load holds no slot that another
could fill, and leaves leases where they are while they are about right, since a moved slot idles until its batch has ended.
"""

from collections.abc import Sequence
from dataclasses import dataclass

_KEEP = 0.75


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
        return _spread(slots, len(demands))
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


def _spread(slots: int, processes: int) -> tuple[int, ...]:
    """As evenly as it goes, for when nobody has anything to do."""
    each, extra = divmod(slots, processes)
    return tuple(each + (i < extra) for i in range(processes))
