import gc
from collections.abc import Hashable

import numpy as np
import pytest

from gateway.batching.adaptive import Adaptive
from gateway.batching.batch import Batch, Part
from gateway.batching.batcher import Batcher, Step
from gateway.batching.policies import POLICIES, Fixed, Greedy
from gateway.batching.policy import Decision, Policy
from gateway.batching.queue import PATIENCE_NS, LengthGroup, Queue, State
from gateway.config import Batching, Ragged
from gateway.errors import DeadlineExceeded, Overloaded, TooLarge
from gateway.types import ALONE, InferRequest

MS = 1_000_000


def request(
    arrival_ms: float = 0, *, rows: int = 1, timeout_ms: float | None = None, priority: int = 0, key: Hashable = None
) -> InferRequest:
    arrival_ns = round(arrival_ms * MS)
    deadline_ns = None if timeout_ms is None else arrival_ns + round(timeout_ms * MS)
    return InferRequest(
        "m", "1", "", {}, rows, arrival_ns=arrival_ns, deadline_ns=deadline_ns, priority=priority, shape_key=key
    )


def batcher_of(
    policy: Policy | None = None,
    *requests: InferRequest,
    max_rows: int = 8,
    row_sizes: tuple[int, ...] = (),
    max_queue_rows: int = 100,
    slo_ns: int | None = None,
) -> Batcher:
    batcher = Batcher(policy or Greedy(), max_rows=max_rows, row_sizes=row_sizes, max_queue_rows=max_queue_rows, slo_ns=slo_ns)
    for one in requests:
        batcher.add(one, one.arrival_ns)
    return batcher


def requests_of(batch: Batch) -> list[InferRequest]:
    return [part.request for part in batch.parts]


def test_nothing_waits_and_nothing_happens() -> None:
    batcher = batcher_of()
    assert batcher.step(0, 1) == Step([], [], None)
    assert (batcher.queue_rows, batcher.queue_requests, batcher.oldest_ns) == (0, 0, None)


def test_greedy_takes_what_waits_in_order_of_arrival() -> None:
    asked = [request(at, rows=2) for at in (0, 1, 2)]
    (batch,) = batcher_of(None, *asked).step(3 * MS, 1).batches
    assert requests_of(batch) == asked
    assert (batch.rows, batch.padded_rows, batch.reason, batch.closed_ns, batch.oldest_ns) == (6, 6, "idle", 3 * MS, 0)


def test_no_batch_is_closed_without_a_free_slot() -> None:
    batcher = batcher_of(None, request())
    assert batcher.step(0, 0).batches == []
    assert batcher.queue_requests == 1


def test_batches_never_exceed_max_rows_nor_the_free_slots() -> None:
    batcher = batcher_of(None, *(request(rows=3) for _ in range(7)))
    batches = batcher.step(0, 3).batches
    assert [batch.rows for batch in batches] == [6, 6, 6]  # 3 + 3, and a third would make 9 > 8
    assert batcher.queue_rows == 3


def test_the_earliest_deadline_leaves_first() -> None:
    late, soon = request(timeout_ms=90), request(timeout_ms=10)
    (batch,) = batcher_of(None, late, soon, max_rows=1).step(0, 1).batches
    assert requests_of(batch) == [soon]


def test_the_slo_bounds_the_clients_deadline_and_equal_deadlines_keep_their_order() -> None:
    patient, plain = request(0, timeout_ms=1000), request(0)
    (batch,) = batcher_of(None, patient, plain, slo_ns=50 * MS).step(0, 1).batches
    assert requests_of(batch) == [patient, plain]


def test_a_request_without_deadline_is_not_starved_by_those_that_have_one() -> None:
    plain = request(0)
    urgent = request(PATIENCE_NS / MS, timeout_ms=10)
    (batch,) = batcher_of(None, plain, urgent, max_rows=1).step(PATIENCE_NS, 1).batches
    assert requests_of(batch) == [plain]


def test_priorities_scale_the_deadline_and_time_passes_for_every_class() -> None:
    low, default, high = request(0, priority=3), request(0), request(0, priority=1)
    (batch,) = batcher_of(None, low, default, high, slo_ns=100 * MS).step(0, 1).batches
    assert requests_of(batch) == [high, default, low]
    later_high = request(160, priority=1)  # 160 + 100/2 = 210 > 0 + 2·100
    (batch,) = batcher_of(None, request(0, priority=3, timeout_ms=100), later_high, max_rows=1).step(100 * MS, 1).batches
    assert batch.parts[0].request.priority == 3


def test_requests_of_different_shape_never_share_a_batch() -> None:
    asked = [request(i, key=i % 2) for i in range(4)]
    first, second = batcher_of(None, *asked).step(4 * MS, 2).batches
    assert requests_of(first) == asked[0::2]
    assert requests_of(second) == asked[1::2]


@pytest.mark.parametrize("buckets", [None, (4, 64)], ids=["plain", "by length"])
@pytest.mark.parametrize("policy", POLICIES)
def test_requests_that_share_no_batch_run_one_by_one_in_their_order(policy: str, buckets: tuple[int, ...] | None) -> None:
    batching = Batching(policy=policy, max_delay_ms=60_000)
    ragged = None if buckets is None else Ragged(pad={"ids": 0}, buckets=buckets)
    batcher = Batcher(POLICIES[policy](batching), max_rows=8, ragged=ragged, max_queue_rows=100)
    asked = []
    for length, rows in ((3, 1), (60, 1), (3, 2), (3, 1), (3, 20), (3, 1), (60, 1)):
        one = InferRequest("m", "1", "", {"ids": np.zeros((rows, length), np.int8)}, rows, len(asked), shape_key=("k", ALONE))
        asked.append(one)
        batcher.add(one, one.arrival_ns)
    ran: list[InferRequest] = []
    now_ns = 1 * MS
    while batcher.has_work:
        (batch,) = batcher.step(now_ns, 1).batches
        (part,) = batch.parts
        assert batch.rows <= 8
        ran += [part.request] if not part.start else []
        now_ns += 1 * MS
        batcher.finished(batch, now_ns, 1 * MS, True)
    assert sorted(ran, key=asked.index) == asked
    if buckets is None:
        assert ran == asked


def test_many_shapes_leave_no_queues_behind() -> None:
    batcher = batcher_of()
    for i in range(1000):
        batcher.add(request(i, key=i), i * MS)
        assert len(batcher.step(i * MS, 1).batches) == 1
    assert batcher.queue_requests == 0


def test_a_request_larger_than_a_batch_is_split_and_fills_what_is_left() -> None:
    small, large, last = request(rows=3), request(rows=20), request(rows=1)
    batches = batcher_of(None, small, large, last).step(0, 9).batches
    assert [[(part.start, part.rows) for part in batch.parts] for batch in batches] == [
        [(0, 3), (0, 5)],
        [(0, 1), (5, 7)],  # what came behind it passes while more than a batch of it is left
        [(12, 8)],
    ]


@pytest.mark.parametrize("priority", [0, 1])
@pytest.mark.parametrize(
    ("patient", "slo_ns"),
    [(request(priority=4), None), (request(priority=4), 100 * MS), (request(timeout_ms=30_000), None)],
)
def test_the_rest_of_a_large_request_stays_before_those_that_one_coming_now_would_pass(
    patient: InferRequest, slo_ns: int | None, priority: int
) -> None:
    large, meanwhile = request(rows=24, priority=priority), request(1, priority=priority)
    batches = batcher_of(None, large, patient, meanwhile, slo_ns=slo_ns).step(2 * MS, 9).batches
    assert [requests_of(batch) for batch in batches] == [[large], [meanwhile, large], [large], [large, patient]]


def test_a_large_request_is_passed_also_by_those_of_another_shape() -> None:
    large, other = request(rows=24, key="a"), request(1, key="b")
    batches = batcher_of(None, large, other).step(2 * MS, 9).batches
    assert [requests_of(batch) for batch in batches] == [[large], [other], [large], [large]]


@pytest.mark.parametrize(("priority", "timeout_ms", "now_ms"), [(4, None, 3500), (0, 30_000, 29_500)])
def test_a_large_request_that_is_due_is_passed_by_those_that_wait_and_by_none_that_comes_later(
    priority: int, timeout_ms: int | None, now_ms: int
) -> None:
    large = request(rows=24, priority=priority, timeout_ms=timeout_ms)
    wait = [request(now_ms, rows=8), request(now_ms, rows=8, key="b")]
    batcher = batcher_of(None, large, *wait)
    order = []
    for ms in range(now_ms + 1, now_ms + 6):
        order += [requests_of(batch) for batch in batcher.step(ms * MS, 1).batches]
        batcher.add(request(ms, rows=8), ms * MS)
    assert order[:5] == [[large], [wait[0]], [wait[1]], [large], [large]]


@pytest.mark.parametrize(
    ("slo_ms", "before", "in_time", "longest_ms"), [(150, 6, True, 100), (600, 1, True, 30), (50, 6, False, 30)]
)
@pytest.mark.parametrize("policy", ["greedy", "adaptive"])
def test_a_large_request_lets_others_pass_unless_it_would_be_late_for_them(
    policy: str, slo_ms: int, before: int, in_time: bool, longest_ms: int
) -> None:
    """Batches take 10 ms. In each of these 6 rows come, beside a request that takes 6 batches; before it, so many."""
    batcher = batcher_of(POLICIES[policy](Batching()), slo_ns=slo_ms * MS)
    batcher.service.probe(None, 8, [10 * MS])
    large, left, ended_ms, waited_ms = request(100, rows=48), 48, 0, 0
    for now_ms in range(0, 1000, 10):
        for one in [request(now_ms) for _ in range(6 if now_ms >= 100 else before)] + [large] * (now_ms == 100):
            batcher.add(one, now_ms * MS)
        step = batcher.step(now_ms * MS, 1)
        assert {asked for asked, _ in step.shed} <= ({large} if not in_time else set())
        (batch,) = step.batches
        batcher.finished(batch, (now_ms + 10) * MS, 10 * MS, True)
        for part in batch.parts:
            if part.request is large:
                left -= part.rows
                ended_ms = now_ms + 10
            else:
                waited_ms = max(waited_ms, now_ms + 10 - part.request.arrival_ns // MS)
    assert (not left and ended_ms <= 100 + slo_ms) is in_time
    assert waited_ms <= longest_ms


def test_what_is_decided_without_a_large_request_that_has_begun_takes_none_of_it() -> None:
    class WithoutTheFirst(Greedy):
        def decide(self, queue: Queue, state: State, now_ns: int, free_slots: int) -> Decision:
            return Decision(8) if not state.in_flight else Decision(1, shed=[queue.entries[0]])

    large, patient = request(rows=24), request(timeout_ms=30_000)
    batcher = batcher_of(WithoutTheFirst(), large, patient)
    step = batcher.step(0, 2)
    assert [requests_of(batch) for batch in step.batches] == [[large], [patient]]
    assert not step.shed
    assert batcher.queue_rows == 16


def test_a_request_that_fits_a_batch_is_never_split() -> None:
    batches = batcher_of(None, request(rows=5), request(rows=5), request(rows=8), request(rows=1)).step(0, 9).batches
    assert [batch.rows for batch in batches] == [5, 5, 8, 1]


def test_compiled_sizes_pad_up() -> None:
    (batch,) = batcher_of(None, *(request() for _ in range(3)), row_sizes=(1, 4, 8)).step(0, 1).batches
    assert (batch.rows, batch.padded_rows) == (3, 4)


def test_without_a_batch_dimension_requests_run_one_by_one() -> None:
    batches = batcher_of(None, request(), request(), max_rows=0).step(0, 9).batches
    assert [(batch.rows, batch.batched) for batch in batches] == [(1, False), (1, False)]


def test_an_expired_request_is_answered_and_never_executed() -> None:
    slow, fine = request(0, timeout_ms=5), request(0, timeout_ms=50)
    step = batcher_of(None, slow, fine).step(6 * MS, 1)
    assert [requests_of(batch) for batch in step.batches] == [[fine]]
    ((asked, error),) = step.shed
    assert asked is slow
    assert isinstance(error, DeadlineExceeded)
    assert "waited 6.0 ms, its deadline was 5.0 ms" in error.message


def test_a_deadline_below_a_millisecond_is_told_with_the_unit_of_timeout() -> None:
    ((_, error),) = batcher_of(None, request(0, timeout_ms=0.05)).step(1 * MS, 1).shed
    assert "its deadline was 50 µs after arrival (`timeout` is in microseconds)" in error.message


def test_a_request_that_came_behind_its_deadline_is_told_so() -> None:
    late = request(5, timeout_ms=-1)
    with pytest.raises(DeadlineExceeded, match="the request came after its deadline"):
        batcher_of(None).add(late, 6 * MS)


def test_an_expired_low_priority_request_is_never_executed_either() -> None:
    low = request(0, priority=4, timeout_ms=5)  # its place in the queue is that of 0 + 4·5 ms
    step = batcher_of(None, low).step(6 * MS, 1)
    assert step.batches == []
    assert [asked for asked, _ in step.shed] == [low]


def test_the_step_asks_to_be_woken_when_the_first_deadline_has_passed() -> None:
    batcher = batcher_of(None, request(0, timeout_ms=5))
    wake_at_ns = batcher.step(0, 0).wake_at_ns
    assert wake_at_ns == 5 * MS + 1
    assert len(batcher.step(wake_at_ns, 0).shed) == 1
    assert batcher.step(wake_at_ns, 0).wake_at_ns is None


def test_a_request_that_comes_too_late_is_not_taken() -> None:
    with pytest.raises(DeadlineExceeded):
        batcher_of().add(request(0, timeout_ms=5), 6 * MS)


def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    batcher = batcher_of(None, *(request(rows=4) for _ in range(2)), max_queue_rows=8)
    with pytest.raises(Overloaded, match="8 rows are waiting, 1 more would exceed max_queue_rows 8") as refused:
        batcher.add(request(), 0)
    assert refused.value.retry_after_s is None  # nothing has run yet
    (batch,) = batcher.step(0, 1).batches
    batcher.finished(batch, 80 * MS, 80 * MS, ok=True)
    batcher.add(request(rows=8), 80 * MS)
    with pytest.raises(Overloaded) as refused:
        batcher.add(request(), 80 * MS)
    assert refused.value.retry_after_s == pytest.approx(0.08)  # 8 rows at 80/8 ms


def test_at_the_limit_a_higher_class_displaces_the_last_of_a_lower_one_which_is_answered_by_the_next_step() -> None:
    low, default = [request(i, priority=4) for i in range(2)], request(2)
    batcher = batcher_of(None, *low, default, max_queue_rows=3)
    high = request(3, priority=1)
    batcher.add(high, 3 * MS)
    assert batcher.queue_rows == 3
    assert batcher.has_work
    step = batcher.step(3 * MS, 1)
    ((displaced, error),) = step.shed
    assert displaced is low[1]
    assert isinstance(error, Overloaded)
    assert requests_of(step.batches[0]) == [high, default, low[0]]


def test_what_is_displaced_is_out_of_the_queue_also_where_time_was_kept_for_the_answer() -> None:
    batcher = batcher_of(None, max_queue_rows=2, slo_ns=99 * MS)
    low, high = [request(i, priority=4) for i in range(2)], [request(2 + i, priority=1) for i in range(2)]
    for asked in (*low, *high):
        batcher.add(asked, asked.arrival_ns, reserved_ns=MS)
    assert (batcher.queue_rows, batcher.queue_requests) == (2, 2)
    step = batcher.step(4 * MS, 1)
    assert [asked for asked, _ in step.shed] == low[::-1]
    assert requests_of(step.batches[0]) == high


def test_whether_there_is_room_is_what_a_request_would_find() -> None:
    for waiting in ([], [request(rows=20)], [request(rows=20), request(rows=20, priority=4)], [request(rows=20)] * 2):
        for rows in (1, 20, 21):
            for priority in (0, 1, 4):
                batcher = batcher_of(None, *waiting, max_queue_rows=40)
                asked = request(rows=rows, priority=priority)
                has_room = batcher.has_room(asked)
                try:
                    batcher.add(asked, 0)
                except (Overloaded, TooLarge):
                    assert not has_room
                else:
                    assert has_room
    batcher = batcher_of(None, request(rows=100), max_rows=0, max_queue_rows=2)
    assert batcher.has_room(request(rows=100))  # which counts as one where there is no batch dimension


def test_what_has_begun_to_run_or_is_of_the_same_class_is_not_displaced() -> None:
    large = request(rows=20, priority=4)
    batcher = batcher_of(None, large, max_queue_rows=40)
    batcher.step(0, 1)  # 8 of its rows run
    batcher.add(request(1, rows=20, priority=1), MS)
    with pytest.raises(Overloaded):
        batcher.add(request(1, rows=9, priority=1), MS)
    batcher.add(request(1, rows=8, priority=1), MS)
    with pytest.raises(Overloaded):
        batcher.add(request(1, priority=1), MS)
    assert batcher.step(MS, 0).shed == []


def test_a_displaced_request_that_is_cancelled_is_not_answered_again() -> None:
    low = request(0, priority=4)
    batcher = batcher_of(None, low, max_queue_rows=1)
    batcher.add(request(1), MS)
    assert batcher.cancel(low)
    assert batcher.step(MS, 0).shed == []


def test_one_request_holds_half_of_the_queue_at_most() -> None:
    batcher = batcher_of(None, max_queue_rows=40)
    with pytest.raises(TooLarge, match="21 rows in one request, expected at most 20"):
        batcher.add(request(rows=21), 0)
    batcher.add(request(rows=20), 0)
    batcher.add(request(rows=20), 0)
    assert batcher.queue_rows == 40


def test_a_request_of_one_batch_is_taken_by_the_smallest_queue() -> None:
    assert batcher_of(None, request(rows=8), max_queue_rows=1).queue_rows == 8
    with pytest.raises(TooLarge):
        batcher_of(None, request(rows=9), max_queue_rows=1)


@pytest.mark.parametrize("slo_ns", [None, 1000 * MS])
def test_a_large_request_lets_those_pass_that_come_meanwhile(slo_ns: int | None) -> None:
    large = request(0, rows=40)
    batcher = batcher_of(None, large, slo_ns=slo_ns)
    order = []
    for ms in range(8):
        small = request(ms, rows=6)
        batcher.add(small, ms * MS)
        (batch,) = batcher.step(ms * MS, 1).batches
        order.append([part.rows for part in batch.parts if part.request is large])
        batcher.finished(batch, ms * MS, MS, ok=True)
    # It has its first batch alone, then two rows of each with a small one; at 8 left it is no longer passed by.
    assert order == [[8], [2], [2], [2], [2], [2], [2], [2]]


def test_a_large_request_that_was_passed_by_is_cancelled_whole() -> None:
    large = request(0, rows=40)
    batcher = batcher_of(None, large, request(rows=6), slo_ns=1000 * MS)
    batcher.step(0, 2)
    assert not batcher.cancel(large)
    assert batcher.queue_rows == 0
    assert not batcher.has_work


def test_a_retry_ends_at_its_deadline_although_no_worker_is_free() -> None:
    asked = request(0, timeout_ms=5)
    batcher = batcher_of(None, asked)
    (batch,) = batcher.step(0, 1).batches
    batcher.finished(batch, MS, MS, ok=False)
    batcher.retry(batch.parts[0], MS)
    wake_at_ns = batcher.step(MS, 0).wake_at_ns
    assert wake_at_ns == 5 * MS + 1
    ((late, error),) = batcher.step(wake_at_ns, 0).shed
    assert late is asked
    assert isinstance(error, DeadlineExceeded)
    assert not batcher.has_work


@pytest.mark.parametrize("reserved_ms", [0, 2])
def test_a_request_that_expires_with_a_retry_and_other_rows_waiting_is_told_once(reserved_ms: int) -> None:
    large = request(0, rows=20)
    batcher = batcher_of(slo_ns=(5 + reserved_ms) * MS)
    batcher.add(large, 0, reserved_ms * MS)
    (batch,) = batcher.step(0, 1).batches
    batcher.finished(batch, MS, MS, ok=False)
    batcher.retry(batch.parts[0], MS)
    assert [late for late, _ in batcher.step(6 * MS, 0).shed] == [large]
    assert not batcher.has_work


def test_a_policy_that_fails_leaves_no_batch_behind_that_nobody_runs() -> None:
    class Failing(Greedy):
        decisions = 0

        def decide(self, queue: Queue, state: State, now_ns: int, free_slots: int) -> Decision:
            self.decisions += 1
            if self.decisions == 2:
                raise ZeroDivisionError
            return super().decide(queue, state, now_ns, free_slots)

    batcher = batcher_of(Failing(), request(rows=8), request(rows=8))
    with pytest.raises(ZeroDivisionError):
        batcher.step(0, 2)
    assert "in_flight=0" in repr(batcher)


def ragged_request(positions: int) -> InferRequest:
    return InferRequest("m", "1", "", {"ids": np.zeros((1, positions), np.int64)}, 1, 0)


@pytest.mark.parametrize("policy", ["greedy", "fixed"])
def test_padding_is_bounded_in_bytes_whatever_lengths_come_together(policy: str) -> None:
    batching = Batching(policy=policy, max_delay_ms=0)
    batcher = Batcher(POLICIES[policy](batching), max_rows=32, ragged=Ragged(pad={"ids": 0}))
    asked = [ragged_request(10) for _ in range(31)]
    asked.insert(7, ragged_request(4 << 20))  # 32 MiB
    for one in asked:
        batcher.add(one, 0)
    batches = batcher.step(0, 9).batches
    assert [batch.rows for batch in batches] == [7, 1, 24]
    for batch in batches:
        given = sum(part.request.inputs["ids"].nbytes for part in batch.parts)
        assert batch.concat()["ids"].nbytes - given <= 16 << 20


def test_a_little_padding_parts_nobody() -> None:
    batcher = Batcher(Greedy(), max_rows=32, ragged=Ragged(pad={"ids": 0}))
    for positions in (1, 60_000) * 16:  # 16 rows of them are padded by less than 8 MiB
        batcher.add(ragged_request(positions), 0)
    assert [batch.rows for batch in batcher.step(0, 9).batches] == [32]


def test_a_cancelled_request_leaves_at_once() -> None:
    asked = [request(i) for i in range(3)]
    batcher = batcher_of(None, *asked, slo_ns=50 * MS)
    assert batcher.cancel(asked[1])
    assert not batcher.cancel(asked[1])
    assert batcher.queue_rows == 2
    (batch,) = batcher.step(3 * MS, 1).batches
    assert requests_of(batch) == [asked[0], asked[2]]
    assert not batcher.cancel(asked[0])


def test_cancelling_tells_whether_a_request_without_a_batch_dimension_was_dispatched() -> None:
    waits, runs = request(1, rows=3), request(0, rows=3)
    batcher = batcher_of(None, runs, waits, max_rows=0)
    batcher.step(MS, 1)
    assert batcher.cancel(waits)
    assert not batcher.cancel(runs)
    assert (batcher.queue_rows, batcher.queue_requests) == (0, 0)


def test_cancelling_takes_the_rest_of_a_half_dispatched_request() -> None:
    large = request(rows=20)
    batcher = batcher_of(None, large)
    batcher.step(0, 1)
    assert not batcher.cancel(large)
    assert batcher.queue_rows == 0


def test_a_failed_part_runs_again_alone_and_first() -> None:
    asked = [request() for _ in range(2)]
    batcher = batcher_of(None, *asked)
    (batch,) = batcher.step(0, 1).batches
    batcher.finished(batch, MS, MS, ok=False)
    batcher.add(request(1), MS)
    for part in batch.parts:
        batcher.retry(part, MS)
    batches = batcher.step(MS, 3).batches
    assert [(batch.reason, batch.rows) for batch in batches] == [("retry", 1), ("retry", 1), ("idle", 1)]
    assert [requests_of(batch)[0] for batch in batches[:2]] == asked


def test_a_retry_whose_deadline_has_passed_or_that_was_cancelled_is_not_executed() -> None:
    late, gone = request(0, timeout_ms=5), request(0)
    batcher = batcher_of(None, late, gone)
    (batch,) = batcher.step(0, 1).batches
    for part in batch.parts:
        batcher.retry(part, MS)
    assert not batcher.cancel(gone)
    step = batcher.step(6 * MS, 1)
    assert step.batches == []
    assert [asked for asked, _ in step.shed] == [late]


def test_fixed_waits_for_size_or_delay_even_with_an_idle_worker() -> None:
    batcher = batcher_of(Fixed(5 * MS), request(0), request(1))
    step = batcher.step(1 * MS, 1)
    assert (step.batches, step.wake_at_ns) == ([], 5 * MS)
    assert batcher.step(2 * MS, 1).batches == []  # early is harmless
    (batch,) = batcher.step(5 * MS, 1).batches
    assert (batch.rows, batch.reason) == (2, "delay")
    full = batcher_of(Fixed(5 * MS), *(request() for _ in range(9)))
    (batch,) = full.step(0, 2).batches
    assert (batch.rows, batch.reason) == (8, "full")


def test_a_batch_tells_its_life() -> None:
    (batch,) = batcher_of(None, *(request(rows=4) for _ in range(3))).step(2 * MS, 1).batches
    assert str(batch) == "closed=full requests=2 rows=8 padded=8 left=4 waited_ms=2.000 expected_ms=0.000 group=None"


# what it says of itself


def test_it_says_what_waits_and_what_it_was_made_with() -> None:
    policy = Greedy()
    batcher = Batcher(policy, max_rows=8, slo_ns=50 * MS)
    assert (batcher.slo_ns, batcher.policy, batcher.workers, batcher.has_work) == (50 * MS, policy, 1, False)
    batcher.workers = 3
    assert batcher.workers == 3
    for at_ms, key in ((4, "a"), (2, "b"), (3, "a")):
        batcher.add(request(at_ms, rows=2, key=key), 4 * MS)
    assert (batcher.queue_rows, batcher.queue_requests, batcher.oldest_ns, batcher.has_work) == (6, 3, 2 * MS, True)
    for _ in range(409):
        batcher.add(request(4, rows=10), 4 * MS)
    with pytest.raises(Overloaded, match="4096 rows are waiting, 1 more would exceed max_queue_rows 4096"):
        batcher.add(request(4), 4 * MS)


def test_there_is_work_while_a_retry_or_an_answer_is_left() -> None:
    batcher = batcher_of(None, request())
    (batch,) = batcher.step(0, 1).batches
    assert not batcher.has_work
    batcher.retry(batch.parts[0], 0)
    assert batcher.has_work
    batcher.step(0, 1)
    assert not batcher.has_work
    full = batcher_of(None, low := request(0, priority=4), max_queue_rows=1)
    high = request(1)
    full.add(high, MS)
    assert full.cancel(high)
    assert full.has_work  # the answer to the one that made room
    step = full.step(MS, 1)
    assert ([asked for asked, _ in step.shed], step.batches, step.wake_at_ns) == ([low], [], None)
    assert not full.has_work


def test_a_second_size_is_run_at_load_unless_lengths_differ() -> None:
    """Padded to eight, two rows take as long as eight: told at once, not by batches that are late."""
    assert Batcher(Adaptive(), max_rows=32).probe_rows == (1, 32, 2)
    assert Batcher(Adaptive(), max_rows=16, row_sizes=(1, 4, 16)).probe_rows == (1, 16, 4)
    assert Batcher(Adaptive(), max_rows=2).probe_rows == (1, 2)
    assert Batcher(Adaptive(), max_rows=0).probe_rows == (1,)
    assert Batcher(Adaptive(), max_rows=32, ragged=Ragged(pad={"x": 0})).probe_rows == (1, 32)


def test_a_probe_is_a_batch_of_its_request_that_passes_the_queue_by() -> None:
    batcher = batcher_of(None, request(), row_sizes=(1, 4, 8))
    asked = request(0, rows=3, key="k")
    batch = batcher.probe(asked, 7 * MS)
    assert batch.parts == [Part(asked, 0, 3)]
    assert (batch.rows, batch.padded_rows, batch.reason, batch.closed_ns) == (3, 4, "probe", 7 * MS)
    assert (batch.group, batch.batched, batch.left_rows, batch.expected_ns, batch.busy) == ("k", True, 0, 0, 1)
    assert batcher.queue_requests == 1
    whole = batcher_of(max_rows=0).probe(request(rows=3), 0)
    assert (whole.parts[0].rows, whole.rows, whole.batched) == (1, 1, False)
    assert batcher_of(max_rows=1).probe(request(), 0).batched


def test_a_batch_says_what_it_left_who_runs_beside_it_and_since_when_its_first_waits() -> None:
    batcher = batcher_of(None, request(3, rows=3), request(1, rows=3), request(2, rows=4), row_sizes=(1, 4, 8), slo_ns=99 * MS)
    first, second = batcher.step(5 * MS, 2).batches
    assert (first.rows, first.padded_rows, first.left_rows, first.busy, first.oldest_ns) == (7, 8, 3, 1, 1 * MS)
    assert (second.rows, second.padded_rows, second.left_rows, second.busy, second.oldest_ns) == (3, 4, 0, 2, 3 * MS)
    batcher.finished(first, 6 * MS, MS, ok=True)
    batcher.add(request(6), 6 * MS)
    (third,) = batcher.step(6 * MS, 1).batches
    assert third.busy == 2


@pytest.mark.parametrize(("length", "bucket"), [(1, 8), (8, 8), (9, 9), (12, 13), (15, 16), (17, 18), (33, 36), (98, 102),
                                                (131_072, 131_072), (131_073, 147_123), (1 << 26, 1 << 26),
                                                ((1 << 26) + 1, (1 << 26) + 1)])  # fmt: skip
def test_a_model_that_takes_any_length_learns_by_edges_an_eighth_apart(length: int, bucket: int) -> None:
    batcher = Batcher(Adaptive(), max_rows=8, ragged=Ragged(pad={"ids": 0}))
    asked = InferRequest("m", "1", "", {"ids": np.zeros((1, length), np.int8)}, 1, 0)
    assert batcher.probe(asked, 0).group == LengthGroup(None, bucket)


def test_a_policy_that_does_not_tell_lengths_apart_joins_them() -> None:
    batcher = Batcher(Greedy(), max_rows=8, ragged=Ragged(pad={"ids": 0}, buckets=(4, 64)))
    for length in (3, 60):
        batcher.add(InferRequest("m", "1", "", {"ids": np.zeros((1, length), np.int8)}, 1, 0), 0)
    (batch,) = batcher.step(0, 2).batches
    assert batch.concat()["ids"].shape == (2, 64)
    plain = Batcher(Adaptive(), max_rows=8)
    asked = InferRequest("m", "1", "", {"ids": np.zeros((1, 3), np.int8)}, 1, 0, shape_key="k")
    assert plain.probe(asked, 0).group == "k"


def test_many_shapes_are_forgotten_once_nothing_of_them_waits() -> None:
    def queues() -> int:
        return sum(type(one) is Queue for one in gc.get_objects())

    batcher = batcher_of()
    before = queues()
    kept = request(0, key="kept")
    batcher.add(kept, 0)
    for i in range(500):
        asked = request(i, key=i)
        batcher.add(asked, i * MS)
        batcher.cancel(asked)
    assert queues() - before <= 100
    assert requests_of(batcher.step(MS, 1).batches[0]) == [kept]


# time


def test_it_asks_to_be_woken_for_the_deadlines_that_are_left() -> None:
    soon, late = request(0, timeout_ms=5), request(0, timeout_ms=50)
    batcher = batcher_of(None, soon, late)
    assert batcher.step(0, 0).wake_at_ns == 5 * MS + 1
    batcher.cancel(soon)
    assert len(batcher.step(5 * MS + 1, 1).batches) == 1
    batcher.add(request(6, timeout_ms=90), 6 * MS)
    assert batcher.step(6 * MS, 0).wake_at_ns == 96 * MS + 1
    without = batcher_of(None, request(0))
    assert without.step(0, 0).wake_at_ns is None


def test_at_its_deadline_a_request_is_still_run_and_after_it_no_more() -> None:
    assert len(batcher_of(None, request(0, timeout_ms=5)).step(5 * MS, 1).batches) == 1
    assert batcher_of(None, request(0, timeout_ms=5)).step(5 * MS + 1, 1).batches == []
    batcher_of().add(request(0, timeout_ms=5), 5 * MS)
    asked = request(0, timeout_ms=5)
    batcher = batcher_of(None, asked)
    (batch,) = batcher.step(0, 1).batches
    batcher.retry(batch.parts[0], 5 * MS)
    assert batcher.step(5 * MS, 1).batches[0].reason == "retry"


def test_what_is_reserved_of_the_slo_and_not_of_the_clients_time_brings_the_deadline_forward() -> None:
    promised, own, gone = request(0), request(0, timeout_ms=30), request(0)
    batcher = batcher_of(None, slo_ns=50 * MS)
    for asked in (promised, own, gone):
        batcher.add(asked, 0, 10 * MS)
    assert batcher.cancel(gone, 10 * MS)
    assert [asked for asked, _ in batcher.step(30 * MS + 1, 0).shed] == [own]
    assert batcher.step(40 * MS, 0).shed == []
    assert [asked for asked, _ in batcher.step(40 * MS + 1, 0).shed] == [promised]


def test_several_shapes_are_woken_for_at_the_first_of_their_times() -> None:
    batcher = batcher_of(Fixed(5 * MS), request(3, key="a"), request(1, key="b"), request(2, key="c"))
    assert batcher.step(3 * MS, 1).wake_at_ns == 6 * MS
    (batch,) = batcher.step(6 * MS, 3).batches
    assert (batch.group, batch.reason) == ("b", "delay")
    patient = batcher_of(Fixed(50 * MS), request(0, timeout_ms=9))
    assert patient.step(0, 1).wake_at_ns == 9 * MS + 1  # before its delay is over


def test_fixed_closes_at_the_delay_and_not_a_moment_before() -> None:
    batcher = batcher_of(Fixed(5 * MS), request(1))
    step = batcher.step(6 * MS - 1, 1)
    assert (step.batches, step.wake_at_ns) == ([], 6 * MS)
    assert len(batcher.step(6 * MS, 1).batches) == 1
    full = batcher_of(Fixed(5 * MS), *(request() for _ in range(8)))
    assert full.step(0, 1).batches[0].reason == "full"


def test_the_most_urgent_shape_goes_first() -> None:
    asked = [request(0, timeout_ms=timeout, key=key) for timeout, key in ((90, "a"), (30, "b"), (60, "c"))]
    batches = batcher_of(None, *asked).step(0, 2).batches
    assert [batch.group for batch in batches] == ["b", "c"]


# retries


def test_retries_take_slots_before_what_waits() -> None:
    batcher = batcher_of(None, *(request() for _ in range(2)))
    (batch,) = batcher.step(0, 1).batches
    for part in batch.parts:
        batcher.retry(part, 0)
    batcher.add(request(), 0)
    assert batcher.step(0, 0).batches == []
    assert [batch.reason for batch in batcher.step(0, 1).batches] == ["retry"]
    assert [batch.reason for batch in batcher.step(0, 1).batches] == ["retry"]
    assert [batch.reason for batch in batcher.step(0, 1).batches] == ["idle"]


def test_a_retry_tells_its_rows_and_its_shape() -> None:
    large = request(rows=20, key="k")
    batcher = batcher_of(None, large, row_sizes=(1, 4, 8))
    batches = batcher.step(0, 3).batches
    batcher.retry(batches[2].parts[0], MS)
    (again,) = batcher.step(2 * MS, 1).batches
    assert again.parts == [Part(large, 16, 4)]
    assert (again.rows, again.padded_rows, again.group, again.closed_ns, again.expected_ns) == (4, 4, "k", 2 * MS, 0)


def test_the_rest_of_a_request_goes_with_its_late_retry() -> None:
    large = request(0, rows=20, timeout_ms=5)
    batcher = batcher_of(None, large)
    (batch,) = batcher.step(0, 1).batches
    batcher.retry(batch.parts[0], MS)
    step = batcher.step(6 * MS, 1)
    assert [asked for asked, _ in step.shed][:1] == [large]
    assert step.batches == []
    assert (batcher.queue_rows, batcher.queue_requests, batcher.has_work) == (0, 0, False)


def test_cancelling_one_says_nothing_of_the_retries_of_others() -> None:
    batcher = batcher_of(None, failed := request())
    (batch,) = batcher.step(0, 1).batches
    batcher.retry(batch.parts[0], 0)
    waits = request()
    batcher.add(waits, 0)
    assert batcher.cancel(waits) is True
    assert batcher.cancel(request(key="never seen")) is False
    assert (batcher.queue_rows, batcher.queue_requests) == (0, 0)
    assert batcher.cancel(failed) is False
    assert not batcher.has_work


# refusals


def test_the_time_to_come_back_follows_what_a_row_took_on_all_workers() -> None:
    batcher = batcher_of(None, request(rows=8), max_queue_rows=8)
    (batch,) = batcher.step(0, 1).batches
    batcher.finished(batch, 80 * MS, 80 * MS, ok=True)  # 10 ms a row
    batcher.add(request(rows=8), 80 * MS)
    (batch,) = batcher.step(80 * MS, 1).batches
    batcher.finished(batch, 240 * MS, 160 * MS, ok=True)  # 20 ms a row, of which a tenth counts
    batcher.finished(batch, 240 * MS, 9999 * MS, ok=False)
    batcher.add(request(rows=5), 240 * MS)
    for workers, after_s in ((1, 5 * 0.011), (2, 5 * 0.0055), (0, 5 * 0.011)):
        batcher.workers = workers
        with pytest.raises(Overloaded) as refused:
            batcher.add(request(rows=4), 240 * MS)
        assert refused.value.retry_after_s == pytest.approx(after_s)


def test_who_made_room_is_told_so_and_when_to_come_back() -> None:
    batcher = batcher_of(None, request(rows=4), max_queue_rows=4)
    (batch,) = batcher.step(0, 1).batches
    batcher.finished(batch, 40 * MS, 40 * MS, ok=True)
    for _ in range(2):
        batcher.add(request(priority=3, rows=2), 40 * MS)
    batcher.add(request(rows=1), 40 * MS)
    ((_, error),) = batcher.step(40 * MS, 0).shed
    assert isinstance(error, Overloaded)
    assert error.message == "model 'm': overloaded, the request made room in the queue for one of a higher class"
    assert error.retry_after_s == pytest.approx(0.04)  # four rows waited


def test_room_is_made_in_all_shapes_from_the_last_in_line_and_for_no_more_than_is_missing() -> None:
    low = [request(at, rows=2, priority=4, key=key) for at, key in ((0, "a"), (1, "b"), (2, "a"), (3, "b"))]
    batcher = batcher_of(None, *low, max_queue_rows=8)
    batcher.add(request(4, rows=3, key="c"), 4 * MS)
    step = batcher.step(4 * MS, 0)
    assert [asked for asked, _ in step.shed] == [low[3], low[2]]
    assert (batcher.queue_rows, batcher.queue_requests) == (7, 3)
    batcher.add(request(4, rows=1, key="c"), 4 * MS)  # fits as it is
    assert batcher.step(4 * MS, 0).shed == []
    with pytest.raises(Overloaded):
        batcher.add(request(4, rows=5, key="c"), 4 * MS)  # four of a lower class are not enough
    assert batcher.queue_rows == 8


# what would be late elsewhere


def test_of_what_would_be_late_retries_come_first_and_only_what_waits_whole() -> None:
    failed, split = request(0, timeout_ms=50), request(0, rows=20, timeout_ms=20)
    batcher = batcher_of(None, failed)
    (batch,) = batcher.step(0, 1).batches
    batcher.add(split, 0)
    batcher.step(0, 1)  # eight of its rows run
    waiting = [request(0, timeout_ms=timeout) for timeout in (30, 60)]
    for asked in waiting:
        batcher.add(asked, 0)
    batcher.retry(batch.parts[0], 0)
    assert batcher.due_before(50 * MS, 9) == [waiting[0]]
    assert batcher.due_before(50 * MS + 1, 9) == [failed, waiting[0]]
    assert batcher.due_before(60 * MS + 1, 9) == [failed, *waiting]
    assert batcher.due_before(60 * MS + 1, 2) == [failed, waiting[0]]
    assert batcher.due_before(60 * MS + 1, 1) == [failed]
    batcher.retry(Part(split, 0, 8), 0)
    assert batcher.due_before(60 * MS + 1, 9) == [failed, *waiting]  # part of it has run
    plain = batcher_of(None, *(request(at, rows=3) for at in range(3)), max_rows=0)
    assert len(plain.due_before(1 << 63, 2)) == 2


# sizes


def test_limits_are_those_of_the_compiled_sizes() -> None:
    batches = batcher_of(None, *(request() for _ in range(9)), max_rows=8, row_sizes=(2, 4)).step(0, 9).batches
    assert [(batch.rows, batch.padded_rows, batch.reason) for batch in batches] == [
        (4, 4, "full"), (4, 4, "full"), (1, 2, "idle"),
    ]  # fmt: skip
    batches = batcher_of(None, *(request() for _ in range(3)), max_rows=2, row_sizes=(2, 4)).step(0, 9).batches
    assert [batch.rows for batch in batches] == [2, 1]


def test_the_speed_that_is_learned_of_a_policy_that_learns_nothing_is_from_closing_to_return() -> None:
    batcher = batcher_of(None, request())
    (batch,) = batcher.step(0, 1).batches
    batcher.finished(batch, 7 * MS, 5 * MS, ok=True)
    assert batcher.service.curve(None).expected_ns(1) == 7 * MS
    other = batcher_of(None, request())
    (batch,) = other.step(0, 1).batches
    other.finished(batch, 7 * MS, 9 * MS, ok=True)  # by clocks of two machines
    assert other.service.curve(None).expected_ns(1) == 9 * MS
    failed = batcher_of(None, request())
    (batch,) = failed.step(0, 1).batches
    failed.finished(batch, 7 * MS, 5 * MS, ok=False)
    assert not failed.service.curve(None).ready


def test_a_batch_counts_from_its_oldest_though_another_was_more_urgent() -> None:
    patient, urgent = request(1, timeout_ms=90), request(2, timeout_ms=10)
    (batch,) = batcher_of(None, patient, urgent).step(3 * MS, 1).batches
    assert requests_of(batch) == [urgent, patient]
    assert batch.oldest_ns == 1 * MS


def test_the_last_row_of_a_large_request_goes_with_others_of_one_row() -> None:
    large, small = request(rows=9), request()
    first, second = batcher_of(None, large, small).step(0, 2).batches
    assert first.parts == [Part(large, 0, 8)]
    assert second.parts == [Part(large, 8, 1), Part(small, 0, 1)]
