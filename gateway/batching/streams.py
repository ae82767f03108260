"""How long streams keep their sessions: what the answers of a model that gives them in parts took as a whole.

Theory of operation. How long a stream goes on is up to what is asked and to who reads it, so no size and no level tells it.
The last ones are kept as they were. Of a stream that has gone on for some time, those that went on for longer say what is left,
each as likely as the other; where none did, it needs as long again as it is overdue. Where several run, the shares of what each
may have left add up to how many sessions are free by when. One is taken to be free for a request once that is half a session
more than those before it take: as likely as not. By the mean, a single client that reads slowly for minutes would make all
seem long.
"""

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable
from heapq import heapify, heappop, heapreplace
from typing import Final

_KEPT: Final = 32
_AS_LIKELY_AS_NOT: Final = 0.499  # a little less than half: shares are not exact


class Streams:
    """The last streams of one lane. usual_ns: what half of them took at most; 0: none has ended yet."""

    __slots__ = ("_last", "_ordered", "usual_ns")

    def __init__(self) -> None:
        self._last: deque[int] = deque()
        self._ordered: list[int] = []
        self.usual_ns = 0

    def ended(self, kept_ns: int) -> None:
        """Learn from one that kept its session so long."""
        if len(self._last) == _KEPT:
            self._ordered.remove(self._last.popleft())
        self._last.append(kept_ns)
        insort(self._ordered, kept_ns)
        self.usual_ns = self._ordered[(len(self._ordered) - 1) // 2]

    def free_ns(self, ages_ns: Iterable[int], others_ns: Iterable[float], ahead: int) -> tuple[float, float]:
        """When a session is free for who waits first, and for one behind `ahead` others.

        There must be one that has ended. ages_ns: for how long each that runs has done so. others_ns: what each other session
        has left. Together these are more than `ahead`.
        """
        ordered = self._ordered
        count = len(ordered)
        # Of each session the least it may have left, the share of that, where it stands in `ordered`, and the age.
        nexts = [(left_ns, 1.0, count, 0) for left_ns in others_ns]
        for age_ns in ages_ns:
            at = bisect_right(ordered, age_ns)
            if at < count:
                nexts.append((ordered[at] - age_ns, 1.0 / (count - at), at, age_ns))
            else:
                nexts.append((age_ns - ordered[-1], 1.0, at, age_ns))
        heapify(nexts)
        first_ns: float | None = None
        free = 0.0
        while True:
            left_ns, share, at, age_ns = nexts[0]
            free += share
            if first_ns is None and free > _AS_LIKELY_AS_NOT:
                first_ns = left_ns
            if first_ns is not None and free > ahead + _AS_LIKELY_AS_NOT:
                return float(first_ns), float(left_ns)
            if at + 1 < count:
                heapreplace(nexts, (ordered[at + 1] - age_ns, share, at + 1, age_ns))
            else:
                heappop(nexts)
