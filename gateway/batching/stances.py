"""Other rules than the planned one, between which and it `rehearsal` chooses.

Each is one that others found good. Where batches have luck, or an SLO leaves hardly any time, no rule is best everywhere. They
see what was learned, as the planned rule does, and like it run nothing that would be late by it.
"""

from typing import Final, Literal

from gateway.batching.inflow import View
from gateway.batching.overload import in_stance
from gateway.batching.policy import Decision
from gateway.batching.queue import NEVER, Entry, Queue
from gateway.batching.shedding import shed_late

Stance = Literal["planned", "at once", "late", "last"]
"""planned: as `adaptive` has it.

at once: all that waits goes, once the first are shed as far as it would by T be late for them (the rule of BentoML's
dispatcher, without its corking). late: a batch goes at the last moment at which one row more would by Q be in time, and who
would be late in one of n, the largest with (1 + 1/k)·Q(n) <= D, is shed (Symphony's). last: the same with T in place of Q.
"""

PLANNED: Final = "planned"
AT_ONCE: Final = "at once"
LATE: Final = "late"
LAST: Final = "last"


def decide_in(stance: Stance, queue: Queue, view: View, slo_ns: int) -> Decision | None:
    """None: nothing would be in time, so the planned rule is to say what becomes of it. Sets the margin of the view."""
    view.margin = view.curve.spread if stance == LATE else 1.0
    view.quantile = view.level * view.margin
    sizes, now_ns = view.sizes, view.now_ns
    most = usual = sizes[-1]
    if stance != AT_ONCE:
        usual = sizes[max(0, view.fits(slo_ns * view.workers / (view.workers + 1)))]
    shed: list[Entry] = []
    left = queue.rows
    for entry in queue.entries:
        if now_ns + view.alone_ns(entry[3] if entry[3] > most else min(left, usual), view.margin) <= entry[2]:
            break
        shed.append(entry)
        left -= entry[3]
    else:
        return None
    due_ns = entry[2]
    if queue.rows - len(queue.entries) >= most:  # else none is larger than a batch
        shed_late(queue, view, min(left, most), shed)
        left = queue.rows - sum([each[3] for each in shed])
    rows = min(left, most)
    if stance != AT_ONCE:
        rows = min(rows, sizes[max(0, view.fits(due_ns - now_ns))])
        if rows == left < most and due_ns != NEVER:
            wake_at_ns = int(due_ns - view.expected_ns(rows + 1) * view.margin)
            if wake_at_ns > now_ns + 1:
                return Decision(0, "hold", wake_at_ns, shed, outlook=in_stance(view, slo_ns))
    rows = max(rows, entry[3])
    ahead = None if stance == AT_ONCE else in_stance(view, slo_ns)
    return Decision(rows, "idle" if rows >= left else "deadline", None, shed, round(view.expected_ns(rows)), outlook=ahead)
