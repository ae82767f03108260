"""Which lengths go together where another stance than the planned one is followed, by stated times."""

from collections import Counter

import pytest

from gateway.batching.choosing import _foresee
from gateway.batching.queue import LengthGroup, State
from gateway.batching.stances import AT_ONCE, LAST, LATE, Stance
from tests.batching.curves import MS
from tests.batching.test_adaptive_lengths import LONG, MIDDLE, NOW_MS, SHORT, add, batcher_of, lengths, step
from tests.batching.test_line import FLAT, ends_of

STEEP = {SHORT: (20.0, 0.1), MIDDLE: (20.0, 2.0), LONG: (20.0, 40.0)}


def test_where_times_hardly_grow_with_the_length_all_that_waits_goes_at_once_padded_to_the_longest() -> None:
    batcher = batcher_of(FLAT, slo_ms=60, stance=AT_ONCE)
    for length in (MIDDLE, LONG, SHORT, LONG):
        add(batcher, length)
    (batch,) = step(batcher)
    assert Counter(lengths(batch)) == {(SHORT, 1): 1, (MIDDLE, 1): 1, (LONG, 1): 2}
    assert batch.group == LengthGroup("k", LONG)
    assert batch.expected_ns == round(21.6 * MS)
    assert (batcher.queue_rows, batcher.queue_requests) == (0, 0)


def test_where_they_do_the_shorter_go_and_the_longer_wait_even_if_they_stand_first() -> None:
    batcher = batcher_of(STEEP, slo_ms=200, stance=AT_ONCE)
    add(batcher, LONG)
    for _ in range(8):
        add(batcher, SHORT)
    (batch,) = step(batcher)
    assert Counter(lengths(batch)) == {(SHORT, 1): 8}  # 8 in 20.8 ms, or 9 in 380
    assert batcher.queue_rows == 1


def test_who_stands_first_goes_along_unless_twice_as_many_end_without_him() -> None:
    batcher = batcher_of({SHORT: (20.0, 0.1), LONG: (20.0, 2.0)}, slo_ms=200, stance=AT_ONCE)
    add(batcher, LONG)
    for _ in range(8):
        add(batcher, SHORT)
    (batch,) = step(batcher)
    assert Counter(lengths(batch)) == {(SHORT, 1): 8, (LONG, 1): 1}  # 9 in 38 ms, or 8 in 20.8


def test_those_who_would_be_late_in_the_batch_are_shed_of_whatever_length() -> None:
    batcher = batcher_of(FLAT, slo_ms=60, stance=AT_ONCE)
    late = [add(batcher, length, timeout_ms=20.7) for length in (LONG, LONG)]
    kept = [add(batcher, length) for length in (SHORT, LONG, LONG)]
    decided = batcher.step(NOW_MS * MS, 1)
    assert {asked for asked, _ in decided.shed} == set(late)
    assert {part.request for part in decided.batches[0].parts} == set(kept)


def test_a_large_request_that_cannot_be_in_time_is_shed_also_where_it_would_fill_a_batch() -> None:
    batcher = batcher_of(FLAT, slo_ms=60, max_rows=8, stance=AT_ONCE)
    short, large = add(batcher, SHORT), add(batcher, LONG, 24)
    decided = batcher.step(NOW_MS * MS, 1)
    assert [asked for asked, _ in decided.shed] == [large]
    assert [part.request for batch in decided.batches for part in batch.parts] == [short]


@pytest.mark.parametrize(("stance", "spread"), [(LATE, 1.2), (LAST, 1.0)])
def test_held_until_the_last_moment_at_which_one_row_more_would_be_in_time(stance: Stance, spread: float) -> None:
    batcher = batcher_of(FLAT, workers=2, slo_ms=60, spread=1.2, stance=stance)
    for length in (SHORT, LONG):
        add(batcher, length)
    held = batcher.step(NOW_MS * MS, 2)
    assert held.batches == []
    assert held.wake_at_ns == round((NOW_MS + 60 - spread * 21.2) * MS)
    (batch,) = batcher.step(held.wake_at_ns, 2).batches
    assert batch.rows == 2


def test_what_may_not_share_a_batch_is_decided_on_as_planned() -> None:
    planned, chosen = (batcher_of(FLAT, slo_ms=60, keys=("k", "l"), stance=stance) for stance in ("planned", AT_ONCE))
    for batcher in (planned, chosen):
        for key in ("k", "l"):
            for length in (SHORT, LONG):
                add(batcher, length, key=key)
    assert [lengths(batch) for batch in step(chosen)] == [lengths(batch) for batch in step(planned)]


@pytest.mark.slow
@pytest.mark.parametrize("stance", [AT_ONCE, LATE, LAST])
def test_each_request_ends_once_in_every_stance(stance: Stance) -> None:
    batcher = batcher_of(FLAT, workers=3, slo_ms=50, max_rows=8, stance=stance)
    ends = ends_of(batcher, lambda number, _: 4 * (number % 50 == 0))
    assert ends == dict.fromkeys(ends, 1)


def test_queues_of_other_shapes_are_not_told_of() -> None:
    state = State(1)
    served, other = LengthGroup(("k",), SHORT), LengthGroup((1,), LONG)  # which have no order
    for group in (served, other):
        state.new_queue(group)
    _foresee(state, served, lambda _: pytest.fail("none of them is longer"), 1.0, 1, 0, 100 * MS)
    assert [queue.outlook for queue in state.queues.values()] == [None, None]
