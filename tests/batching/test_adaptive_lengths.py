"""When requests of other lengths fill what a batch leaves free: step 6 of the adaptive policy, by stated times."""

from collections.abc import Iterable

import numpy as np
import pytest

from gateway.batching.adaptive import Adaptive
from gateway.batching.batch import Batch
from gateway.batching.batcher import Batcher
from gateway.batching.queue import LengthGroup
from gateway.batching.stances import Stance
from gateway.config import Ragged
from gateway.errors import Overloaded
from gateway.types import InferRequest
from tests.batching.curves import MS, kept_curve, kept_model

NOW_MS = 10_000
SHORT, MIDDLE, LONG = 16, 32, 64


def batcher_of(
    times: dict[int, tuple[float, float]],
    *,
    workers: int = 1,
    max_rows: int = 32,
    row_sizes: tuple[int, ...] = (),
    slo_ms: float | None = 1000,
    spread: float = 1.0,
    keys: Iterable[str] = ("k",),
    stance: Stance | None = None,
) -> Batcher:
    """times: fixed and row in ms, by length."""
    policy = Adaptive(stance)
    batcher = Batcher(
        policy,
        max_rows=max_rows,
        row_sizes=row_sizes,
        workers=workers,
        slo_ns=None if slo_ms is None else round(slo_ms * MS),
        ragged=Ragged(pad={"ids": 0}, buckets=(SHORT, MIDDLE, LONG)),
    )
    curves: dict[object, dict[str, object]] = {
        LengthGroup(key, length): kept_curve(*each, max_rows, spread=spread) for key in keys for length, each in times.items()
    }
    policy.service.restore(kept_model(curves))
    return batcher


def add(
    batcher: Batcher,
    length: int,
    rows: int = 1,
    *,
    at_ms: float = NOW_MS,
    timeout_ms: float | None = None,
    key: str = "k",
    priority: int = 0,
) -> InferRequest:
    arrival_ns = round(at_ms * MS)
    deadline_ns = None if timeout_ms is None else arrival_ns + round(timeout_ms * MS)
    ids = np.zeros((rows, length), np.int8)
    asked = InferRequest(
        "m", "1", "", {"ids": ids}, rows, arrival_ns, deadline_ns=deadline_ns, priority=priority, shape_key=key
    )
    batcher.add(asked, arrival_ns)
    return asked


def test_texts_are_joined_by_what_their_lengths_cost() -> None:
    policy = Adaptive()
    batcher = Batcher(policy, max_rows=32, workers=1, slo_ns=1000 * MS, ragged=Ragged(text=("t",)))
    short, long = (LengthGroup("k", length) for length in (16, 64))
    policy.service.restore(kept_model({short: kept_curve(20.0, 1.0, 32), long: kept_curve(20.0, 4.0, 32)}))
    for length, rows in ((13, 2), (15, 2), (60, 1)):
        texts = np.array([[b"t" * length]] * rows, object)
        batcher.add(InferRequest("m", "1", "", {"t": texts}, rows, NOW_MS * MS, shape_key="k"), NOW_MS * MS)
    (batch,) = step(batcher)
    assert [(len(part.request.inputs["t"][0, 0]), part.rows) for part in batch.parts] == [(13, 2), (15, 2)]
    assert (batch.group, batch.expected_ns) == (short, 24 * MS)


def press(batcher: Batcher, length: int) -> None:
    """More arrives than the workers do: a thousand rows a second, of which nothing is left."""
    for ms in range(100):
        batcher.cancel(add(batcher, length, at_ms=NOW_MS - 100 + ms))


def step(batcher: Batcher, free_slots: int = 1) -> list[Batch]:
    return batcher.step(NOW_MS * MS, free_slots).batches


def lengths(batch: Batch) -> list[tuple[int, int]]:
    """Length and rows of each part."""
    return [(part.request.inputs["ids"].shape[1], part.rows) for part in batch.parts]


DEAR = {SHORT: (20.0, 1.0), LONG: (20.0, 4.0)}
EVEN = {SHORT: (20.0, 0.1), MIDDLE: (20.0, 0.1), LONG: (20.0, 0.1)}


def test_one_batch_that_takes_less_than_two_is_expected_to_take_its_own_time() -> None:
    batcher = batcher_of(EVEN)
    add(batcher, SHORT, 2, timeout_ms=500)
    add(batcher, LONG, 3)
    (batch,) = step(batcher)
    assert lengths(batch) == [(SHORT, 2), (LONG, 3)]
    assert (batch.rows, batch.group, batch.expected_ns) == (5, LengthGroup("k", LONG), round(20.5 * MS))
    assert batcher.queue_rows == 0


@pytest.mark.parametrize(("pressed", "joined"), [(False, False), (True, True)])
def test_those_who_would_wait_longer_than_is_gained_do_not_unless_more_comes_than_is_done(pressed: bool, joined: bool) -> None:
    batcher = batcher_of(DEAR)
    if pressed:
        press(batcher, LONG)
    add(batcher, SHORT, 4, timeout_ms=500)  # 24 ms; with the long one 40, which alone takes 24
    add(batcher, LONG, 1)
    (batch,) = step(batcher)
    assert lengths(batch) == ([(SHORT, 4), (LONG, 1)] if joined else [(SHORT, 4)])
    assert batch.expected_ns == (40 if joined else 24) * MS


@pytest.mark.parametrize(("many", "joined"), [(7, False), (8, True), (9, True)])
def test_what_is_gained_and_lost_is_weighed_by_the_rows_it_concerns(many: int, joined: bool) -> None:
    batcher = batcher_of({SHORT: (20.0, 0.0), LONG: (28.0, 0.0)})
    add(batcher, SHORT, 20, timeout_ms=500)  # each of them waits 8 ms longer
    add(batcher, LONG, many)  # and each of these gets 20 ms
    (batch,) = step(batcher)
    assert len(batch.parts) == (2 if joined else 1)


def test_even_when_pressed_nobody_joins_who_saves_no_time() -> None:
    batcher = batcher_of({SHORT: (1.0, 1.0), LONG: (1.0, 9.0)})
    press(batcher, LONG)
    add(batcher, SHORT, 4, timeout_ms=500)
    add(batcher, LONG, 1)
    assert lengths(step(batcher)[0]) == [(SHORT, 4)]


def test_the_first_is_not_made_late_by_what_would_join() -> None:
    batcher = batcher_of({SHORT: (20.0, 0.1), LONG: (30.0, 0.1)})
    add(batcher, SHORT, 1, timeout_ms=30)
    add(batcher, LONG, 3)
    assert lengths(step(batcher)[0]) == [(SHORT, 1)]
    on_time = batcher_of({SHORT: (20.0, 0.1), LONG: (30.0, 0.1)})
    add(on_time, SHORT, 1, timeout_ms=30.4)
    add(on_time, LONG, 3)
    assert lengths(step(on_time)[0]) == [(SHORT, 1), (LONG, 3)]


LATE = {SHORT: (25.0, 0.0), LONG: (30.0, 0.0)}


def with_late_ones(batcher: Batcher, *, others: int = 1) -> list[InferRequest]:
    """A short one that has time, and long ones of a lower class of which the first two would be late in its batch."""
    add(batcher, SHORT, 1, timeout_ms=90)
    late = [add(batcher, LONG, 1, timeout_ms=timeout_ms, priority=4) for timeout_ms in (26, 29)]
    for _ in range(others):
        add(batcher, LONG, 1, timeout_ms=500)
    return late


def test_who_would_be_late_in_a_batch_that_it_could_join_is_shed_if_others_of_its_length_are_not() -> None:
    batcher = batcher_of(LATE)
    late = with_late_ones(batcher)
    decided = batcher.step(NOW_MS * MS, 1)
    assert [asked for asked, _ in decided.shed] == late
    assert all(isinstance(error, Overloaded) for _, error in decided.shed)
    assert [lengths(batch) for batch in decided.batches] == [[(SHORT, 1), (LONG, 1)]]
    assert (batcher.queue_rows, batcher.queue_requests) == (0, 0)


def test_who_would_be_late_is_kept_if_another_worker_may_be_in_time_or_all_of_its_length_would_be() -> None:
    two = batcher_of(LATE, workers=2)
    add(two, SHORT)
    step(two, free_slots=2)  # one worker is busy
    with_late_ones(two)
    alone = batcher_of(LATE)
    with_late_ones(alone, others=0)
    for batcher in (two, alone):
        decided = batcher.step(NOW_MS * MS, 1)
        assert decided.shed == []
        assert [lengths(batch) for batch in decided.batches] == [[(SHORT, 1)]]


def test_room_that_would_be_padded_anyway_is_taken_by_shorter_ones_whatever_they_take() -> None:
    costly = {SHORT: (20.0, 9.0), LONG: (20.0, 9.0)}
    batcher = batcher_of(costly, row_sizes=(1, 4, 8), max_rows=8)
    add(batcher, LONG, 3, timeout_ms=500)
    for _ in range(3):
        add(batcher, SHORT)
    (batch,) = step(batcher)
    assert lengths(batch) == [(LONG, 3), (SHORT, 1)]
    assert (batch.padded_rows, batch.group, batch.expected_ns) == (4, LengthGroup("k", LONG), 56 * MS)
    longer = batcher_of({SHORT: (20.0, 9.0), LONG: (20.0, 19.0)}, row_sizes=(1, 4, 8), max_rows=8)
    add(longer, SHORT, 3, timeout_ms=500)
    add(longer, LONG)
    assert lengths(step(longer)[0]) == [(SHORT, 3)]  # all would be padded to its length
    full = batcher_of(costly, row_sizes=(1, 4, 8), max_rows=8)
    add(full, LONG, 4, timeout_ms=500)
    add(full, SHORT)
    assert lengths(step(full)[0]) == [(LONG, 4)]


def test_only_requests_alike_but_for_their_length_are_joined() -> None:
    batcher = batcher_of(EVEN, keys=("k", "other"))
    add(batcher, SHORT, 1, timeout_ms=500)
    add(batcher, LONG, 1, key="other")
    add(batcher, LONG, 1)
    assert [part.request.shape_key for part in step(batcher)[0].parts] == ["k", "k"]


def test_the_most_urgent_lengths_join_first_up_to_a_full_batch() -> None:
    batcher = batcher_of(EVEN, max_rows=8)
    add(batcher, MIDDLE, 3, timeout_ms=100)
    for _ in range(4):
        add(batcher, SHORT, 1, timeout_ms=400)
    for _ in range(3):
        add(batcher, LONG, 1, timeout_ms=200)
    (batch,) = step(batcher)
    assert lengths(batch) == [(MIDDLE, 3)] + [(LONG, 1)] * 3 + [(SHORT, 1)] * 2
    assert (batch.rows, batch.reason, batch.group) == (8, "full", LengthGroup("k", LONG))
    assert (batcher.queue_rows, batcher.queue_requests) == (2, 2)
    assert lengths(step(batcher)[0]) == [(SHORT, 1)] * 2


def test_all_that_join_are_expected_to_take_what_the_longest_of_them_does() -> None:
    batcher = batcher_of({SHORT: (20.0, 0.0), MIDDLE: (22.0, 0.0), LONG: (25.0, 0.0)})
    add(batcher, SHORT, 2, timeout_ms=100)
    add(batcher, LONG, 2, timeout_ms=200)
    add(batcher, MIDDLE, 1, timeout_ms=300)
    (batch,) = step(batcher)
    assert lengths(batch) == [(SHORT, 2), (LONG, 2), (MIDDLE, 1)]
    assert (batch.group, batch.expected_ns) == (LengthGroup("k", LONG), 25 * MS)


def test_with_another_worker_idle_lengths_keep_apart() -> None:
    batcher = batcher_of(EVEN, workers=2)
    add(batcher, SHORT, 1, timeout_ms=500)
    add(batcher, LONG, 1)
    assert [lengths(batch) for batch in step(batcher, free_slots=2)] == [[(SHORT, 1)], [(LONG, 1)]]


def test_a_batch_that_leaves_some_of_its_own_length_takes_no_other() -> None:
    batcher = batcher_of(EVEN, max_rows=4)
    for _ in range(5):
        add(batcher, SHORT, 1, timeout_ms=500)
    add(batcher, LONG, 1)
    assert lengths(step(batcher)[0]) == [(SHORT, 1)] * 4


def test_a_batch_teaches_the_speed_of_its_longest_and_from_closing_to_return() -> None:
    batcher = batcher_of(EVEN)
    add(batcher, SHORT, 2, timeout_ms=500)
    add(batcher, LONG, 2)
    (batch,) = step(batcher)
    before = {group: curve.expected_ns(4) for group, curve in batcher.service.curves.items()}
    batcher.finished(batch, NOW_MS * MS + 40 * MS, 10 * MS, ok=True)
    after = {group: curve.expected_ns(4) for group, curve in batcher.service.curves.items()}
    assert {group for group in after if after[group] != before[group]} == {LengthGroup("k", LONG)}
    assert after[LengthGroup("k", LONG)] > before[LengthGroup("k", LONG)]
    add(batcher, SHORT, 4)
    (batch,) = step(batcher)
    batcher.finished(batch, NOW_MS * MS + 1, 40 * MS, ok=True)  # by the other machine's clock
    assert batcher.service.curves[LengthGroup("k", SHORT)].expected_ns(4) > before[LengthGroup("k", SHORT)]
    known = dict(batcher.service.curve(LengthGroup("k", SHORT)).to_dict())
    add(batcher, SHORT, 4)
    (batch,) = step(batcher)
    batcher.finished(batch, NOW_MS * MS + 900 * MS, 900 * MS, ok=False)
    assert batcher.service.curve(LengthGroup("k", SHORT)).to_dict() == known


def test_lengths_are_not_joined_on_the_luck_of_one_of_them() -> None:
    """What the short one alone says, from some slow batches, is that the long one's would take it along for nothing."""
    times = {length: (2.0, 0.15 * length) for length in (SHORT, MIDDLE, LONG)}
    batcher = batcher_of(times, slo_ms=None)
    unlucky = batcher.service.curve(LengthGroup("k", SHORT))
    batcher.service.curve(LengthGroup("k", MIDDLE))
    unlucky.restore(kept_curve(2, 0.15 * LONG, 32))
    press(batcher, LONG)
    add(batcher, LONG, 1)
    add(batcher, SHORT, 1)
    assert lengths(step(batcher)[0]) == [(LONG, 1)]


STEEP = {SHORT: (2.0, 0.15 * SHORT), LONG: (2.0, 0.15 * LONG)}


@pytest.mark.parametrize(
    ("fixed_ms", "later_ms", "passing"),
    [
        (2.0, 70, 9),  # 11.6 ms alone, and 9.6 more in a batch: 11.6 · exp(-70 / 400) > 9.6
        (0.5, 15, 9),  # 10.1 · exp(-15 / 400) > 9.6 > 10.1 · exp(-30 / 400)
        (0.5, 30, 0),
        (0.1, 20, 0),
    ],
)
def test_who_came_later_than_one_that_stays_goes_if_enough_is_saved_for_that(
    fixed_ms: float, later_ms: int, passing: int
) -> None:
    batcher = batcher_of({length: (fixed_ms, 0.15 * length) for length in (SHORT, LONG)}, slo_ms=None)
    add(batcher, LONG, at_ms=NOW_MS - 100)
    add(batcher, SHORT, at_ms=NOW_MS - 90)
    for _ in range(9):
        add(batcher, LONG, at_ms=NOW_MS - 100 + later_ms)
    (batch,) = step(batcher)
    assert lengths(batch) == [(LONG, 1)] * (1 + passing)
    assert batch.expected_ns == round((fixed_ms + 0.15 * LONG * (1 + passing)) * MS)
    assert batch.reason == ("cap" if passing < 9 else "idle")


def test_without_a_promise_clients_deadlines_are_kept_by_who_goes_along() -> None:
    batcher = batcher_of({SHORT: (20.0, 0.1), MIDDLE: (20.0, 0.1), LONG: (20.0, 5.0)}, slo_ms=None)
    for length in (SHORT, MIDDLE, LONG):
        add(batcher, length, at_ms=NOW_MS - 100, timeout_ms=122)  # of which 22 are left: 20.2 < 22 < 20 + 3 · 5
    assert lengths(step(batcher)[0]) == [(SHORT, 1), (MIDDLE, 1)]


def test_rows_up_to_a_compiled_size_are_weighed_together() -> None:
    batcher = batcher_of({SHORT: (1.0, 2.0)}, slo_ms=None, max_rows=8, row_sizes=(1, 4, 8), keys=("k", "other"))
    for _ in range(4):  # 3 ms alone, and 9 for two, three or four
        add(batcher, SHORT, at_ms=NOW_MS - 100)
    add(batcher, SHORT, at_ms=NOW_MS - 100, key="other")
    assert lengths(step(batcher)[0]) == [(SHORT, 1)] * 4


def test_a_large_request_is_not_passed_by_those_of_its_own_length_that_came_later() -> None:
    batcher = batcher_of(STEEP, slo_ms=None)
    add(batcher, LONG, at_ms=NOW_MS - 100)
    add(batcher, SHORT, at_ms=NOW_MS - 99)
    add(batcher, LONG, 6, at_ms=NOW_MS - 98)  # a row of it takes 9.9 ms alone, one of the next 11.6
    add(batcher, LONG, at_ms=NOW_MS - 97)
    assert lengths(step(batcher)[0]) == [(LONG, 1), (LONG, 6), (LONG, 1)]


def test_those_who_pass_nobody_go_together_where_that_takes_no_longer() -> None:
    batcher = batcher_of({length: (0.1, 0.15 * length) for length in (SHORT, LONG)}, slo_ms=None)
    for _ in range(4):
        add(batcher, LONG, at_ms=NOW_MS - 100)
    add(batcher, SHORT, at_ms=NOW_MS - 90)
    assert lengths(step(batcher)[0]) == [(LONG, 1)] * 4


def test_where_going_together_saves_nothing_all_go_as_they_came() -> None:
    batcher = batcher_of({length: (0.1, 0.15 * length) for length in (SHORT, LONG)}, slo_ms=None)
    for length, at_ms in ((LONG, -100), (SHORT, -90), (LONG, -80), (LONG, -80)):
        add(batcher, length, at_ms=NOW_MS + at_ms)
    assert [lengths(batch) for _ in range(2) for batch in step(batcher)] == [[(LONG, 1)], [(SHORT, 1)]]


def test_with_a_promise_it_is_kept_in_whatever_order() -> None:
    batcher = batcher_of(STEEP)
    add(batcher, LONG, at_ms=NOW_MS - 100)
    add(batcher, SHORT, at_ms=NOW_MS - 90)
    for _ in range(3):
        add(batcher, LONG, at_ms=NOW_MS - 30)
    assert lengths(step(batcher)[0]) == [(LONG, 1)] * 4


def test_of_those_that_join_only_some_may_pass() -> None:
    near = {SHORT: (5.0, 39.0), MIDDLE: (5.0, 40.0), LONG: (5.0, 42.0)}
    batcher = batcher_of(near, slo_ms=None, max_rows=16, keys=("k", "other"))
    add(batcher, SHORT, at_ms=NOW_MS - 300)
    add(batcher, LONG, at_ms=NOW_MS - 290, key="other")
    for _ in range(5):
        add(batcher, MIDDLE, at_ms=NOW_MS - 280)  # 45 ms alone, and 40 more in a batch: 45 · exp(-20 / 1500) > 40
    for _ in range(10):
        add(batcher, MIDDLE, at_ms=NOW_MS - 20)  # 45 · exp(-280 / 1500) < 40
    (batch,) = step(batcher)
    assert lengths(batch) == [(SHORT, 1), *[(MIDDLE, 1)] * 5]
    assert (batch.group, batch.expected_ns) == (LengthGroup("k", MIDDLE), 245 * MS)
    assert batcher.queue_rows == 11
