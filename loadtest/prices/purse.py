"""What candidates that are paid for have cost so far, by the clock: from the moment they are asked for until they are gone."""

import math
import time
from collections.abc import Callable


class Purse:
    """usd: of all, those included that still run. max_usd: None: no limit. clock: seconds that only grow."""

    def __init__(self, max_usd: float | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_usd = max_usd
        self._clock = clock
        self._ended_usd = 0.0
        self._running: dict[str, tuple[float, float]] = {}  # since when, USD per hour

    def __repr__(self) -> str:
        return f"<Purse {self.usd:.4f} USD of {self.max_usd}, {len(self._running)} running>"

    def begin(self, name: str, usd_per_hour: float) -> None:
        self._running[name] = self._clock(), usd_per_hour

    def end(self, name: str) -> None:
        """Of one that never began, or has ended: nothing."""
        if name in self._running:
            since_s, usd_per_hour = self._running.pop(name)
            self._ended_usd += (self._clock() - since_s) / 3600 * usd_per_hour

    def runs(self, name: str) -> bool:
        return name in self._running

    @property
    def usd(self) -> float:
        now_s = self._clock()
        return self._ended_usd + sum((now_s - since_s) / 3600 * each for since_s, each in self._running.values())

    def left_s(self, *, besides_usd: float = 0.0, also_usd_per_hour: float = 0.0) -> float:
        """For so long the rest pays for what runs, and for something more. besides_usd: what an earlier search has spent."""
        if self.max_usd is None:
            return math.inf
        per_hour = also_usd_per_hour + sum(each for _, each in self._running.values())
        left_usd = self.max_usd - besides_usd - self.usd
        return left_usd / per_hour * 3600 if per_hour else math.inf if left_usd > 0 else 0.0
