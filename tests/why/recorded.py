"""Recordings of lanes in simulated time, with faults made on purpose."""

import contextlib
import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from gateway.batching.batch import Batch
from gateway.batching.checkpoint import thaw
from gateway.batching.queue import NEVER, LengthGroup
from gateway.batching.recorded_file import LaneRecording, packed, unpacked
from gateway.batching.recording import LaneSettings, RecordedBatcher, Ring
from gateway.batching.replay import replay
from gateway.batching.service_model import ServiceModel
from gateway.errors import GatewayError
from gateway.types import InferRequest
from gateway.why.causes import Diagnosis, diagnose

MS = 1_000_000
S = 1_000_000_000
MIB = 1 << 20

Time = Callable[[Batch, int, float], float]
"""A batch, which one it is, and its usual time in ns, to how long it takes."""


def usual(batch: Batch, index: int, usual_ns: float) -> float:
    return usual_ns


@dataclass
class Scene:
    """A backend of fixed_ms + row_ms · rows, spread log-normally by noise, and Poisson arrivals at rps.

    lengths: that requests have by chance; row_ms is for a length of 64, and in proportion. takes: what goes wrong with batches.
    fails: batches that end in an error. lag_ms: after what it is closed for, a batch is. leave_ms: after which every other
    client leaves. away: (from, to) when no session is there. settings: of the lane.
    """

    fixed_ms: float = 4.0
    row_ms: float = 6.0
    rps: float = 75.0
    seconds: float = 12.0
    workers: int = 1
    noise: float = 0.05
    lag_ms: float = 0.0
    leave_ms: float | None = None
    probed: bool = True
    takes: Time = usual
    fails: tuple[int, ...] = ()
    away_s: tuple[float, float] | None = None
    timeout_ms: float | None = None
    timeout_share: float = 0.0
    lengths: tuple[int, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    _alive: int = 1

    def recorded(self, seed: int) -> LaneRecording:
        """Run it, and give what is told of it."""
        return unpacked(self.packed(seed), "here")[0].lanes[0]

    def packed(self, seed: int) -> bytes:
        rng = np.random.default_rng(seed)
        base: dict[str, Any] = {"slo_ns": 100 * MS, "max_rows": 32, "model_rows": 32, "sessions": self.workers}
        made = LaneSettings(**(base | self.settings))
        batcher = made.batcher(Ring(64 * MIB, made))
        assert isinstance(batcher, RecordedBatcher)
        if self.probed:
            for rows in batcher.service.probe_rows:
                batcher.service.probe(None, rows, [round(self.rows_ns(rows))] * 2)
        self._alive = self.workers
        batcher.record(lambda: self._alive > 0)
        self._run(batcher, rng)
        assert batcher.ring is not None
        return packed("m", "1", [batcher.ring], process="p", processes=1, now_ns=2 * S, unix_s=0.0)

    def rows_ns(self, rows: int, length: int = 64) -> float:
        return (self.fixed_ms + self.row_ms * rows * length / 64) * MS

    def _run(self, batcher: RecordedBatcher, rng: np.random.Generator) -> None:
        count = int(self.rps * self.seconds)
        arrivals = [S + int(at) for at in np.cumsum(rng.exponential(S / self.rps, count))]
        away = tuple(S + round(at * S) for at in self.away_s) if self.away_s else (NEVER, NEVER)
        running: list[tuple[int, int, Batch]] = []
        leaving: deque[tuple[int, InferRequest]] = deque()
        answered: set[InferRequest] = set()
        upcoming = started = now_ns = 0
        wake_ns = NEVER
        while upcoming < count or running or batcher.has_work:
            come_ns = arrivals[upcoming] if upcoming < count else NEVER
            back_ns = away[1] if now_ns < away[1] else NEVER
            leave_ns = leaving[0][0] if leaving else NEVER
            now_ns = min(come_ns, running[0][0] if running else NEVER, leave_ns, wake_ns, back_ns)
            while running and running[0][0] <= now_ns:
                _, index, batch = heapq.heappop(running)
                batcher.finished(batch, now_ns, now_ns - batch.closed_ns, index not in self.fails)
                answered.update(part.request for part in batch.parts)
            while leaving and leaving[0][0] <= now_ns:
                if (gone := leaving.popleft()[1]) not in answered:
                    batcher.cancel(gone, now_ns=now_ns)
            while upcoming < count and arrivals[upcoming] <= now_ns:
                own_ns = None
                if self.timeout_ms is not None and rng.random() < self.timeout_share:
                    own_ns = arrivals[upcoming] + round(self.timeout_ms * MS)
                inputs = {"x": np.zeros((1, int(rng.choice(self.lengths))), np.float32)} if self.lengths else {}
                request = InferRequest("m", "1", f"r{upcoming}", inputs, 1, arrivals[upcoming], deadline_ns=own_ns)
                upcoming += 1
                with contextlib.suppress(GatewayError):
                    batcher.add(request, now_ns)
                    if self.leave_ms is not None and upcoming % 2:
                        leaving.append((now_ns + round(self.leave_ms * MS), request))
            alive = 0 if away[0] <= now_ns < away[1] else self.workers
            self._alive = alive
            batcher.workers = max(1, alive)
            step = batcher.step(now_ns + round(self.lag_ms * MS), max(0, alive - len(running)))
            wake_ns = NEVER if step.wake_at_ns is None else max(step.wake_at_ns, now_ns + 1)
            for batch in step.batches:
                length = batch.group.length if isinstance(batch.group, LengthGroup) else 64
                usual_ns = self.rows_ns(batch.padded_rows, length) * float(np.exp(rng.normal(0, self.noise)))
                taken_ns = round(self.takes(batch, started, usual_ns))
                heapq.heappush(running, (batch.closed_ns + taken_ns, started, batch))
                started += 1


def learned_of(lane: LaneRecording) -> ServiceModel:
    batcher, _ = thaw(lane.segments[0]["state"])
    service: ServiceModel = batcher.service
    return service


def diagnosed(scene: Scene, seed: int) -> Diagnosis:
    lane = scene.recorded(seed)
    history = replay(lane.recorded())
    assert history.difference is None, str(history.difference)
    return diagnose(history, lane.settings, partial(learned_of, lane))


def slowed(at: Sequence[int], by_ms: float) -> Time:
    """These batches take so much longer."""
    return lambda batch, index, usual_ns: usual_ns + (by_ms * MS if index in at else 0.0)
