"""What rate a candidate should carry: the gateway's own batcher, simulated on the measured t(rows, concurrency)."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from backends.base import Tensors
from gateway.batching.batch import Batch, bucket_of, ragged_length
from gateway.batching.batcher import Batcher
from gateway.batching.policies import POLICIES
from gateway.config import Batching, Ragged
from gateway.types import InferRequest
from loadtest.results import SloSpec
from loadtest.search.events import Timing
from loadtest.search.simulator import Simulated, simulate

# Of one simulated run; the first fifth is warm-up. With _BISECTED_TO: under a second of CPU per prediction.
REQUESTS: Final = 3000
_BISECTED_TO: Final = 1.04
_LENGTH_STREAM: Final = 7  # of randomness, beside those of arrivals and noise
_TYPICAL: Final = 0.1  # of the mean length: what is so near to it is typical


@dataclass(frozen=True, slots=True)
class Lengths:
    """What the requests of a ragged model are long, one each, and how the model joins and pads them."""

    ragged: Ragged
    sizes: tuple[int, ...]

    def padded(self, size: int) -> int:
        return bucket_of(size, self.ragged.buckets)

    @property
    def typical(self) -> tuple[int, ...]:
        """The sizes that are padded to what is nearest to the mean of all; those that a profile is taken of."""
        mean = sum(map(self.padded, self.sizes)) / len(self.sizes)
        nearest = min(abs(self.padded(size) - mean) for size in self.sizes)
        return tuple(size for size in self.sizes if abs(self.padded(size) - mean) <= max(nearest, _TYPICAL * mean))

    def drawn(self, seed: int) -> Callable[[int], Tensors]:
        """By its index, the inputs of a request that is as long as any, as often as it is."""
        rng = np.random.default_rng([seed, _LENGTH_STREAM])
        known = {size: {name: np.zeros((1, size), np.int8) for name in self.ragged.pad} for size in set(self.sizes)}
        order = rng.choice(self.sizes, 4096).tolist()
        return lambda index: known[order[index % len(order)]]


class ProfiledService:
    """t(rows, concurrency), interpolated in rows, scattered as it was measured.

    Concurrency above the largest that was measured counts as that. lengths: the profile is of the typical ones; what a batch
    takes beyond its fixed part (where t would be at no rows) is in proportion to the length that it is padded to.
    """

    def __init__(self, timings: Sequence[Timing], max_rows: int, *, seed: int = 0, lengths: Lengths | None = None) -> None:
        self._curves: dict[int, tuple[list[float], list[float]]] = {}
        self._fixed_ms: dict[int, float] = {}
        self._lengths = lengths
        self._profiled_length = (
            float(np.mean([lengths.padded(size) for size in lengths.typical])) if lengths is not None else 1.0
        )
        wanted = np.arange(max_rows + 1)
        for concurrency in sorted({timing.concurrency for timing in timings}):
            curve = sorted((t.rows, t.ms, t.spread) for t in timings if t.concurrency == concurrency)
            sizes, times, spreads = np.array(curve).T
            # Beyond the largest size, where nothing was measured, in proportion to it.
            ms = np.interp(wanted, sizes, times) * np.maximum(1.0, wanted / sizes[-1])
            if lengths is not None:
                self._fixed_ms[concurrency] = _fixed_ms(sizes, times)
            self._curves[concurrency] = ms.tolist(), np.interp(wanted, sizes, spreads).tolist()
        self._most = max(self._curves)
        for busy in range(self._most, 0, -1):  # what was not measured counts as the next larger concurrency that was
            self._curves.setdefault(busy, self._curves.get(busy + 1, self._curves[self._most]))
            self._fixed_ms.setdefault(busy, self._fixed_ms.get(busy + 1, 0.0))
        self._noise: Iterator[float] = itertools.cycle(np.random.default_rng(seed).standard_normal(4096).tolist())

    def ms(self, rows: int, concurrency: int) -> float:
        """The mean time of one batch."""
        return self._curves[min(concurrency, self._most)][0][rows]

    def __call__(self, batch: Batch, busy: int, now_ns: int) -> int:
        busy = min(busy, self._most)
        times, spreads = self._curves[busy]
        rows = batch.padded_rows
        ms, spread = times[rows], spreads[rows]
        if self._lengths is not None:
            longest = max(ragged_length(part.request, self._lengths.ragged) for part in batch.parts)
            fixed_ms = self._fixed_ms[busy]
            ms = fixed_ms + (ms - fixed_ms) * self._lengths.padded(longest) / self._profiled_length
        # A lognormal factor whose mean is 1: the mean is what was measured.
        return round(ms * math.exp(spread * (next(self._noise) - spread / 2)) * 1e6)


def _fixed_ms(sizes: np.ndarray, times: np.ndarray) -> float:
    """Where the line through the times would be at no rows; between 0 and the least of them."""
    if len(sizes) < 2:
        return 0.0
    slope, start = np.polyfit(sizes, times, 1, w=1 / times)  # each size counts by its share, not by its time
    return float(np.clip(start, 0.0, times.min())) if slope > 0 else 0.0


def predicted_rps(
    timings: Sequence[Timing],
    *,
    overhead_ms: float,
    slo: SloSpec,
    batching: Batching,
    sessions: int,
    max_rows: int,
    rows_per_request: int = 1,
    lengths: Lengths | None = None,
    seed: int = 0,
    requests: int = REQUESTS,
) -> float:
    """The largest rate of Poisson arrivals at which the simulated gateway meets the SLO; 0 if it does at none.

    overhead_ms: see `loadtest.lab.profiling.Findings`. lengths: of a ragged model's requests; None: all are alike.

    The scatter of a short profile on a busy machine is a rough guess: where only it breaks the SLO, the candidate is not given
    up, but predicted at half of what it would carry without.
    """
    if slo.strictest is None or slo.tightest_ms is None or slo.tightest_ms <= overhead_ms:
        return 0.0
    limit_ms = slo.strictest.limit_ms  # as its configuration says

    def holds(rps: float) -> bool:
        arrivals_ns = np.cumsum(np.random.default_rng(seed).exponential(1e9 / rps, requests)).astype(np.int64)
        batcher = Batcher(
            POLICIES[batching.policy](batching),
            max_rows=max_rows,
            workers=sessions,
            max_queue_rows=batching.max_queue_rows,
            slo_ns=round((limit_ms - overhead_ms) * 1e6),
            ragged=lengths.ragged if lengths is not None else None,
        )
        fresh = ProfiledService(timings, max_rows, seed=seed, lengths=lengths)  # the same noise at every rate
        asked = _requests(rows_per_request, lengths.drawn(seed) if lengths is not None else lambda index: {})
        outcome = simulate(batcher, arrivals_ns, fresh, workers=sessions, request_of=asked).after(0.2)
        return _meets(outcome, slo, overhead_ms)

    # No batching serves more than the best of n / t(n, k), on all sessions.
    service = ProfiledService(timings, max_rows)
    ceiling = max(sessions * rows / service.ms(rows, sessions) for rows in range(1, max_rows + 1)) * 1e3 / rows_per_request
    low, high = ceiling * 0.02, ceiling
    if not holds(low):
        if not any(timing.spread for timing in timings):
            return 0.0
        steady = tuple(replace(timing, spread=0.0) for timing in timings)
        return 0.5 * predicted_rps(
            steady, overhead_ms=overhead_ms, slo=slo, batching=batching, sessions=sessions, max_rows=max_rows,
            rows_per_request=rows_per_request, lengths=lengths, seed=seed, requests=requests,
        )  # fmt: skip
    if holds(high):
        return high
    while high / low > _BISECTED_TO:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _meets(outcome: Simulated, slo: SloSpec, overhead_ms: float) -> bool:
    latencies = outcome.latencies_ns
    answered = latencies >= 0
    if slo.max_error_rate is not None and 1 - float(np.mean(answered)) > slo.max_error_rate:
        return False
    for objective in slo.objectives:
        limit_ns = (objective.limit_ms - overhead_ms) * 1e6
        if float(np.mean(answered & (latencies <= limit_ns))) < objective.percentile / 100:
            return False
    return True


def _requests(rows: int, inputs: Callable[[int], Tensors]) -> Callable[[int, int], InferRequest]:
    return lambda index, arrival_ns: InferRequest("simulated", "1", "", inputs(index), rows, arrival_ns)
