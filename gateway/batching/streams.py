"""How long streams keep their sessions: what the answers of a model that gives them in parts took as a whole.

Theory of operation. How long a stream goes on is up to what is asked and to who reads it, so no size and no level tells it.
The last ones are kept as they were. Of a stream that has gone on for some time, those that went on for longer say what is left,
each as likely as the other; where none did, it needs as long again as it is overdue. Where several run, the shares of what each
may have left add up to how many sessions are free by when. One is taken to be free for a request once that is half a session
more than those before it take: as likely as not. By the mean, a single client that reads slowly for minutes would make all
seem long.
"""

from bisect import insort
from collections import deque
from collections.abc import Sequence
from typing import Final

import numpy as np

_KEPT: Final = 32
_AS_LIKELY_AS_NOT: Final = 0.499  # a little less than half: shares are not exact
_COUNT_BITS: Final = _KEPT.bit_length()


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

    def free_ns(self, ages_ns: Sequence[int], others_ns: Sequence[float], ahead: int) -> tuple[float, float]:
        """When a session is free for who waits first, and for one behind `ahead` others.

        There must be one that has ended. ages_ns: for how long each that runs has done so. others_ns: what each other session
        has left. Together these are more than `ahead`.
        """
        ordered, ages = np.array(self._ordered), np.array(ages_ns, np.int64)
        longer = len(ordered) - ordered.searchsorted(ages, "right")  # how many went on for longer than each has
        left_ns = ordered[:, None] - ages
        overdue_ns = ages[longer == 0] - ordered[-1]
        certain_ns = np.concatenate((overdue_ns, np.array(others_ns).astype(np.int64)))
        # What each session may have left, and in its last bits as one of how many.
        told = (left_ns << _COUNT_BITS | longer)[left_ns > 0]
        nexts = np.concatenate((told, certain_ns << _COUNT_BITS | 1))
        # Stable, which finds what is in order, as sessions are told by age: with 256 that takes a sixth of the time, and all of
        # this 0.1 ms. To go from one to the next took up to 2.7.
        nexts.sort(kind="stable")
        free = (1.0 / (nexts & (1 << _COUNT_BITS) - 1)).cumsum()
        first, last = free.searchsorted((_AS_LIKELY_AS_NOT, ahead + _AS_LIKELY_AS_NOT), "right")
        return float(nexts[first] >> _COUNT_BITS), float(nexts[last] >> _COUNT_BITS)
