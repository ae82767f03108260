"""Which lengths share a batch, and who may overtake whom: steps 6 and 7 of the adaptive policy."""

from collections.abc import Callable, Hashable
from itertools import islice
from typing import Final, Protocol

from gateway.batching.policy import Fill
from gateway.batching.queue import NEVER, BatchLimits, LengthGroup, Queue, State
from gateway.batching.service_model import ServiceCurve

_TOGETHER: Final = 0.7  # of the time that the first takes to its end: who came so soon after it may go with it
_LONGER: Final = 1.0  # times what it takes without them, those may lengthen a batch who came later
_WORTH: Final = 6.0  # times the fixed part of a lone request's time: the share of these two that is allowed


class Moment(Protocol):
    """When a batch is to start: the curve of its queue, and how many workers run and live."""

    curve: ServiceCurve
    now_ns: int
    busy: int
    workers: int

    def expected_ns(self, rows: float) -> float: ...


def filled(
    queue: Queue,
    view: Moment,
    rows: int,
    deadline_ns: int,
    pressed: bool,
    state: State,
    limits: BatchLimits,
    curve_of: Callable[[Hashable], ServiceCurve],
) -> tuple[list[Fill], float]:
    """Step 6. Rows to take from queues of other lengths, the most urgent first, and the expected time of the whole.

    Together must take less worker time than apart. That is enough when pressed: more arrives than the workers do easily.
    Else those who wait longer for it must not lose more than those gain who need not wait for a batch of their own, and those
    who wait behind them.
    """
    fill: list[Fill] = []
    longest, curve, time_ns = queue, view.curve, view.expected_ns(rows)
    busy = view.busy + 1
    others = [other for other in state.queues.values() if other is not queue and _joins(other.group, queue.group)]
    others.sort(key=lambda other: other.entries[0][0] if other.entries else NEVER)
    for other in others:
        more = min(other.rows, curve.sizes[-1] - rows)
        if more <= 0:
            continue
        theirs = curve_of(other.group)
        if not theirs.ready:
            continue
        longer = longest.group < other.group  # type: ignore[operator]  # both are LengthGroups of one shape key
        together = theirs if longer else curve
        together_ns = together.expected_ns(rows + more, busy)
        saved_ns = time_ns + theirs.expected_ns(more, busy) - together_ns
        if saved_ns > 0 and not limits.row_sizes:
            # A small difference of large times: believed only if all lengths together tell it as well.
            apart_ns = curve.surface_ns(rows, busy) + theirs.surface_ns(more, busy)
            saved_ns = saved_ns if apart_ns > together.surface_ns(rows + more, busy) else 0.0
        padding = limits.padded(rows) - rows
        end_ns = view.now_ns + together_ns * together.spread
        late = []
        for entry in other.entries:
            if entry[2] >= end_ns:
                break
            late.append(entry)
        late_rows = sum(entry[3] for entry in late)
        if late and (view.workers > 1 or late_rows == other.rows):
            continue  # another worker may be in time for them
        more = min(more, other.rows - late_rows)
        gaining = more + (state.rows - rows - more) / view.workers
        if saved_ns > 0 and (pressed or gaining * saved_ns >= rows * (together_ns - time_ns)) and end_ns <= deadline_ns:
            longest, curve, time_ns = (other if longer else longest), together, together_ns
        elif padding and not longer:
            more = min(more, padding)
        else:
            continue
        fill.append(Fill(other, more, late))
        rows += more
    return fill, time_ns


def in_turn(
    queue: Queue,
    view: Moment,
    rows: int,
    fill: list[Fill],
    expected_ns: float,
    state: State,
    curve_of: Callable[[Hashable], ServiceCurve],
) -> tuple[int, list[Fill], float] | None:
    """Step 7. The batch without those who would overtake others by too much; None: all may go.

    Who came later than one that stays behind goes only if it came soon after the first, or if it makes the batch little longer:
    the less of either, the smaller the fixed part of a request's time, as that is all that is saved. So nobody waits for much
    longer than if all went as they came: every batch has the first of those who wait in it, and takes at most twice its time
    for others, unless they came before 0.7 of the first's time was over.
    """
    joined = [more.queue for more in fill]
    behind = [each.entries[0][0] for each in state.queues.values() if each.entries and each is not queue and each not in joined]
    if not behind:
        return None
    first = queue.entries[0]
    busy = view.busy + 1
    worth = min(1.0, _WORTH * view.curve.line_ns[0] * view.curve.level(busy) / view.expected_ns(first[3]))
    until = first[0] + int(worth * _TOGETHER * (view.now_ns + expected_ns - first[4].arrival_ns))
    passes_nobody = min(behind)
    taken = [0] * (1 + len(fill))
    later: list[tuple[int, int, int, int]] = []  # as entries, with the place of their queue
    most = [rows, *(more.rows for more in fill)]
    late = [0, *(len(more.shed) for more in fill)]  # first in their queues
    for at, each in enumerate((queue, *joined)):
        seen = 0
        for entry in islice(each.entries, late[at], None):
            if seen >= most[at]:
                break
            part = min(entry[3], most[at] - seen)
            seen += part
            if entry[0] <= passes_nobody or entry is first:
                taken[at] += part
            else:
                later.append((entry[0], entry[1], part, at))
    if not later:
        return None
    curves = [view.curve, *(curve_of(each.group) for each in joined)]

    def time_ns(total: int) -> float:
        return max([curve.expected_ns(total, busy) for curve, part in zip(curves, taken, strict=True) if part])

    total = sum(taken)
    limit_ns = (1.0 + worth * _LONGER) * time_ns(total)
    closed = set()
    for key, _, part, at in sorted(later):
        if at in closed:
            continue
        taken[at] += part
        if key > until and time_ns(total + part) > limit_ns:
            taken[at] -= part
            closed.add(at)
        else:
            total += part
    if not closed:
        return None
    kept = [Fill(more.queue, part, more.shed) for more, part in zip(fill, taken[1:], strict=True) if part]
    return taken[0], kept, time_ns(total)


def _joins(one: Hashable, other: Hashable) -> bool:
    """Whether requests of both groups may be padded to share a batch."""
    return isinstance(one, LengthGroup) and isinstance(other, LengthGroup) and one.shape_key == other.shape_key
