"""Which lengths go together, in the stances others than the planned one.

Theory of operation. A batch takes as long as its longest makes it. So for each length that waits the batch is weighed of all
that is no longer, once the first are left out who would be late in it; of these, the one goes that ends most rows for its time.
Where times hardly grow with the length, that is all that waits, padded to the longest; where they do, it is the shorter ones.
Who stands first is in it, unless without him it would end more than twice as many.
"""

from bisect import bisect_right
from collections.abc import Callable, Hashable, Sequence
from typing import Final, NamedTuple

from gateway.batching.inflow import Inflow
from gateway.batching.joining import joined
from gateway.batching.overload import OVERLOADED, Plan, collected, outlook
from gateway.batching.policy import Decision, Fill
from gateway.batching.queue import Entry, Expected, Outlook, Queue, State
from gateway.batching.service_curve import ServiceCurve
from gateway.batching.stances import AT_ONCE, LATE, Stance

_FIRST: Final = 2.0  # times the rows for its time, that a batch must end for the first in line not to be in it

_Line = Sequence[tuple[int, int, int, Entry]]
"""All that waits in order: virtual deadline, sequence number, place of the queue, entry."""


class _Choice(NamedTuple):
    """A batch of the first rows of line[skip:]. time_ns: expected. wake_at_ns: it may wait until then; 0: it goes."""

    line: _Line
    skip: int
    rows: int
    time_ns: float
    wake_at_ns: int


class _Weigher:
    """Weighs batches that are to start now."""

    def __init__(self, stance: Stance, level: float, workers: int, now_ns: int, slo_ns: int) -> None:
        self._holds = stance != AT_ONCE
        self._by_spread = stance == LATE
        self._level = level
        self._now_ns = now_ns
        self._usual_ns = slo_ns * workers / (workers + 1)

    def batch(self, line: _Line, rows: int, curve: ServiceCurve) -> _Choice | None:
        """Of this line, so many rows in all; None: all would be late."""
        now_ns, sizes = self._now_ns, curve.sizes
        quantile = self._level * (curve.spread if self._by_spread else 1.0)
        most = usual = sizes[-1]
        if self._holds:
            usual = sizes[max(0, bisect_right(curve.shape, self._usual_ns / quantile) - 1)]
        left, skip = rows, 0
        for _, _, _, entry in line:
            due_ns = entry[2]
            if now_ns + curve.shape[curve.at(min(left, usual))] * quantile <= due_ns:
                break
            left -= entry[3]
            skip += 1
        else:
            return None
        taken = min(left, most)
        wake_at_ns = 0
        if self._holds:
            taken = min(taken, sizes[max(0, bisect_right(curve.shape, (due_ns - now_ns) / quantile) - 1)])
            if taken == left < most:
                wake_at_ns = int(due_ns - curve.shape[curve.at(taken + 1)] * quantile)
        return _Choice(
            line, skip, taken, curve.shape[curve.at(taken)] * self._level, wake_at_ns if wake_at_ns > now_ns + 1 else 0
        )


def decide_among(
    stance: Stance,
    queue: Queue,
    state: State,
    stream_of: Callable[[Hashable], Inflow],
    now_ns: int,
    free_slots: int,
    slo_ns: int,
) -> Decision | None:
    """Of all lengths that wait. queue: which is asked for; only that of the first in line answers.

    None: nothing would be in time, or not all may share a batch; so the planned rule is to say what becomes of it.
    """
    waiting = [each for each in state.queues.values() if each.entries]
    first = queue.entries[0]
    for each in waiting:
        if not joined(each.group, queue.group) or each.has_lower_class:
            return None
        if each.entries[0] < first:
            return Decision(0, outlook=queue.outlook)
    waiting.sort(key=lambda each: each.group)  # type: ignore[arg-type, return-value]  # LengthGroups of one shape key
    curves = [stream_of(each.group).curve.current() for each in waiting]
    line = sorted([(entry[0], entry[1], at, entry) for at, each in enumerate(waiting) for entry in each.entries])
    busy = len(state.in_flight)
    level = curves[-1].level(busy + 1)
    shed: list[list[Entry]] = [[] for _ in waiting]
    most = curves[-1].sizes[-1]
    if state.rows - state.requests >= most:  # else none is larger than a batch
        paces = [Expected(curve, level, 1.0) for curve in curves]
        for _, _, at, entry in line:
            if entry[3] > most and entry[2] < now_ns + paces[at].alone_ns(entry[3], busy + free_slots):
                shed[at].append(entry)
        gone = {entry[1] for entries in shed for entry in entries}
        line = [each for each in line if each[1] not in gone]
    weigher = _Weigher(stance, level, busy + free_slots, now_ns, slo_ns)
    best, chosen, longest, rows = 0.0, None, 0, 0
    own = waiting.index(queue)
    for at, curve in enumerate(curves):
        rows += waiting[at].rows - sum([entry[3] for entry in shed[at]])
        shorter = line if at == len(curves) - 1 else [each for each in line if each[2] <= at]
        choice = weigher.batch(shorter, rows, curve)
        if choice is None:
            continue
        worth = choice.rows / choice.time_ns
        if at >= own and not choice.skip:
            worth *= _FIRST
        if worth >= best:
            best, chosen, longest = worth, choice, at
    if chosen is None:
        return None
    _foresee(state, waiting[longest].group, stream_of, level, busy + free_slots, now_ns, slo_ns)
    return _decision(chosen, waiting, own, queue.outlook, shed)


def _foresee(
    state: State,
    longest: Hashable,
    stream_of: Callable[[Hashable], Inflow],
    level: float,
    workers: int,
    now_ns: int,
    slo_ns: int,
) -> None:
    """Set the outlook of all queues: none of what is served; under overload of all that comes, that of what is longer.

    Of that one may wait, whatever its length: its turn may come when it stands first.
    """
    together = [each for each in state.queues.values() if joined(each.group, longest)]
    aside = [each for each in together if each.group > longest]  # type: ignore[operator]  # LengthGroups of one shape key
    ahead: Outlook | None = None
    if aside and any(each.entries for each in aside):
        rate = sum([stream_of(group).rate(now_ns) for group in state.queues])
        curve = stream_of(max([each.group for each in aside])).curve.current()  # type: ignore[type-var]  # as above
        at = collected(curve, rate, slo_ns, level)
        crowd = rate / curve.rates[at] * curve.level(workers) / workers if curve.ready else 0.0
        if crowd > OVERLOADED:
            ahead = outlook(curve, level, Plan(at, 1.0), workers, crowd, now_ns, together=True)
            ahead.full_ns = ahead.least_ns = slo_ns
            ahead.due_ns = ahead.pace.margin * slo_ns
    for each in state.queues.values():
        each.outlook = None
    for each in aside:
        each.outlook = ahead


def _decision(
    chosen: _Choice, waiting: Sequence[Queue], own: int, ahead: Outlook | None, shed: Sequence[list[Entry]]
) -> Decision:
    """Shed whom the batch leaves out, beside others by queue, and take its rows of each."""
    for _, _, at, entry in chosen.line[: chosen.skip]:
        shed[at].append(entry)
    taken = [0] * len(waiting)
    if not chosen.wake_at_ns:
        rows = 0
        for _, _, at, entry in chosen.line[chosen.skip :]:
            if rows and rows + entry[3] > chosen.rows:
                break
            rows += entry[3]
            taken[at] += entry[3]
    fill = [Fill(each, taken[at], shed[at]) for at, each in enumerate(waiting) if at != own and (taken[at] or shed[at])]
    if chosen.wake_at_ns:
        return Decision(0, "hold", chosen.wake_at_ns, shed[own], 0, fill, ahead)
    return Decision(taken[own], "idle", None, shed[own], round(chosen.time_ns), fill, ahead)
