"""Which lengths share a batch, and who may overtake whom: steps 6 and 7 of the adaptive policy."""

from collections.abc import Callable, Hashable, Sequence
from math import exp, inf
from typing import Any, Final, Protocol

from gateway.batching.policy import Fill
from gateway.batching.queue import NEVER, BatchLimits, LengthGroup, Queue, State, shares_none
from gateway.batching.service_curve import ServiceCurve

# Times what the first has waited: by so much later may have come a request that is worth 1/e of what it else were.
_PASSES: Final = 4.0


class Moment(Protocol):
    """When a batch is to start: the curve of its queue, and how many workers run and live.

    level: times the curve's shape is what rows are expected to take now. quantile: what they take at worst.
    """

    curve: ServiceCurve
    now_ns: int
    level: float
    quantile: float
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
    others: list[Queue] = []
    if isinstance(queue.group, LengthGroup):
        others += [other for other in state.queues.values() if other is not queue and joined(other.group, queue.group)]
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
        deadline_ns = min(deadline_ns, other.entries[len(late)][2])
        rows += more
    return fill, time_ns


# Rows of one request: what each of them is worth, below zero, so that in a sorted list those worth most come first; their place
# in its queue, in rows; which of the queues; how many; and the deadline. A plain tuple, which is made in a seventh of the time
# of a named one.
_InLine = tuple[float, int, int, int, int]


def in_turn(
    queue: Queue,
    view: Moment,
    rows: int,
    fills: bool,
    state: State,
    limits: BatchLimits,
    curve_of: Callable[[Hashable], ServiceCurve],
) -> tuple[int, list[Fill], float]:
    """Step 7. The batch with the first of the queue that is worth most for its time: its rows, what else, and its time.

    rows: of this queue at most. fills: whether other lengths may go along. A request is worth the time that it takes alone, and
    the less, the later it stands in line: so where nothing is saved, all go as they came.
    """
    queues = [queue]
    for each in state.queues.values() if fills and isinstance(queue.group, LengthGroup) else ():
        if each.entries and each is not queue and joined(each.group, queue.group):
            queues.append(each)
    curves = [view.curve, *[curve_of(each.group) for each in queues[1:]]]
    busy, most = view.busy + 1, max(rows, view.curve.sizes[-1])
    times = [curve.pooled(busy) if curve.ready else None for curve in curves]
    groups: list[Any] = [each.group for each in queues]  # where there are several: LengthGroups of one shape key
    first, line = _by_worth(queues, curves, times, rows, most, busy, view.now_ns)
    first_worth, _, _, first_rows, first_deadline_ns = first
    now_ns, own, in_steps = view.now_ns, groups[0], bool(limits.row_sizes)
    best, kept, time_ns = 0.0, [first_rows], 0.0
    for at, time_of in enumerate(times):
        longest, curve = groups[at], curves[at]
        if time_of is None or (at and longest < own):
            continue
        total, worth, deadline_ns = first_rows, first_worth * first_rows, first_deadline_ns
        taken = [total] + [0] * (len(curves) - 1)
        per_time = worth / time_of(total)
        if per_time < best:
            best, kept, time_ns = per_time, list(taken), curve.expected_ns(total, busy)
        for each_worth, _, of, more, due_ns in line:
            if of and groups[of] > longest:
                continue
            total += more
            if due_ns < deadline_ns:
                deadline_ns = due_ns
            if total > most or (deadline_ns != NEVER and now_ns + curve.expected_ns(total, busy) * curve.spread > deadline_ns):
                break
            worth += each_worth * more
            before, per_time = per_time, worth / time_of(total)
            if per_time > before and not in_steps:  # those after it are worth still less
                break
            taken[of] += more
            if per_time <= best:  # who costs nothing goes along
                best, kept, time_ns = per_time, list(taken), curve.expected_ns(total, busy)
    return kept[0], [Fill(each, more) for each, more in zip(queues[1:], kept[1:], strict=True) if more], time_ns


def _by_worth(
    queues: Sequence[Queue],
    curves: Sequence[ServiceCurve],
    times: Sequence[Callable[[int], float] | None],
    rows: int,
    most: int,
    busy: int,
    now_ns: int,
) -> tuple[_InLine, list[_InLine]]:
    """The first of the first queue, and all others, of which those worth most come first; nobody before who stands before it.

    times: what rows of each queue take; None: unknown. So many rows of the first queue, and as many as a batch takes of the
    others.
    """
    key, _, _, _, request = queues[0].entries[0]
    scale_ns = _PASSES * max(1, now_ns - request.arrival_ns)
    line: list[_InLine] = []
    for at, time_of in enumerate(times):
        if time_of is None:
            continue
        place, limit, least, known, row_ns = 0, most if at else rows, -inf, 0, 0.0
        for entry_key, _, deadline_ns, part, _ in queues[at].entries:
            if place + part > limit:
                part = limit - place
                if part <= 0:
                    break
            if part != known:
                known, row_ns = part, _lone_ns(curves[at], time_of(part), part, busy) / part
            worth = -row_ns * exp((key - entry_key) / scale_ns) if entry_key > key else -row_ns
            if worth > least:
                least = worth
            line.append((least, place, at, part, deadline_ns))
            place += part
    return line[0], sorted(line[1:])


def _lone_ns(curve: ServiceCurve, pooled_ns: float, rows: int, busy: int) -> float:
    """What rows take by themselves: by all lengths together or by their own, whichever is less, until the former is sure."""
    told_ns = 0.0 if curve.pools else curve.surface_ns(rows, busy)
    return min(told_ns, pooled_ns) if told_ns else pooled_ns


def joined(one: Hashable, other: Hashable) -> bool:
    """Whether requests of both groups may be padded to share a batch."""
    both = isinstance(one, LengthGroup) and isinstance(other, LengthGroup) and one.shape_key == other.shape_key
    return both and not shares_none(one)
