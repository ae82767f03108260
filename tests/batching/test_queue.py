"""The queue against a sorted list, and the deadlines that it is ordered by."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.batching.overload import Plan, outlook
from gateway.batching.queue import NEVER, PATIENCE_NS, BatchLimits, Entry, Queue, class_of, deadline_of, virtual_deadline
from gateway.batching.service_curve import ServiceCurve, size_grid
from gateway.types import InferRequest

MS = 1_000_000


def request(arrival_ms: float, *, timeout_ms: float | None = None, priority: int = 0) -> InferRequest:
    arrival_ns = round(arrival_ms * MS)
    deadline_ns = None if timeout_ms is None else arrival_ns + round(timeout_ms * MS)
    return InferRequest("m", "1", "", {}, 1, arrival_ns, deadline_ns=deadline_ns, priority=priority)


def entry(sequence: int, asked: InferRequest, rows: int = 1) -> Entry:
    deadline_ns = deadline_of(asked, None)
    return virtual_deadline(asked, deadline_ns), sequence, deadline_ns, rows, asked


def pushed(queue: Queue, *asked: InferRequest) -> None:
    for sequence, one in enumerate(asked):
        queue.push(*entry(sequence, one))


@pytest.mark.parametrize(
    ("asked", "slo_ms", "reserved_ms", "deadline_ms"),
    [
        (request(5), None, 0, None),
        (request(5, timeout_ms=10), None, 0, 15),
        (request(5), 20, 3, 22),
        (request(5, timeout_ms=30), 20, 3, 22),
        (request(5, timeout_ms=10), 20, 3, 15),
    ],
)
def test_the_deadline_is_the_first_of_the_promise_and_the_clients_own(
    asked: InferRequest, slo_ms: int | None, reserved_ms: int, deadline_ms: int | None
) -> None:
    found = deadline_of(asked, None if slo_ms is None else slo_ms * MS, reserved_ms * MS)
    assert found == (NEVER if deadline_ms is None else deadline_ms * MS)


@pytest.mark.parametrize(("priority", "class_"), [(0, 2), (1, 1), (2, 2), (3, 3), (4, 4), (9, 4)])
def test_there_are_four_classes(priority: int, class_: int) -> None:
    assert class_of(request(0, priority=priority)) == class_


@pytest.mark.parametrize(("priority", "weight"), [(0, 1), (1, 0.5), (2, 1), (3, 2), (4, 4), (7, 4)])
def test_the_place_in_line_is_by_the_time_to_the_deadline_and_the_class(priority: int, weight: float) -> None:
    asked = request(100, timeout_ms=30, priority=priority)
    assert virtual_deadline(asked, 130 * MS) == 100 * MS + weight * 30 * MS
    assert virtual_deadline(asked, 90 * MS) == (90 if weight == 1 else 100) * MS  # it came too late: no time is left to weigh
    patient = request(100, priority=priority)
    assert virtual_deadline(patient, NEVER) == 100 * MS + weight * PATIENCE_NS


def test_rows_are_padded_to_the_next_compiled_size() -> None:
    limits = BatchLimits(8, (2, 4, 8))
    assert [limits.padded(rows) for rows in (1, 2, 3, 4, 5, 8, 9)] == [2, 2, 4, 4, 8, 8, 9]
    assert BatchLimits(8).padded(3) == 3


def test_a_queue_without_lower_classes_knows_it_and_knows_it_again_once_they_are_gone() -> None:
    queue = Queue(None)
    pushed(queue, request(0, timeout_ms=9), request(1, timeout_ms=9, priority=1))
    assert not queue.has_lower_class
    low = request(2, timeout_ms=9, priority=3)
    queue.push(*entry(9, low))
    assert queue.has_lower_class
    queue.pop_many(3)
    pushed(queue, request(3, timeout_ms=9))
    assert not queue.has_lower_class
    queue.push(*entry(9, low))
    assert queue.expired(11 * MS) == []
    assert queue.has_lower_class
    assert [one[4] for one in queue.expired(11 * MS + 1)] == [low]
    assert not queue.has_lower_class
    lows = [request(4, timeout_ms=timeout, priority=4) for timeout in (5, 7)]
    for sequence, one in enumerate(lows):
        queue.push(*entry(20 + sequence, one))
    queue.expired(10 * MS)
    assert queue.has_lower_class  # the other is left
    queue.expired(12 * MS)
    assert not queue.has_lower_class


def test_a_lower_class_that_left_an_emptied_queue_is_forgotten_though_all_came_in_order() -> None:
    queue = Queue(None)
    queue.push(*entry(0, request(0, timeout_ms=9, priority=4)))
    assert queue.has_lower_class
    queue.pop()
    pushed(queue, request(1, timeout_ms=9))
    assert not queue.has_lower_class


@pytest.mark.parametrize(
    ("first", "last", "hopeless"),
    [
        ((1, 20, 0), (1, 21, 0), True),
        ((1, 20, 0), (1, 41, 0), False),
        ((1, 41, 0), (24, 60, 0), False),  # more rows than there is time for, behind one that has it
        ((1, 41, 0), (1, 20, 4), False),  # a lower class, which stands behind those with more time
        ((1, 20, 0), (24, 60, 0), True),
        ((24, 60, 0), (1, 20, 4), True),
    ],
)
def test_all_that_waits_is_hopeless_only_if_each_would_be_late(
    first: tuple[int, float, int], last: tuple[int, float, int], hopeless: bool
) -> None:
    """rows, timeout in ms, priority. T(n) = 30 + n ms, in batches of at most 8."""
    queue = Queue(None)
    curve = ServiceCurve(size_grid(8))
    for rows in (1, 8):
        curve.probe(rows, [(30 + rows) * MS] * 2)
    queue.outlook = outlook(curve, 1.0, Plan(0, 1.0), 1, 2.0, 0)
    for sequence, (rows, timeout_ms, priority) in enumerate((first, last)):
        queue.push(*entry(sequence, request(0, timeout_ms=timeout_ms, priority=priority), rows))
    assert queue.is_hopeless(0) == hopeless


def test_an_empty_queue_has_no_times() -> None:
    queue = Queue("g")
    assert (queue.oldest_ns, queue.least_deadline_ns, queue.rows, list(queue.below(1)), queue.expired(NEVER)) == (
        NEVER, NEVER, 0, [], [],
    )  # fmt: skip


moves = st.one_of(
    st.tuples(st.just("push"), st.integers(0, 4), st.one_of(st.none(), st.integers(0, 20)), st.integers(1, 5)),
    st.tuples(st.just("push"), st.just(0), st.integers(0, 20), st.integers(1, 5)),
    st.tuples(st.just("pop")),
    st.tuples(st.just("pop_many"), st.integers(0, 6)),
    st.tuples(st.just("take_rows")),
    st.tuples(st.just("take_rows_and_yield")),
    st.tuples(st.just("remove"), st.integers(0, 20)),
    st.tuples(st.just("remove_entry"), st.integers(0, 20)),
    st.tuples(st.just("expired"), st.integers(0, 6)),
    st.tuples(st.just("below"), st.integers(1, 4)),
)


@settings(max_examples=120, derandomize=True)
@given(st.lists(moves, max_size=40))
def test_it_is_a_list_that_is_always_sorted(history: list[tuple[object, ...]]) -> None:
    queue = Queue(None)
    model: list[Entry] = []
    now_ms = 0
    for sequence, move in enumerate(history):
        match move:
            case ("push", int(priority), timeout_ms, int(rows)):
                timeout = timeout_ms if isinstance(timeout_ms, int) else None
                one = entry(sequence, request(now_ms, timeout_ms=timeout, priority=priority), rows)
                queue.push(*one)
                model = sorted([*model, one], key=lambda one: one[:2])
            case ("pop",) if model:
                assert queue.pop() == model.pop(0)
            case ("pop_many", int(count)):
                taken, model = model[:count], model[count:]
                assert queue.pop_many(count) == taken
            case ("take_rows",) if model and model[0][3] > 1:
                queue.take_rows(1)
                key, order, deadline_ns, rows, asked = model[0]
                model[0] = (key, order, deadline_ns, rows - 1, asked)
            case ("take_rows_and_yield",) if model and model[0][3] > 1:
                key, _, deadline_ns, rows, asked = model[0]
                anew = virtual_deadline(asked, deadline_ns) + now_ms * MS - asked.arrival_ns
                last = queue.last_before(anew, key)
                assert last == max(one[0] for one in model if one[0] <= max(anew, key))
                queue.take_rows(1, (last, sequence))
                model = sorted([*model[1:], (last, sequence, deadline_ns, rows - 1, asked)], key=lambda one: one[:2])
            case ("remove", int(which)) if which < len(model):
                stranger = request(now_ms)
                assert queue.remove(stranger, model[which][0]) == 0
                gone = model.pop(which)
                assert queue.remove(gone[4], gone[0]) == gone[3]
                assert queue.remove(gone[4], gone[0]) == 0
            case ("remove_entry", int(which)) if which < len(model):
                queue.remove_entry(model.pop(which))
            case ("expired", int(ms)):
                now_ms += ms
                late = [one for one in model if one[2] < now_ms * MS]
                model = [one for one in model if one[2] >= now_ms * MS]
                assert queue.expired(now_ms * MS) == late
            case ("below", int(priority)):
                lower = [one for one in reversed(model) if class_of(one[4]) > priority]
                assert list(queue.below(priority)) == lower
        assert list(queue.entries) == model
        assert queue.rows == sum(one[3] for one in model)
        assert queue.oldest_ns == min((one[4].arrival_ns for one in model), default=NEVER)
        assert queue.least_deadline_ns == min((one[2] for one in model), default=NEVER)
        assert queue.has_lower_class or not any(one[0] > one[2] for one in model)


def test_the_lower_classes_are_found_also_after_one_was_looked_for_in_vain() -> None:
    queue = Queue(None)
    pushed(queue, request(0, timeout_ms=9, priority=1))
    assert list(queue.below(1)) == []
    default = request(1, timeout_ms=9)
    queue.push(*entry(5, default))
    assert [one[4] for one in queue.below(1)] == [default]
    assert list(queue.below(2)) == []
    low = request(2, timeout_ms=9, priority=4)
    queue.push(*entry(6, low))
    assert [one[4] for one in queue.below(2)] == [low]
    assert [one[4] for one in queue.below(3)] == [low]
    assert [one[4] for one in queue.below(1)] == [low, default]
    queue.pop_many(9)
    queue.push(*entry(7, low))
    assert [one[4] for one in queue.below(3)] == [low]
