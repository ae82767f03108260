from types import SimpleNamespace

import numpy as np
import pytest

from gateway.batching.policies import POLICIES
from gateway.config import Batching, Ragged
from loadtest.events import Timing
from loadtest.prediction import Lengths, MeasuredService, predicted_rps
from loadtest.results import Slo

SLO = Slo.parse("p99<100ms")
SIZES = (1, 2, 4, 8, 16, 32)
CPU = tuple(Timing(rows, 1, 4 + 6.0 * rows) for rows in SIZES)


def capacity(timings: tuple[Timing, ...] = CPU, **changes: object) -> float:
    asked: dict[str, object] = {"overhead_ms": 0.0, "slo": SLO, "batching": Batching(policy="greedy")}
    asked |= {"sessions": 1, "max_rows": 32, "requests": 1500, **changes}
    return predicted_rps(timings, **asked)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("policy", list(POLICIES))
def test_the_prediction_lies_below_the_fluid_limit_and_not_far(policy: str) -> None:
    # Two batches of n must fit in 100 ms: 2 · (4 + 6n) <= 100 gives n = 7 and 7 / 46 ms = 152/s.
    assert 0.6 * 152 < capacity(batching=Batching(policy=policy)) <= 152  # type: ignore[arg-type]


@pytest.mark.slow
def test_overhead_and_scatter_lower_the_prediction() -> None:
    best = capacity()
    assert capacity(overhead_ms=20.0) < best
    scattered = tuple(Timing(t.rows, 1, t.ms, 0.3) for t in CPU)
    assert capacity(scattered) < best


@pytest.mark.slow
def test_sessions_that_share_the_cores_do_not_double_the_capacity() -> None:
    shared = (*CPU, *(Timing(t.rows, 2, 2 * t.ms) for t in CPU))
    apart = (*CPU, *(Timing(t.rows, 2, t.ms) for t in CPU))
    assert capacity(apart, sessions=2) > 1.8 * capacity()
    assert capacity(shared, sessions=2) < 1.1 * capacity()


@pytest.mark.slow
def test_a_batch_cap_is_kept() -> None:
    steep = tuple(Timing(rows, 1, 20 + 0.5 * rows) for rows in SIZES)
    assert capacity(steep, max_rows=1) < 1000 / 20.5  # one row at a time
    assert capacity(steep) > 5 * capacity(steep, max_rows=1)


def test_an_slo_below_one_row_alone_is_met_at_no_rate() -> None:
    assert capacity(slo=Slo.parse("p99<9ms")) == 0.0
    assert capacity(slo=Slo.parse("p99<9ms"), overhead_ms=10.0) == 0.0


@pytest.mark.slow
def test_scatter_alone_gives_nobody_up() -> None:
    wild = tuple(Timing(t.rows, 1, t.ms, 2.5) for t in CPU)
    assert capacity(wild) == pytest.approx(0.5 * capacity())


def test_the_service_interpolates_in_rows_and_takes_the_next_larger_concurrency() -> None:
    service = MeasuredService((Timing(1, 1, 10), Timing(4, 1, 40), Timing(1, 4, 15), Timing(4, 4, 60)), max_rows=8)
    assert service.ms(2, 1) == pytest.approx(20)
    assert service.ms(8, 1) == pytest.approx(80)  # beyond the largest in proportion
    assert service.ms(1, 2) == service.ms(1, 4) == service.ms(1, 9) == 15


def test_the_mean_of_scattered_times_is_what_was_measured() -> None:
    service = MeasuredService((Timing(1, 1, 10, 0.4),), max_rows=1)

    class Batch:
        padded_rows = 1

    times = [service(Batch(), 1, 0) / 1e6 for _ in range(4096)]  # type: ignore[arg-type]
    assert np.mean(times) == pytest.approx(10, rel=0.03)


def mixed(*sizes: int) -> Lengths:
    return Lengths(Ragged(pad={"x": 0.0}, buckets=(16, 64, 128)), sizes)


def test_lengths_share_out_what_a_batch_takes_beyond_its_fixed_part() -> None:
    lengths = mixed(10, 60, 60)  # padded to 16 and 64, 48 on average: 64 is typical, and was profiled
    service = MeasuredService((Timing(1, 1, 10.0), Timing(2, 1, 16.0), Timing(4, 1, 28.0)), max_rows=4, lengths=lengths)

    def ms(*sizes: int) -> float:
        parts = [SimpleNamespace(request=SimpleNamespace(inputs={"x": np.zeros((1, size))})) for size in sizes]
        return service(SimpleNamespace(padded_rows=len(parts), parts=parts), 1, 0) / 1e6  # type: ignore[arg-type]

    assert lengths.typical == (60, 60)
    # 4 ms, and 6 ms a row of the profiled length.
    assert ms(60) == pytest.approx(10)
    assert ms(10) == pytest.approx(4 + 6 * 16 / 64)
    assert ms(10, 60) == pytest.approx(16)  # padded to the longest


@pytest.mark.slow
def test_mixed_lengths_carry_less_than_their_mean() -> None:
    # Batches are of one bucket each, and so smaller; on the mean length nothing is lost.
    timings = tuple(Timing(rows, 1, 10 + 2.0 * rows) for rows in SIZES)
    batching = Batching()
    alike = capacity(timings, batching=batching, lengths=mixed(60))
    apart = capacity(timings, batching=batching, lengths=mixed(10, 60, 60, 60, 100))  # 67 on average
    assert alike == pytest.approx(capacity(timings, batching=batching), rel=0.05)
    assert apart < 0.95 * alike
