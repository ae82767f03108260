"""What a queue predicts of a request that would join it."""

import numpy as np
import pytest

from gateway.batching.batch import Batch
from gateway.batching.batcher import Batcher
from gateway.batching.policies import POLICIES
from gateway.config import Batching
from gateway.types import InferRequest

MS = 1_000_000


def request(rows: int = 1, now_ns: int = 0) -> InferRequest:
    return InferRequest("m", "1", "", {"X": np.zeros((rows, 1), np.float32)}, rows, now_ns)


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
