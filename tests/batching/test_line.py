"""Lengths that share batches at little cost are decided on as one queue."""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.cases import TUNING, Backend, DrawnCase
from benchmarks.contest import Contender, goodput, ours, run
from gateway.batching.batch import Batch
from gateway.batching.batcher import Batcher
from gateway.batching.inflow import Inflow
from gateway.batching.line import Line, dealt
from gateway.batching.queue import Entry, LengthGroup, Queue
from gateway.batching.service_model import ServiceModel
from gateway.errors import GatewayError
from gateway.types import InferRequest
from tests.batching.curves import MS, kept_curve, kept_model
from tests.batching.test_adaptive_lengths import LONG, MIDDLE, NOW_MS, SHORT, add, batcher_of, lengths, step

FLAT = {SHORT: (20.0, 0.1), MIDDLE: (20.0, 0.2), LONG: (20.0, 0.4)}


def traffic(batcher: Batcher, gap_ms: float, until_ms: float = NOW_MS) -> None:
    """For 300 ms a request each gap, of all lengths in turn, of which nothing is left."""
    for number in range(int(300 / gap_ms)):
        batcher.cancel(add(batcher, (SHORT, MIDDLE, LONG)[number % 3], at_ms=until_ms - 300 + number * gap_ms))


def in_line(times: Mapping[int, tuple[float, float]], gap_ms: float = 1, each: int = 8, slo_ms: float | None = 60) -> bool:
    """Whether requests of two lengths share a batch although another worker is idle."""
    batcher = batcher_of(dict(times), workers=4, slo_ms=slo_ms)
    traffic(batcher, gap_ms)
    for _ in range(each):
        add(batcher, SHORT)
        add(batcher, LONG)
    return len({length for length, _ in lengths(step(batcher, free_slots=4)[0])}) > 1


def test_lengths_share_batches_at_once_where_that_takes_less_time_and_little_of_it_for_padding() -> None:
    assert in_line({SHORT: (20.0, 0.2), MIDDLE: (20.0, 0.3), LONG: (20.0, 0.4)})  # 32 rows: 29.6 ms, or 32.8 padded
    assert not in_line(FLAT, gap_ms=100, each=1)  # each is alone mostly, and runs alone sooner
    assert not in_line({SHORT: (20.0, 0.1), MIDDLE: (20.0, 0.5), LONG: (20.0, 4.0)})  # 20 rows: 22 ms, or 100 padded
    assert not in_line({SHORT: (2.0, 1.0), MIDDLE: (2.0, 1.1), LONG: (2.0, 2.0)})  # two of one length share more than that
    assert not in_line(FLAT, slo_ms=None)


@pytest.mark.parametrize(("workers", "one"), [(4, False), (2, True)])
def test_more_goes_into_padding_where_even_together_more_comes_than_the_workers_do(workers: int, one: bool) -> None:
    service = ServiceModel(32)
    padded = {SHORT: 0.0, MIDDLE: 0.0, LONG: 0.5}  # 15 rows: 22.5 ms, or 27.5 padded, in which 34 come: two workers do 30
    service.restore(kept_model({LengthGroup("k", length): kept_curve(20, row_ms, 32) for length, row_ms in padded.items()}))
    streams: dict[Hashable, Inflow] = {
        group: Inflow(service.curve(group)) for group in (LengthGroup("k", length) for length in padded)
    }
    for number in range(300):
        streams[LengthGroup("k", (SHORT, MIDDLE, LONG)[number % 3])].came(1, number * 800_000)
    line = Line(streams[LengthGroup("k", LONG)].curve)
    assert line.is_one(streams, streams.__getitem__, workers, 240 * MS, 40 * MS) == one


def test_what_waits_for_a_batch_waits_for_the_arrivals_of_all_lengths() -> None:
    batcher = batcher_of(FLAT, workers=4, slo_ms=60)
    traffic(batcher, 1)
    for number in range(5):
        add(batcher, (SHORT, MIDDLE, LONG)[number % 3])
    assert step(batcher, free_slots=4) == []  # 1 row/ms keeps 4 workers busy by half with 13 rows in a batch of 25 ms
    for _ in range(11):
        add(batcher, LONG)
    (batch,) = step(batcher, free_slots=4)
    assert Counter(length for length, _ in lengths(batch)) == {SHORT: 2, MIDDLE: 2, LONG: 12}
    assert batch.group == LengthGroup("k", LONG)
    assert batch.expected_ns == round((20 + 16 * 0.4) * MS)
    assert (batcher.queue_rows, batcher.queue_requests) == (0, 0)


def test_those_who_would_be_late_are_shed_of_whatever_length_and_the_others_go() -> None:
    batcher = batcher_of(FLAT, workers=2, slo_ms=60)
    traffic(batcher, 1)
    late = [add(batcher, length, timeout_ms=15) for length in (SHORT, LONG)]
    kept = [add(batcher, length, timeout_ms=45) for length in (MIDDLE, LONG)]
    decided = batcher.step(NOW_MS * MS, 2)
    assert {asked for asked, _ in decided.shed} == set(late)
    assert decided.batches == []  # 1 row/ms: there is time to wait for more
    while not decided.batches:
        assert decided.wake_at_ns is not None
        assert decided.wake_at_ns < (NOW_MS + 25) * MS
        decided = batcher.step(decided.wake_at_ns, 2)
    assert [part.request for part in decided.batches[0].parts] == kept


def entry(place: int, rows: int = 1) -> Entry:
    asked = InferRequest("m", "1", "", {"ids": np.zeros((rows, 1), np.int8)}, rows, 0)
    return place, place, place, rows, asked


def queues(*entries: list[Entry]) -> list[Queue]:
    made = []
    for length, each in enumerate(entries):
        queue = Queue(LengthGroup("k", length))
        for one in each:
            queue.push(*one)
        made.append(queue)
    return made


def test_the_first_rows_of_a_line_are_dealt_to_the_queues_in_which_they_wait() -> None:
    one, other, last = queues([entry(1), entry(4), entry(5)], [entry(2), entry(3)], [entry(6)])
    line = Queue.joined(other.group, [one, other, last])
    assert [each[0] for each in line.entries] == [1, 2, 3, 4, 5, 6]
    assert (line.rows, line.oldest_ns) == (6, 0)
    parts = dealt(line, other, [one, other, last], 3, [one.entries[0], last.entries[0]])
    assert [(part.queue, part.rows, [each[0] for each in part.shed]) for part in parts] == [
        (other, 2, []),
        (one, 1, [1]),
        (last, 0, [6]),
    ]


def test_a_request_that_does_not_fit_into_a_batch_ends_it_unless_it_is_the_first() -> None:
    one, other = queues([entry(1, 3), entry(3)], [entry(2, 4)])
    line = Queue.joined(one.group, [one, other])
    assert [part.rows for part in dealt(line, one, [one, other], 6, ())] == [3]
    assert [part.rows for part in dealt(line, one, [one, other], 2, ())] == [3]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3, 8])
def test_lengths_that_hardly_matter_are_served_as_well_as_if_they_were_alike(workers: int) -> None:
    backend = Backend(fixed_ns=6 * MS, row_ns=0.05 * MS, workers=workers, max_rows=16, noise=0.15)
    alike = DrawnCase("alike", backend, 15 * MS, "poisson", TUNING, 901)
    mixed = replace(alike, backend=replace(backend, lengths=tuple(range(8, 129, 8))))
    of_alike, of_mixed = (
        np.mean([goodput(case, run(case, Contender(ours), 1.5, 1500, seed)) for seed in range(3)]) for case in (alike, mixed)
    )
    assert of_mixed >= 0.85 * of_alike


def ends_of(batcher: Batcher, priority_of: Callable[[int, np.random.Generator], int]) -> dict[InferRequest, int]:
    """How often each of 3000 requests ended, of random rows and lengths, that three workers are asked for; some are refused.

    priority_of: of a request, by its number.
    """
    rng = np.random.default_rng(5)
    ends: dict[InferRequest, int] = {}
    rows_left: dict[InferRequest, int] = {}
    running: list[tuple[int, Batch]] = []
    now_ns = NOW_MS * MS

    def end(batch: Batch, at_ns: int, took_ns: int = 20 * MS) -> None:
        batcher.finished(batch, at_ns, took_ns, ok=True)
        for part in batch.parts:
            rows_left[part.request] -= part.rows
            ends[part.request] += not rows_left[part.request]

    def decided(free_slots: int) -> list[Batch]:
        step = batcher.step(now_ns, free_slots)
        for refused, _ in step.shed:
            ends[refused] += 1
            rows_left[refused] += 1 << 30
        return step.batches

    for number in range(3000):
        now_ns += int(rng.exponential(0.8 * MS))
        for end_ns, batch in [each for each in running if each[0] <= now_ns]:
            running.remove((end_ns, batch))
            end(batch, end_ns, batch.expected_ns or 20 * MS)
        try:
            rows, priority = int(rng.choice([1, 1, 1, 3, 11])), priority_of(number, rng)
            length = int(rng.choice([SHORT, MIDDLE, LONG]))
            asked = add(batcher, length, rows, at_ms=now_ns / MS, priority=priority)
            ends[asked], rows_left[asked] = 0, rows
        except GatewayError:
            continue
        running += [(now_ns + int(rng.uniform(15, 30) * MS), batch) for batch in decided(3 - len(running))]
    for _, batch in running:
        end(batch, now_ns)
    while batcher.queue_rows:
        now_ns += MS
        for batch in decided(3):
            end(batch, now_ns)
    assert batcher.queue_requests == 0
    return ends


@pytest.mark.slow
def test_each_request_ends_once_whatever_its_length_rows_and_class() -> None:
    batcher = batcher_of(FLAT, workers=3, slo_ms=50, max_rows=8)
    ends = ends_of(batcher, lambda _, rng: int(rng.choice([0, 0, 1, 4])))
    assert ends == dict.fromkeys(ends, 1)
