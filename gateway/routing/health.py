"""Whether a backend is fit for requests, judged by how its executions end: no probe of its own, no readiness flag.

Theory of operation. LIVE -> EJECTED, after so many failures in a row, or too large a share of the last 20, or one failure so
slow that nothing of its requests could be saved. After a pause the ejected backend is half open: it gets copies of real
requests, one at a time, whose answers nobody waits for. Two good ones in a row make it live again; a bad one ejects it anew,
for twice as long. So a backend that lies about its health costs callers nothing to find out.
"""

from collections import deque
from typing import Final

from gateway.config import Ejection

_RECENT: Final = 20
_PROBES: Final = 2
_FORGIVEN_AFTER_NS: Final = 30_000_000_000  # live for so long, and the next ejection is a first one again


class Health:
    """See the module. eject is the caller's decision: it knows whether another backend is left."""

    __slots__ = (
        "_good_probes", "_in_a_row", "_live_since_ns", "_pause_s", "_recent", "_settings", "_until_ns", "ejected",
    )  # fmt: skip

    def __init__(self, settings: Ejection) -> None:
        self._settings = settings
        self.ejected = False
        # while live
        self._in_a_row = 0
        self._recent: deque[bool] = deque(maxlen=_RECENT)
        # while ejected
        self._pause_s = 0.0
        self._until_ns = 0
        self._good_probes = 0
        # since it last became live
        self._live_since_ns = 0

    def __repr__(self) -> str:
        return f"<Health {self}>"

    def __str__(self) -> str:
        some = "failure" if self._in_a_row == 1 else "failures"
        failures = f"{self._in_a_row} {some} in a row, {sum(self._recent)} of the last {len(self._recent)}"
        if self.ejected:
            return f"ejected for {self._pause_s:g} s after {failures}; {self._good_probes} of {_PROBES} probes"
        return f"live, {failures}"

    def succeeded(self) -> None:
        """An execution for callers ended well."""
        self._in_a_row = 0
        self._recent.append(False)

    def failed(self, *, slow: bool = False) -> bool:
        """An execution for callers failed. slow: after so long that its requests are late. True: it should be ejected."""
        if self.ejected:
            return False
        self._in_a_row += 1
        self._recent.append(True)
        return (
            slow
            or self._in_a_row >= self._settings.consecutive_failures
            or (len(self._recent) == _RECENT and sum(self._recent) >= self._settings.failed_share * _RECENT)
        )

    def eject(self, now_ns: int) -> None:
        settings = self._settings
        if not self.ejected and now_ns - self._live_since_ns > _FORGIVEN_AFTER_NS:
            self._pause_s = 0.0
        self._pause_s = min(2 * self._pause_s, settings.max_pause_s) if self._pause_s else settings.pause_s
        self._until_ns = now_ns + round(self._pause_s * 1e9)
        self._good_probes = 0
        self.ejected = True

    def may_probe(self, now_ns: int) -> bool:
        """Whether it is half open."""
        return self.ejected and now_ns >= self._until_ns

    def probed(self, ok: bool, now_ns: int) -> None:
        """A copy sent while half open has ended."""
        if not self.ejected:
            return
        if not ok:
            self.eject(now_ns)
            return
        self._good_probes += 1
        if self._good_probes >= _PROBES:
            self.ejected = False
            self._live_since_ns = now_ns
            self._in_a_row = 0
            self._recent.clear()
