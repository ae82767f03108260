import itertools
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from benchmarks.queues import BATCHER, CONSTANT, Batching, Queue
from loadtest.results import Interval, Percentiles, SloSpec
from loadtest.verdict.decision import JudgedRequests, attainment, judge, overall
from loadtest.verdict.statistics import (
    BatchMeans,
    batch_means,
    binomial_interval,
    falling,
    histogram,
    latency_interval,
    mser5,
    nearest_rank,
    percentiles,
    slowest,
)


def queue(rng: np.random.Generator, count: int, busy: float) -> np.ndarray:
    """Latencies of a single server queue, in service times: M/D/1 by Lindley's recursion, its start left out."""
    lead = 20_000
    steps = np.concatenate([[0], 1 - rng.exponential(1 / busy, count + lead - 1)])
    walk = np.cumsum(steps)
    return ((walk - np.minimum.accumulate(walk)) + 1)[lead:]


def requests(latency_ms: np.ndarray, failed: np.ndarray | None = None, blocks: int = 20) -> JudgedRequests:
    ns = (latency_ms * 1e6).astype(np.int64)
    return JudgedRequests(ns, ns, np.zeros(len(ns), bool) if failed is None else failed, np.arange(len(ns)) * blocks // len(ns))


def test_percentiles_are_those_of_nearest_rank() -> None:
    found = percentiles(np.arange(1, 1001) * 1_000_000)
    assert (found.p50, found.p90, found.p99, found.p999, found.max) == (500, 900, 990, 999, 1000)
    assert found.mean == 500.5


def test_no_requests_have_no_percentiles() -> None:
    assert percentiles(np.empty(0, np.int64)) == Percentiles(0, 0, 0, 0, 0, 0, 0, 0)
    assert histogram(np.empty(0, np.int64)) == ()


@pytest.mark.parametrize("scale", [1e3, 1e6, 1e9])
def test_the_histogram_is_within_a_thousandth_of_the_exact_percentiles(scale: float) -> None:
    latencies = (np.random.default_rng(0).lognormal(1, 1.5, 50_000) * scale).astype(np.int64) + 1
    edges, counts = np.array(histogram(latencies)).T
    for percentile in (1, 50, 90, 99, 99.9, 99.99):
        rank = nearest_rank(percentile, 50_000)
        exact_ns = np.sort(latencies)[rank - 1]
        assert exact_ns <= edges[np.searchsorted(np.cumsum(counts), rank)] <= exact_ns * 1.0005


def test_histograms_merge_exactly_by_adding_counts() -> None:
    latencies = np.random.default_rng(0).integers(1, 10**9, 2000)
    merged: dict[int, int] = {}
    for part in (latencies[:700], latencies[700:]):
        for edge, count in histogram(part):
            merged[edge] = merged.get(edge, 0) + count
    assert tuple(sorted(merged.items())) == histogram(latencies)


@pytest.mark.parametrize(("misses", "needed"), [(0, 459), (1, 662), (10, 2010)])
def test_the_binomial_interval_gives_the_counts_of_mlperf(misses: int, needed: int) -> None:
    # One-sided 99 % at p99, as published for LoadGen: two tails of 1 % each.
    assert binomial_interval(misses, needed, 0.98).lower >= 0.99
    assert binomial_interval(misses, needed - 1, 0.98).lower < 0.99


@pytest.mark.slow
@pytest.mark.parametrize(("busy", "blocks"), [(0.8, 40), (0.9, 100)])
def test_batch_means_cover_the_true_attainment_near_the_knee_where_the_binomial_interval_does_not(
    busy: float, blocks: int
) -> None:
    truth = queue(np.random.default_rng(99), 3_000_000, busy)
    limit = float(np.percentile(truth, 99))
    covered = binomial_covered = 0
    per_block = max(200, int(10 * limit * busy))
    for run in range(200):
        latency = queue(np.random.default_rng([1, run]), per_block * blocks, busy)
        missed = latency > limit
        interval = batch_means(np.arange(len(latency)) // per_block, missed, slowest(latency, 99)).interval(0.95)
        covered += interval.lower <= 0.99 <= interval.upper
        binomial = binomial_interval(np.count_nonzero(missed), len(missed), 0.95)
        binomial_covered += binomial.lower <= 0.99 <= binomial.upper
    assert 180 <= covered <= 198  # 90 to 99 %
    assert binomial_covered < 80


def test_independent_requests_have_no_design_effect_to_speak_of() -> None:
    missed = np.random.default_rng(0).random(20_000) < 0.02
    assert batch_means(np.arange(20_000) // 200, missed).design_effect < 1.5


def test_warm_up_is_cut_where_the_level_settles() -> None:
    noise = np.random.default_rng(0).normal(0, 1, 10_000)
    cut, steady = mser5(noise + np.where(np.arange(10_000) < 800, 10.0, 0.0))
    assert 790 <= cut <= 850
    assert steady


def test_a_steady_series_loses_next_to_nothing() -> None:
    for seed in range(20):
        cut, steady = mser5(np.random.default_rng(seed).lognormal(0, 1, 5000))
        assert cut <= 50  # 1 %
        assert steady


def test_a_drift_is_told() -> None:
    cut, steady = mser5(np.arange(10_000) * 0.01 + np.random.default_rng(0).normal(0, 1, 10_000))
    assert (cut, steady) == (2000, False)


def test_a_clear_margin_passes_and_a_clear_miss_fails() -> None:
    latency = np.random.default_rng(0).uniform(5, 15, 4000)
    assert [judge(SloSpec.parse(text), requests(latency))[0].verdict for text in ("p99<50ms", "p99<10ms")] == ["pass", "fail"]


def test_a_close_call_is_undecided_and_says_how_many_more_requests_decide() -> None:
    latency = np.where(np.arange(2000) % 125 == 124, 60.0, 40.0)  # 0.8 % miss
    judged = judge(SloSpec.parse("p99<50ms"), requests(latency))[0]
    assert judged.verdict == "undecided"
    assert judged.requests_needed is not None
    more = np.where(np.arange(2000 + judged.requests_needed) % 125 == 124, 60.0, 40.0)
    assert judge(SloSpec.parse("p99<50ms"), requests(more))[0].verdict == "pass"


def test_failures_miss_every_objective_and_count_as_errors() -> None:
    failed = np.arange(4000) % 20 == 0  # 5 %, and fast
    judged = judge(SloSpec.parse("p99<50ms,p90<50ms,errors<1%"), requests(np.full(4000, 1.0), failed))
    assert [result.verdict for result in judged] == ["fail", "pass", "fail"]
    assert overall(judged) == "fail"
    assert attainment(SloSpec.parse("p99<50ms"), requests(np.full(4000, 1.0), failed)).estimate == pytest.approx(0.95)


def test_no_error_allowed_means_none() -> None:
    failed = np.zeros(1000, bool)
    slo = SloSpec.parse("errors<0%")
    assert judge(slo, requests(np.ones(1000), failed))[0].verdict == "pass"
    failed[3] = True
    assert judge(slo, requests(np.ones(1000), failed))[0].verdict == "fail"


def test_few_requests_cannot_pass_a_p99() -> None:
    # 100 requests without a miss prove 97.0 % at 95 % confidence, not 99 %.
    judged = judge(SloSpec.parse("p99<50ms"), requests(np.full(100, 10.0)))[0]
    assert judged.verdict == "undecided"
    assert judged.requests_needed is not None
    assert 180 <= judged.requests_needed <= 210  # 299 are needed in all


def test_a_machine_whose_speed_drifts_passes_where_half_the_limit_is_kept() -> None:
    # Minutes of fast and slow stretches, and a cluster of 16 just above half the limit: nothing of it is near the limit.
    stretch = np.repeat([20.0, 45.0, 25.0, 60.0], 4000)
    latency = stretch + np.random.default_rng(0).exponential(5, len(stretch))
    latency[9000:9016] = 110.0
    assert batch_means(np.arange(16_000) * 36 // 16_000, latency > 200, slowest(latency, 99)).design_effect > 50
    assert judge(SloSpec.parse("p99<200ms"), requests(latency, blocks=36))[0].verdict == "pass"
    latency[4000:4200] = 110.0  # over 1 % beyond half
    assert judge(SloSpec.parse("p99<200ms"), requests(latency, blocks=36))[0].verdict == "undecided"


def test_the_interval_of_a_percentile_of_independent_requests_is_that_of_order_statistics() -> None:
    # Conover, Practical Nonparametric Statistics: of 1000 values the 469th to the 532nd hold the median at 95 %.
    latency = np.arange(1, 1001).reshape(50, 20).T.ravel() * 1_000_000  # every block of 50 alike
    assert latency_interval(latency, np.arange(1000) // 50, 50, 0.95) == (469, 532)


def test_the_interval_of_a_percentile_agrees_with_the_interval_of_the_share_within_its_ends() -> None:
    # A limit at either end is just held, or just not, at the same confidence.
    latency = (queue(np.random.default_rng(3), 40_000, 0.8) * 1e6).astype(np.int64)
    block = np.arange(40_000) // 1000
    ends = latency_interval(latency, block, 99, 0.95)
    at = np.sort(latency)[nearest_rank(99, 40_000) - 1]
    means = batch_means(block, latency > at, slowest(latency, 99))
    for end_ms, inside in ((ends[0], 1), (ends[1], -1)):
        for nudge, holds in ((inside, True), (-inside, False)):
            missed = int(np.count_nonzero(latency > end_ms * 1e6 + nudge))
            found = replace(means, misses=missed).interval(0.95)
            assert (found.lower <= 0.99 <= found.upper) == holds


def test_too_few_requests_bound_no_high_percentile_from_above() -> None:
    latency = np.arange(1, 101).reshape(5, 20).T.ravel() * 1_000_000
    lower_ms, upper_ms = latency_interval(latency, np.arange(100) // 5, 99, 0.95)
    assert 90 <= lower_ms <= 97  # of independent ones the 97th
    assert upper_ms == np.inf
    assert latency_interval(latency[:1], np.zeros(1, np.int64), 50, 0.95) == (0, np.inf)


@pytest.mark.slow
def test_the_intervals_of_p50_p95_and_p99_hold_the_true_percentile_near_the_knee() -> None:
    truth = queue(np.random.default_rng(99), 3_000_000, 0.9)
    for percentile in (50, 95, 99):
        exact = float(np.percentile(truth, percentile))
        held = 0
        for run in range(100):
            latency = (queue(np.random.default_rng([2, run]), 30_000, 0.9) * 1e6).astype(np.int64)
            lower_ms, upper_ms = latency_interval(latency, np.arange(30_000) // 750, percentile, 0.95)
            held += lower_ms <= exact <= upper_ms
        assert held >= 90


@pytest.mark.parametrize(
    ("shares", "weights", "fallen"),
    [
        ([0.9], [5], [0.9]),
        ([1.0, 0.99, 0.5], [1, 1, 1], [1.0, 0.99, 0.5]),
        ([0.9, 1.0, 0.5], [100, 300, 100], [0.975, 0.975, 0.5]),  # the heavier one counts for more
        ([0.2, 0.4, 0.9], [1, 1, 2], [0.6, 0.6, 0.6]),
    ],
)
def test_shares_fall_with_the_rate_by_as_little_change_as_their_weights_allow(
    shares: list[float], weights: list[int], fallen: list[float]
) -> None:
    assert falling(shares, weights) == pytest.approx(fallen)


@pytest.mark.slow
@pytest.mark.parametrize(("server", "busy", "percentile"), [(CONSTANT, 0.9, 95), (BATCHER, 0.9, 99)])
def test_a_limit_that_is_just_missed_passes_in_one_of_twenty_runs_at_most(
    server: Queue | Batching, busy: float, percentile: float
) -> None:
    limit = server.percentile(percentile - 0.01, busy, seed=0) if isinstance(server, Queue) else 0.025931
    per_block = max(200, int(10 * limit * busy * server.rate_rps))
    passed = 0
    for latency in server.runs(5, 400, per_block * 20, busy):
        means = batch_means(np.arange(len(latency)) // per_block, latency > limit, slowest(latency, percentile))
        passed += means.interval(0.9).lower >= percentile / 100
    assert passed <= 0.07 * 400  # 5 %, and what 400 runs scatter


def test_a_longer_run_with_the_same_outcome_has_a_narrower_interval_of_the_same_estimate() -> None:
    for means in (BatchMeans(20, 2000, 1.0, 20), BatchMeans(20, 2000, 8.0, 20)):
        one, four = means.interval(0.95), means.interval(0.95, scale=4)
        assert one.lower < four.lower < four.estimate == one.estimate == 0.99 < four.upper < one.upper
    assert BatchMeans(20, 2000, 1.0, 20).interval(0.95, scale=2) == binomial_interval(40, 4000, 0.95)


def test_a_share_other_than_the_one_seen_is_tested_with_the_dependence_it_would_show() -> None:
    # One that is twice as large or larger with √2 times as much, one of a quarter or less with half as much.
    means = BatchMeans(0, 4000, 50.0, 1_000_000)
    assert 1 - means.interval(0.95).lower == pytest.approx(1 - 0.025 ** (1 / (4000 / (1 + 49 * 2**0.5))), rel=1e-3)
    assert means.interval(0.95).upper == 1
    all_of_them = BatchMeans(4000, 4000, 50.0, 1_000_000).interval(0.95)
    assert (all_of_them.lower, all_of_them.estimate) == (0, 0)
    assert 0 < all_of_them.upper < 0.1


def test_fewer_blocks_tell_less_of_the_same_misses() -> None:
    lower = [BatchMeans(20, 4000, 8.0, blocks).interval(0.95).lower for blocks in (2, 3, 5, 20, 100)]
    assert all(fewer < more for fewer, more in itertools.pairwise(lower))
    assert BatchMeans(20, 4000, 8.0, 1).interval(0.95).lower == lower[0]


def test_that_few_blocks_estimate_the_dependence_is_paid_for_as_students_quantile_says() -> None:
    # No miss of 4000, six blocks: n is the requests over the design effect, times the square of the quantiles' ratio.
    for confidence in (0.95, 0.9):
        tail = (1 - confidence) / 2
        ratio = stats.t.ppf(1 - tail, 3999) / stats.t.ppf(1 - tail, 5)
        n = 4000 / (1 + 49 * 2**0.5) * ratio**2
        assert 1 - BatchMeans(0, 4000, 50.0, 6).interval(confidence).lower == pytest.approx(1 - tail ** (1 / n), rel=1e-6)


def test_misses_that_come_in_one_block_weigh_as_one() -> None:
    block = np.arange(4000) // 200
    together, apart = np.zeros(4000, bool), np.zeros(4000, bool)
    together[1000:1020] = True
    apart[::200] = True
    assert batch_means(block, apart) == BatchMeans(20, 4000, 1.0, 20)
    # 20 times the variance of what is spread: all are in one of 20 blocks.
    assert batch_means(block, together).design_effect == pytest.approx(20, rel=0.02)
    # Ten and twenty of a hundred: 2 · (5² + 5²) / 200², over 0.15 · 0.85 / 200.
    two = np.arange(200) // 100
    assert batch_means(two, np.arange(200) % 100 < np.where(two, 20, 10)).design_effect == pytest.approx(0.0025 * 200 / 0.1275)
    assert batch_means(block, np.zeros(4000, bool)).design_effect == 1
    assert batch_means(np.zeros(50, np.int64), together[1000:1050]).design_effect == 1  # one block tells nothing
    assert batch_means(block * 3, together).blocks == 20  # numbers without requests are no blocks


def test_neighbouring_blocks_that_are_alike_weigh_more_than_others() -> None:
    block = np.arange(4000) // 200
    some = {place: np.isin(block, place) & (np.arange(4000) % 10 == 0) for place in ((4, 5, 6, 7), (1, 6, 11, 16))}
    alike, apart = (batch_means(block, missed).design_effect for missed in some.values())
    assert alike > 2 * apart
    assert apart == pytest.approx(17, rel=0.1)
    halves = np.where(block < 10, True, False) & (np.arange(4000) % 10 == 0)
    assert batch_means(block, halves).design_effect < 9.5 * apart  # how far neighbours can be told alike has an end


def test_the_slowest_are_three_times_as_many_as_may_miss_and_half_at_most() -> None:
    latencies = np.random.default_rng(0).permutation(np.arange(10_000))
    for percentile, count in ((99, 300), (95, 1500), (99.9, 30), (50, 5000), (80, 5000)):
        found = slowest(latencies, percentile)
        assert np.count_nonzero(found) == count
        assert latencies[found].min() == 10_000 - count


def test_nothing_measured_says_nothing() -> None:
    assert binomial_interval(0, 0, 0.95) == Interval(0, 0, 1, 0.95)
    assert binomial_interval(7, 7, 0.95).lower == 0
    assert binomial_interval(0, 7, 0.95).upper == 1
    assert batch_means(np.zeros(1, np.int64), np.ones(1, bool)).interval(0.95).lower == 0


def test_no_time_is_counted_as_a_nanosecond_and_small_ones_exactly() -> None:
    assert histogram(np.array([0, 1, 7, 4095])) == ((1, 2), (7, 1), (4095, 1))
    assert [edge for edge, _ in histogram(np.array([4096, 4097, 8192]))] == [4097, 8195]


def test_ranks_are_those_of_the_nearest_and_begin_with_one() -> None:
    assert [nearest_rank(percentile, 1000) for percentile in (0, 0.1, 50, 99.9, 100)] == [1, 1, 500, 999, 1000]
    assert [nearest_rank(99, count) for count in (1, 100, 101)] == [1, 99, 100]
    single = percentiles(np.array([5_000_000]))
    assert (single.count, single.mean, single.p50, single.p999, single.max) == (1, 5, 5, 5, 5)
    ordered = percentiles(np.arange(1000, 0, -1) * 1_000_000)
    assert (ordered.p90, ordered.p95, ordered.p99, ordered.p999) == (900, 950, 990, 999)


@pytest.mark.parametrize(("count", "cut"), [(199, 0), (200, 20)])
def test_too_short_a_series_loses_nothing(count: int, cut: int) -> None:
    noise = np.random.default_rng(1).normal(0, 0.1, count)
    assert mser5(noise + np.where(np.arange(count) < 20, 10.0, 0.0)) == (cut, True)


def test_what_would_take_more_than_may_be_dropped_is_not_steady() -> None:
    noise = np.random.default_rng(0).normal(0, 1, 10_000)
    late = noise + np.where(np.arange(10_000) < 3000, 10.0, 0.0)
    assert mser5(late) == (2000, False)
    assert mser5(late, most=0.1) == (1000, False)
    cut, steady = mser5(late, most=0.4)
    assert (2990 <= cut <= 3050, cut % 5, steady) == (True, 0, True)
    assert mser5(np.append(late, [1e9] * 4))[0] == 2000  # what fills no five is left out


def test_a_start_that_differs_by_no_more_than_noise_is_kept() -> None:
    # Slow waves, whose own batches scatter as much as the start differs.
    waves = 3 * np.sin(np.arange(20_000) / 500) + np.random.default_rng(3).normal(0, 1, 20_000)
    small = waves + np.where(np.arange(20_000) < 500, 1.5, 0.0)
    assert mser5(small) == (0, True)
    large = waves + np.where(np.arange(20_000) < 500, 60.0, 0.0)
    assert 490 <= mser5(large)[0] <= 520


def test_where_a_series_settles_does_not_depend_on_its_level() -> None:
    series = np.random.default_rng(2).normal(0, 1, 4000) + np.where(np.arange(4000) < 300, 2.0, 0.0)
    cuts = {mser5(series + level)[0] for level in (-50.0, 0.0, 3.0, 1000.0)}
    assert len(cuts) == 1
    assert 250 <= cuts.pop() <= 350
