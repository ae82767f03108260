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
