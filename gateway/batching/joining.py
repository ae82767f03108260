"""Which lengths share a batch, and who may overtake whom: steps 6 and 7 of the adaptive policy."""

from collections.abc import Callable, Hashable
from itertools import islice
from typing import Final, Protocol

from gateway.batching.policy import Fill
from gateway.batching.queue import NEVER, BatchLimits, LengthGroup, Queue, State
from gateway.batching.service_model import ServiceCurve

_SAVED: Final = 0.05  # of what a batch takes longer for those who pass others, if it takes twice as long; else in proportion


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


def in_turn(
    queue: Queue,
    view: Moment,
    rows: int,
    fill: list[Fill],
    state: State,
    curve_of: Callable[[Hashable], ServiceCurve],
) -> tuple[int, list[Fill], float] | None:
    """Step 7. The batch without those who would overtake others for too little; None: all may go.

    Who stands in line behind one that stays goes only if that saves enough: the more, the more the batch takes longer, by which
    those who stay wait longer. Who passes nobody goes if it takes no longer than one after the other.
    """
    joined = [more.queue for more in fill]
    behind = [each.entries[0][0] for each in state.queues.values() if each.entries and each is not queue and each not in joined]
    if not behind:
        return None
    busy = view.busy + 1
    passes_nobody = min(behind)
    curves = [view.curve, *(curve_of(each.group) for each in joined)]
    most = [rows, *(more.rows for more in fill)]
    late = [0, *(len(more.shed) for more in fill)]  # first in their queues
    line: list[tuple[int, int, int, int]] = []  # as entries, with the place of their queue
    for at, each in enumerate((queue, *joined)):
        seen = 0
        for entry in islice(each.entries, late[at], None):
            if seen >= most[at]:
                break
            line.append((entry[0], entry[1], min(entry[3], most[at] - seen), at))
            seen += entry[3]
    taken = [0] * len(curves)
    kept: list[int] = []
    alone_ns = apart_ns = in_line_ns = saved_in_line_ns = 0.0
    for key, _, part, at in sorted(line):
        taken[at] += part
        apart_ns += curves[at].pooled_ns(part, busy)
        total = sum(taken)
        time_ns = max([curve.pooled_ns(total, busy) for curve, has in zip(curves, taken, strict=True) if has])
        saved_ns = apart_ns - time_ns
        if not kept:
            alone_ns = in_line_ns = time_ns
            kept = list(taken)
        elif key <= passes_nobody:
            in_line_ns, saved_in_line_ns = time_ns, saved_ns
        longer_ns = time_ns - in_line_ns
        if saved_ns >= 0.0 and saved_ns - saved_in_line_ns >= _SAVED * longer_ns * longer_ns / alone_ns:
            kept = list(taken)
    if kept == taken:
        return None
    total = sum(kept)
    expected_ns = max([curve.expected_ns(total, busy) for curve, has in zip(curves, kept, strict=True) if has])
    return kept[0], [Fill(more.queue, part, more.shed) for more, part in zip(fill, kept[1:], strict=True) if part], expected_ns


def joined(one: Hashable, other: Hashable) -> bool:
    """Whether requests of both groups may be padded to share a batch."""
    return isinstance(one, LengthGroup) and isinstance(other, LengthGroup) and one.shape_key == other.shape_key
