"""How many of a lane's failed requests are told in the log: a burst at once, then one from time to time.

A traceback for each request of a broken model would fill a disk at the rate of its clients, and tell no more than the first.
"""

from typing import Final

_BURST: Final = 10
_EVERY_NS: Final = 6_000_000_000  # one more, once the burst is used up


class FailureLog:
    """Decides which to tell, and counts the others."""

    __slots__ = ("_left_out", "_room", "_since_ns")

    def __init__(self) -> None:
        self._room = _BURST
        self._since_ns = 0
        self._left_out = 0

    def take(self, now_ns: int) -> int | None:
        """Whether to tell one now: then how many were left out since the last one told; None: leave it out."""
        regained = (now_ns - self._since_ns) // _EVERY_NS
        self._since_ns += regained * _EVERY_NS
        self._room = min(_BURST, self._room + regained)
        if not self._room:
            self._left_out += 1
            return None
        if self._room == _BURST:
            self._since_ns = now_ns
        self._room -= 1
        left_out, self._left_out = self._left_out, 0
        return left_out
