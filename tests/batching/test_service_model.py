import json
import random
from itertools import pairwise
from math import exp

import pytest

from gateway.batching.queue import LengthGroup
from gateway.batching.service_curve import ServiceCurve, size_grid
from gateway.batching.service_model import ServiceModel
from tests.batching.curves import kept_curve, kept_model

MS = 1_000_000


def probed(fixed_ms: float = 2, row_ms: float = 0.5, max_rows: int = 32) -> ServiceCurve:
    curve = ServiceCurve(size_grid(max_rows))
    for rows in (1, max_rows):
        curve.probe(rows, [round((fixed_ms + row_ms * rows) * MS)] * 2)
    return curve


def test_two_probes_tell_every_size() -> None:
    curve = probed(fixed_ms=2, row_ms=0.5)
    for rows in range(1, 33):
        assert curve.expected_ns(rows) == pytest.approx((2 + 0.5 * rows) * MS)


def test_the_first_run_of_a_probe_is_the_warm_up() -> None:
    curve = ServiceCurve(size_grid(8))
    curve.probe(1, [900 * MS, 3 * MS, 3 * MS])
    assert curve.expected_ns(1) == pytest.approx(3 * MS)


def test_an_unseen_size_costs_in_proportion_at_most() -> None:
    curve = ServiceCurve(size_grid(8))
    curve.probe(2, [4 * MS, 4 * MS])
    assert curve.expected_ns(8) == pytest.approx(16 * MS)


def test_time_never_falls_with_size() -> None:
    curve = ServiceCurve(size_grid(8))
    for rows, time_ms in ((1, 5), (4, 3), (8, 9)):
        curve.probe(rows, [time_ms * MS] * 2)
    shape = curve.shape
    assert list(shape) == sorted(shape)
    assert curve.expected_ns(4) >= curve.expected_ns(1)


def test_a_curve_that_is_no_line_is_followed_where_it_was_seen() -> None:
    curve = ServiceCurve(size_grid(16))
    times = {1: 2.0, 4: 2.1, 8: 6.0, 16: 20.0}
    for _ in range(50):
        for rows, time_ms in times.items():
            curve.observe(rows, 1, round(time_ms * MS))
    for rows, time_ms in times.items():
        assert curve.expected_ns(rows) == pytest.approx(time_ms * MS, rel=0.1)


def test_q_is_what_one_batch_in_ten_exceeds() -> None:
    curve = probed()
    lots = random.Random(0)
    times = [round((2 + 0.5 * 8) * MS * lots.lognormvariate(0, 0.2)) for _ in range(2000)]
    late = 0
    for time_ns in times:
        late += time_ns > curve.expected_ns(8) * curve.spread
        curve.observe(8, 1, time_ns)
    assert 0.05 < late / len(times) < 0.15


def test_one_outlier_does_not_move_the_mean_far() -> None:
    curve = probed()
    for _ in range(20):
        curve.observe(8, 1, 6 * MS)
    curve.observe(8, 1, 600 * MS)
    assert curve.expected_ns(8) < 6 * MS * 1.25


def test_a_slower_backend_is_known_at_every_size_within_ten_batches() -> None:
    curve = probed(fixed_ms=2, row_ms=0.5)
    for _ in range(30):
        curve.observe(4, 1, 4 * MS)
    for _ in range(10):
        curve.observe(4, 1, 8 * MS)
    assert curve.expected_ns(4) == pytest.approx(8 * MS, rel=0.2)
    assert curve.expected_ns(32) > 18 * MS * 1.3  # never seen since, and yet


def test_a_backend_beyond_all_clipping_is_caught_by_the_reset() -> None:
    curve = probed()
    for _ in range(30):
        curve.observe(4, 1, 4 * MS)
    for _ in range(40):
        curve.observe(4, 1, 400 * MS)
    assert curve.resets >= 1
    assert curve.expected_ns(4) == pytest.approx(400 * MS, rel=0.1)
    for _ in range(80):
        curve.observe(4, 1, 4 * MS)
    assert curve.expected_ns(4) == pytest.approx(4 * MS, rel=0.1)


def test_workers_that_slow_each_other_are_learned_apart() -> None:
    curve = probed(fixed_ms=2, row_ms=0.5)
    for _ in range(60):
        curve.observe(4, 1, 4 * MS)
        curve.observe(4, 2, 7 * MS)
    assert curve.expected_ns(4, busy=1) == pytest.approx(4 * MS, rel=0.1)
    assert curve.expected_ns(4, busy=2) == pytest.approx(7 * MS, rel=0.1)
    assert curve.expected_ns(4, busy=3) == curve.expected_ns(4, busy=2)  # the nearest that is known


def test_compiled_sizes_and_large_limits_keep_the_table_short() -> None:
    assert size_grid(8, (1, 4, 8)) == (1, 4, 8)
    assert size_grid(4, (1, 4, 8)) == (1, 4)
    large = size_grid(1 << 20)
    assert len(large) < 400
    assert large[-1] == 1 << 20
    assert all(after <= before * 17 / 16 + 1 for before, after in pairwise(large[127:]))


def test_what_was_learned_survives_a_restart() -> None:
    model = ServiceModel(32)
    curve = model.curve(LengthGroup(("ids",), 64))
    curve.probe(1, [3 * MS] * 2)
    curve.probe(32, [18 * MS] * 2)
    for _ in range(50):
        curve.observe(8, 2, 9 * MS)
    kept = json.loads(json.dumps(model.to_dict()))
    again = ServiceModel(32)
    again.restore(kept)
    restored = again.curve(LengthGroup(("ids",), 64))
    for rows in (1, 8, 32):
        assert restored.expected_ns(rows, 2) == pytest.approx(curve.expected_ns(rows, 2), rel=0.01)
    assert restored.spread == pytest.approx(curve.spread, rel=0.01)


@pytest.mark.parametrize(
    "kept",
    [
        {},
        {"buckets": []},
        {"buckets": {"None": {"format": 99}}},
        {"buckets": {"None": {"format": 1, "means": [[1, -5, 1]], "sums": [0] * 5, "levels": [], "ratios": []}}},
        {"buckets": {"None": {"format": 1, "means": "x", "sums": [0] * 5, "levels": [], "ratios": []}}},
    ],
)
def test_a_damaged_memory_is_refused_and_nothing_is_taken_over(kept: dict[str, object]) -> None:
    model = ServiceModel(8)
    with pytest.raises(ValueError, match="not a service"):
        model.restore(kept)
    assert not model.curve(None).ready


def test_a_new_length_borrows_from_the_nearest_in_proportion() -> None:
    model = ServiceModel(8)
    for length, time_ms in ((16, 2), (128, 16)):
        model.probe(LengthGroup(None, length), 1, [time_ms * MS] * 2)
    assert model.curve(LengthGroup(None, 64)).expected_ns(1) == pytest.approx(8 * MS)  # 64/16 of 2 ms
    assert model.curve(LengthGroup(None, 256)).expected_ns(1) == pytest.approx(32 * MS)  # 256/128 of 16 ms


def test_any_number_of_shapes_is_bounded() -> None:
    model = ServiceModel(8)
    for shape in range(1000):
        model.curve(shape)
    assert len(model.curves) <= 256


# to the nanosecond


def stated(
    points: dict[int, float], *, fixed_ms: float, row_ms: float, max_rows: int = 16, levels: dict[int, float] | None = None,
    ratios: tuple[float, ...] = (1.0,), counts: int = 100,
) -> ServiceCurve:  # fmt: skip
    """A curve that has seen these sizes, in ms, and whose line is another."""
    kept = kept_curve(fixed_ms, row_ms, max_rows, levels)
    kept["means"] = [[rows, time_ms * MS, counts] for rows, time_ms in points.items()]
    kept["ratios"] = list(ratios)
    curve = ServiceCurve(size_grid(max_rows))
    curve.restore(kept)
    return curve


def test_between_sizes_it_is_interpolated_and_beyond_them_follows_the_line() -> None:
    curve = stated({4: 16, 8: 20}, fixed_ms=6, row_ms=0.5)
    times = [curve.expected_ns(rows) / MS for rows in (1, 2, 4, 5, 6, 8, 12, 16, 99)]
    assert times == pytest.approx([16 * 6.5 / 8, 16 * 7 / 8, 16, 17, 18, 20, 20 * 12 / 10, 20 * 14 / 10, 20 * 14 / 10])
    assert curve.line_ns == pytest.approx((6 * MS, 0.5 * MS))


@pytest.mark.parametrize(
    ("scatter", "ms"),
    [
        (0.0, 30.0),
        (0.1, 22.5),  # the middle half of a normal distribution's logarithms: the line counts for one batch, as many as it had
    ],
)
def test_the_more_batches_scatter_the_more_the_line_tells_of_a_size_that_had_few(scatter: float, ms: float) -> None:
    quarter = exp(0.5 * 1.35 * scatter)
    ratios = (1 / quarter, 1.0, quarter) * 12
    curve = stated({1: 12, 16: 27}, fixed_ms=11, row_ms=1, ratios=ratios)
    kept = curve.to_dict()
    kept["means"].append([4, 30 * MS, 1])  # by bad luck twice what the line says
    curve.restore(kept)
    assert curve.expected_ns(4) / MS == pytest.approx(ms, rel=0.02)


def test_a_larger_size_never_takes_less_and_the_rate_is_the_best_up_to_it() -> None:
    curve = stated({1: 2, 2: 8, 4: 6, 8: 6}, fixed_ms=1, row_ms=0.5, max_rows=8)
    assert [time_ns / MS for time_ns in curve.shape] == [2, 8, 8, 8, 8, 8, 8, 8]
    assert [rate * MS for rate in curve.rates] == pytest.approx([0.5, 0.5, 0.5, 0.5, 0.625, 0.75, 0.875, 1])


def test_where_batches_scatter_a_size_that_had_bad_luck_does_not_make_all_above_it_slow() -> None:
    ratios = (0.8, 1.0, 1.25) * 12
    curve = stated({1: 10, 2: 14, 8: 10, 16: 10}, fixed_ms=10, row_ms=0, counts=7, ratios=ratios)
    assert list(curve.shape) == sorted(curve.shape)
    assert curve.expected_ns(16) < 11.5 * MS  # the mean of those that are out of order


def test_the_more_a_backend_scatters_the_slower_its_level_follows() -> None:
    for scatter, moved in ((0.0, 0.02), (0.1, 0.01)):
        quarter = exp(0.5 * 1.35 * scatter)
        curve = stated({4: 10}, fixed_ms=0, row_ms=2.5, counts=40, ratios=(1 / quarter, 1.0, quarter) * 12)
        curve.observe(4, 1, 12 * MS)
        assert curve.level(1) == pytest.approx(1 + moved, rel=1e-3)


def test_the_first_batches_count_fully_and_a_size_seen_twice_moves_the_level() -> None:
    curve = ServiceCurve(size_grid(8))
    told = []
    for time_ms in (4, 8, 12, 88, 12.1):
        curve.observe(4, 1, round(time_ms * MS))
        told.append(curve.expected_ns(4) / MS)
    assert told == pytest.approx([
        4,
        6,  # the mean of both
        8 * 1.1,  # twice what was expected: a third mean, and a tenth of the excess in the level
        10 * 1.1 * 1.1,  # ten times, of which two count
        10 * 1.21,  # as expected
    ])  # fmt: skip
    assert curve.level(1) == pytest.approx(1.21)


def test_a_size_seen_often_follows_slowly_and_the_level_at_once() -> None:
    often = stated({4: 10}, fixed_ms=0, row_ms=2.5, counts=40)
    often.observe(4, 1, 12 * MS)
    assert often.level(1) == pytest.approx(1.02)
    assert often.expected_ns(4) == pytest.approx((10 + 0.03 * 2) * 1.02 * MS, rel=0.01)  # tables are built at one per cent
    seldom = stated({4: 10}, fixed_ms=0, row_ms=2.5, counts=9)
    seldom.observe(4, 1, 18 * MS)
    assert seldom.expected_ns(4) == pytest.approx((10 + 0.1 * 8) * 1.08 * MS)
    for counts, share in ((32, 1 / 33), (33, 0.03)):
        curve = stated({4: 10}, fixed_ms=0, row_ms=2.5, counts=counts)
        curve.observe(4, 1, 20 * MS)
        assert curve.to_dict()["means"] == [[4, pytest.approx((10 + share * 10) * MS), counts + 1]]


def test_tables_are_built_with_the_next_ranking_once_a_mean_has_moved_by_a_hundredth_and_at_once_by_a_twentieth() -> None:
    curve = stated({4: 10}, fixed_ms=0, row_ms=2.5, counts=40, ratios=(1.0,) * 16)  # ranked: not again for sixteen
    table = curve.shape
    curve.observe(4, 1, 14 * MS)  # 1.2 per cent
    for _ in range(14):
        curve.observe(4, 1, round(10 * curve.level(1) * MS))
        assert curve.shape is table
    curve.observe(4, 1, round(13 * curve.level(1) * MS))
    assert curve.shape is not table
    assert curve.shape[3] == curve.to_dict()["means"][0][1]

    table = curve.shape
    while curve.to_dict()["means"][0][1] < 1.05 * table[3]:
        assert curve.shape is table
        curve.observe(4, 1, round(1.29 * table[3] * curve.level(1)))
    assert curve.shape is not table


def test_the_first_batch_beside_others_counts_at_the_nearest_level() -> None:
    curve = stated({4: 10}, fixed_ms=0, row_ms=2.5, levels={1: 1.0, 3: 2.0})
    assert [curve.level(busy) for busy in (1, 2, 3, 4, 9)] == [1, 1, 2, 2, 2]
    curve.observe(4, 4, 24 * MS)  # 1.2 times as long as with three
    assert curve.level(4) == pytest.approx(2.04)
    curve.observe(8, 5, 99 * MS)  # a size never seen says nothing of the level
    assert curve.level(5) == pytest.approx(2.04)
    assert curve.level(4) == pytest.approx(2.04)
    for _ in range(3):
        curve.observe(4, 4, round(curve.expected_ns(4, 4)))
    assert curve.level(5) == pytest.approx(2.04)
    assert ServiceCurve((1, 2)).level(7) == 1.0


def test_nothing_is_expected_before_anything_was_seen() -> None:
    curve = ServiceCurve((1, 2, 4))
    assert (curve.ready, curve.shape, curve.rates, curve.line_ns, curve.spread, curve.resets) == (
        False, (0, 0, 0), (0, 0, 0), (0, 0), 1, 0,
    )  # fmt: skip
    assert curve.expected_ns(2) == 0
    assert [curve.at(rows) for rows in (1, 2, 3, 4, 5)] == [0, 1, 2, 2, 2]
    curve.observe(2, 3, 6 * MS)
    assert curve.ready
    assert curve.level(3) == 1
    assert [curve.expected_ns(rows, busy) / MS for rows, busy in ((1, 3), (2, 3), (4, 1))] == [3, 6, 12]
    assert curve.line_ns == (0, 3 * MS)


@pytest.mark.parametrize(
    ("ratios", "spread"),
    [
        ((), 1.0),
        ((1.5,), 1.5),
        ((0.5,), 1.0),
        (tuple(1 + i / 100 for i in range(10)), 1.09),
        (tuple(1 + i / 100 for i in range(20)), 1.18),
        (tuple(1 + i / 1000 for i in reversed(range(128))), 1.115),
        (tuple(1 + i / 1000 for i in range(200)), 1.187),  # the last 128 of them
    ],
)
def test_the_spread_is_what_nine_in_ten_do_not_exceed(ratios: tuple[float, ...], spread: float) -> None:
    assert stated({4: 10}, fixed_ms=0, row_ms=2.5, ratios=ratios).spread == pytest.approx(spread)


def test_the_first_ratios_are_ranked_soon() -> None:
    curve = stated({4: 10}, fixed_ms=0, row_ms=2.5)
    ranked = []
    for batch in range(1, 17):
        curve.observe(4, 1, round((1 + batch / 100) * curve.expected_ns(4)))
        ranked.append(round(curve.spread, 2))
    # With that of the file there are 2, 4, 8 and 16, of which nine in ten are at most the last, and the 15th of 16.
    assert ranked == [1.01, 1.01, 1.03, 1.03, 1.03, 1.03, *[1.07] * 8, 1.14, 1.14]


def test_luck_is_what_the_last_batches_took_in_eight_equal_parts_and_at_the_most() -> None:
    luck = stated({4: 10}, fixed_ms=0, row_ms=2.5, ratios=(*[9.0] * 50, *[1 + i / 100 for i in range(24)])).luck
    assert luck == pytest.approx((1.01, 1.04, 1.07, 1.1, 1.13, 1.16, 1.19, 1.22, 1.23))


def test_the_spread_is_ranked_again_every_sixteen_batches() -> None:
    curve = stated({4: 10}, fixed_ms=0, row_ms=2.5, ratios=(1.0,) * 16)
    ranked = []
    for _ in range(34):
        curve.observe(4, 1, round(1.2 * curve.expected_ns(4)))
        ranked.append(round(curve.spread, 2))
    assert ranked == [1.0] * 15 + [1.2] * 19
    for _ in range(34):
        curve.observe(4, 1, round(curve.expected_ns(4)))
    ranked = []
    for _ in range(17):
        curve.observe(8, 1, round(3 * curve.expected_ns(8)))
        ranked.append(round(curve.spread, 2))
    assert len(set(ranked)) == 2  # once in sixteen


def factors(curve: ServiceCurve, *times: float, rows: int = 4) -> None:
    """Batches that take so many times what is expected."""
    for factor in times:
        curve.observe(rows, 1, round(factor * curve.expected_ns(rows)))


@pytest.mark.parametrize(
    ("times", "resets"),
    [
        ((1.4,) * 15, 0),
        ((1.4,) * 16, 1),
        ((1.29,) * 40, 0),
        ((0.7,) * 15, 0),
        ((0.7,) * 16, 1),
        ((0.78,) * 40, 0),
        ((1.4,) * 15 + (1.0,) + (1.4,) * 15, 0),
        ((1.4,) * 15 + (0.7,) + (1.4,) * 15, 0),
        ((1.4,) * 8 + (0.7,) * 15, 0),
        ((1.4,) * 8 + (0.7,) * 16, 1),
        ((1.4,) * 31, 1),
        ((1.4,) * 32, 2),
    ],
)
def test_sixteen_in_a_row_on_one_side_are_a_change(times: tuple[float, ...], resets: int) -> None:
    curve = stated({4: 10}, fixed_ms=0, row_ms=2.5)
    factors(curve, *times)
    assert curve.resets == resets


@pytest.mark.parametrize("before", range(16))
def test_after_a_change_the_next_batch_tells_the_spread(before: int) -> None:
    curve = probed()
    for _ in range(40 + before):
        curve.observe(4, 1, 4 * MS)
    while not curve.resets:
        curve.observe(4, 1, 400 * MS)
    curve.observe(4, 1, round(1.25 * curve.expected_ns(4)))
    assert curve.spread == pytest.approx(1.25, rel=1e-6)


def test_a_change_moves_every_level_and_forgets_the_spread_and_what_the_shape_was() -> None:
    curve = stated({4: 10, 8: 20}, fixed_ms=0, row_ms=2.5, levels={1: 1.0, 2: 1.5}, ratios=(1.9,) * 20)
    factors(curve, *(1.4,) * 15)
    before = curve.level(1)
    factors(curve, 1.6)
    assert curve.resets == 1
    assert curve.level(1) == pytest.approx(before * 1.06 * 1.4)  # the middle one of the sixteen
    assert curve.level(2) == pytest.approx(1.5 * 1.4)
    assert [count for _, _, count in curve.to_dict()["means"]] == [2, 2]
    assert curve.to_dict()["ratios"] == []
    factors(curve, 1.0)
    assert curve.spread == pytest.approx(1.0)
    mean_ns = curve.to_dict()["means"][0][1]
    factors(curve, 1.2)
    assert curve.to_dict()["means"][0][1] == pytest.approx(mean_ns * (1 + 0.2 / 4), rel=0.01)  # the fourth that counts


def test_another_length_has_the_fixed_time_and_as_many_times_what_a_row_takes() -> None:
    model = ServiceModel(8)
    short = model.curve(LengthGroup("k", 16))
    short.restore(kept_curve(2, 0.5, 8, {1: 1.0, 2: 1.5}, spread=1.3))
    longer = model.curve(LengthGroup("k", 64))
    assert [time_ns / MS for time_ns in longer.shape] == pytest.approx([2 + 2 * rows for rows in range(1, 9)])
    assert longer.line_ns == pytest.approx((2 * MS, 2 * MS))
    assert (longer.level(2), longer.spread) == (1.5, 1.3)
    longer.observe(1, 1, 8 * MS)  # the first of its size: the surface counts as four
    assert longer.expected_ns(1) == pytest.approx((4 + 4 / 5) * MS, rel=0.01)
    assert short.expected_ns(1) == pytest.approx(2.5 * MS)
    other = model.curve("another shape")
    assert other.expected_ns(8) == pytest.approx(longer.expected_ns(8))  # of the last that is known
    shorter = model.curve(LengthGroup("k", 8))
    assert shorter.expected_ns(8) == pytest.approx((2 + 0.25 * 8) * MS)


def test_a_length_borrows_from_lengths_and_nothing_from_what_has_not_run() -> None:
    model = ServiceModel(8)
    assert not model.curve(LengthGroup("k", 16)).ready
    model.curve("plain").restore(kept_curve(2, 1, 8))
    assert model.curve(LengthGroup("k", 32)).expected_ns(1) == pytest.approx(3 * MS)  # nothing else is known
    model.curve("late").restore(kept_curve(50, 1, 8))
    for _ in range(9):
        model.curve(LengthGroup("k", 32)).observe(1, 1, 3 * MS)
    assert model.curve(LengthGroup("k", 48)).expected_ns(1) == pytest.approx(4.5 * MS, rel=0.01)


def test_the_line_is_through_what_was_seen_and_never_falls_or_starts_below_nothing() -> None:
    def line_ms(*seen: tuple[int, float]) -> tuple[float, float]:
        curve = ServiceCurve(size_grid(16))
        for rows, time_ms in seen:
            curve.probe(rows, [round(time_ms * MS)])
        fixed_ns, row_ns = curve.line_ns
        return fixed_ns / MS, row_ns / MS

    assert line_ms((1, 3), (11, 8)) == pytest.approx((2.5, 0.5))
    assert line_ms((4, 8)) == pytest.approx((0, 2))
    assert line_ms((1, 1), (11, 31)) == pytest.approx((0, (0.98 * 1 + 31) / (0.98 * 1 + 11)))  # else it began at -2
    assert line_ms((1, 8), (11, 3)) == pytest.approx(((0.98 * 8 + 3) / 1.98, 0))
    weights, rows, times = (0.98**2, 0.98, 1), (1, 2, 4), (3.0, 3.0, 7.0)
    weight, x, y = sum(weights), *(sum(w * v for w, v in zip(weights, values, strict=True)) for values in (rows, times))
    xx = sum(w * v * v for w, v in zip(weights, rows, strict=True))
    xy = sum(w * v * t for w, v, t in zip(weights, rows, times, strict=True))
    slope = (weight * xy - x * y) / (weight * xx - x * x)
    assert line_ms(*zip(rows, times, strict=True)) == pytest.approx(((y - slope * x) / weight, slope))


def test_a_probe_alone_counts_and_else_the_first_run_does_not() -> None:
    curve = ServiceCurve(size_grid(4))
    curve.probe(2, [6 * MS])
    assert curve.expected_ns(2) == 6 * MS
    curve.probe(4, [99 * MS, 8 * MS, 10 * MS])
    assert curve.expected_ns(4) == 9 * MS
    curve.probe(2, [99 * MS, 9 * MS])
    assert curve.expected_ns(2) == 7.5 * MS


def test_a_batch_in_which_the_clock_did_not_move_took_next_to_nothing() -> None:
    fresh, probed_curve, slow = ServiceCurve(size_grid(8)), ServiceCurve(size_grid(8)), probed(max_rows=8)
    probed_curve.probe(1, [0, 0])
    for curve in (fresh, probed_curve, slow):
        for _ in range(40):
            curve.observe(4, 1, 0)
        assert 0 < curve.expected_ns(8) < MS
        curve.restore(json.loads(json.dumps(curve.to_dict())))
        for _ in range(40):
            curve.observe(4, 1, 4 * MS)
        assert curve.expected_ns(4) == pytest.approx(4 * MS, rel=0.2)


def test_the_sizes_worth_telling_apart() -> None:
    assert size_grid(1) == (1,)
    assert size_grid(128) == tuple(range(1, 129))
    assert size_grid(129) == (*range(1, 129), 129)
    assert size_grid(300)[126:] == (127, 128, 136, 144, 153, 162, 172, 182, 193, 205, 217, 230, 244, 259, 275, 292, 300)
    assert size_grid(3, (4, 8)) == (4,)
    assert ServiceModel(8).probe_rows == (1, 8)
    assert ServiceModel(2).probe_rows == (1, 2)
    assert ServiceModel(1).probe_rows == (1,)
    assert ServiceModel(8, (2, 4, 8)).probe_rows == (2, 8)


def test_all_that_is_kept_comes_back_as_it_was() -> None:
    curve = stated({4: 10, 8: 18}, fixed_ms=2, row_ms=2, levels={1: 1.0, 2: 1.7}, ratios=(1.25, 0.75, 1.5), counts=7)
    kept = json.loads(json.dumps(curve.to_dict()))
    again = ServiceCurve(size_grid(16))
    for _ in range(3):
        again.observe(1, 3, 99 * MS)
    again.restore(kept)
    assert again.to_dict() == curve.to_dict()
    assert (again.shape, again.rates, again.line_ns, again.spread) == (curve.shape, curve.rates, curve.line_ns, curve.spread)
    assert kept["format"] == 1
    assert kept["means"] == [[4, 10 * MS, 7], [8, 18 * MS, 7]]
    assert kept["levels"] == [[1, 1.0], [2, 1.7]]
    assert kept["ratios"] == [1.25, 0.75, 1.5]


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("format", 2, "of format 1: 2"),
        ("means", [], "out of range"),
        ("means", [[1, 0, 1]], "out of range"),
        ("means", [[1, 5, 1], [2, -1, 1]], "out of range"),
        ("levels", [[1, 0.0]], "out of range"),
        ("levels", [[1, 1.0], [2, -1.0]], "out of range"),
        ("sums", [1, 2, 3, 4], "not a service curve"),
        ("sums", None, "not a service curve"),
        ("ratios", ["x"], "not a service curve"),
        ("levels", [["x", 1]], "not a service curve"),
    ],
)
def test_a_curve_that_is_none_changes_nothing(key: str, value: object, words: str) -> None:
    curve = probed()
    before = curve.to_dict()
    kept = {**kept_curve(9, 9, 32), key: value}
    with pytest.raises(ValueError, match=words):
        curve.restore(kept)
    assert curve.to_dict() == before
    del kept[key]
    with pytest.raises(ValueError, match="not a service curve"):
        curve.restore(kept)
    model = ServiceModel(32)
    with pytest.raises(ValueError, match="not a service curve"):
        model.restore({"buckets": {"'good'": kept_curve(1, 1, 32), "'bad'": kept}})
    assert not model.curve("good").ready


def test_a_model_keeps_what_it_knows_by_bucket_and_takes_it_back_for_buckets_old_and_new() -> None:
    model = ServiceModel(8)
    model.curve("unknown")
    model.curve("known").restore(kept_curve(2, 1, 8))
    assert list(model.to_dict()["buckets"]) == ["'known'"]
    fresh = ServiceModel(8)
    fresh.curve("known")
    fresh.restore(kept_model({"known": kept_curve(2, 1, 8), "new": kept_curve(7, 1, 8)}))
    assert fresh.curves["known"].expected_ns(1) == pytest.approx(3 * MS)
    assert "new" not in fresh.curves
    assert fresh.curve("new").expected_ns(1) == pytest.approx(8 * MS)
    fresh.curve("new").observe(1, 1, 80 * MS)
    assert fresh.curve("new") is fresh.curve("new")


def test_of_too_many_shapes_the_first_is_forgotten() -> None:
    model = ServiceModel(8)
    for shape in range(256):
        model.curve(shape)
    assert 0 in model.curves
    model.curve(256)
    assert (len(model.curves), 0 in model.curves, 1 in model.curves, 256 in model.curves) == (256, False, True, True)
