"""Which lengths share a batch, and who may overtake whom: steps 6 and 7 of the adaptive policy."""

from collections.abc import Callable, Hashable, Sequence
from math import exp, inf
from typing import Final, NamedTuple, Protocol

from gateway.batching.policy import Fill
from gateway.batching.queue import NEVER, BatchLimits, LengthGroup, Queue, State
from gateway.batching.service_model import ServiceCurve

# Times what the first has waited: by so much later may have come a request that is worth 1/e of what it else were.
_PASSES: Final = 5.0


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
    others = [other for other in state.queues.values() if other is not queue and joined(other.group, queue.group)]
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


class _InLine(NamedTuple):
    """Rows of one request. worth: of each of them, below zero, so that in a sorted list those worth most come first."""

    worth: float
    place: int  # in its queue, in rows
    at: int  # of its queue
    rows: int
    deadline_ns: int


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
    for each in state.queues.values() if fills else ():
        if each.entries and each is not queue and joined(each.group, queue.group):
            queues.append(each)
    curves = [curve_of(each.group) for each in queues]
    busy, most = view.busy + 1, max(rows, view.curve.sizes[-1])
    first, line = _by_worth(queues, curves, rows, most, busy, view.now_ns)
    best, kept, time_ns = 0.0, [first.rows], 0.0
    for at, curve in enumerate(curves):
        if at and (not curve.ready or queues[at].group < queue.group):  # type: ignore[operator]  # LengthGroups of one shape key
            continue
        total, worth, deadline_ns = first.rows, first.worth * first.rows, first.deadline_ns
        taken = [total] + [0] * (len(curves) - 1)
        per_time = worth / curve.pooled_ns(total, busy)
        if per_time < best:
            best, kept, time_ns = per_time, list(taken), curve.expected_ns(total, busy)
        for more in line:
            if more.at and queues[more.at].group > queues[at].group:  # type: ignore[operator]
                continue
            total += more.rows
            deadline_ns = min(deadline_ns, more.deadline_ns)
            if total > most or (
                deadline_ns != NEVER and view.now_ns + curve.expected_ns(total, busy) * curve.spread > deadline_ns
            ):
                break
            worth += more.worth * more.rows
            before, per_time = per_time, worth / curve.pooled_ns(total, busy)
            if per_time > before and not limits.row_sizes:  # those after it are worth still less
                break
            taken[more.at] += more.rows
            if per_time <= best:  # who costs nothing goes along
                best, kept, time_ns = per_time, list(taken), curve.expected_ns(total, busy)
    return kept[0], [Fill(each, more) for each, more in zip(queues[1:], kept[1:], strict=True) if more], time_ns


def _by_worth(
    queues: Sequence[Queue], curves: Sequence[ServiceCurve], rows: int, most: int, busy: int, now_ns: int
) -> tuple[_InLine, list[_InLine]]:
    """The first of the first queue, and all others, of which those worth most come first; nobody before who stands before it.

    So many rows of the first queue, and as many as a batch takes of the others.
    """
    key, _, _, _, request = queues[0].entries[0]
    scale_ns = _PASSES * max(1, now_ns - request.arrival_ns)
    line: list[_InLine] = []
    for at, (each, curve) in enumerate(zip(queues, curves, strict=True)):
        if not curve.ready:
            continue
        place, limit, least, known, row_ns = 0, most if at else rows, -inf, 0, 0.0
        for entry in each.entries:
            part = min(entry[3], limit - place)
            if part <= 0:
                break
            if part != known:
                known, row_ns = part, _lone_ns(curve, part, busy) / part
            least = max(least, -row_ns * exp(min(0.0, (key - entry[0]) / scale_ns)))
            line.append(_InLine(least, place, at, part, entry[2]))
            place += part
    return line[0], sorted(line[1:])


def _lone_ns(curve: ServiceCurve, rows: int, busy: int) -> float:
    """What rows take by themselves: by all lengths together or by their own, whichever is less, until the former is sure."""
    told_ns = curve.surface_ns(rows, busy)
    return min(told_ns, curve.pooled_ns(rows, busy)) if told_ns else curve.pooled_ns(rows, busy)


def joined(one: Hashable, other: Hashable) -> bool:
    """Whether requests of both groups may be padded to share a batch."""
    return isinstance(one, LengthGroup) and isinstance(other, LengthGroup) and one.shape_key == other.shape_key
