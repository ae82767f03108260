"""The batching rules of other servers, as policies of our batcher: the simulation compares rules, not implementations.

Each is written after its source and keeps its quirks where they decide when a batch closes. Where a server leaves room, the
reading that serves it better is taken.
"""

from collections import deque
from itertools import islice
from typing import Protocol

import numpy as np

from gateway.batching.batch import Batch
from gateway.batching.policy import Decision
from gateway.batching.queue import BatchLimits, Entry, Queue, State
from loadtest.search.simulator import Affine


class Profile(Protocol):
    """How long a batch takes, as a rule that needs it is told."""

    def rows_ns(self, rows: int) -> int: ...


class _Rule:
    """What a rule leaves alone: lengths, our model of what batches take, arrivals and ends."""

    by_length = False
    service = None

    def arrived(self, queue: Queue, state: State, rows: int, now_ns: int) -> None: ...

    def finished(self, batch: Batch, now_ns: int, compute_ns: int, ok: bool) -> None: ...


class RayServe(_Rule):
    """`@serve.batch` (Ray 2.60, serve/batching.py): a batch closes by size or by clock, and then waits for a worker.

    What has closed never grows again. The clock starts when the collecting loop takes the batch's first request.
    """

    def __init__(self, max_rows: int, wait_ns: int) -> None:
        self._max_rows = max_rows
        self._wait_ns = wait_ns
        self._closed: deque[int] = deque()
        self._open_rows = 0
        self._opened_ns = 0

    def bind(self, limits: BatchLimits) -> None:
        self._max_rows = min(self._max_rows, limits.max_rows)

    def arrived(self, queue: Queue, state: State, rows: int, now_ns: int) -> None:
        self._close_by_clock(now_ns)
        if not self._open_rows:
            self._opened_ns = now_ns
        self._open_rows += rows
        if self._open_rows >= self._max_rows:
            self._closed.append(self._open_rows)
            self._open_rows = 0

    def decide(self, queue: Queue, state: State, now_ns: int, free_slots: int) -> Decision:
        self._close_by_clock(now_ns)
        if self._closed:
            return Decision(self._closed.popleft(), "closed")
        return Decision(0, wake_at_ns=self._opened_ns + self._wait_ns)

    def _close_by_clock(self, now_ns: int) -> None:
        if self._open_rows and now_ns >= self._opened_ns + self._wait_ns:
            self._closed.append(self._open_rows)
            self._open_rows = 0


class Bento(_Rule):
    """BentoML's CorkDispatcher (marshal/dispatcher.py), after its training phase.

    Fits duration = a·n + b over the last 50 batches, drops the first while the whole queue could not end within max_latency,
    and corks while n·(time since the last arrival + tick + a) <= .95 of the usual wait. One batch in flight: one per process.
    Its 1 ms polling is kept; that it takes the newest first is not (with everything taken at once it makes no difference).
    """

    _TICK_NS = 1_000_000
    _DECAY = 0.95
    _KEPT = 50
    _REFRESH_NS = 5_000_000_000

    def __init__(self, max_latency_ns: int, profile: Affine) -> None:
        self._max_latency_ns = max_latency_ns
        self._row_ns, self._fixed_ns = profile.row_ns, profile.fixed_ns
        self._wait_ns = 10e6
        self._seen: deque[tuple[int, int, int]] = deque(maxlen=self._KEPT)
        self._refreshed_ns = 0
        self._max_rows = 1

    def bind(self, limits: BatchLimits) -> None:
        self._max_rows = limits.max_rows

    def decide(self, queue: Queue, state: State, now_ns: int, free_slots: int) -> Decision:
        shed: list[Entry] = []
        entries = queue.entries
        count = len(entries)
        for entry in entries:
            left = count - len(shed)
            if left <= 1 or now_ns - entry[4].arrival_ns + self._row_ns * left + self._fixed_ns < self._max_latency_ns:
                break
            shed.append(entry)
        rows = count - len(shed)
        since_last_ns = now_ns - entries[-1][4].arrival_ns
        if rows < self._max_rows and rows * (since_last_ns + self._TICK_NS + self._row_ns) <= self._wait_ns * self._DECAY:
            return Decision(0, wake_at_ns=now_ns + self._TICK_NS, shed=shed)
        return Decision(min(rows, self._max_rows), "uncorked", shed=shed)

    def finished(self, batch: Batch, now_ns: int, compute_ns: int, ok: bool) -> None:
        self._seen.append((batch.rows, compute_ns, batch.closed_ns - batch.oldest_ns))
        if now_ns - self._refreshed_ns >= self._REFRESH_NS and len(self._seen) > 1:
            self._refreshed_ns = now_ns
            rows, times, waits = np.array(self._seen, dtype=float).T
            (self._row_ns, self._fixed_ns), *_ = np.linalg.lstsq(
                np.stack([rows, np.ones_like(rows)], axis=1), times, rcond=None
            )
            self._row_ns, self._fixed_ns = max(1e3, float(self._row_ns)), max(0.0, float(self._fixed_ns))
            self._wait_ns = float(np.mean(waits))


class Nexus(_Rule):
    """Nexus (Shen et al., SOSP 2019): early drop with a sliding window of the target batch from an offline profile.

    The target is the largest batch of which two fit in the SLO. The window slides from the front over the queue to the first
    position whose request can still be in time in a batch of the target; what it passes is dropped.
    """

    def __init__(self, slo_ns: int, profile: Profile) -> None:
        self._slo_ns = slo_ns
        self._profile = profile
        self._limits = BatchLimits(1)
        self._target = 1

    def bind(self, limits: BatchLimits) -> None:
        self._limits = limits
        sizes = limits.row_sizes or range(1, limits.max_rows + 1)
        self._target = max((size for size in sizes if 2 * self._profile.rows_ns(size) <= self._slo_ns), default=sizes[0])

    def decide(self, queue: Queue, state: State, now_ns: int, free_slots: int) -> Decision:
        shed: list[Entry] = []
        left = len(queue.entries)
        for entry in islice(queue.entries, left):
            rows = min(self._target, left)
            if now_ns + self._profile.rows_ns(self._limits.padded(rows)) <= entry[4].arrival_ns + self._slo_ns:
                return Decision(rows, "target" if rows == self._target else "idle", shed=shed)
            shed.append(entry)
            left -= 1
        return Decision(0, shed=shed)


class Symphony(_Rule):
    """Symphony (Chen et al., 2023): deferred batches. A batch closes at the latest moment at which one more row still fits.

    With d the deadline of the first and n the rows that wait and fit: at d - t(n + 1), which one row more can no longer make;
    at once when it is full. What cannot be in time in a batch of the target, the largest that k staggered workers take without
    a loss, is dropped, as far as more waits: the sliding window of Nexus, which its batches are formed by.
    """

    def __init__(self, slo_ns: int, profile: Profile, workers: int) -> None:
        self._slo_ns = slo_ns
        self._profile = profile
        self._share = 1 + 1 / workers
        self._limits = BatchLimits(1)
        self._target = 1

    def bind(self, limits: BatchLimits) -> None:
        self._limits = limits
        sizes = limits.row_sizes or range(1, limits.max_rows + 1)
        self._target = max((size for size in sizes if self._share * self._rows_ns(size) <= self._slo_ns), default=sizes[0])

    def decide(self, queue: Queue, state: State, now_ns: int, free_slots: int) -> Decision:
        shed: list[Entry] = []
        left = len(queue.entries)
        for entry in islice(queue.entries, left):
            due_ns = entry[4].arrival_ns + self._slo_ns
            if now_ns + self._rows_ns(min(self._target, left)) <= due_ns:
                break
            shed.append(entry)
            left -= 1
        else:
            return Decision(0, shed=shed)
        rows = min(left, self._limits.max_rows)
        while now_ns + self._rows_ns(rows) > due_ns:
            rows -= 1
        if rows < left or rows == self._limits.max_rows:
            return Decision(rows, "deferred", shed=shed)
        latest_ns = due_ns - self._rows_ns(rows + 1)
        return Decision(rows, "deferred", shed=shed) if now_ns >= latest_ns else Decision(0, wake_at_ns=latest_ns, shed=shed)

    def _rows_ns(self, rows: int) -> int:
        return self._profile.rows_ns(self._limits.padded(rows))


class Clipper(_Rule):
    """Clipper (clipper, containers' queue in task_executor.hpp): the rows that its regression of rows on latency allows.

    What the first has left of the SLO is what the batch may take; a first whose time has passed runs in a batch of one.
    Nothing waits for more and nothing is dropped. Fits over the last 50 batches; explores one row beyond the largest seen.
    """

    _KEPT = 50

    def __init__(self, slo_ns: int) -> None:
        self._slo_ns = slo_ns
        self._seen: deque[tuple[int, int]] = deque(maxlen=self._KEPT)
        self._max_rows = 1

    def bind(self, limits: BatchLimits) -> None:
        self._max_rows = limits.max_rows

    def decide(self, queue: Queue, state: State, now_ns: int, free_slots: int) -> Decision:
        left_ns = queue.oldest_ns + self._slo_ns - now_ns
        if left_ns <= 0 or not self._seen:
            return Decision(1, "late" if self._seen else "first")
        rows, times = np.array(self._seen, dtype=float).T
        spread = float(np.var(times))
        slope = float(np.mean((times - times.mean()) * (rows - rows.mean()))) / spread if spread else 0.0
        most = rows.mean() + slope * (left_ns - times.mean()) if slope > 0 else rows.max() + 1
        return Decision(max(1, min(self._max_rows, int(most))), "budget")

    def finished(self, batch: Batch, now_ns: int, compute_ns: int, ok: bool) -> None:
        self._seen.append((batch.rows, compute_ns))
