"""How far leased slots are from one shared queue: several ingress processes, one pool of workers, in simulated time.

    shared   one queue for all: the limit
    leased   slots follow the load by `gateway.batching.leases.share`, every quarter of an SLO
    static   every process keeps an equal part of the slots

Requests fall to processes at random, with the given shares of the load.
"""

import contextlib
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from gateway.batching.batch import Batch
from gateway.batching.batcher import Batcher
from gateway.batching.leases import Demand, share
from gateway.batching.queue import NEVER
from gateway.errors import GatewayError
from gateway.types import InferRequest
from loadtest.search.simulator import SHED, Affine


@dataclass(frozen=True, slots=True)
class Split:
    """What came of one run. latencies_ns: int64 (requests,), `SHED` for those without a result."""

    latencies_ns: np.ndarray
    mean_rows: float


@dataclass(slots=True)
class _Process:
    batcher: Batcher
    slots: int
    busy: int = 0
    arrived: int = 0
    wake_ns: int = NEVER


def run(
    make_batcher: Callable[[], Batcher],
    arrivals: np.ndarray,
    parts: Sequence[float],
    profile: Affine,
    *,
    workers: int,
    slo_ns: int,
    leased: bool,
    seed: int,
) -> Split:
    """parts: of the load, per process; one part is the shared queue. leased: else static."""
    of = np.random.default_rng(seed).choice(len(parts), len(arrivals), p=parts)
    slots = [workers // len(parts) + (i < workers % len(parts)) for i in range(len(parts))]
    processes = [_Process(make_batcher(), slot) for slot in slots]
    latencies = np.full(len(arrivals), SHED, dtype=np.int64)
    index: dict[InferRequest, int] = {}
    running: list[tuple[int, int, Batch, _Process]] = []
    rows: list[int] = []
    period_ns = slo_ns // 4
    lease_ns = int(arrivals[0]) + period_ns if leased and len(parts) > 1 else NEVER
    upcoming = 0
    while upcoming < len(arrivals) or running or any(process.batcher.queue_requests for process in processes):
        now_ns = min(
            int(arrivals[upcoming]) if upcoming < len(arrivals) else NEVER,
            running[0][0] if running else NEVER,
            lease_ns if upcoming < len(arrivals) else NEVER,
            *(process.wake_ns for process in processes),
        )
        touched: list[_Process] = [process for process in processes if process.wake_ns <= now_ns]
        while running and running[0][0] <= now_ns:
            _, _, batch, process = heapq.heappop(running)
            process.busy -= 1
            process.batcher.finished(batch, now_ns, now_ns - batch.closed_ns, True)
            for part in batch.parts:
                latencies[index[part.request]] = now_ns - part.request.arrival_ns
            touched.append(process)
        while upcoming < len(arrivals) and arrivals[upcoming] <= now_ns:
            process = processes[of[upcoming]]
            request = InferRequest("m", "1", "", {}, 1, int(arrivals[upcoming]))
            index[request] = upcoming
            with contextlib.suppress(GatewayError):
                process.batcher.add(request, now_ns)
            process.arrived += 1
            touched.append(process)
            upcoming += 1
        if now_ns >= lease_ns:
            _lease(processes, profile, workers, period_ns, slo_ns)
            lease_ns = now_ns + period_ns
            touched = processes
        taken = sum(process.busy for process in processes)
        for process in touched:
            # A slot that was given away may still run its last batch: the new owner waits for it.
            free = min(process.slots - process.busy, workers - taken)
            step = process.batcher.step(now_ns, max(0, free))
            process.wake_ns = NEVER if step.wake_at_ns is None else max(now_ns + 1, step.wake_at_ns)
            for batch in step.batches:
                process.busy += 1
                taken += 1
                rows.append(batch.rows)
                heapq.heappush(running, (now_ns + profile.rows_ns(batch.padded_rows), len(rows), batch, process))
    return Split(latencies, float(np.mean(rows)))


def _lease(processes: Sequence[_Process], profile: Affine, workers: int, period_ns: int, slo_ns: int) -> None:
    # The usual batch of a shared queue: half an SLO long.
    usual = max(1, int((slo_ns / 2 - profile.fixed_ns) / profile.row_ns))
    row_ns = profile.rows_ns(usual) / usual
    demands = [
        Demand(process.arrived * row_ns / period_ns, process.batcher.queue_rows * row_ns, process.slots)
        for process in processes
    ]
    for process, slots in zip(processes, share(workers, demands, slo_ns // 2), strict=True):
        process.slots = slots
        process.arrived = 0
