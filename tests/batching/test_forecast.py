"""What a queue predicts of a request that would join it."""

import numpy as np
import pytest

from gateway.batching.batch import Batch
from gateway.batching.batcher import Batcher
from gateway.batching.forecast import Forecast
from gateway.batching.overload import Plan, outlook
from gateway.batching.policies import POLICIES
from gateway.batching.queue import LengthGroup
from gateway.config import Batching, Ragged
from gateway.types import ALONE, InferRequest
from tests.batching.curves import kept_curve, kept_model

MS = 1_000_000


def request(rows: int = 1, now_ns: int = 0, *, key: object = None) -> InferRequest:
    return InferRequest("m", "1", "", {"X": np.zeros((rows, 1), np.float32)}, rows, now_ns, shape_key=key)  # type: ignore[arg-type]


def batcher_that_knows(policy: str = "adaptive", *, workers: int = 1, slo_ms: int | None = 100) -> Batcher:
    """Batches of n rows take 10 + n ms."""
    batcher = Batcher(
        POLICIES[policy](Batching(policy=policy)),  # type: ignore[arg-type]
        max_rows=64,
        workers=workers,
        slo_ns=slo_ms * MS if slo_ms else None,
    )
    for rows in (1, 20, 40, 64) * 2:
        run(batcher, rows, now_ns=0)
    return batcher


def run(batcher: Batcher, rows: int, now_ns: int) -> None:
    batcher.add(request(rows, now_ns), now_ns)
    (batch,) = batcher.step(now_ns, 1).batches
    batcher.finished(batch, now_ns, (10 + rows) * MS, True)


def start(batcher: Batcher, rows: int, now_ns: int, free_slots: int = 1) -> Batch:
    batcher.add(request(rows, now_ns), now_ns)
    (batch,) = batcher.step(now_ns, free_slots).batches
    return batch


@pytest.mark.parametrize("policy", ["adaptive", "greedy"])
def test_with_a_free_worker_it_is_the_own_batch(policy: str) -> None:
    forecast = batcher_that_knows(policy).forecast(request(20), 0, free_slots=1)
    assert (forecast.wait_ns, forecast.ahead_ns) == (0, 0)
    assert forecast.own_ns == pytest.approx(30 * MS, rel=0.05)
    assert forecast.workers == 1
    assert forecast.known


def test_a_running_batch_is_waited_for_and_the_queue_goes_with_the_own_batch() -> None:
    batcher = batcher_that_knows()
    start(batcher, 20, now_ns=0)  # until 30 ms
    batcher.add(request(9), 10 * MS)
    forecast = batcher.forecast(request(), 10 * MS, free_slots=0)
    assert forecast.wait_ns == pytest.approx(20 * MS, rel=0.05)
    assert forecast.ahead_ns == 0
    assert forecast.own_ns == pytest.approx((10 + 9 + 1) * MS, rel=0.05)


def test_where_all_workers_are_busy_and_nothing_waits_the_next_to_free_takes_the_own_batch() -> None:
    batcher = batcher_that_knows(workers=2)
    start(batcher, 40, 0, free_slots=2)  # until 50 ms
    start(batcher, 20, 0, free_slots=1)  # until 30 ms
    forecast = batcher.forecast(request(), 10 * MS, free_slots=0)
    assert forecast.wait_ns == pytest.approx(20 * MS, rel=0.05)
    assert forecast.ahead_ns == 0
    assert forecast.own_ns == pytest.approx(11 * MS, rel=0.05)
    assert forecast.batch_ns == pytest.approx(55 * MS, rel=0.05)  # 10 + 45
    assert forecast.workers == 2


def test_full_batches_ahead_take_their_turn_on_all_workers() -> None:
    batcher = batcher_that_knows(workers=2)
    start(batcher, 20, 0, free_slots=2)
    start(batcher, 40, 0, free_slots=1)
    cap = 45  # 10 + 45 = 0.55 · 100
    for _ in range(3 * cap):
        batcher.add(request(), 0)
    forecast = batcher.forecast(request(), 0, free_slots=0)
    # three before: on the first worker, on the second, on the first again, whose turn ends at 30 + 55 + 55; the second's at 105
    assert forecast.total_ns == pytest.approx((50 + 55 + 11) * MS, rel=0.05)


@pytest.mark.parametrize("policy", ["adaptive", "greedy"])
def test_each_that_shares_no_batch_is_waited_for(policy: str) -> None:
    batcher = batcher_that_knows(policy, slo_ms=1000)
    start(batcher, 20, 0)  # until 30 ms
    for _ in range(6):
        batcher.add(request(2, key=("a", ALONE)), 0)
    own, other = (batcher.forecast(request(5, key=key), 0, free_slots=0) for key in (("a", ALONE), None))
    assert own.total_ns == pytest.approx((30 + 6 * 12 + 15) * MS, rel=0.05)
    assert other.total_ns == pytest.approx(own.total_ns, rel=0.05)


def test_an_overdue_batch_is_taken_to_need_as_long_again() -> None:
    batcher = batcher_that_knows()
    start(batcher, 20, now_ns=0)
    assert batcher.wait_ns(530 * MS, 0) == pytest.approx(500 * MS, rel=0.01)


def test_nothing_is_known_before_the_first_batch() -> None:
    batcher = Batcher(POLICIES["adaptive"](Batching()), max_rows=8, slo_ns=100 * MS)
    forecast = batcher.forecast(request(), 0, free_slots=1)
    assert not forecast.known
    assert forecast.workers == 1


def test_without_a_worker_it_says_so() -> None:
    assert batcher_that_knows().forecast(request(), 0, free_slots=0).workers == 0


def test_asking_for_shapes_never_seen_makes_no_curves() -> None:
    batcher = batcher_that_knows()
    for key in range(10):
        asked = request()
        asked.shape_key = key
        assert batcher.forecast(asked, 0, 1).own_ns == pytest.approx(11 * MS, rel=0.05)
    assert len(batcher.service.curves) == 1


def test_what_would_be_late_is_found_at_the_front_and_only_whole() -> None:
    batcher = batcher_that_knows()
    start(batcher, 1, now_ns=0)
    early, late = request(now_ns=0), request(now_ns=50 * MS)
    for each in (early, late):
        batcher.add(each, 50 * MS)
    assert batcher.due_before(101 * MS, 10) == [early]
    assert batcher.due_before(151 * MS, 10) == [early, late]
    assert batcher.due_before(151 * MS, 1) == [early]


# Two workers at once take half as long again, three twice as long; a tenth of all batches takes a fifth longer.

LEVELS = {1: 1.0, 2: 1.5, 3: 2.0}


def batcher_told(
    *, workers: int = 3, slo_ms: int | None = 100, spread: float = 1.2, policy: str = "greedy", **buckets: tuple[float, float]
) -> Batcher:
    """buckets: fixed and row in ms, by shape key; without any, 10 and 1 for all shapes."""
    batcher = Batcher(
        POLICIES[policy](Batching(policy=policy, max_delay_ms=0)),  # type: ignore[arg-type]
        max_rows=64,
        workers=workers,
        slo_ns=slo_ms * MS if slo_ms else None,
    )
    told = {key: kept_curve(*times, 64, LEVELS, spread) for key, times in buckets.items()} or {
        None: kept_curve(10, 1, 64, LEVELS, spread)
    }
    batcher.service.restore(kept_model(told))
    for key in told:
        batcher.service.curve(key)
    return batcher


def keyed(key: str, rows: int = 1, now_ns: int = 0) -> InferRequest:
    asked = request(rows, now_ns)
    asked.shape_key = key
    return asked


@pytest.mark.parametrize(
    ("running", "rows", "free", "own_ms", "batch_ms"),
    [
        (0, 20, 3, (10 + 20) * 1.2, 10 + 35),  # alone: the cap is 35 rows, (10 + 35) · 1.2 <= 55
        (1, 20, 2, (10 + 20) * 1.5 * 1.2, (10 + 20) * 1.5),  # beside one: the cap is 20
        (2, 5, 1, (10 + 5) * 2 * 1.2, (10 + 12) * 2),  # beside two: the cap is 12
    ],
)
def test_the_own_batch_takes_as_long_as_beside_those_that_run(
    running: int, rows: int, free: int, own_ms: float, batch_ms: float
) -> None:
    batcher = batcher_told()
    for index in range(running):
        start(batcher, 20, 0, free_slots=3 - index)
    forecast = batcher.forecast(request(rows), 0, free)
    assert (forecast.wait_ns, forecast.ahead_ns, forecast.workers, forecast.known) == (0, 0, 3, True)
    assert forecast.own_ns == pytest.approx(own_ms * MS, rel=1e-6)
    assert forecast.batch_ns == pytest.approx(batch_ms * MS, rel=1e-6)
    assert forecast.total_ns == forecast.own_ns


def test_a_request_larger_than_the_usual_batch_waits_for_its_own_first_rows() -> None:
    forecast = batcher_told(workers=1).forecast(request(50), 0, free_slots=1)
    assert forecast.wait_ns == 0
    assert forecast.ahead_ns == pytest.approx(45 * MS, rel=1e-6)  # 35 rows of it
    assert forecast.own_ns == pytest.approx((10 + 15) * 1.2 * MS, rel=1e-6)
    two = batcher_told(workers=2).forecast(request(50), 0, free_slots=2)
    assert two.ahead_ns == 0  # on the other worker
    assert two.own_ns == pytest.approx((10 + 15) * 1.2 * MS, rel=1e-6)


@pytest.mark.parametrize(
    ("waiting", "ahead_ms", "own_rows"),
    [(0, 0, 1), (19, 0, 20), (20, 15, 1), (39, 15, 20), (40, 45, 1), (60, 60, 1), (80, 90, 1)],
)
def test_what_waits_goes_before_in_usual_batches_on_the_workers_as_they_free(
    waiting: int, ahead_ms: float, own_rows: int
) -> None:
    batcher = batcher_told(workers=2)
    start(batcher, 10, 0, free_slots=2)  # until 20 ms
    start(batcher, 10, 5 * MS, free_slots=1)  # until 5 + 30 = 35 ms
    if waiting:
        batcher.add(request(waiting), 5 * MS)
    forecast = batcher.forecast(request(), 10 * MS, free_slots=0)  # frees in 10 and in 25 ms, usual batches take 45
    assert forecast.wait_ns == 10 * MS
    assert forecast.ahead_ns == pytest.approx(ahead_ms * MS, rel=1e-6)
    assert forecast.own_ns == pytest.approx((10 + own_rows) * 1.5 * 1.2 * MS, rel=1e-6)
    assert forecast.batch_ns == pytest.approx(45 * MS, rel=1e-6)


def test_what_waits_beside_a_free_worker_goes_before_as_well() -> None:
    batcher = batcher_told(workers=2)
    start(batcher, 10, 0, free_slots=2)  # until 20 ms
    for rows in (20, 30):
        batcher.add(request(rows), 0)
    forecast = batcher.forecast(request(), 0, free_slots=1)
    assert forecast.wait_ns == 0  # one is free
    assert forecast.ahead_ns == pytest.approx(45 * MS, rel=1e-6)  # 20, 20 and 10 + 1 rows; the first worker is free again at 45
    assert forecast.own_ns == pytest.approx((10 + 11) * 1.5 * 1.2 * MS, rel=1e-6)


def test_what_waits_in_other_shapes_takes_its_part_of_the_workers() -> None:
    batcher = batcher_told(workers=2, a=(10, 1), b=(4, 2), c=(1, 1))
    start(batcher, 10, 0, free_slots=2)
    start(batcher, 10, 0, free_slots=1)
    for key, rows in (("a", 3), ("b", 6), ("c", 7)):
        batcher.add(keyed(key, rows), 0)
    forecast = batcher.forecast(keyed("a"), 0, free_slots=0)
    # usual batches: of b 13 rows, (4 + 2 · 13) · 1.5 · 1.2 <= 55; of c 29
    others_ms = 6 * (4 + 2 * 13) * 1.5 / 13 + 7 * (1 + 29) * 1.5 / 29
    assert forecast.ahead_ns == pytest.approx(others_ms / 2 * MS, rel=1e-6)
    assert forecast.own_ns == pytest.approx((10 + 4) * 1.5 * 1.2 * MS, rel=1e-6)


def classed(priority: int, rows: int = 1, key: str | None = None) -> InferRequest:
    asked = request(rows)
    asked.priority, asked.shape_key = priority, key
    return asked


def test_what_it_would_pass_is_not_ahead_of_a_request_of_a_higher_class() -> None:
    batcher = batcher_told(workers=1)
    start(batcher, 35, 0)  # until 45 ms; usual batches are of 35 rows
    for rows in (30, 30):
        batcher.add(classed(3, rows), 0)
    for priority, ahead_ms, own_rows in ((1, 0, 1), (2, 0, 1), (3, 45, 26), (4, 45, 26)):
        forecast = batcher.forecast(classed(priority), 0, free_slots=0)
        assert forecast.ahead_ns == pytest.approx(ahead_ms * MS, rel=1e-6)
        assert forecast.own_ns == pytest.approx((10 + own_rows) * 1.2 * MS, rel=1e-6)
    batcher.add(classed(1, 4), 0)
    for rows in (1, 31):  # with the four that are of its class
        assert batcher.forecast(classed(1, rows), 0, free_slots=0).ahead_ns == 0
    assert batcher.forecast(classed(1, 32), 0, free_slots=0).ahead_ns == pytest.approx(45 * MS, rel=1e-6)


def test_what_it_would_pass_in_other_shapes_is_not_ahead_of_a_request_of_a_higher_class() -> None:
    batcher = batcher_told(workers=1, a=(10, 1), b=(4, 2))
    start(batcher, 10, 0)
    batcher.add(classed(3, 6, "b"), 0)
    assert batcher.forecast(classed(1, 1, "a"), 0, free_slots=0).ahead_ns == 0
    assert batcher.forecast(classed(3, 1, "a"), 0, free_slots=0).ahead_ns > 0


def test_a_shape_whose_speed_nobody_knows_counts_as_the_last_that_is_known() -> None:
    batcher = batcher_told(a=(10, 1), b=(4, 2))
    assert batcher.forecast(keyed("b"), 0, 3).own_ns == pytest.approx(6 * 1.2 * MS, rel=1e-6)
    assert batcher.forecast(keyed("new"), 0, 3).own_ns == pytest.approx(6 * 1.2 * MS, rel=1e-6)


def test_a_length_nobody_has_seen_counts_as_the_nearest() -> None:
    ragged = Ragged(pad={"X": 0}, buckets=(8, 16, 32, 64))
    batcher = Batcher(POLICIES["adaptive"](Batching()), max_rows=64, ragged=ragged, slo_ns=100 * MS)
    groups = {LengthGroup(None, 8): (1, 1), LengthGroup(None, 64): (9, 1), None: (40, 1)}
    batcher.service.restore(kept_model({group: kept_curve(*times, 64) for group, times in groups.items()}))
    for group in groups:
        batcher.service.curve(group)

    def own_ms(length: int) -> float:
        asked = InferRequest("m", "1", "", {"X": np.zeros((1, length), np.float32)}, 1, 0)
        return batcher.forecast(asked, 0, 1).own_ns / MS

    assert [own_ms(length) for length in (8, 16, 32, 64)] == pytest.approx([2, 2, 2, 10], rel=1e-6)
    assert own_ms(60) == pytest.approx(10, rel=1e-6)
    other = InferRequest("m", "1", "", {"X": np.zeros((1, 36), np.float32)}, 1, 0)
    assert batcher.forecast(other, 0, 1).own_ns == pytest.approx(10 * MS, rel=1e-6)  # padded to 64


def test_without_an_slo_the_usual_batch_is_a_full_one() -> None:
    forecast = batcher_told(slo_ms=None).forecast(request(60), 0, 3)
    assert forecast.batch_ns == pytest.approx(74 * MS, rel=1e-6)
    assert forecast.ahead_ns == 0
    assert forecast.own_ns == pytest.approx(70 * 1.2 * MS, rel=1e-6)


def test_where_not_even_one_row_fits_twice_the_usual_batch_is_of_one() -> None:
    batcher = batcher_told(slo_ms=15)
    assert batcher.forecast(request(), 0, 3).batch_ns == pytest.approx(11 * MS, rel=1e-6)
    assert batcher.forecast(request(2), 0, 3).ahead_ns == pytest.approx(0, abs=1)  # on another worker
    assert batcher_told(slo_ms=15, workers=1).forecast(request(2), 0, 1).ahead_ns == pytest.approx(11 * MS, rel=1e-6)


def test_a_batch_of_a_policy_that_predicts_nothing_ends_when_its_speed_says() -> None:
    batcher = batcher_told(workers=2)
    start(batcher, 10, 0, free_slots=2)  # 20 ms
    start(batcher, 20, 0, free_slots=1)  # 45 ms
    assert batcher.wait_ns(5 * MS, 0) == pytest.approx(15 * MS, rel=1e-6)
    assert batcher.wait_ns(5 * MS, 1) == 0
    assert batcher.forecast(request(), 5 * MS, 0).wait_ns == pytest.approx(15 * MS, rel=1e-6)


def test_where_nothing_runs_or_is_known_nothing_is_waited_for() -> None:
    nothing = batcher_told()
    assert nothing.wait_ns(5 * MS, 0) == 0
    nobody = nothing.forecast(request(), 5 * MS, 0)
    assert (nobody.wait_ns, nobody.ahead_ns, nobody.workers, nobody.known) == (0, 0, 0, True)
    unknown = Batcher(POLICIES["greedy"](Batching()), max_rows=8, workers=1, slo_ns=100 * MS)
    assert unknown.forecast(request(), 0, 1) == Forecast(0, 0, 0, 0, 1, False)
    start(unknown, 1, now_ns=0)
    assert unknown.wait_ns(7 * MS, 0) == 7 * MS  # overdue since the start
    assert unknown.forecast(request(), 7 * MS, 0) == Forecast(7 * MS, 0, 0, 0, 1, False)


def batcher_of_streams(workers: int = 1) -> Batcher:
    """First parts take 10 ms, and streams 300."""
    batcher = Batcher(POLICIES["greedy"](Batching(policy="greedy")), max_rows=0, workers=workers, slo_ns=100 * MS)
    for _ in range(2):
        batch = start(batcher, 1, 0)
        batcher.finished(batch, 10 * MS, 10 * MS, True)
        batcher.streams.ended(300 * MS)
    return batcher


def test_a_session_is_waited_for_until_the_stream_ends_and_not_its_first_part() -> None:
    batcher = batcher_of_streams()
    start(batcher, 1, now_ns=0)
    forecast = batcher.forecast(request(), 50 * MS, free_slots=0)
    assert (forecast.wait_ns, forecast.ahead_ns) == (250 * MS, 0)
    assert forecast.own_ns == forecast.batch_ns == pytest.approx(10 * MS)
    assert batcher.wait_ns(50 * MS, 0) == 250 * MS


def test_each_that_waits_for_a_stream_to_end_is_one_itself() -> None:
    batcher = batcher_of_streams(workers=2)
    for at in (0, 50 * MS):
        start(batcher, 1, at)
    batcher.add(request(), 60 * MS)
    forecast = batcher.forecast(request(), 60 * MS, free_slots=0)
    assert (forecast.wait_ns, forecast.ahead_ns) == (240 * MS, 50 * MS)
    other = request()
    other.shape_key = "another"
    batcher.add(other, 60 * MS)
    assert batcher.forecast(request(), 60 * MS, free_slots=0).ahead_ns == 300 * MS
    passing = request()
    passing.priority = 1
    assert batcher.forecast(passing, 60 * MS, free_slots=0).ahead_ns == 300 * MS  # none of another class is there


def test_who_may_pass_those_that_wait_for_streams_does_not_wait_for_theirs() -> None:
    batcher = batcher_of_streams()
    start(batcher, 1, now_ns=0)
    low, high = request(), request()
    low.priority, high.priority = 4, 1
    batcher.add(low, 0)
    assert batcher.forecast(high, 0, free_slots=0).total_ns == pytest.approx(310 * MS)
    assert batcher.forecast(request(), 0, free_slots=0).total_ns == pytest.approx(310 * MS)
    assert batcher.forecast(low, 0, free_slots=0).total_ns == pytest.approx(610 * MS)


def test_a_free_session_is_as_near_beside_streams_as_it_is() -> None:
    batcher = batcher_of_streams(workers=2)
    start(batcher, 1, 0, free_slots=2)
    assert batcher.forecast(request(), 50 * MS, free_slots=1).total_ns == pytest.approx(10 * MS)
    batcher.add(request(), 50 * MS)
    assert batcher.forecast(request(), 50 * MS, free_slots=1).total_ns == pytest.approx(260 * MS)


def test_a_copy_of_a_stream_is_taken_to_end_with_its_first_part() -> None:
    batcher = batcher_of_streams()
    copy = request()
    copy.copied = True
    batcher.add(copy, 0)
    batcher.step(0, 1)
    assert batcher.forecast(request(), 4 * MS, free_slots=0).wait_ns == pytest.approx(6 * MS)


def test_until_a_stream_has_ended_it_is_taken_to_go_on_as_long_again() -> None:
    batcher = Batcher(POLICIES["greedy"](Batching(policy="greedy")), max_rows=0, slo_ns=100 * MS)
    batcher.finished(start(batcher, 1, 0), 10 * MS, 10 * MS, True)
    start(batcher, 1, now_ns=0)
    assert batcher.wait_ns(500 * MS, 0) == pytest.approx(490 * MS)


@pytest.mark.parametrize("level", [1.0, 0.05])
def test_what_others_take_is_by_their_own_level(level: float) -> None:
    batcher = batcher_that_knows()
    own, others = kept_curve(10, 1, 64), kept_curve(10 / level, 1 / level, 64, {1: level})  # one time, whatever the level
    batcher.service.restore(kept_model({None: own, "another": others}))
    start(batcher, 20, now_ns=0)
    other = request(8)
    other.shape_key = "another"
    batcher.add(other, 0)
    assert batcher.forecast(request(), 0, free_slots=0).ahead_ns == pytest.approx(9.8 * MS, rel=0.01)


def test_others_that_are_to_be_shed_take_nothing() -> None:
    batcher = batcher_that_knows()
    batcher.service.restore(kept_model({None: kept_curve(10, 1, 64), "another": kept_curve(200, 1, 64)}))
    start(batcher, 20, now_ns=0)
    other = request()
    other.shape_key = "another"
    batcher.add(other, 0)
    assert batcher.forecast(request(), 0, free_slots=0).ahead_ns > 100 * MS
    told = outlook(batcher.service.known("another"), 1.0, Plan(0, 1.0), 1, 2.0, 0)
    batcher._state.queues["another"].outlook = told
    assert batcher.forecast(request(), 0, free_slots=0).ahead_ns == 0


def test_when_others_will_be_done_under_overload_is_by_their_own_level() -> None:
    full_ns = set()
    for level in (1.0, 0.05):
        batcher = batcher_that_knows(slo_ms=60)
        own, others = kept_curve(10, 1, 64), kept_curve(10 / level, 1 / level, 64, {1: level})
        batcher.service.restore(kept_model({None: own, "another": others}))
        first = start(batcher, 20, now_ns=0)
        for at in range(200):
            asked = request(1, at * MS // 8)
            asked.shape_key = None if at % 4 else "another"
            batcher.add(asked, at * MS // 8)
        batcher.finished(first, 30 * MS, 30 * MS, True)
        batcher.step(30 * MS, 1)
        (waits,) = [queue for queue in batcher._state.queues.values() if queue.rows]
        assert waits.outlook is not None
        full_ns.add(round(waits.outlook.full_ns))
    assert len(full_ns) == 1
