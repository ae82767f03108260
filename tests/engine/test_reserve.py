"""What is set aside for answering, and the place in line that it leaves."""

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.batching.queue import deadline_of, virtual_deadline
from gateway.engine.reserve import Reserve
from gateway.types import InferRequest

MS = 1_000_000
SLO_NS = 100 * MS

moves = st.one_of(
    st.tuples(st.just("learn"), st.integers(0, 30)),
    st.tuples(st.just("come"), st.integers(-3, 9), st.integers(0, 4), st.sampled_from((None, 90, 99))),
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(moves, max_size=40))
def test_nobody_is_before_an_earlier_one_of_the_class_by_what_is_set_aside(history: list[tuple[object, ...]]) -> None:
    reserve, now_ns = Reserve(SLO_NS), 1000 * MS
    came: list[tuple[InferRequest, int | None, int]] = []
    for move in history:
        match move:
            case ("learn", int(took_ms)):
                reserve.learn(took_ms * MS)
            case ("come", int(later_ms), int(priority), timeout_ms):
                now_ns += later_ms * MS // 3
                timeout = timeout_ms if isinstance(timeout_ms, int) else None
                own_ns = None if timeout is None else now_ns + timeout * MS
                request = InferRequest("m", "1", "", {}, 1, now_ns, deadline_ns=own_ns, priority=priority)
                key = virtual_deadline(request, deadline_of(request, SLO_NS, reserve.take_ns(now_ns)))
                for before, theirs, their_key in came:
                    alike = before.priority == priority and theirs == timeout
                    assert not alike or before.arrival_ns > now_ns or their_key <= key
                came.append((request, timeout, key))


def test_all_that_was_learned_is_set_aside_once_four_times_as_much_time_has_passed() -> None:
    reserve = Reserve(SLO_NS)
    assert reserve.take_ns(1000 * MS) == 0
    reserve.learn(16 * MS)  # mean and two deviations: 3 · 16 / 16 ms
    assert [reserve.take_ns(round((1000 + ms) * MS)) / MS for ms in (0, 2, 4, 12, 13)] == [0, 0.5, 1, 3, 3]
