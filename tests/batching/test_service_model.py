import json
import random
from itertools import pairwise

import pytest

from gateway.batching.queue import LengthGroup
from gateway.batching.service_model import ServiceCurve, ServiceModel, size_grid

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
