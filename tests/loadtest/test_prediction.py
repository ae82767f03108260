import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy.optimize import curve_fit

from gateway.batching.policies import POLICIES
from gateway.config import Batching, Ragged
from loadtest.results import SloSpec
from loadtest.search.events import Timing
from loadtest.search.prediction import Lengths, ProfiledService, predicted_rps

SLO = SloSpec.parse("p99<100ms")
SIZES = (1, 2, 4, 8, 16, 32)
CPU = tuple(Timing(rows, 1, 4 + 6.0 * rows) for rows in SIZES)


def predicted(timings: tuple[Timing, ...] = CPU, **changes: object) -> float:
    asked: dict[str, object] = {"overhead_ms": 0.0, "slo": SLO, "batching": Batching(policy="greedy")}
    asked |= {"sessions": 1, "max_rows": 32, "requests": 1500, **changes}
    return predicted_rps(timings, **asked)  # type: ignore[arg-type]


FOUND: dict[str, float] = {}


def capacity(*timings: tuple[Timing, ...], **changes: object) -> float:
    """What is predicted, simulated once: it is the same by one seed, as the last test sees."""
    asked = repr((timings, sorted(changes.items())))
    if asked not in FOUND:
        FOUND[asked] = predicted(*timings, **changes)
    return FOUND[asked]


@pytest.mark.slow
@pytest.mark.parametrize("policy", list(POLICIES))
def test_the_prediction_lies_below_the_fluid_limit_and_not_far(policy: str) -> None:
    # Two batches of n must fit in 100 ms: 2 · (4 + 6n) <= 100 gives n = 7 and 7 / 46 ms = 152/s.
    assert 0.6 * 152 < capacity(batching=Batching(policy=policy)) <= 152  # type: ignore[arg-type]


def test_half_of_the_requests_may_be_later_than_what_only_the_median_must_keep() -> None:
    timings = (Timing(1, 1, 12.0), Timing(8, 1, 16.0), Timing(32, 1, 30.0))
    both = predicted(timings, slo=SloSpec.parse("p50<20ms,p99<200ms"), batching=Batching(), overhead_ms=1.0)
    assert both > 100
    assert predicted(timings, slo=SloSpec.parse("p50<12ms,p99<200ms"), batching=Batching(), overhead_ms=1.0) == 0


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
    assert capacity(slo=SloSpec.parse("p99<9ms")) == 0.0
    assert capacity(slo=SloSpec.parse("p99<9ms"), overhead_ms=10.0) == 0.0


@pytest.mark.slow
def test_scatter_alone_gives_nobody_up() -> None:
    wild = tuple(Timing(t.rows, 1, t.ms, 2.5) for t in CPU)
    assert capacity(wild) == pytest.approx(0.5 * capacity())


def test_the_service_interpolates_in_rows_and_takes_the_next_larger_concurrency() -> None:
    service = ProfiledService((Timing(1, 1, 10), Timing(4, 1, 40), Timing(1, 4, 15), Timing(4, 4, 60)), max_rows=8)
    assert service.ms(2, 1) == pytest.approx(20)
    assert service.ms(8, 1) == pytest.approx(80)  # beyond the largest in proportion
    assert service.ms(6, 1) == pytest.approx(60)
    assert service.ms(1, 2) == service.ms(1, 4) == service.ms(1, 9) == 15


def test_the_mean_of_scattered_times_is_what_was_measured() -> None:
    service = ProfiledService((Timing(1, 1, 10, 0.4),), max_rows=1)

    class Batch:
        padded_rows = 1

    times = [service(Batch(), 1, 0) / 1e6 for _ in range(4096)]  # type: ignore[arg-type]
    assert np.mean(times) == pytest.approx(10, rel=0.03)


def mixed(*sizes: int) -> Lengths:
    return Lengths(Ragged(pad={"x": 0.0}, buckets=(16, 64, 128)), sizes)


def test_lengths_share_out_what_a_batch_takes_beyond_its_fixed_part() -> None:
    lengths = mixed(10, 60, 60)  # padded to 16 and 64, 48 on average: 64 is typical, and was profiled
    service = ProfiledService((Timing(1, 1, 10.0), Timing(2, 1, 16.0), Timing(4, 1, 28.0)), max_rows=4, lengths=lengths)

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


def test_the_lengths_that_are_padded_to_what_is_nearest_to_the_mean_are_typical() -> None:
    def typical(*sizes: int) -> tuple[int, ...]:
        return Lengths(Ragged(pad={"x": 0.0}), sizes).typical

    assert typical(100, 101, 120) == (100, 101)  # 107 on average, and a tenth of it to either side
    assert typical(10, 90) == (10, 90)  # both are as near
    assert typical(90, 100, 110, 100) == (90, 100, 110, 100)
    assert typical(89, 100, 111, 100) == (100, 100)
    assert mixed(10, 16, 17, 17, 17).typical == (17, 17, 17)  # padded to 16 and 64


def test_lengths_are_drawn_as_often_as_they_are_and_the_same_by_one_seed() -> None:
    lengths = mixed(10, 60, 60, 60)
    first = lengths.drawn(3)
    drawn = [first(index)["x"].shape for index in range(4096)]
    assert set(drawn) == {(1, 10), (1, 60)}
    assert drawn.count((1, 10)) / 4096 == pytest.approx(0.25, abs=0.03)
    again, other = lengths.drawn(3), lengths.drawn(4)
    assert [again(index + 4096)["x"].shape for index in range(4096)] == drawn
    assert [other(index)["x"].shape for index in range(4096)] != drawn


def batch(*sizes: int) -> Any:
    parts = [SimpleNamespace(request=SimpleNamespace(inputs={"x": np.zeros((1, size))})) for size in sizes]
    return SimpleNamespace(padded_rows=len(parts), parts=parts)


def test_the_fixed_part_of_a_batch_weighs_each_size_by_its_share() -> None:
    sizes, times = np.array([1.0, 2.0, 4.0]), np.array([10.0, 16.0, 40.0])
    (_, start), _ = curve_fit(lambda n, slope, start: start + slope * n, sizes, times, sigma=times)
    service = ProfiledService([Timing(int(n), 1, ms) for n, ms in zip(sizes, times, strict=True)], 4, lengths=mixed(60))
    fixed_ms = max(0.0, start)
    assert service(batch(10), 1, 0) / 1e6 == pytest.approx(fixed_ms + (10 - fixed_ms) * 16 / 64, rel=1e-3)


@pytest.mark.parametrize(
    ("timings", "fixed_ms"),
    [
        ((Timing(1, 1, 10.0),), 0.0),  # of one size nothing is known of it
        ((Timing(1, 1, 10.0), Timing(2, 1, 9.0)), 0.0),  # nor where more rows take less
        ((Timing(1, 1, 10.0), Timing(2, 1, 25.0)), 0.0),  # it is no less than nothing
        ((Timing(1, 1, 10.0), Timing(2, 1, 12.0)), 8.0),
        ((Timing(1, 1, 10.0), Timing(2, 1, 10.5)), 9.5),
    ],
)
def test_the_fixed_part_is_between_nothing_and_the_least_time(timings: tuple[Timing, ...], fixed_ms: float) -> None:
    service = ProfiledService(timings, 2, lengths=mixed(60))
    assert service(batch(10), 1, 0) / 1e6 == pytest.approx(fixed_ms + (10 - fixed_ms) * 16 / 64)


def test_a_concurrency_between_measured_ones_counts_as_the_larger_and_its_fixed_part_too() -> None:
    measured = (Timing(1, 1, 10.0), Timing(2, 1, 16.0), Timing(1, 3, 20.0), Timing(2, 3, 36.0))
    service = ProfiledService(measured, 2, lengths=mixed(60))
    for busy in (2, 3, 4):
        assert service.ms(2, busy) == 36
        assert service(batch(10), busy, 0) / 1e6 == pytest.approx(4 + 16 * 16 / 64)
    assert service(batch(10), 1, 0) / 1e6 == pytest.approx(4 + 6 * 16 / 64)
    above_all = ProfiledService((Timing(1, 2, 10.0), Timing(2, 2, 16.0)), 2, lengths=mixed(60))
    assert above_all.ms(1, 1) == 10


def test_scatter_is_lognormal_as_wide_as_measured_and_the_same_by_one_seed() -> None:
    def times(seed: int) -> list[float]:
        service = ProfiledService((Timing(1, 1, 10.0, 0.2), Timing(3, 1, 30.0, 0.4)), 3, seed=seed)
        return [service(batch(1, 1), 1, 0) / 1e6 for _ in range(4096)]

    logs = np.log(times(1))
    assert logs.std() == pytest.approx(0.3, rel=0.05)  # between the two
    assert logs.mean() == pytest.approx(math.log(20) - 0.3**2 / 2, abs=0.02)
    assert times(1) == times(1) != times(2)


def test_no_rate_is_predicted_where_nothing_is_left_of_the_limit() -> None:
    assert capacity(overhead_ms=100.0) == 0
    assert capacity(slo=SloSpec.parse("errors<1%")) == 0


@pytest.mark.slow
def test_what_all_sessions_carry_in_their_best_batches_is_the_most() -> None:
    patient = SloSpec.parse("p99<60s")
    assert capacity(slo=patient) == pytest.approx(32 / 0.196)
    assert capacity(slo=patient, rows_per_request=4) == pytest.approx(8 / 0.196)
    assert capacity(slo=patient, sessions=2) == pytest.approx(64 / 0.196)  # two at once are as quick, as far as is known
    shared = (*CPU, *(Timing(t.rows, 2, 2 * t.ms) for t in CPU))
    assert capacity(shared, slo=patient, sessions=2) == pytest.approx(32 / 0.196)
    dip = (Timing(1, 1, 10.0), Timing(2, 1, 12.0), Timing(4, 1, 60.0))  # the best is in the middle
    assert capacity(dip, slo=patient, max_rows=4) == pytest.approx(2 / 0.012)
    assert capacity(CPU[:1], slo=patient, max_rows=1) == pytest.approx(1 / 0.010)


@pytest.mark.slow
def test_every_objective_counts_and_errors_do_where_they_are_limited() -> None:
    strict, lenient = capacity(), capacity(slo=SloSpec.parse("p50<100ms"))
    assert lenient > 1.02 * strict
    assert capacity(slo=SloSpec.parse("p50<100ms,p99<100ms")) == pytest.approx(strict)
    assert capacity(slo=SloSpec.parse("p99<100ms,p50<30ms")) < strict
    # Adaptive sheds what would be late: of few it sheds many are not missed at p10, but as errors they are.
    shedding = {"batching": Batching(policy="adaptive"), "slo": SloSpec.parse("p10<100ms")}
    assert 0 < capacity(**{**shedding, "slo": SloSpec.parse("p10<100ms,errors<1%")}) < 0.95 * capacity(**shedding)  # type: ignore[arg-type]


@pytest.mark.slow
def test_overhead_is_taken_off_the_limit() -> None:
    for policy in ("greedy", "adaptive"):  # which forms its batches to what is left
        how = {"batching": Batching(policy=policy)}  # type: ignore[arg-type]
        assert capacity(overhead_ms=20.0, **how) == pytest.approx(capacity(slo=SloSpec.parse("p99<80ms"), **how))


@pytest.mark.slow
def test_the_same_seed_predicts_the_same() -> None:
    assert predicted(seed=1) == predicted(seed=1) != predicted(seed=2)
