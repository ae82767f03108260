"""What rate a candidate should carry: the gateway's own batcher, simulated on the measured t(rows, concurrency)."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from gateway.batching.batch import Batch
from gateway.batching.batcher import Batcher
from gateway.batching.policies import POLICIES
from gateway.config import Batching
from gateway.types import InferRequest
from loadtest.results import Slo
from loadtest.search import Timing
from loadtest.simulator import Outcome, simulate

REQUESTS = 3000  # of one simulated run; the first fifth is warm-up. With PRECISION: under a second of CPU per prediction
PRECISION = 1.04


class MeasuredService:
    """t(rows, concurrency), interpolated in rows, scattered as it was measured.

    Concurrency above the largest that was measured counts as that.
    """

    def __init__(self, timings: Sequence[Timing], max_rows: int, *, seed: int = 0) -> None:
        self._curves: dict[int, tuple[list[float], list[float]]] = {}
        wanted = np.arange(max_rows + 1)
        for concurrency in sorted({timing.concurrency for timing in timings}):
            curve = sorted((t.rows, t.ms, t.spread) for t in timings if t.concurrency == concurrency)
            sizes, times, spreads = np.array(curve).T
            # Beyond the largest size, where nothing was measured, in proportion to it.
            ms = np.interp(wanted, sizes, times) * np.maximum(1.0, wanted / sizes[-1])
            self._curves[concurrency] = ms.tolist(), np.interp(wanted, sizes, spreads).tolist()
        self._most = max(self._curves)
        for busy in range(self._most, 0, -1):  # what was not measured counts as the next larger concurrency that was
            self._curves.setdefault(busy, self._curves.get(busy + 1, self._curves[self._most]))
        self._noise: Iterator[float] = itertools.cycle(np.random.default_rng(seed).standard_normal(4096).tolist())

    def ms(self, rows: int, concurrency: int) -> float:
        """The mean time of one batch."""
        return self._curves[min(concurrency, self._most)][0][rows]

    def __call__(self, batch: Batch, busy: int, now_ns: int) -> int:
        times, spreads = self._curves[min(busy, self._most)]
        rows = batch.padded_rows
        spread = spreads[rows]
        # A lognormal factor whose mean is 1: the mean is what was measured.
        return round(times[rows] * math.exp(spread * (next(self._noise) - spread / 2)) * 1e6)


def predicted_rps(
    timings: Sequence[Timing],
    *,
    overhead_ms: float,
    slo: Slo,
    batching: Batching,
    sessions: int,
    max_rows: int,
    rows_per_request: int = 1,
    seed: int = 0,
    requests: int = REQUESTS,
) -> float:
    """The largest rate of Poisson arrivals at which the simulated gateway meets the SLO; 0 if it does at none.

    overhead_ms: see `loadtest.profiling.Findings`.

    The scatter of a short profile on a busy machine is a rough guess: where only it breaks the SLO, the candidate is not given
    up, but predicted at half of what it would carry without.
    """
    limit_ms = slo.tightest_ms
    if limit_ms is None or limit_ms <= overhead_ms:
        return 0.0

    def holds(rps: float) -> bool:
        arrivals_ns = np.cumsum(np.random.default_rng(seed).exponential(1e9 / rps, requests)).astype(np.int64)
        batcher = Batcher(
            POLICIES[batching.policy](batching),
            max_rows=max_rows,
            workers=sessions,
            max_queue_rows=batching.max_queue_rows,
            slo_ns=round((limit_ms - overhead_ms) * 1e6),
        )
        fresh = MeasuredService(timings, max_rows, seed=seed)  # the same noise at every rate
        outcome = simulate(batcher, arrivals_ns, fresh, workers=sessions, request_of=_requests(rows_per_request)).after(0.2)
        return _meets(outcome, slo, overhead_ms)

    # No batching serves more than the best of n / t(n, k), on all sessions.
    service = MeasuredService(timings, max_rows)
    ceiling = max(sessions * rows / service.ms(rows, sessions) for rows in range(1, max_rows + 1)) * 1e3 / rows_per_request
    low, high = ceiling * 0.02, ceiling
    if not holds(low):
        if not any(timing.spread for timing in timings):
            return 0.0
        steady = tuple(replace(timing, spread=0.0) for timing in timings)
        return 0.5 * predicted_rps(
            steady, overhead_ms=overhead_ms, slo=slo, batching=batching, sessions=sessions, max_rows=max_rows,
            rows_per_request=rows_per_request, seed=seed, requests=requests,
        )  # fmt: skip
    if holds(high):
        return high
    while high / low > PRECISION:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _meets(outcome: Outcome, slo: Slo, overhead_ms: float) -> bool:
    latencies = outcome.latencies_ns
    answered = latencies >= 0
    if slo.max_error_rate is not None and 1 - float(np.mean(answered)) > slo.max_error_rate:
        return False
    for objective in slo.objectives:
        limit_ns = (objective.limit_ms - overhead_ms) * 1e6
        if float(np.mean(answered & (latencies <= limit_ns))) < objective.percentile / 100:
            return False
    return True


def _requests(rows: int) -> Callable[[int, int], InferRequest]:
    return lambda index, arrival_ns: InferRequest("simulated", "1", "", {}, rows, arrival_ns)
