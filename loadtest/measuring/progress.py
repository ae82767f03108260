"""How far a run has come, told while it goes on."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from loadtest.load.patterns import Schedule
from loadtest.load.request_log import OK, PENDING, REFUSED, RESET, RequestLog
from loadtest.verdict.statistics import percentiles

_FOLLOW_REQUESTS: Final = 200_000  # looked at in one go: more are not sent in between


@dataclass(frozen=True, slots=True)
class Progress:
    """What has happened so far, for a live display; rate and percentiles are of about the last second.

    gone_s: how long all that ended found nobody, from the first such request to the last; 0, once one ends in another way.
    """

    elapsed_s: float
    sent: int
    succeeded: int
    failed: int
    rate_rps: float
    p50_ms: float
    p99_ms: float
    gone_s: float = 0.0


class Follower:
    """Follows a log that is being written, looking at each request about once."""

    def __init__(self, log: RequestLog, plan: Schedule, processes: int) -> None:
        segments = processes if plan.users else 1
        size = log.size // segments
        self._log = log
        self._closed = plan.users > 0
        self._settled = [size * number for number in range(segments)]  # every request below, in its segment, is done
        self._ends = [size * (number + 1) for number in range(segments)]
        self._succeeded = self._failed = 0
        self._last_ns = 0
        self._there_ns = -1  # when the latest request ended that found somebody
        self._gone_ns = np.array([], np.int64)  # when the first and the last ended since then

    def settled_ns(self, elapsed_ns: int) -> int:
        """Up to when every intended request of an open loop is done."""
        index = self._settled[0]
        return min(elapsed_ns, self._log.intended[index] if index < self._log.size else elapsed_ns)

    def look(self, elapsed_ns: int) -> Progress:
        succeeded = failed = sent = 0
        recent: list[np.ndarray] = []
        gone_ns = [self._gone_ns]
        for number, (first, end) in enumerate(zip(self._settled, self._ends, strict=True)):
            part = slice(first, min(end, first + _FOLLOW_REQUESTS))
            status, dispatched = np.asarray(self._log.status)[part], np.asarray(self._log.dispatched)[part]
            done, intended = np.asarray(self._log.done)[part], np.asarray(self._log.intended)[part]
            pending = np.flatnonzero(status == PENDING)
            settled = int(pending[0]) if len(pending) else len(status)
            self._settled[number] += settled
            self._succeeded += int(np.count_nonzero(status[:settled] == OK))
            self._failed += int(np.count_nonzero(status[:settled] > OK))
            succeeded += int(np.count_nonzero(status[settled:] == OK))
            failed += int(np.count_nonzero(status[settled:] > OK))
            sent += int(np.count_nonzero(dispatched[settled:] > 0))
            gone = (status == REFUSED) | (status == RESET)
            self._there_ns = max(self._there_ns, int(done[(status != PENDING) & ~gone].max(initial=-1)))
            gone_ns.append(done[gone])
            recent.append((done - intended)[(status == OK) & (done > self._last_ns)])
        found_nobody_ns = np.concatenate(gone_ns)
        found_nobody_ns = found_nobody_ns[found_nobody_ns > self._there_ns]
        if len(found_nobody_ns):
            found_nobody_ns = np.array([found_nobody_ns.min(), found_nobody_ns.max()])
        self._gone_ns = found_nobody_ns
        latencies = percentiles(np.concatenate(recent))
        passed_s = max(elapsed_ns - self._last_ns, 1) / 1e9
        self._last_ns = elapsed_ns
        return Progress(
            elapsed_s=elapsed_ns / 1e9,
            sent=self._succeeded + self._failed + sent,
            succeeded=self._succeeded + succeeded,
            failed=self._failed + failed,
            rate_rps=latencies.count / passed_s,
            p50_ms=latencies.p50,
            p99_ms=latencies.p99,
            gone_s=float(np.ptp(found_nobody_ns)) / 1e9 if len(found_nobody_ns) else 0.0,
        )
