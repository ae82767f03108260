"""Under overload: who is refused on arrival, when, and what becomes of those who are not."""

import numpy as np
import pytest

from gateway.batching.adaptive import Adaptive
from gateway.batching.batch import Batch
from gateway.batching.batcher import Batcher
from gateway.batching.overload import plan
from gateway.batching.service_curve import ServiceCurve, size_grid
from gateway.batching.stances import PLANNED
from gateway.errors import Overloaded
from gateway.types import ALONE, InferRequest
from loadtest.search.simulator import SHED, Affine, simulate
from tests.batching.curves import MS, kept_curve, kept_model
from tests.batching.test_adaptive import add, batcher_of, request


def overloaded() -> tuple[Batcher, float, Batch]:
    """One worker, T(n) = 2 + .15·n ms, SLO 20 ms: 10 requests per ms for 200 ms. With the time in ms, and what runs."""
    batcher = batcher_of(fixed_ms=2, row_ms=0.15, slo_ms=20, max_rows=64)
    now_ms, free_ms, running = 0.0, 0.0, None
    for _ in range(2000):
        now_ms += 0.1
        if running is not None and now_ms >= free_ms:
            batcher.finished(running, round(now_ms * MS), running.expected_ns, ok=True)
            running = None
        refused_after_s(batcher, request(now_ms))
        if running is None:
            (running,) = batcher.step(round(now_ms * MS), 1).batches
            free_ms = now_ms + running.expected_ns / MS
    assert running is not None
    return batcher, now_ms, running


def refused_after_s(batcher: Batcher, asked: InferRequest) -> float | None:
    """When to try again; None, if it may wait."""
    try:
        batcher.add(asked, asked.arrival_ns)
    except Overloaded as exc:
        return exc.retry_after_s
    return None


@pytest.mark.parametrize(
    ("times", "fixed_ms", "row_ms", "workers", "slo_ms", "max_rows", "soon"),
    [
        (2, 1.5, 0.01, 1, 7, 64, 0.95),
        (5, 1.5, 0.01, 1, 7, 64, 0.95),
        (2, 27, 0.3, 8, 180, 16, 0.95),
        (5, 27, 0.3, 8, 180, 16, 0.95),
        (2, 2, 0.15, 1, 20, 64, 0.95),
        (5, 2, 0.15, 1, 20, 64, 0.95),
        (2, 4, 6, 1, 100, 32, 0.95),
        (2, 4, 6, 4, 100, 32, 0.95),
        (5, 4, 6, 4, 100, 32, 0.95),
        (2, 2, 0.15, 4, 12, 64, 0.95),
        (5, 2, 0.15, 4, 12, 64, 0.95),
    ],
)
def test_under_overload_most_refusals_come_at_once_and_nothing_that_is_answered_is_late(
    times: int, fixed_ms: float, row_ms: float, workers: int, slo_ms: float, max_rows: int, soon: float
) -> None:
    profile = Affine(fixed_ms * MS, row_ms * MS)
    batcher = batcher_of(fixed_ms=fixed_ms, row_ms=row_ms, workers=workers, slo_ms=slo_ms, max_rows=max_rows)
    rows = [n for n in range(1, max_rows + 1) if (1 + 1 / workers) * profile.rows_ns(n) <= slo_ms * MS]
    fluid_rps = max(workers * n / profile.rows_ns(n) for n in rows) * 1e9
    count = round(30 * slo_ms / 1e3 * times * fluid_rps)
    arrivals = np.cumsum(np.random.default_rng(0).exponential(1e9 / (times * fluid_rps), count)).astype(np.int64)
    outcome = simulate(batcher, arrivals, profile, workers=workers)
    refused = outcome.refused_ns[outcome.refused_ns != SHED]
    assert np.mean(refused <= 0.1 * slo_ms * MS) >= soon
    assert np.mean(outcome.latencies_ns > slo_ms * MS) == 0
    assert outcome.goodput_rps(round(slo_ms * MS)) >= 0.9 * fluid_rps


@pytest.mark.parametrize("sequences", [1, 20, 100, 1000])
def test_requests_that_share_no_batch_are_refused_at_once_by_what_each_of_them_takes(sequences: int) -> None:
    def of_sequence(number: int, now_ns: int) -> InferRequest:
        key = ("sequence", number % sequences), ALONE
        return InferRequest("m", "1", "", {"X": np.zeros((1, 1), np.float32)}, 1, now_ns, shape_key=key)

    batcher = batcher_of(fixed_ms=20, row_ms=1, slo_ms=200, max_rows=64)
    arrivals = np.cumsum(np.random.default_rng(0).exponential(1e9 / 95, 400)).astype(np.int64)  # twice what it can do
    outcome = simulate(batcher, arrivals, Affine(20 * MS, 1 * MS), workers=1, request_of=of_sequence)
    refused = outcome.refused_ns[outcome.refused_ns != SHED]
    assert np.mean(refused <= 20 * MS) >= 0.95
    assert np.mean(outcome.latencies_ns > 200 * MS) <= 0.02
    assert outcome.goodput_rps(200 * MS) >= 0.95 * 1000 / 21


def test_of_a_new_sequence_it_is_forecast_whether_it_would_be_refused_until_the_overload_is_over() -> None:
    def of_sequence(number: int, now_ns: int) -> InferRequest:
        return InferRequest("m", "1", "", {}, 1, now_ns, shape_key=(number, ALONE))

    batcher = batcher_of(fixed_ms=20, row_ms=1, slo_ms=200, max_rows=64)
    now_ns, running = 0, None
    seen = []
    for number in range(1000):
        now_ns += (10 if number < 500 else 40) * MS
        while running is not None and running.closed_ns + 21 * MS <= now_ns:
            ended_ns = running.closed_ns + 21 * MS
            batcher.finished(running, ended_ns, 21 * MS, True)
            running = next(iter(batcher.step(ended_ns, 1).batches), None)
        asked = of_sequence(number, now_ns)
        told_ns = batcher.forecast(asked, now_ns, int(running is None)).total_ns
        refused = refused_after_s(batcher, asked) is not None
        assert not refused or told_ns > 200 * MS
        seen.append(refused)
        if running is None:
            running = next(iter(batcher.step(now_ns, 1).batches), None)
    assert sum(seen[:500]) > 200
    assert not any(seen[520:])


def test_requests_that_share_a_batch_are_not_refused_for_those_that_share_none_and_are_due_later() -> None:
    alone = np.random.default_rng(1).random(1500) < 0.5

    def either(number: int, now_ns: int) -> InferRequest:
        key = ("sequence", ALONE) if alone[number] else None
        return InferRequest("m", "1", "", {"X": np.zeros((1, 1), np.float32)}, 1, now_ns, shape_key=key)

    batcher = batcher_of(fixed_ms=20, row_ms=0.5, workers=4, slo_ms=200, max_rows=32)
    arrivals = np.cumsum(np.random.default_rng(0).exponential(1e9 / 545, 1500)).astype(np.int64)  # 1.6 times what it can do
    latencies_ns = simulate(batcher, arrivals, Affine(20 * MS, 0.5 * MS), workers=4, request_of=either).latencies_ns
    in_time = (latencies_ns >= 0) & (latencies_ns <= 200 * MS)
    assert np.mean(in_time[~alone]) >= 0.9
    assert np.mean(in_time[alone]) >= 0.6


@pytest.mark.parametrize("workers", [1, 4])
def test_overload_is_told_of_although_no_worker_has_become_free_since_it_began(workers: int) -> None:
    batcher = batcher_of(fixed_ms=2, row_ms=0.15, workers=workers, slo_ms=20, max_rows=64)
    free, refused = workers, 0
    for i in range(300 * workers):  # in 11 ms, while batches of 1 to 64 rows run
        refused += refused_after_s(batcher, request(0.037 * i / workers)) is not None
        free -= len(batcher.step(round(0.037 * i / workers * MS), free).batches)
    assert not free
    assert refused > 100 * workers


def test_before_anything_has_run_nobody_is_refused() -> None:
    batcher = Batcher(Adaptive(), max_rows=8, slo_ns=20 * MS)
    for i in range(100):
        assert refused_after_s(batcher, request(0.01 * i)) is None
        batcher.step(round(0.01 * i * MS), int(not i))


def test_who_is_refused_on_arrival_is_told_when_it_would_have_been_in_time() -> None:
    batcher, now_ms, _ = overloaded()
    retry_after_s = None
    while retry_after_s is None:
        now_ms += 0.1
        retry_after_s = refused_after_s(batcher, request(now_ms))
    assert 0 < retry_after_s < 0.02
    assert refused_after_s(batcher, request(now_ms + 1e3 * retry_after_s + 0.1)) is None


def test_one_larger_than_a_batch_is_refused_by_all_its_batches() -> None:
    batcher, now_ms, _ = overloaded()
    while refused_after_s(batcher, request(now_ms)) is not None:
        now_ms += 0.1
    assert refused_after_s(batcher, request(now_ms, rows=128)) is not None  # two of 11.6 ms, of an SLO of 20
    assert refused_after_s(batcher, request(now_ms)) is None


def test_a_higher_class_takes_the_place_of_others_and_who_waits_longer_has_one() -> None:
    batcher, now_ms, _ = overloaded()
    while refused_after_s(batcher, request(now_ms)) is None:
        pass
    assert refused_after_s(batcher, request(now_ms, priority=1)) is None
    batcher = batcher_of(fixed_ms=2, row_ms=0.15, slo_ms=20, max_rows=64)
    for _ in range(300):  # no overload is known of
        assert refused_after_s(batcher, request(0)) is None


def test_once_it_is_over_nobody_is_refused() -> None:
    batcher, now_ms, running = overloaded()
    now_ms += 100
    batcher.finished(running, round(now_ms * MS), running.expected_ns, ok=True)
    for i in range(20):
        assert refused_after_s(batcher, request(now_ms + i)) is None
        step = batcher.step(round((now_ms + i) * MS), 1)
        for batch in step.batches:
            batcher.finished(batch, round((now_ms + i + 0.9) * MS), batch.expected_ns, ok=True)


def curve_of(luck: tuple[float, ...], max_rows: int = 32) -> ServiceCurve:
    """T(n) = 7 + .2·n ms."""
    kept = kept_curve(7, 0.2, max_rows)
    kept["ratios"] = list(luck)
    curve = ServiceCurve(size_grid(max_rows))
    curve.restore(kept)
    return curve


def test_the_margin_is_wide_where_that_costs_nothing_and_narrow_where_it_costs_rows() -> None:
    luck = tuple(np.exp(np.linspace(-0.5, 0.5, 24)))
    loose = plan(curve_of(luck), 1.0, 5 / MS, 200 * MS)
    assert (loose.at, loose.margin) == (31, max(curve_of(luck).luck))
    tight = plan(curve_of(luck), 1.0, 1.5 / MS, 18 * MS)  # 7 rows would be collected at the 98th percentile, 16 at the median
    assert 0.9 < tight.margin < 1.3
    assert 8 < tight.at < 16


def test_without_luck_the_plan_is_the_batch_that_is_collected_fresh() -> None:
    planned = plan(curve_of((1.0,)), 1.0, 1.5 / MS, 18 * MS)
    assert planned == (12, 1.0)  # 13 rows: 1.5 · (18 - 7 - .2 · 13) = 12.6


def test_of_sizes_far_apart_one_that_is_not_filled_is_planned_where_it_gets_more_done() -> None:
    curve = ServiceCurve((1, 4, 16))
    for rows in curve.sizes:
        curve.probe(rows, [round((12.7 + 0.13 * rows) * MS)] * 2)
    planned = plan(curve, 1.0, 1.0 / MS, 24 * MS)  # in 24 - 14.8 ms come 9 rows: 4 would leave 5 of them behind
    assert curve.sizes[planned.at] == 16


@pytest.mark.parametrize(("rows", "row_ms", "alone_ms"), [(1, 6, 10), (16, 0.75, 20)])
def test_a_request_that_may_be_late_runs_while_little_else_comes(rows: int, row_ms: float, alone_ms: float) -> None:
    """Of 16 rows as two batches of 10 ms, not as 16 of one row."""
    for gap_ms, tried in ((10 * alone_ms, True), (0.95 * alone_ms, False)):
        slo_ms = alone_ms + 10
        batcher = batcher_of(row_ms=row_ms, slo_ms=slo_ms, max_rows=8, stance=PLANNED)  # each batch by luck 7 to 14 ms
        now_ms = 0.0
        for i in range(160):
            now_ms = gap_ms * i
            add(batcher, request(now_ms, rows=rows))
            for _ in range(2):
                for batch in batcher.step(round(now_ms * MS), 1).batches:
                    took_ms = 7 + 7 * (i * 7 % 16) / 15
                    batcher.finished(batch, round(now_ms * MS) + round(min(took_ms, gap_ms) * MS), round(took_ms * MS), ok=True)
        add(batcher, request(now_ms + gap_ms, rows=rows))
        step = batcher.step(round((now_ms + gap_ms + 9) * MS), 1)  # 11 ms are left
        assert bool(step.batches) == tried


@pytest.mark.parametrize(("workers", "others", "turns"), [(1, (), 3), (1, (1, 1), 1), (2, (), 3), (2, (48,), 1)])
def test_a_large_request_that_has_just_come_or_begun_is_not_late_by_its_spread_alone(
    workers: int, others: tuple[int, ...], turns: int
) -> None:
    """But what is left of it is, if others of fewer rows wait, or have their part of several workers."""
    batcher = batcher_of(slo_ms=25, max_rows=8, workers=workers, stance=PLANNED)
    batcher.service.restore(kept_model({None: kept_curve(4, 0.5, 8, spread=1.3)}))  # 24 rows: T is 24 ms, Q 26.4
    for number in range(38):  # they keep the worker busy for 24 of 26 ms
        now_ms = 26 * number
        large = request(now_ms, rows=24 * workers)
        add(batcher, large)
        reasons = []
        for at_ms in (now_ms, now_ms + 8, now_ms + 16):
            for batch in batcher.step(at_ms * MS, workers).batches:
                if batch.parts[0].request is large:
                    reasons.append(batch.reason)
                batcher.finished(batch, (at_ms + 8) * MS, 8 * MS, ok=False)  # which teaches nothing
            for rows in others if number == 37 and at_ms == now_ms else ():
                add(batcher, request(now_ms + 1, rows=rows))
        batcher.step((now_ms + 26) * MS - 1, workers)
    assert len(reasons) == turns * workers
    assert "probe" not in reasons


def test_where_little_time_is_left_to_wait_workers_are_not_all_kept_busy_by_small_batches() -> None:
    workers, slo_ms = 4, 2.0  # (1 + 1/4)·(1.2 + .04·n) <= 2: n = 10, in 1.6 ms
    fluid_rps = workers * 10 / 1.6e-3
    batcher = batcher_of(fixed_ms=1.2, row_ms=0.04, workers=workers, slo_ms=slo_ms, max_rows=64)
    arrivals = np.cumsum(np.random.default_rng(0).exponential(1e9 / (0.45 * fluid_rps), 6000)).astype(np.int64)
    outcome = simulate(batcher, arrivals, Affine(1.2 * MS, 0.04 * MS), workers=workers)
    assert outcome.attainment(round(slo_ms * MS)) > 0.99


def test_who_would_be_refused_on_arrival_is_forecast_to_be_late() -> None:
    batcher, now_ms, _ = overloaded()
    while True:
        now_ms += 0.1
        forecast = batcher.forecast(request(now_ms), round(now_ms * MS), 0)
        if refused_after_s(batcher, request(now_ms)) is not None:
            break
        assert forecast.total_ns < 1.3 * 20 * MS
    assert forecast.total_ns > 20 * MS


@pytest.mark.parametrize("load", [0.3, 2.0])
@pytest.mark.parametrize(("workers", "priorities"), [(1, (0,)), (1, (4,)), (3, (4,)), (3, (1, 0, 4))])
@pytest.mark.parametrize("slower", [5, 200])
def test_after_a_slow_spell_it_is_found_to_be_fast_again(
    slower: int, workers: int, priorities: tuple[int, ...], load: float
) -> None:
    """t = 4 + .5·n ms, SLO 30 ms; from 1 s to 2 s slower. In the 6th second it is as before. load: requests/ms and worker."""
    count = round(6e3 * load * workers)
    arrivals = np.cumsum(np.random.default_rng(0).exponential(MS / (load * workers), count)).astype(np.int64)

    def service_ns(batch: Batch, busy: int, now_ns: int) -> int:
        return round((4 + 0.5 * batch.rows) * MS) * (slower if 1000 * MS < now_ns < 2000 * MS else 1)

    def request_of(index: int, arrival_ns: int) -> InferRequest:
        return InferRequest("m", "1", "", {}, 1, arrival_ns, priority=priorities[index % len(priorities)])

    batcher = batcher_of(fixed_ms=4, row_ms=0.5, workers=workers, slo_ms=30, max_rows=16)
    outcome = simulate(batcher, arrivals, service_ns, workers=workers, request_of=request_of)
    in_time = (outcome.latencies_ns >= 0) & (outcome.latencies_ns <= 30 * MS)
    before = in_time[(arrivals > 200 * MS) & (arrivals < 950 * MS)].mean()
    assert in_time[arrivals > 5000 * MS].mean() > 0.97 * before


def test_a_request_of_a_lower_class_that_comes_alone_runs_however_slow_the_last_ones_were() -> None:
    """Copies that routing sends to learn are such."""
    batcher = batcher_of(fixed_ms=1, row_ms=1, slo_ms=60)
    for now_ms in range(0, 40_000, 2000):
        add(batcher, request(now_ms, priority=4))
        (batch,) = batcher.step(now_ms * MS, 1).batches
        took_ms = 2 if now_ms < 4000 else 400
        batcher.finished(batch, (now_ms + took_ms) * MS, took_ms * MS, ok=True)
