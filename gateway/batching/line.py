"""Lengths that share every batch at little cost stand in one line, and are decided on as if they were one queue.

Theory of operation. Each length has a queue and a curve of its own. Apart, each must gather a batch of its own, and every
batch costs the fixed part of t(n) again; together, all are padded to the longest. Where together takes less worker time, in
batches of what can be collected within the SLO, and hardly any of it for padding, the policy is shown one queue of all that
waits, in order, with the rate of all arrivals and the curve of the longest that waits. What it takes and sheds is then dealt
out to the queues.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Final

from gateway.batching.inflow import Inflow
from gateway.batching.joining import joined
from gateway.batching.overload import collected
from gateway.batching.policy import Fill
from gateway.batching.queue import Entry, Queue
from gateway.batching.service_curve import ServiceCurve

_ASKED_EVERY: Final = 64  # arrivals
_PADDING: Final = 0.25  # of a batch's time, at most, where even together they keep more workers busy than there are
_PADDING_AT_EASE: Final = 0.15  # else


class Line:
    """The requests of all queues. stream: these, with the curve of the longest that waits.

    one: whether they stand in one line; asked anew after for_more arrivals, and when there are more or fewer queues than of.
    """

    __slots__ = ("for_more", "of", "one", "stream")

    def __init__(self, curve: ServiceCurve) -> None:
        self.stream = Inflow(curve)
        self.one = False
        self.for_more = self.of = 0

    def came(self, rows: int, now_ns: int) -> None:
        self.stream.came(rows, now_ns)
        self.for_more -= 1

    def is_one(
        self, groups: Collection[Hashable], stream_of: Callable[[Hashable], Inflow], workers: int, now_ns: int, slo_ns: int
    ) -> bool:
        """groups: of all queues."""
        if self.for_more <= 0 or self.of != len(groups):
            self.for_more, self.of = _ASKED_EVERY, len(groups)
            self.one = _joins({group: stream_of(group) for group in groups}, workers, now_ns, slo_ns)
        return self.one


def _joins(streams: dict[Hashable, Inflow], workers: int, now_ns: int, slo_ns: int) -> bool:
    first = next(iter(streams))
    if not all(joined(group, first) for group in streams):
        return False
    longest = streams[max(streams)].curve.current()  # type: ignore[type-var]  # all are LengthGroups of one shape key
    rates = [(stream.curve.current(), stream.rate(now_ns)) for stream in streams.values()]
    if not all(curve.ready for curve, _ in rates):
        return False
    rate = sum([each for _, each in rates])
    size = _collected(longest, rate, slo_ns)
    time_ns = longest.shape[size]
    own_ns = sum([each * curve.shape[size] for curve, each in rates])
    together = rate / longest.rates[size]
    most = _PADDING if together * longest.level(workers) > workers else _PADDING_AT_EASE
    if own_ns < (1 - most) * rate * time_ns:
        return False
    return together < sum([each / curve.rates[_collected(curve, each, slo_ns)] for curve, each in rates])


def _collected(curve: ServiceCurve, rate: float, slo_ns: int) -> int:
    return collected(curve, rate, slo_ns, curve.level(1) * curve.spread)


def dealt(line: Queue, first: Queue, queues: Iterable[Queue], rows: int, shed: Sequence[Entry]) -> list[Fill]:
    """What each queue gives of the first `rows` of a line, once `shed` has left it: `first`, then others that give any."""
    gone = {entry[1] for entry in shed}
    left, last = rows, (0, 0)
    for entry in line.entries if rows else ():
        if entry[1] in gone:
            continue
        if entry[3] > left and left < rows:
            break
        left -= entry[3]
        last = entry[:2]
        if left <= 0:
            break
    found = [Fill(first, 0)]
    for queue in queues:
        taken = 0
        out: list[Entry] = []
        for entry in queue.entries:
            if entry[1] in gone:
                out.append(entry)
            elif entry[:2] <= last:
                taken += entry[3]
            elif not gone:
                break
        if queue is first:
            found[0] = Fill(queue, taken, out)
        elif taken or out:
            found.append(Fill(queue, taken, out))
    return found
