"""How much a key may ask, in simulated time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.access.limits import FULL, KeyStanding, Limit, admit

S = 1_000_000_000


def test_what_limits_nothing_is_none() -> None:
    assert Limit.of(None, None, None) is None
    assert Limit.of(10, None, None) == Limit(S // 10, 10, 0)
    assert Limit.of(0.5, None, None) == Limit(2 * S, 1, 0)
    assert Limit.of(None, None, 3) == Limit(0, 1, 3)
    assert Limit.of(100, 7, 3) == Limit(S // 100, 7, 3)


def test_a_burst_is_taken_and_then_one_at_each_interval() -> None:
    limit, standing = Limit(S // 10, 3), KeyStanding()
    for _ in range(3):
        standing, verdict = admit(standing, limit, S)
        assert verdict == 0
    assert admit(standing, limit, S) == (standing, S // 10)  # which says when
    assert admit(standing, limit, S + S // 10 - 1)[1] == 1
    standing, verdict = admit(standing, limit, S + S // 10)
    assert verdict == 0
    assert admit(standing, limit, S + S // 10)[1] == S // 10


def test_so_many_are_in_flight_at_most_and_who_is_refused_uses_up_nothing() -> None:
    limit, standing = Limit(S, 10, 2), KeyStanding()
    for _ in range(2):
        standing, _verdict = admit(standing, limit, 0)
    assert admit(standing, limit, 0) == (standing, FULL)
    standing, verdict = admit(standing._replace(running=1), limit, 0)
    assert verdict == 0
    assert standing == KeyStanding(3 * S, 2)


@given(
    st.integers(1, S), st.integers(1, 50), st.lists(st.integers(0, S), min_size=1, max_size=200)
)  # fmt: skip
def test_no_stretch_of_time_sees_more_than_the_burst_and_the_rate(interval_ns: int, burst: int, gaps: list[int]) -> None:
    limit, standing, now_ns = Limit(interval_ns, burst), KeyStanding(), 0
    taken = []
    for gap in gaps:
        now_ns += gap
        before, (standing, verdict) = standing, admit(standing, limit, now_ns)
        if verdict == 0:
            taken.append(now_ns)
        else:
            assert standing == before
            assert admit(standing, limit, now_ns + verdict)[1] == 0  # it said when there is room
            assert verdict == 1 or admit(standing, limit, now_ns + verdict - 1)[1] > 0
    for first, begin in enumerate(taken):
        for last, end in enumerate(taken[first:], first):
            assert last - first + 1 <= burst + (end - begin) // interval_ns


@given(st.integers(1, S), st.integers(1, 1000), st.integers(0, 1000), st.lists(st.integers(1, 8), min_size=1, max_size=8))
def test_all_places_together_grant_the_whole_and_one_for_each_that_would_get_none(
    interval_ns: int, burst: int, most: int, places: list[int]
) -> None:
    whole, of = Limit(interval_ns, burst, most), sum(places)
    parts = [whole.part(here, of) for here in places]
    assert sum(1 / part.interval_ns for part in parts) <= (1 + 1e-9) / whole.interval_ns
    for name in ("burst", "most"):
        limit, granted = getattr(whole, name), [getattr(part, name) for part in parts]
        assert all(granted) == bool(limit)
        assert sum(granted) <= limit + sum(limit * here < of for here in places)


@pytest.mark.parametrize("before", [Limit(1000 * S, 5), Limit(S, 5000)])
def test_a_limit_that_was_stricter_is_soon_forgotten(before: Limit) -> None:
    """As is the clock of before a reboot."""
    standing, now = KeyStanding(), Limit(S, 2)
    while (outcome := admit(standing, before, S))[1] == 0:
        standing = outcome[0]
    standing, verdict = admit(standing, now, S)
    assert (standing.due_ns, verdict) == (3 * S, S)
    assert admit(standing, now, 2 * S)[1] == 0


@pytest.mark.parametrize("here", [3, 4])
def test_who_is_all_or_more_grants_the_whole(here: int) -> None:
    assert Limit(S, 5, 7).part(here, 3) == Limit(S, 5, 7)
