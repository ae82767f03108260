"""Which batches are so short that to hand them to a thread costs more than to run them on the event loop.

Theory of operation. To wake a thread and to be woken by it costs about 100 µs where both want the interpreter. So a batch runs
on the loop while batches of its group and size (to the next power of two) take less than that. On a thread their CPU time is
what counts, since a run is timed there with what it waits for the interpreter; on the loop the time that the loop stood still,
unless batches run on threads beside: for those it waits as well, and one that was sent back to a thread for that would have the
next ones wait longer, until all of hundreds of models were on threads.

Being wrong costs others: what a run takes beyond twice the limit is owed, and what others take less is paid back. So one that
was interrupted by the machine is forgiven, and one that takes long sends its size back to threads at once, each time for twice
as many runs as before; but for as many as at first, once thousands had been short: with hundreds of models some are interrupted
for long each minute, and all would end up on threads. Pure.
"""

from collections.abc import Hashable
from typing import Final

SHORT_NS: Final = 100_000
_OWED_NS: Final = 5_000_000
_PROVEN_AT_FIRST: Final = 4
_PROVEN_AGAIN: Final = 64
_PROVEN_MOST: Final = 1 << 14
_FORGIVEN: Final = 4096  # runs on the loop, and it goes back for as many as at first
_SIZES: Final = 256  # clients choose shapes, and could choose many


class _Size:
    """left: short runs on a thread until it is near; proving: how many that are next time. owed_ns, runs: since it is near."""

    __slots__ = ("left", "owed_ns", "proving", "runs")

    def __init__(self) -> None:
        self.left = _PROVEN_AT_FIRST
        self.owed_ns = self.runs = 0
        self.proving = _PROVEN_AGAIN


class Nearness:
    """Of the batches of one backend.

    Bound: runs of one size hold the loop for at most 5 ms beyond twice SHORT_NS each, and the one run with which they do; what
    they wait for the interpreter beside threads is not counted.
    """

    def __init__(self) -> None:
        self._sizes: dict[tuple[Hashable, int], _Size] = {}

    def __repr__(self) -> str:
        near = sum(not size.left for size in self._sizes.values())
        return f"<Nearness: {near} of {len(self._sizes)} sizes on the loop>"

    def near(self, group: Hashable, rows: int) -> bool:
        """Whether a batch is to run on the loop."""
        size = self._sizes.get((group, rows.bit_length()))
        return size is not None and not size.left

    def ran_on_thread(self, group: Hashable, rows: int, cpu_ns: int) -> None:
        key = group, rows.bit_length()
        size = self._sizes.get(key)
        if size is None:
            if len(self._sizes) >= _SIZES:
                del self._sizes[next(iter(self._sizes))]
            size = self._sizes[key] = _Size()
        if cpu_ns > SHORT_NS:
            size.left = max(size.left, _PROVEN_AT_FIRST)
        elif size.left:
            size.left -= 1

    def ran_on_loop(self, group: Hashable, rows: int, took_ns: int) -> None:
        size = self._sizes.get((group, rows.bit_length()))
        if size is None or size.left:
            return  # forgotten, or sent back, while this one was on its way
        size.runs += 1
        size.owed_ns = max(0, size.owed_ns + took_ns - 2 * SHORT_NS)
        if size.owed_ns > _OWED_NS:
            if size.runs > _FORGIVEN:
                size.proving = _PROVEN_AGAIN
            size.left, size.owed_ns, size.runs = size.proving, 0, 0
            size.proving = min(2 * size.proving, _PROVEN_MOST)
