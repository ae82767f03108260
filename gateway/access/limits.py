"""How much a key may ask: a rate and a number at once, decided from what it has asked before. Pure.

The rate is kept by one number, the time at which all that was asked would have been due (the generic cell rate algorithm, ITU-T
I.371, which does as a leaky bucket does): each request moves it on by an interval, and is refused while it is further ahead
than the burst allows.
"""

import math
from typing import Final, NamedTuple

FULL: Final = -1  # so many requests are in flight already
_SKEW_NS: Final = 1_000_000_000  # more than processes read one clock apart


class Limit(NamedTuple):
    """interval_ns: from one request to the next, 0 for no rate. burst: that may come at once. most: in flight, 0 for any."""

    interval_ns: int = 0
    burst: int = 1
    most: int = 0

    @classmethod
    def of(cls, per_s: float | None, burst: int | None, most: int | None) -> "Limit | None":
        """As it is written in a file; None where it limits nothing."""
        if per_s is None and most is None:
            return None
        interval_ns = 0 if per_s is None else max(1, round(1e9 / per_s))
        return cls(interval_ns, burst or max(1, math.ceil(per_s or 1)), most or 0)

    def part(self, here: int, of: int) -> "Limit":
        """What of it one place may grant that has `here` of all `of` who grant it; at least one request at a time."""
        if here >= of:
            return self
        interval_ns = -(-self.interval_ns * of // here)
        return Limit(interval_ns, max(1, self.burst * here // of), self.most and max(1, self.most * here // of))


class KeyStanding(NamedTuple):
    """What a key has asked. due_ns: see the module. running: in flight."""

    due_ns: int = 0
    running: int = 0


def admit(standing: KeyStanding, limit: Limit, now_ns: int) -> tuple[KeyStanding, int]:
    """What is so after one more request, and 0; or without it, and FULL, or after how many nanoseconds there is room."""
    if limit.most and standing.running >= limit.most:
        return standing, FULL
    due_ns = standing.due_ns
    if limit.interval_ns:
        latest_ns = now_ns + limit.burst * limit.interval_ns
        if due_ns > latest_ns + _SKEW_NS:  # by a stricter limit that is no more, or by the clock of before a reboot
            due_ns = latest_ns
            standing = KeyStanding(due_ns, standing.running)
        due_ns = max(due_ns, now_ns)
        ahead_ns = due_ns - now_ns - (limit.burst - 1) * limit.interval_ns
        if ahead_ns > 0:
            return standing, ahead_ns
        due_ns += limit.interval_ns
    return KeyStanding(due_ns, standing.running + 1), 0
