"""The adaptive policy, decision by decision: T(n) = 4 + 6n ms or as stated, known from the start."""

import heapq
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import pytest

from gateway.batching.adaptive import Adaptive
from gateway.batching.batch import Batch
from gateway.batching.batcher import Batcher
from gateway.batching.stances import Stance
from gateway.config import Ragged
from gateway.errors import DeadlineExceeded, Overloaded
from gateway.types import InferRequest
from loadtest.search.simulator import SHED, Affine, simulate
from tests.batching.curves import kept_curve, kept_model

MS = 1_000_000


def request(
    arrival_ms: float, *, rows: int = 1, timeout_ms: float | None = None, priority: int = 0, length: int = 0
) -> InferRequest:
    arrival_ns = round(arrival_ms * MS)
    inputs = {"ids": np.zeros((rows, length), dtype=np.int64)} if length else {}
    deadline_ns = None if timeout_ms is None else arrival_ns + round(timeout_ms * MS)
    return InferRequest("m", "1", "", inputs, rows, arrival_ns, deadline_ns=deadline_ns, priority=priority)


def batcher_of(
    *,
    fixed_ms: float = 4,
    row_ms: float = 6,
    workers: int = 1,
    slo_ms: float | None = 100,
    max_rows: int = 32,
    row_sizes: tuple[int, ...] = (),
    stance: Stance | None = None,
) -> Batcher:
    policy = Adaptive(stance)
    batcher = Batcher(
        policy,
        max_rows=max_rows,
        row_sizes=row_sizes,
        workers=workers,
        max_queue_rows=20_000,
        slo_ns=None if slo_ms is None else round(slo_ms * MS),
    )
    for rows in policy.service.probe_rows:
        policy.service.probe(None, rows, [round((fixed_ms + row_ms * rows) * MS)] * 2)
    return batcher


def add(batcher: Batcher, *requests: InferRequest) -> None:
    for one in requests:
        batcher.add(one, one.arrival_ns)


def only(batcher: Batcher, now_ms: float, free_slots: int = 1) -> Batch:
    (batch,) = batcher.step(round(now_ms * MS), free_slots).batches
    return batch


def test_a_lone_request_leaves_at_once() -> None:
    batcher = batcher_of()
    add(batcher, request(0))
    batch = only(batcher, 0)
    assert (batch.rows, batch.reason, batch.expected_ns) == (1, "idle", 10 * MS)


def test_without_any_knowledge_it_takes_what_waits() -> None:
    batcher = Batcher(Adaptive(), max_rows=8, slo_ns=100 * MS)
    add(batcher, *(request(0) for _ in range(5)))
    assert only(batcher, 0).rows == 5


def test_a_batch_is_capped_so_that_two_fit_into_the_slo() -> None:
    batcher = batcher_of()
    for i in range(128):  # few come
        add(batcher, request(100 * i))
        batcher.finished(only(batcher, 100 * i), (100 * i + 10) * MS, 10 * MS, ok=True)
    add(batcher, *(request(12_800) for _ in range(12)))
    batch = only(batcher, 12_800)
    assert (batch.rows, batch.reason) == (8, "cap")  # 4 + 6·8 = 52 <= 55


def test_the_first_deadline_bounds_the_batch() -> None:
    batcher = batcher_of()
    add(batcher, request(0, timeout_ms=30), *(request(i) for i in range(1, 4)))
    assert (batch := only(batcher, 3)).rows == 3  # 4 + 6·3 = 22 <= 30 - 3 < 4 + 6·4
    assert batch.reason == "deadline"


def test_what_would_be_late_even_alone_is_shed_before_it_is_executed() -> None:
    batcher = batcher_of()
    late, fine = request(0), request(60)
    add(batcher, late, fine)
    step = batcher.step(95 * MS, 1)  # 95 + 10 > 100
    ((shed, error),) = step.shed
    assert shed is late
    assert isinstance(error, Overloaded)
    assert [part.request for part in step.batches[0].parts] == [fine]


def test_a_request_of_several_rows_is_hopeless_by_what_they_take_and_not_by_what_a_full_batch_does() -> None:
    batcher = batcher_of(slo_ms=200)
    late, fine = request(0, rows=2, timeout_ms=100), request(1, rows=2, timeout_ms=120)
    add(batcher, late, fine)
    step = batcher.step(90 * MS, 1)  # 4 + 6·2 = 16: until 106
    assert [asked for asked, _ in step.shed] == [late]
    assert [part.request for part in step.batches[0].parts] == [fine]


@pytest.mark.parametrize("stance", [None, "at once"])
@pytest.mark.parametrize(("workers", "rows", "runs"), [(1, 25, True), (1, 26, False), (2, 48, True), (2, 50, False)])
def test_a_request_larger_than_a_batch_is_hopeless_by_all_its_batches(
    stance: Stance | None, workers: int, rows: int, runs: bool
) -> None:
    batcher = batcher_of(slo_ms=168, max_rows=8, workers=workers, stance=stance)  # three times 4 + 6·8, and 4 + 6
    add(batcher, large := request(0, rows=rows), request(1))
    step = batcher.step(1 * MS, workers)
    assert [asked for asked, _ in step.shed] == [] if runs else [large]
    assert [part.request.rows for batch in step.batches for part in batch.parts][:1] == [rows if runs else 1]


def test_who_comes_is_not_refused_for_a_large_request_that_cannot_be_in_time() -> None:
    """T(n) = 50 + 25 n ms, SLO 1 s: of at most 8 rows at once, 80 take 2.5 s."""
    batcher = batcher_of(fixed_ms=50, row_ms=25, max_rows=8, slo_ms=1000)
    answered, large, frees_ns, running = 0, 0, 0, None
    for now_ms in range(0, 60_000, 5):
        for one in [request(now_ms)] * (now_ms % 105 == 0) + [request(now_ms, rows=80)] * (now_ms % 2100 == 0):
            with suppress(Overloaded):
                add(batcher, one)
        if running is not None and frees_ns <= now_ms * MS:
            batcher.finished(running, now_ms * MS, now_ms * MS - running.closed_ns, ok=True)
            answered += sum(part.request.rows == 1 for part in running.parts)
            large += sum(part.rows for part in running.parts if part.request.rows > 1)
            running = None
        for batch in batcher.step(now_ms * MS, int(running is None)).batches:
            running, frees_ns = batch, (now_ms + 50 + 25 * batch.rows) * MS
    assert answered > 0.98 * 60_000 / 105
    assert large < 100  # of 2240: with nothing else to do it is tried


def test_under_overload_it_sheds_decisively_and_runs_a_full_batch() -> None:
    batcher = batcher_of()
    add(batcher, *(request(ms) for ms in range(90)))  # 1000/s against 160/s
    step = batcher.step(90 * MS, 1)
    (batch,) = step.batches
    assert batch.reason == "overload"
    assert batch.rows >= 10
    first = batch.parts[0].request
    assert first.arrival_ns + 100 * MS >= 90 * MS + batch.expected_ns  # in time
    assert len(step.shed) > 30  # in one decision, not one by one


def test_a_burst_while_the_worker_keeps_up_is_not_shed_for_a_larger_batch() -> None:
    batcher = batcher_of()
    for i in range(128):  # 125/s against 160/s
        add(batcher, request(8 * i))
        batcher.finished(only(batcher, 8 * i), 8 * i * MS, 10 * MS, ok=True)
    add(batcher, *(request(1024) for _ in range(20)))
    step = batcher.step(1084 * MS, 1)  # 40 ms are left: 6 rows; 7 could be collected fresh
    assert step.shed == []
    assert (step.batches[0].rows, step.batches[0].reason) == (6, "deadline")


def test_a_short_queue_is_not_shed_when_the_lookahead_sees_it_through() -> None:
    batcher = batcher_of()
    add(batcher, request(0, timeout_ms=20), *(request(i, timeout_ms=200) for i in range(1, 10)))
    step = batcher.step(9 * MS, 1)
    assert step.shed == []
    assert step.batches[0].rows == 1


def test_if_the_lookahead_finds_nothing_that_can_be_in_time_together_all_of_it_is_shed() -> None:
    batcher = batcher_of()
    asked = [request(0, timeout_ms=33), request(1, rows=8, timeout_ms=42)]  # 4 + 6·4 <= 33 - 3, and 4 + 6·8 > 43 - 3
    add(batcher, *asked)
    step = batcher.step(3 * MS, 1)
    assert [shed for shed, _ in step.shed] == asked
    assert step.batches == []
    assert (batcher.queue_rows, batcher.queue_requests) == (0, 0)


def test_compiled_sizes_run_full_rather_than_padded() -> None:
    batcher = batcher_of(row_ms=1, row_sizes=(1, 4, 8), max_rows=8)  # 5, 8 and 12 ms
    add(batcher, *(request(0) for _ in range(5)))
    batch = only(batcher, 0)
    assert (batch.rows, batch.padded_rows) == (4, 4)  # 4/8 > 5/12 rows per ms
    batcher.finished(batch, 8 * MS, 8 * MS, ok=True)
    add(batcher, *(request(8) for _ in range(6)))
    batch = only(batcher, 8)
    assert (batch.rows, batch.padded_rows) == (7, 8)  # 7/12 > 4/8


def test_the_last_idle_worker_holds_for_a_moment_and_says_until_when() -> None:
    batcher = batcher_of(workers=2, fixed_ms=20, row_ms=0.1, slo_ms=200)
    for ms in range(40):
        add(batcher, request(ms))
    first = only(batcher, 40, free_slots=2)
    add(batcher, request(45))
    step = batcher.step(45 * MS, 1)
    assert step.batches == []
    while not step.batches:
        assert step.wake_at_ns is not None
        assert 45 * MS < step.wake_at_ns <= 40 * MS + 2 * first.expected_ns
        step = batcher.step(step.wake_at_ns, 1)
    assert step.batches[0].reason == "hold"


def held_behind_a_long_batch() -> tuple[Batcher, Batch]:
    """Of two workers one runs 8 rows until 452 ms; one request, of 100 in a second, waits since 401 ms."""
    batcher = batcher_of(workers=2)
    for i in range(40):
        early = request(10 * i)
        add(batcher, early)
        batcher.cancel(early)
    add(batcher, request(400, rows=8))
    (long,) = batcher.step(400 * MS, 2).batches
    add(batcher, request(401))
    step = batcher.step(401 * MS, 1)
    assert step.batches == []
    assert step.wake_at_ns is not None
    return batcher, long


def test_the_last_idle_worker_waits_for_one_more_no_longer_than_the_busy_one_is_worth() -> None:
    batcher, _ = held_behind_a_long_batch()
    rate = 49 / 401  # rows per ms
    apart = 51 + 46  # G, and T(7): 6.2 rows come in it
    together = 2 / rate + 6 + 16  # n·(τ + ΔT) + T(n+1) + τ
    assert batcher.step(401 * MS, 1).wake_at_ns == pytest.approx((401 + apart - together) * MS, abs=1)


def test_where_one_more_would_take_a_far_larger_compiled_size_none_is_waited_for() -> None:
    batcher = batcher_of(workers=2, row_sizes=(1, 8), max_rows=8)  # 10 and 52 ms
    for i in range(40):
        early = request(8 * i)
        add(batcher, early)
        batcher.cancel(early)
    add(batcher, request(320, rows=8))
    batcher.step(320 * MS, 2)
    add(batcher, request(321))
    assert only(batcher, 321).rows == 1  # together 2·321/49 + 42 + 52, apart 51 + 52


def test_one_that_was_held_and_finds_a_second_worker_idle_goes_as_if_it_had_just_come() -> None:
    batcher, long = held_behind_a_long_batch()
    batcher.finished(long, 402 * MS, 2 * MS, ok=True)
    assert (batch := only(batcher, 402, free_slots=2)).reason == "idle"
    assert batch.rows == 1


def test_a_single_worker_never_holds() -> None:
    batcher = batcher_of(fixed_ms=20, row_ms=0.1)
    for ms in range(40):
        add(batcher, request(ms))
        for batch in batcher.step(ms * MS, 1).batches:
            batcher.finished(batch, ms * MS, 20 * MS, ok=True)
        assert batcher.queue_requests == 0


@pytest.mark.parametrize(("workers", "waiting", "rows"), [(1, 24, 24), (4, 24, 6), (2, 4, 3)])  # sqrt(4·20/(5·2)) = 2.8
def test_without_slo_nothing_is_shed_and_batches_serve_the_queue_soonest(workers: int, waiting: int, rows: int) -> None:
    batcher = batcher_of(slo_ms=None, workers=workers, fixed_ms=20, row_ms=5)
    add(batcher, *(request(0) for _ in range(waiting)))
    step = batcher.step(60_000 * MS, workers)
    assert step.shed == []
    assert step.batches[0].rows == rows


@pytest.mark.parametrize("workers", [1, 2])
def test_without_slo_hand_overs_that_become_slow_do_not_let_the_queue_grow(workers: int) -> None:
    batcher = batcher_of(slo_ms=None, fixed_ms=0.5, row_ms=0.05, max_rows=256, workers=workers)
    arrivals = np.cumsum(np.random.default_rng(1).exponential(MS, 6000)).astype(np.int64)  # 1000/s

    def service_ns(batch: Batch, busy: int, now_ns: int) -> int:
        return round(0.5 * MS + 0.05 * MS * batch.rows) + (12 * MS if 2000 * MS < now_ns < 4000 * MS else 0)

    latencies_ns = simulate(batcher, arrivals, service_ns, workers=workers).latencies_ns
    assert latencies_ns.max() < 3 * 13 * MS


def test_a_lower_class_is_shed_first() -> None:
    batcher = batcher_of()
    classes = [1, 4]  # in turn, 300/s together against 160/s
    arrivals = np.arange(1500, dtype=np.int64) * round(1000 / 300 * MS)
    made: list[InferRequest] = []

    def make(index: int, arrival_ns: int) -> InferRequest:
        made.append(request(arrival_ns / MS, priority=classes[index % 2]))
        return made[-1]

    outcome = simulate(batcher, arrivals, Affine(4 * MS, 6 * MS), workers=1, request_of=make)
    high, low = (outcome.latencies_ns[i::2] != SHED for i in (0, 1))
    assert high.mean() > 0.9
    assert low.mean() < 0.2


def test_a_backend_that_recovers_is_found_out_by_probes() -> None:
    batcher = batcher_of()
    now_ms = 0.0
    for _ in range(40):  # it hangs for a while: ten times the SLO
        add(batcher, request(now_ms))
        for batch in batcher.step(round(now_ms * MS), 1).batches:
            now_ms += 1000
            batcher.finished(batch, round(now_ms * MS), 1000 * MS, ok=True)
    reasons = []
    for _ in range(60):
        add(batcher, request(now_ms))
        for batch in batcher.step(round(now_ms * MS), 1).batches:
            reasons.append(batch.reason)
            now_ms += 10
            batcher.finished(batch, round(now_ms * MS), 10 * MS, ok=True)
    assert reasons[0] == "probe"
    assert reasons[-1] == "idle"


@pytest.mark.parametrize("beside", [False, True])
def test_a_backend_that_recovers_is_found_out_by_requests_larger_than_a_batch(beside: bool) -> None:
    """beside: single ones too, so that what is known is never old."""
    batcher = batcher_of(fixed_ms=20, row_ms=1, max_rows=8)
    now_ms, last = 0.0, 0

    def run(rows: int, times: float) -> int:
        nonlocal now_ms
        add(batcher, request(now_ms, rows=rows))
        ran = 0
        for _ in range(2):
            for batch in batcher.step(round(now_ms * MS), 1).batches:
                takes_ms = (20 + batch.rows) * times
                now_ms += takes_ms
                batcher.finished(batch, round(now_ms * MS), round(takes_ms * MS), ok=True)
                ran += batch.rows
        return ran

    for times in [2.2] * 30 + [1.0] * 12:
        for _ in range(2 * beside):
            run(1, times)
            now_ms += 200
        last = run(16, times)
        now_ms += 300
    assert last == 16


def test_a_large_request_that_is_tried_is_not_shed_before_that_has_run() -> None:
    batcher = batcher_of(fixed_ms=292, row_ms=1, workers=2, max_rows=8)
    add(batcher, large := request(2000, rows=20))
    step = batcher.step(2000 * MS, 2)
    assert [batch.reason for batch in step.batches] == ["probe"]
    add(batcher, another := request(2001))
    later = batcher.step(2001 * MS, 1)
    assert [asked for asked, _ in (*step.shed, *later.shed)] == [another]
    left = large.rows
    for now_ms in (2010, 2020, 2030):
        for batch in step.batches:
            batcher.finished(batch, now_ms * MS, 10 * MS, ok=True)
            left -= batch.rows
        step = batcher.step(now_ms * MS, 2)
        assert not step.shed
    assert not left


def test_of_a_large_request_that_is_hopeless_one_batch_is_tried_and_the_rest_told_that_it_has_begun() -> None:
    batcher = batcher_of(fixed_ms=20, row_ms=1, slo_ms=80, max_rows=8)  # three batches of 28 ms
    add(batcher, large := request(2000, rows=24))
    (batch,) = batcher.step(2000 * MS, 1).batches
    assert [part.request for part in batch.parts] == [large]
    add(batcher, single := request(2010))
    batcher.finished(batch, 2027 * MS, 27 * MS, ok=True)
    step = batcher.step(2027 * MS, 1)
    assert [part.request for batch in step.batches for part in batch.parts] == [single]
    ((asked, error),) = step.shed
    assert asked is large
    assert isinstance(error, DeadlineExceeded)
    assert "a part of the request has run" in error.message


@pytest.mark.parametrize("stance", [None, "at once"])
def test_a_large_request_that_cannot_be_in_time_does_not_fill_what_is_left_of_a_batch(stance: Stance | None) -> None:
    batcher = batcher_of(slo_ms=168, max_rows=8, stance=stance)  # 26 rows take three times 4 + 6·8, and 4 + 6·2
    add(batcher, single := request(0), large := request(0, rows=26))
    step = batcher.step(1 * MS, 1)
    assert [asked for asked, _ in step.shed] == [large]
    assert [part.request for batch in step.batches for part in batch.parts] == [single]


@dataclass(frozen=True)
class Tried:
    answered: int
    refused: int
    longest_gap_ms: float  # in which none of them ran
    busy: float  # of one worker's time, with them
    others: float  # share of the others that were answered in time


def beside_another(
    wrong: str, *, takes_ms: float, workers: int, known_ms: float = 0, first_ms: float = 0, per_s: int = 200, seconds: int = 20
) -> Tried:
    """Requests of a shape, 19 a second, beside so many for each worker of one that keeps them busy. SLO 100 ms.

    known_ms: what it is known to take; 0: nothing is known. first_ms: of its first run.
    """
    policy = Adaptive()
    batcher = Batcher(policy, max_rows=8, workers=workers, slo_ns=100 * MS)
    known = {wrong: kept_curve(known_ms, 1, 8)} if known_ms else {}
    policy.service.restore(kept_model({"other": kept_curve(9, 1, 8)} | known))
    running: list[tuple[int, int, Batch]] = []
    answered, refused, ran_ns, last_ns, gap_ns, started, others, came = 0, 0, 0, 0, 0, 0, 0, 0
    for now_ns in range(0, seconds * 1000 * MS, MS):
        comes = now_ns * per_s * workers % 10**9 < per_s * workers * MS
        came += comes
        for shape in ["other"] * comes + [wrong] * (now_ns % (53 * MS) == 13 * MS):
            try:
                batcher.add(InferRequest("m", "1", "", {}, 1, now_ns, shape_key=shape), now_ns)
            except Overloaded:
                refused += shape == wrong
        while running and running[0][0] <= now_ns:
            _, _, batch = heapq.heappop(running)
            batcher.finished(batch, now_ns, now_ns - batch.closed_ns, ok=True)
            in_time = batch.rows if now_ns - batch.oldest_ns <= 100 * MS else 0
            if batch.group != wrong:
                others += in_time
            else:
                answered += in_time
                ran_ns += now_ns - batch.closed_ns
                gap_ns, last_ns = max(gap_ns, batch.closed_ns - last_ns), now_ns
        step = batcher.step(now_ns, workers - len(running))
        refused += sum(asked.shape_key == wrong for asked, _ in step.shed)
        for batch in step.batches:
            started += 1
            takes = 10.0
            if batch.group == wrong:
                takes, first_ms = first_ms or takes_ms, 0
            heapq.heappush(running, (now_ns + round(takes * MS), started, batch))
    return Tried(answered, refused, max(gap_ns, now_ns - last_ns) / MS, ran_ns / now_ns, others / came)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_shape_that_was_learned_too_slow_is_found_out_while_others_keep_the_workers_busy(workers: int) -> None:
    tried = beside_another("b", known_ms=400, takes_ms=10, workers=workers)
    assert tried.answered >= 0.75 * 400
    assert tried.refused <= 6 * 20  # in the first seconds


@pytest.mark.parametrize("first_ms", [60, 300])
def test_a_shape_that_was_slow_once_is_served_beside_more_of_another_than_can_be_done(first_ms: float) -> None:
    assert beside_another("b", first_ms=first_ms, takes_ms=5, workers=1, per_s=1000, seconds=6).answered > 10


def test_of_many_shapes_that_are_seldom_asked_for_few_are_tried_while_another_keeps_the_worker_busy() -> None:
    """Each takes 60 ms, of an SLO of 200 ms, beside 1.3 times what the worker can do of another."""
    policy = Adaptive()
    batcher = Batcher(policy, max_rows=8, workers=1, slo_ns=200 * MS)
    policy.service.restore(kept_model({"hot": kept_curve(4, 1, 8)} | {rare: kept_curve(60, 1, 8) for rare in range(30)}))
    running: list[Batch] = []
    frees_ns = rare_ns = 0
    for now_ns in range(0, 6000 * MS, MS):
        for shape in ["hot"] * (now_ns % (8 * MS) != 0) + [now_ns // (67 * MS) % 30] * (now_ns % (67 * MS) == 0):
            with suppress(Overloaded):
                batcher.add(InferRequest("m", "1", "", {}, 1, now_ns, shape_key=shape), now_ns)
        if running and frees_ns <= now_ns:
            batcher.finished(running[0], now_ns, now_ns - running[0].closed_ns, ok=True)
            running.clear()
        for batch in batcher.step(now_ns, 1 - len(running)).batches:
            takes_ns = (4 + batch.rows if batch.group == "hot" else 60) * MS
            rare_ns += takes_ns if batch.group != "hot" else 0
            frees_ns = now_ns + takes_ns
            running.append(batch)
    assert rare_ns <= 0.25 * 6000 * MS  # most in the first second, before it is known that more comes than can be done


@pytest.mark.parametrize(("workers", "per_s"), [(1, 500), (2, 200)])
def test_what_is_too_slow_for_its_promise_takes_a_tenth_of_one_worker_from_others(workers: int, per_s: int) -> None:
    tried = beside_another("b", known_ms=400, takes_ms=400, workers=workers, per_s=per_s)
    assert tried.answered == 0
    assert tried.others > 0.89  # nobody is refused for what waits to be tried, or to be shed
    assert 0.05 <= tried.busy <= 0.11
    assert tried.longest_gap_ms <= 4100  # nine times 400 ms, and until the next of them comes


@pytest.mark.parametrize("reserved_ms", [0, 5])
def test_a_backend_that_was_slow_within_the_slo_is_found_out_too(reserved_ms: float) -> None:
    batcher = batcher_of(slo_ms=50)
    now_ms, answered = 0.0, 0
    for took_ms in [47.0] * 60 + [1.0] * 40:
        asked = request(now_ms)
        batcher.add(asked, asked.arrival_ns, round(reserved_ms * MS))
        for batch in batcher.step(round(now_ms * MS), 1).batches:
            now_ms += took_ms
            batcher.finished(batch, round(now_ms * MS), round(took_ms * MS), ok=True)
            answered += took_ms == 1.0
        now_ms += 50
    assert answered == 40


def test_whoever_wants_less_than_the_slo_and_what_was_learned_is_tried_once_a_second() -> None:
    batcher = batcher_of(fixed_ms=40, row_ms=1)
    add(batcher, request(0))
    (batch,) = batcher.step(0, 1).batches
    batcher.finished(batch, 41 * MS, 41 * MS, ok=True)
    for now_ms, tried in ((50, 0), (1040, 0), (1041, 1)):
        add(batcher, request(now_ms, timeout_ms=20))
        step = batcher.step(now_ms * MS, 1)
        assert (len(step.batches), len(step.shed)) == (tried, 1 - tried)
    (batch,) = step.batches
    assert batch.reason == "probe"


def test_short_requests_join_a_longer_batch_where_padding_them_costs_less_than_their_own() -> None:
    ragged = Ragged(pad={"ids": 0}, buckets=(16, 64))
    policy = Adaptive()
    batcher = Batcher(policy, max_rows=32, ragged=ragged, slo_ns=1000 * MS)

    def learn(length: int, fixed_ms: float, row_ms: float) -> None:
        probe = request(0, length=length)
        batcher.add(probe, 0)
        batcher.cancel(probe)
        bucket = next(group for group in policy.service.curves if group.length == length)  # type: ignore[attr-defined]
        for rows in policy.service.probe_rows:
            policy.service.probe(bucket, rows, [round((fixed_ms + row_ms * rows) * MS)] * 2)

    learn(64, 20, 0.1)
    learn(16, 20, 0.1)  # an accelerator: length costs nothing
    add(batcher, request(1, length=64), request(2, length=16), request(2, length=16))
    assert only(batcher, 3).rows == 3

    expensive = Batcher(policy_ := Adaptive(), max_rows=32, ragged=ragged, slo_ns=1000 * MS)
    batcher, policy = expensive, policy_
    learn(64, 0.1, 16)
    learn(16, 0.1, 4)  # a CPU: a padded row costs as a long one
    add(batcher, request(1, length=64), request(2, length=16), request(2, length=16))
    assert [batch.rows for batch in batcher.step(3 * MS, 3).batches] == [1, 2]


def test_requests_alone_in_the_queue_cost_the_short_way_but_decide_the_same() -> None:
    lone = batcher_of(workers=2)
    add(lone, request(0))
    batch = only(lone, 0, free_slots=2)
    assert (batch.rows, batch.expected_ns) == (1, 10 * MS)


def test_a_request_alone_is_expected_to_take_what_the_last_ones_took() -> None:
    batcher = batcher_of(row_sizes=(2, 4), max_rows=4)  # 16 and 28 ms
    expected = []
    for number, (rows, took_ms) in enumerate([(1, 16), (2, 32), (2, 32), (1, 16), (1, 16)]):
        add(batcher, request(1000 * number, rows=rows))
        batch = only(batcher, 1000 * number)
        assert (batch.rows, batch.reason) == (rows, "idle")
        assert batch.expected_ns == round(batcher.service.curve(None).expected_ns(rows))
        expected.append(batch.expected_ns)
        batcher.finished(batch, (1000 * number + took_ms) * MS, took_ms * MS, ok=True)
    assert expected[1] < expected[2] < expected[3]
    assert expected[4] < expected[3]


@pytest.mark.parametrize("jump_ms", [-50, 3_600_000])
def test_a_jump_of_the_clock_is_survived(jump_ms: int) -> None:
    batcher = batcher_of(workers=2)
    now_ms = 1000.0
    for i in range(200):
        if i == 100:
            now_ms += jump_ms
        add(batcher, request(now_ms))
        step = batcher.step(round(now_ms * MS), 1)
        for batch in step.batches:
            now_ms += 10
            batcher.finished(batch, round(now_ms * MS), 10 * MS, ok=True)
        now_ms += 5
    batcher.step(round(now_ms * MS), 1)
    assert batcher.queue_requests == 0  # nothing is held for ever
    curve = batcher.policy.service.curve(None)  # type: ignore[attr-defined]
    assert curve.expected_ns(1) == pytest.approx(10 * MS, rel=0.3)


def test_what_comes_after_a_flood_is_soon_not_held_for_more() -> None:
    batcher = batcher_of(fixed_ms=14, row_ms=4, workers=2)
    add(batcher, *(request(i / 10) for i in range(1000)))  # a client that repeats at once what is refused
    waits = []
    for i in range(20):  # then one that waits for its answer
        sent_ms = 100 + 60.0 * i
        add(batcher, request(sent_ms))
        step = batcher.step(round(sent_ms * MS), 2)
        started_ns = sent_ms * MS if step.batches else step.wake_at_ns
        assert started_ns is not None
        batches = step.batches or batcher.step(round(started_ns), 2).batches
        waits.append(started_ns - sent_ms * MS)
        for batch in batches:
            batcher.finished(batch, round(started_ns + 18 * MS), 18 * MS, ok=True)
    assert max(waits[8:]) == 0


def stepped_batcher(slo_ms: float | None, *, sizes: Sequence[int], spread: float = 1.0, workers: int = 1) -> Batcher:
    """That has seen these sizes of 5 + 3n ms, padded to eight rows unless it is one."""
    batcher = batcher_of(slo_ms=slo_ms, max_rows=16, workers=workers)
    kept = kept_curve(5, 3, 16, spread=spread)
    means = [[size, (5 + 3 * (1 if size == 1 else 8 if size <= 8 else 16)) * MS, 100] for size in sizes]
    batcher.service.restore(kept_model({None: kept | {"means": means}}))
    return batcher


@pytest.mark.parametrize("slo_ms", [400, None])
@pytest.mark.parametrize("spread", [1.0, 1.6])
def test_a_row_beyond_a_known_step_waits_for_the_next_batch(slo_ms: float | None, spread: float) -> None:
    batcher = stepped_batcher(slo_ms, sizes=[1, 3, 8, 9, 16], spread=spread)
    add(batcher, *(request(0) for _ in range(9)))
    assert only(batcher, 0).rows == 8


@pytest.mark.parametrize(("slo_ms", "spread", "rows"), [(400, 1.0, 8), (400, 1.6, 9), (None, 1.0, 9)])
def test_a_step_that_is_not_known_is_one_beyond_what_scatter_feigns(slo_ms: float | None, spread: float, rows: int) -> None:
    batcher = stepped_batcher(slo_ms, sizes=[1, 8, 9], spread=spread)  # 53 / 29 ms: what 9 rows take may be luck
    add(batcher, *(request(0) for _ in range(9)))
    assert only(batcher, 0).rows == rows


def test_a_nearly_filled_step_is_run() -> None:
    batcher = stepped_batcher(400, sizes=[1, 3, 8, 9, 16])
    add(batcher, *(request(0) for _ in range(15)))
    assert only(batcher, 0).rows == 15  # 53 ms, 3.5 each: those up to the step take 3.6


def test_with_several_workers_a_step_is_gathered() -> None:
    batcher = stepped_batcher(200, sizes=[1, 3, 8, 9, 16], workers=2)
    outcome = simulate(
        batcher,
        np.arange(1, 400) * 2_500_000,  # more than two workers do one by one
        lambda batch, busy, now_ns: (5 + 3 * (1 if batch.rows == 1 else 8 if batch.rows <= 8 else 16)) * MS,
        workers=2,
    )
    assert np.mean(outcome.batch_rows[20:]) >= 6


def test_what_waits_goes_together_if_one_after_the_other_would_be_late_and_few_will_come() -> None:
    batcher = stepped_batcher(50, sizes=[1, 3, 8, 9, 16])  # 8, 29 and 53 ms: the cap is one row
    add(batcher, *(request(i) for i in (-12.0, -11.0, -10.0, -9.0)))
    assert only(batcher, 0).rows == 4  # the fourth would end after 32 ms: it is in time either way
    late = stepped_batcher(50, sizes=[1, 3, 8, 9, 16])
    add(late, *(request(i) for i in (-20.0, -20.0, -20.0, -20.0)))
    assert only(late, 0).rows == 4  # the fourth would end after 32 ms, and has 30
