from hypothesis import given
from hypothesis import strategies as st

from gateway.batching.leases import Demand, share

MS = 1_000_000
HORIZON_NS = 50 * MS


def test_slots_follow_the_load() -> None:
    assert share(8, [Demand(3.0, 0), Demand(1.0, 0)], HORIZON_NS) == (6, 2)


def test_what_waits_counts_as_load() -> None:
    assert share(4, [Demand(1.0, 0), Demand(1.0, 100 * MS)], HORIZON_NS) == (1, 3)


def test_who_has_anything_to_do_gets_a_slot_and_who_has_nothing_gets_none() -> None:
    assert share(4, [Demand(3.9, 0), Demand(0.01, 0), Demand(0, 0)], HORIZON_NS) == (3, 1, 0)


def test_too_few_slots_go_where_the_most_work_waits() -> None:
    assert share(1, [Demand(0.5, 1 * MS), Demand(0.1, 90 * MS)], HORIZON_NS) == (0, 1)


def test_an_idle_gateway_spreads_them() -> None:
    assert share(5, [Demand(0, 0)] * 2, HORIZON_NS) == (3, 2)


def test_a_lease_that_is_about_right_stays() -> None:
    assert share(4, [Demand(1.15, 0, held=2), Demand(0.85, 0, held=2)], HORIZON_NS) == (2, 2)  # ideal 2.3 and 1.7


@given(
    slots=st.integers(1, 40),
    demands=st.lists(st.builds(Demand, st.floats(0, 20), st.floats(0, 1e10), held=st.integers(0, 40)), min_size=1, max_size=10),
)
def test_every_slot_is_leased_once_and_nobody_with_work_is_left_out(slots: int, demands: list[Demand]) -> None:
    given_slots = share(slots, demands, HORIZON_NS)
    assert sum(given_slots) == slots
    assert min(given_slots) >= 0
    active = [i for i, demand in enumerate(demands) if demand.arriving + demand.waiting_ns / HORIZON_NS > 0]
    if len(active) <= slots:
        assert all(given_slots[i] >= 1 for i in active)


def test_among_equals_who_holds_a_slot_keeps_it_and_else_the_first_gets_it() -> None:
    assert share(2, [Demand(1, 0), Demand(1, 0, held=1), Demand(1, 0, held=1)], HORIZON_NS) == (0, 1, 1)
    assert share(2, [Demand(1, 0)] * 3, HORIZON_NS) == (1, 1, 0)
    assert share(3, [Demand(1, 0)] * 2, HORIZON_NS) == (2, 1)
    assert share(3, [Demand(9, 0), Demand(1, 0), Demand(1, 0)], HORIZON_NS) == (1, 1, 1)


def test_what_is_left_of_a_slot_goes_where_most_is_missing() -> None:
    assert share(10, [Demand(2.1, 0), Demand(4.6, 0), Demand(3.3, 0)], HORIZON_NS) == (2, 5, 3)
    assert share(10, [Demand(2.6, 0), Demand(4.7, 0), Demand(2.7, 0)], HORIZON_NS) == (2, 5, 3)


def test_a_lease_moves_when_it_is_off_by_more_than_three_quarters() -> None:
    assert share(8, [Demand(4.75, 0, held=4), Demand(3.25, 0, held=4)], HORIZON_NS) == (4, 4)
    assert share(8, [Demand(4.76, 0, held=4), Demand(3.24, 0, held=4)], HORIZON_NS) == (5, 3)
    assert share(8, [Demand(1.0, 0, held=5), Demand(7.0, 0, held=3)], HORIZON_NS) == (1, 7)


def test_of_more_leases_than_slots_those_furthest_above_their_part_end() -> None:
    assert share(4, [Demand(1.3, 0, held=2), Demand(1.35, 0, held=2), Demand(1.35, 0, held=2)], HORIZON_NS) == (1, 2, 1)
    assert share(5, [Demand(3.9, 0, held=4), Demand(0.05, 0), Demand(1.05, 0, held=1)], HORIZON_NS) == (3, 1, 1)


def test_an_idle_process_gives_its_slots_up() -> None:
    assert share(4, [Demand(0, 0, held=3), Demand(0.1, 0, held=1)], HORIZON_NS) == (0, 4)
    assert share(4, [Demand(0, 1 * MS), Demand(0, 0)], HORIZON_NS) == (4, 0)
    assert share(7, [Demand(0, 0)] * 3, HORIZON_NS) == (3, 2, 2)
