"""Candidates whose lanes say what a test wants."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from gateway.batching.forecast import Forecast
from gateway.config import Ejection
from gateway.routing.health import Health
from gateway.routing.policies import Candidate
from gateway.types import InferRequest

MS = 1_000_000


@dataclass(slots=True, eq=False)
class StatedLane:
    """A lane that would serve any request in wait_ms + ahead_ms + own_ms. spread: times the mean, that own_ms is."""

    own_ms: float = 1.0
    wait_ms: float = 0.0
    ahead_ms: float = 0.0
    pending: int = 0
    available: bool = True
    workers: int = 1
    known: bool = True
    spread: float = 1.0

    def forecast(self, request: InferRequest, now_ns: int, mean: bool = False) -> Forecast:
        own_ns = self.own_ms * MS / (self.spread if mean else 1.0)
        return Forecast(self.wait_ms * MS, self.ahead_ms * MS, own_ns, own_ns, self.workers, self.known)


def candidate(label: str, own_ms: float, usd: float, *, equivalents: tuple[str, ...] = (), **fields: Any) -> Candidate:
    """Its usual batch is one row of own_ms, at usd per worker and hour."""
    lane = StatedLane(own_ms)
    made = Candidate(label, lane, Health(Ejection()), usd, equivalents=frozenset(equivalents), **fields)
    made.executed(1, round(own_ms * MS))
    return made


def lane_of(chosen: Candidate) -> StatedLane:
    assert isinstance(chosen.lane, StatedLane)
    return chosen.lane


def request(now_ns: int = 0, deadline_ns: int | None = None, rows: int = 1) -> InferRequest:
    return InferRequest("m", "1", "", {"X": np.zeros((rows, 1), np.float32)}, rows, now_ns, deadline_ns=deadline_ns)
