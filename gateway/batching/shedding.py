"""What does not go with a batch: requests that would be late, and rows that do not pay."""

from bisect import bisect_left
from itertools import islice
from math import inf
from typing import Final

from gateway.batching.inflow import View
from gateway.batching.queue import BatchLimits, Entry, Queue

_STEP: Final = 1.1  # times the rows per second, for which it is worth to leave some behind
_FEW: Final = 4  # rows left behind are no more than go, or these: if more, times are just changing


def shed_late(queue: Queue, view: View, rows: int, shed: list[Entry]) -> int:
    """Shed what goes with this batch and would be late although the first is not. Returns the rows that stay.

    Requests of a lower class, and those larger than a batch that even alone would not be done: others take the place of these.
    """
    end_ns, most = view.now_ns + view.expected_ns(rows) * view.margin, view.sizes[-1]
    seen = late = 0
    for at, entry in enumerate(islice(queue.entries, len(shed), None)):
        if at and entry[3] > most and seen < rows and entry[2] < view.now_ns + view.alone_ns(entry[3], 1.0):
            shed.append(entry)
            continue
        seen += entry[3]
        if seen > rows:
            break
        if at and entry[2] < end_ns and entry[0] > entry[2]:
            shed.append(entry)
            late += entry[3]
    else:
        rows = min(rows, seen)
    return rows - late


def stepped(view: View, rows: int, limits: BatchLimits) -> int:
    """Step 5."""
    curve = view.curve
    up = curve.at(rows)
    if not limits.row_sizes:
        # What is no known step may be feigned by scatter. Without an SLO it would let the queue grow where what was learned
        # holds no more; of known steps at most one stays unfilled.
        feigned = 1.0 if curve.steps is not None else curve.spread if limits.slo_ns is not None else inf
        if curve.rates[up] * curve.shape[up] > _STEP * feigned * rows:
            full = curve.sizes[bisect_left(curve.rates, curve.rates[up])]
            return full if rows - full <= max(full, _FEW) else rows
    elif up and view.sizes[up] > rows and view.sizes[up - 1] / view.shape[up - 1] > rows / view.shape[up]:
        return view.sizes[up - 1]
    return rows


def shed_hopeless(queue: Queue, view: View, hope: float, most_ns: float, shed: list[Entry]) -> int:
    """Step 1. Returns the rows shed. most_ns: that a request larger than a batch takes by hope, unless by T it takes more."""
    soonest_ns = view.now_ns + view.alone_ns(1, hope)
    rows = 0
    for entry in queue.entries:
        if entry[3] > view.sizes[0]:
            # What has run would have in vain. But others have their part of several workers, and those of fewer rows that wait
            # are more that can be served in that time.
            others = len(queue.entries) - 1
            goes_on = not others or (view.workers == 1 and entry[3] * others <= queue.rows - entry[3])
            goes_on = goes_on and entry[3] < entry[4].rows
            alone_ns = view.alone_ns(entry[3], min(hope, 1.0) if goes_on else hope)
            if alone_ns > most_ns and entry[4].rows > view.sizes[-1]:
                alone_ns = min(alone_ns, max(most_ns, view.alone_ns(entry[3], 1.0)))
            if entry[2] >= view.now_ns + alone_ns:
                break
        elif entry[2] >= soonest_ns:
            break
        shed.append(entry)
        rows += entry[3]
    return rows


def sure(queue: Queue, view: View, skip: int) -> int:
    """The deadline that bounds the batch: of the first that will be in time; without any, of the first that may be."""
    for entry in islice(queue.entries, skip, None):
        if entry[2] >= view.now_ns + view.alone_ns(entry[3], view.margin):
            return entry[2]
    return queue.entries[skip][2]


def shed_front(queue: Queue, view: View, fresh: int, waiting: int, shed: list[Entry]) -> tuple[int, int]:
    """Step 3. Returns the rows that stay and the index of what the new first allows."""
    fits = 0
    for entry in islice(queue.entries, len(shed), None):
        fits = view.fits(entry[2] - view.now_ns)
        if fits >= 0 and view.sizes[fits] >= min(view.sizes[fresh], waiting):
            break
        shed.append(entry)
        waiting -= entry[3]
    return waiting, fits
