"""A backend that is slow for a while: what is known of its sizes and lengths stays true, and counts again once it is back."""

import random

import numpy as np
import pytest

from gateway.batching.adaptive import Adaptive
from gateway.batching.batch import Batch
from gateway.batching.batcher import Batcher
from gateway.batching.queue import LengthGroup
from gateway.batching.service_model import ServiceModel
from loadtest.search.simulator import simulate
from tests.batching.curves import MS

WITHIN = 32  # batches: a change is believed after sixteen, and may come in the middle of the sixteen that are looked at


class Backend:
    """Batches of random sizes and lengths, one after the other, and what was learned of them."""

    def __init__(
        self, fixed_ms: float, row_ms: float, cell_ms: float, max_rows: int, noise: float, *, workers: int = 1
    ) -> None:
        self.times = fixed_ms, row_ms, cell_ms
        self.lengths = (8, 16, 32, 64, 120) if cell_ms else (0,)
        self.max_rows, self.noise, self.workers = max_rows, noise, workers
        self.lots = random.Random(1)
        self.model = ServiceModel(max_rows)

    def time_ns(self, rows: int, length: int) -> float:
        fixed_ms, row_ms, cell_ms = self.times
        return (fixed_ms + row_ms * rows + cell_ms * rows * length) * MS

    def run(self, batches: int, *, level: float = 1.0, delay_ms: float = 0.0, max_rows: int | None = None) -> None:
        for _ in range(batches):
            length, rows = self.lots.choice(self.lengths), self.lots.randint(1, max_rows or self.max_rows)
            time_ns = level * self.time_ns(rows, length) + delay_ms * MS
            curve = self.model.curve(LengthGroup("k", length) if length else "k")
            curve.observe(rows, self.lots.randint(1, self.workers), round(time_ns * self.lots.lognormvariate(0, self.noise)))

    def worst(self, *, level: float = 1.0, delay_ms: float = 0.0) -> float:
        """The largest error over sizes and lengths, as a share."""
        errors = []
        for length in self.lengths:
            curve = self.model.curve(LengthGroup("k", length) if length else "k").current()
            for rows in (1, 2, self.max_rows // 4, self.max_rows):
                expected_ns = level * self.time_ns(rows, length) + delay_ms * MS
                errors.append(abs(curve.expected_ns(rows) / expected_ns - 1))
        return max(errors)


BACKENDS = {
    "a small model": (0.5, 0.05, 0.0, 32, 0.05),
    "BERT on a CPU": (4.0, 6.0, 0.0, 16, 0.1),
    "ResNet on a GPU": (2.0, 0.15, 0.0, 64, 0.1),
    "minilm, mixed lengths": (2.2, 0.0, 0.155, 16, 0.1),
    "a small model, mixed lengths": (0.2, 0.0, 0.01, 16, 0.05),
}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("name", BACKENDS)
def test_hand_overs_that_are_slow_for_a_while_are_known_at_every_size_and_leave_no_trace(name: str, workers: int) -> None:
    backend = Backend(*BACKENDS[name], workers=workers)
    backend.run(600)
    usual = backend.worst()
    backend.run(WITHIN, delay_ms=12)
    assert backend.worst(delay_ms=12) < 0.45
    backend.run(300, delay_ms=12)
    assert backend.worst(delay_ms=12) < 0.2
    backend.run(WITHIN)
    assert backend.worst() < usual + 0.3
    backend.run(200)
    assert backend.worst() < usual + 0.2


@pytest.mark.parametrize("name", BACKENDS)
def test_a_device_that_is_throttled_for_a_while_is_known_at_every_size_and_leaves_no_trace(name: str) -> None:
    backend = Backend(*BACKENDS[name])
    backend.run(600)
    usual = backend.worst()
    backend.run(WITHIN, level=3)
    assert backend.worst(level=3) < 0.3
    backend.run(300, level=3)
    backend.run(WITHIN)
    assert backend.worst() < usual + 0.2


def test_hand_overs_that_are_slow_while_only_few_rows_run_leave_no_trace_at_many() -> None:
    backend = Backend(*BACKENDS["a small model"])
    backend.run(600)
    backend.run(10 * WITHIN, delay_ms=12, max_rows=4)
    backend.run(WITHIN)
    assert backend.worst() < 0.25


@pytest.mark.parametrize("noise", [0.05, 0.15, 0.4])
@pytest.mark.parametrize("name", BACKENDS)
def test_what_only_scatters_is_taken_for_no_change(name: str, noise: float) -> None:
    backend = Backend(*BACKENDS[name][:4], noise)
    backend.run(200)
    curves = backend.model.curves.values()
    before = sum(curve.resets for curve in curves)
    backend.run(3000)
    assert sum(curve.resets for curve in curves) - before <= 2
    assert backend.worst() < 0.35


def test_a_delay_is_kept_between_restarts() -> None:
    backend = Backend(*BACKENDS["minilm, mixed lengths"])
    backend.run(600)
    backend.run(100, delay_ms=12)
    kept, backend.model = backend.model.to_dict(), ServiceModel(16)
    backend.model.restore(kept)
    assert backend.worst(delay_ms=12) < 0.2
    backend.run(WITHIN)
    assert backend.worst() < 0.3


def test_while_hand_overs_are_slow_large_batches_are_known_to_pay_and_after_them_all_is_in_time_again() -> None:
    """Bursts of 1 to 100, SLO 30 ms; from 4 s to 8 s each batch takes 12 ms longer, so that at most one fits between."""
    lots = np.random.default_rng(3)
    bursts = np.sort(lots.uniform(0, 12_000, 400))
    at_ms = np.concatenate([at + 0.1 * np.arange(rows) for at, rows in zip(bursts, lots.integers(1, 101, 400), strict=True)])
    arrivals = np.sort(at_ms * MS).astype(np.int64)

    def service_ns(batch: Batch, busy: int, now_ns: int) -> int:
        return round((0.5 + 0.05 * batch.rows) * MS) + (12 * MS if 4000 * MS < now_ns < 8000 * MS else 0)

    latencies_ns = simulate(Batcher(Adaptive(), max_rows=256, slo_ns=30 * MS), arrivals, service_ns, workers=1).latencies_ns
    in_time = (latencies_ns >= 0) & (latencies_ns <= 30 * MS)
    assert in_time[(arrivals > 5000 * MS) & (arrivals < 8000 * MS)].mean() > 0.8
    assert in_time[arrivals > 8000 * MS].mean() > 0.99
