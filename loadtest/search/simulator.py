"""Batching in simulated time: the gateway's own `Batcher` and policy against a model of how long batches run.

A discrete-event simulation with three kinds of event: an arrival, the end of a batch, the wake-up a policy asked for. What it
decides is what the gateway would decide; only the workers are replaced, by `Service`. One core simulates about 100 000 requests
per second.
"""

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np

from gateway.batching.batch import Batch
from gateway.batching.batcher import Batcher
from gateway.batching.queue import NEVER
from gateway.errors import GatewayError
from gateway.types import InferRequest

SHED: Final = -1
"""Latency of a request that was refused, shed or expired."""


class Service(Protocol):
    """How long a batch occupies a worker."""

    def __call__(self, batch: Batch, busy: int, now_ns: int) -> int:
        """busy: workers that run when the batch starts, its own included. Returns nanoseconds."""
        ...


@dataclass(frozen=True, slots=True)
class Affine:
    """t = (fixed + per_row · padded rows) · factor."""

    fixed_ns: float
    row_ns: float
    factor: float = 1.0

    def rows_ns(self, rows: int) -> int:
        return round((self.fixed_ns + self.row_ns * rows) * self.factor)

    def __call__(self, batch: Batch, busy: int, now_ns: int) -> int:
        return self.rows_ns(batch.padded_rows)


@dataclass(frozen=True, slots=True)
class Simulated:
    """What became of every request, in order of arrival.

    arrivals_ns, latencies_ns, refused_ns: int64 (requests,). A latency is `SHED` for a request that got no result;
    refused_ns: how long after its arrival it was told so, `SHED` for one that got a result.
    """

    arrivals_ns: np.ndarray
    latencies_ns: np.ndarray
    batch_rows: tuple[int, ...]
    reasons: Counter[str]
    busy_ns: int
    workers: int
    refused_ns: np.ndarray

    def attainment(self, slo_ns: int) -> float:
        """Share of all requests answered within the SLO."""
        return float(np.mean(self._within(slo_ns)))

    def goodput_rps(self, slo_ns: int) -> float:
        """Requests answered within the SLO, per second of offered time."""
        offered_ns = int(self.arrivals_ns[-1] - self.arrivals_ns[0])
        return float(np.sum(self._within(slo_ns))) / (offered_ns / 1e9)

    def percentile_ms(self, percentile: float) -> float:
        """Of the answered; `nan` if there are none."""
        answered = self.latencies_ns[self.latencies_ns >= 0]
        return float(np.percentile(answered, percentile)) / 1e6 if len(answered) else float("nan")

    def mean_ms(self) -> float:
        answered = self.latencies_ns[self.latencies_ns >= 0]
        return float(np.mean(answered)) / 1e6 if len(answered) else float("nan")

    def after(self, share: float) -> "Simulated":
        """Without the first share of the requests: the warm-up."""
        skip = int(len(self.arrivals_ns) * share)
        return replace(
            self,
            arrivals_ns=self.arrivals_ns[skip:],
            latencies_ns=self.latencies_ns[skip:],
            refused_ns=self.refused_ns[skip:],
        )

    def _within(self, slo_ns: int) -> np.ndarray:
        return (self.latencies_ns >= 0) & (self.latencies_ns <= slo_ns)


def simulate(
    batcher: Batcher,
    arrivals_ns: np.ndarray,
    service: Service,
    *,
    workers: int,
    request_of: Callable[[int, int], InferRequest] | None = None,
    fails: Callable[[Batch, int], bool] | None = None,
    step_all: bool = False,
    limit_ns: int = NEVER,
    most_missed: int = NEVER,
) -> Simulated:
    """Run requests through a batcher to their ends.

    arrivals_ns: ascending. request_of: makes request i that arrives at the given time; None: one row each.
    fails: whether a batch that ends at the given time is lost instead; then its requests run once more, each alone.
    step_all: also step on arrivals that find no worker free, as the gateway does; costs time and changes nothing but when
    expired requests are answered.
    most_missed: end as soon as more than that are refused or answered after the limit; what is open then got no result.
    """
    make = request_of or _one_row
    arrivals = [int(at) for at in arrivals_ns]
    latencies = np.full(len(arrivals), SHED, dtype=np.int64)
    refused = np.full(len(arrivals), SHED, dtype=np.int64)
    index: dict[InferRequest, int] = {}
    rows_left: dict[InferRequest, int] = {}
    running: list[tuple[int, int, Batch, int]] = []
    batch_rows: list[int] = []
    reasons: Counter[str] = Counter()
    busy_ns = 0
    free = workers
    started = 0
    upcoming = 0
    wake_ns = NEVER
    missed = 0
    count = len(arrivals)
    while (upcoming < count or running or index) and missed <= most_missed:
        now_ns = arrivals[upcoming] if upcoming < count else NEVER
        if running and running[0][0] < now_ns:
            now_ns = running[0][0]
        now_ns = min(now_ns, wake_ns)
        if now_ns == NEVER:
            raise RuntimeError(f"{batcher!r} waits for nothing: its policy neither closes a batch nor asks to be woken")
        due = now_ns >= wake_ns
        while running and running[0][0] <= now_ns:
            _, _, batch, compute_ns = heapq.heappop(running)
            free += 1
            lost = fails is not None and fails(batch, now_ns)
            batcher.finished(batch, now_ns, compute_ns, not lost)
            if lost:
                for part in batch.parts:
                    if batch.reason == "retry":
                        at = index.pop(part.request, None)
                        if at is not None:
                            refused[at] = now_ns - arrivals[at]
                        batcher.cancel(part.request)
                    elif part.request in index:
                        batcher.retry(part, now_ns)
                continue
            for part in batch.parts:
                request = part.request
                if part.rows != request.rows:
                    rows_left[request] = rows_left.get(request, request.rows) - part.rows
                    if rows_left[request]:
                        continue
                at = index.pop(request, None)
                if at is not None:
                    latencies[at] = latency_ns = now_ns - arrivals[at]
                    missed += latency_ns > limit_ns
        while upcoming < count and arrivals[upcoming] <= now_ns:
            request = make(upcoming, arrivals[upcoming])
            try:
                batcher.add(request, now_ns)
                index[request] = upcoming
            except GatewayError:
                refused[upcoming] = now_ns - arrivals[upcoming]
                missed += 1
            upcoming += 1
        if not free and not due and not step_all:
            continue
        step = batcher.step(now_ns, free)
        wake_ns = NEVER if step.wake_at_ns is None else max(step.wake_at_ns, now_ns + 1)
        for request, _ in step.shed:
            at = index.pop(request, None)
            if at is not None:
                refused[at] = now_ns - arrivals[at]
                missed += 1
        for batch in step.batches:
            free -= 1
            compute_ns = service(batch, workers - free, now_ns)
            busy_ns += compute_ns
            started += 1
            heapq.heappush(running, (now_ns + compute_ns, started, batch, compute_ns))
            batch_rows.append(batch.rows)
            reasons[batch.reason] += 1
    return Simulated(np.asarray(arrivals_ns), latencies, tuple(batch_rows), reasons, busy_ns, workers, refused)


def _one_row(index: int, arrival_ns: int) -> InferRequest:
    return InferRequest("simulated", "1", "", {}, 1, arrival_ns)
