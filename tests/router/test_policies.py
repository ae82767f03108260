"""What a candidate costs and how its share is counted, and whom each rule takes."""

from collections import Counter
from math import inf

import pytest

from gateway.batching.queue import NEVER
from gateway.config import Ejection, Routing
from gateway.routing.health import Health
from gateway.routing.policies import POLICIES, Candidate, Cheapest, RoutingPolicy
from tests.router.candidates import MS, StatedLane, candidate, lane_of, request

S = 1000 * MS
SLO_NS = 100 * MS


def chosen(
    policy: RoutingPolicy, *usable: Candidate, now_ns: int = 0, deadline_ns: int = SLO_NS
) -> tuple[str | None, str, float]:
    """Whom the policy takes, why, and its eta in ms."""
    route = policy.choose(usable, request(now_ns), now_ns, deadline_ns)
    return route.candidate.label if route.candidate else None, route.reason, route.eta_ns / MS


# a candidate


def test_a_row_costs_what_a_session_does_during_its_part_of_the_usual_batch() -> None:
    fresh = Candidate("fresh", StatedLane(), Health(Ejection()), worker_usd_per_hour=3.6)
    assert fresh.usd_per_row == inf
    fresh.alone_row_ns = 2 * S
    assert fresh.usd_per_row == pytest.approx(0.002)
    fresh.executed(10, 10 * MS)
    assert (fresh.rows, fresh.busy_ns) == (10, 10 * MS)
    assert fresh.usd_per_row == pytest.approx(3.6 / 3600 / 1000)
    fresh.executed(20, 30 * MS)
    assert (fresh.rows, fresh.busy_ns) == (11, 12 * MS)


def test_of_a_share_that_could_not_be_given_two_requests_are_made_up_for() -> None:
    one = candidate("one", 1, 1)
    for _ in range(100):
        one.due(0.25)
    given = []
    for _ in range(12):
        given.append(one.due(0.25))
        one.credit -= given[-1]
    assert given == [True, True, False, False, True, False, False, False, True, False, False, False]


@pytest.mark.parametrize("share", [0.1, 0.3, 1.0])
def test_a_share_is_kept_over_many_requests(share: float) -> None:
    one = candidate("one", 1, 1)
    given = 0
    for _ in range(1000):
        if one.due(share):
            one.credit -= 1
            given += 1
    assert given == pytest.approx(1000 * share, abs=1)


def test_a_cold_start_is_as_configured_else_as_the_last_one_else_ten_seconds() -> None:
    one = candidate("one", 1, 1)
    assert one.start_ns(1, 5 * S) == 0
    assert one.start_ns(0, 5 * S) == 10 * S
    one.woken(5 * S)
    one.woken(7 * S)  # it is on its way already
    assert one.start_ns(0, 8 * S) == 7 * S
    assert one.start_ns(0, 17 * S) == 2 * S  # overdue by two
    assert one.start_ns(2, 18 * S) == 0
    assert one.learned_cold_ns == 13 * S
    one.lives(30 * S)
    assert one.learned_cold_ns == 13 * S  # it lived already
    assert one.start_ns(0, 40 * S) == 13 * S
    told = candidate("told", 1, 1, cold_start_ns=3 * S, learned_cold_ns=4 * S)
    assert told.start_ns(0, 0) == 3 * S


# cheapest


def test_the_part_of_the_time_that_the_cheapest_may_take_is_of_the_slo_or_of_what_is_left() -> None:
    cheap, dear = candidate("cheap", 10, 0.1), candidate("dear", 10, 1.0)
    rule = Cheapest(SLO_NS, 0.5)
    lane_of(cheap).ahead_ms = 40
    assert chosen(rule, cheap, dear) == ("cheap", "cheapest", 50)
    assert chosen(rule, cheap, dear, deadline_ns=99 * MS) == ("dear", "spill", 10)
    assert chosen(rule, cheap, dear, deadline_ns=900 * MS) == ("cheap", "cheapest", 50)  # of the SLO, not of more
    lane_of(cheap).ahead_ms = 41
    assert chosen(rule, cheap, dear, deadline_ns=900 * MS) == ("dear", "spill", 10)
    own_deadline = Cheapest(None, 0.5)
    assert chosen(own_deadline, cheap, dear, deadline_ns=102 * MS) == ("cheap", "cheapest", 51)
    assert chosen(own_deadline, cheap, dear, now_ns=10 * MS, deadline_ns=111 * MS) == ("dear", "spill", 10)


def test_without_a_deadline_two_usual_batches_are_waited_for() -> None:
    cheap, dear = candidate("cheap", 10, 0.1), candidate("dear", 10, 1.0)
    lane_of(cheap).wait_ms, lane_of(cheap).ahead_ms = 4, 6
    assert chosen(Cheapest(None, 0.5), cheap, dear, deadline_ns=NEVER) == ("cheap", "cheapest", 20)
    lane_of(cheap).ahead_ms = 7
    assert chosen(Cheapest(None, 0.5), cheap, dear, deadline_ns=NEVER) == ("dear", "spill", 10)


def test_the_least_eta_is_taken_up_to_the_deadline_itself() -> None:
    cheap, dear = candidate("cheap", 10, 0.1), candidate("dear", 10, 1.0)
    lane_of(cheap).wait_ms = lane_of(dear).wait_ms = 80
    assert chosen(Cheapest(SLO_NS, 0.5), cheap, dear, now_ns=10 * MS) == ("cheap", "fastest", 90)
    assert chosen(Cheapest(SLO_NS, 0.5), cheap, dear, now_ns=11 * MS) == (None, "late", 90)


def test_a_cold_start_counts_until_a_session_lives() -> None:
    cold = candidate("cold", 10, 0.1, cold_start_ns=30 * MS)
    rule = Cheapest(SLO_NS, 0.5)
    lane_of(cold).workers = 0
    lane_of(cold).known = False  # nobody may ask how fast it is before it lives
    assert chosen(rule, cold) == ("cold", "cheapest", 40)
    cold.cold_start_ns = 41 * MS
    assert chosen(rule, cold) == ("cold", "fastest", 51)
    cold.cold_start_ns = 91 * MS
    assert chosen(rule, cold) == (None, "late", 101)
    cold.woken(0)
    lane_of(cold).workers, lane_of(cold).known = 1, True
    assert chosen(rule, cold, now_ns=9 * MS) == ("cold", "cheapest", 10)
    assert cold.learned_cold_ns == 9 * MS


def test_no_request_waits_for_a_cold_start_while_one_with_a_session_is_in_time() -> None:
    cold, warm = candidate("cold", 10, 0.1, cold_start_ns=30 * MS), candidate("warm", 10, 1.0)
    lane_of(cold).workers = 0
    rule = Cheapest(SLO_NS, 0.5)
    assert chosen(rule, cold, warm) == ("warm", "spill", 10)
    lane_of(warm).wait_ms = 90
    assert chosen(rule, cold, warm) == ("warm", "fastest", 100)
    lane_of(warm).wait_ms = 91
    assert chosen(rule, cold, warm) == ("cold", "cheapest", 40)
    lane_of(warm).known, lane_of(warm).wait_ms = False, 0  # it may be in time
    assert chosen(rule, cold, warm) == ("warm", "unknown", inf)


def test_of_several_without_a_session_the_first_in_price_that_is_comfortably_in_time_starts_else_the_soonest() -> None:
    slow, dear, dearer = (candidate(label, 10, usd) for label, usd in (("slow", 0.1), ("dear", 0.5), ("dearer", 1.0)))
    for one, start_ms in ((slow, 60), (dear, 30), (dearer, 20)):
        lane_of(one).workers, one.cold_start_ns = 0, start_ms * MS
    assert chosen(Cheapest(SLO_NS, 0.5), slow, dear, dearer) == ("dear", "spill", 40)
    assert chosen(Cheapest(SLO_NS, 0.1), slow, dear, dearer) == ("dearer", "fastest", 30)


def test_without_a_deadline_a_cold_start_is_waited_for_where_that_is_sooner() -> None:
    cold, warm = candidate("cold", 10, 0.1, cold_start_ns=30 * MS), candidate("warm", 10, 1.0)
    lane_of(cold).workers = 0
    rule = Cheapest(None, 0.5)
    assert chosen(rule, cold, warm, deadline_ns=NEVER) == ("warm", "spill", 10)
    lane_of(warm).wait_ms = 30
    assert chosen(rule, cold, warm, deadline_ns=NEVER) == ("warm", "fastest", 40)
    lane_of(warm).wait_ms = 31
    assert chosen(rule, cold, warm, deadline_ns=NEVER) == ("cold", "fastest", 40)


def test_only_one_that_is_idle_alive_and_too_slow_is_doubted() -> None:
    slow, busy, cold, fast = (candidate(label, own_ms, 0.1) for label, own_ms in zip("sbcf", (80, 80, 80, 10), strict=True))
    lane_of(busy).pending = 1
    lane_of(cold).workers = 0
    assert chosen(Cheapest(SLO_NS, 0.5), slow, busy, cold, fast)[0] == "f"
    assert [one.doubted for one in (slow, busy, cold, fast)] == [True, False, False, False]


def test_where_no_speed_is_known_the_least_busy_gets_the_request_and_else_only_an_idle_one() -> None:
    first, second, known = candidate("first", 1, 0.1), candidate("second", 1, 0.2), candidate("known", 10, 1.0)
    lane_of(first).known = lane_of(second).known = False
    lane_of(first).pending, lane_of(second).pending = 3, 2
    rule = Cheapest(SLO_NS, 0.5)
    assert chosen(rule, first, second) == ("second", "unknown", inf)
    assert chosen(rule, first, second, known) == ("known", "spill", 10)
    lane_of(known).wait_ms = 95
    assert chosen(rule, first, second, known) == (None, "late", 105)
    lane_of(first).pending = 0
    assert chosen(rule, first, second, known) == ("first", "unknown", inf)


@pytest.mark.parametrize("seed", range(10))
def test_each_process_spills_a_little_before_the_share_and_not_where_others_do(seed: int) -> None:
    def spills_at_ms(seed: int) -> int:
        cheap, dear = candidate("cheap", 0, 0.1), candidate("dear", 0, 1.0)
        rule = POLICIES["cheapest"](Routing(spill_share=0.5), 1000 * MS, seed)
        for wait_ms in range(400, 600):
            lane_of(cheap).wait_ms = wait_ms
            if chosen(rule, cheap, dear, deadline_ns=1000 * MS)[0] == "dear":
                return wait_ms
        raise AssertionError("never spilled")

    assert 450 < spills_at_ms(seed) <= 501
    assert spills_at_ms(seed) == spills_at_ms(seed)
    assert spills_at_ms(seed) != spills_at_ms(seed + 100)


# the rules it is measured against


def test_least_eta_takes_who_is_first_done_at_any_price() -> None:
    cheap, dear = candidate("cheap", 10, 0.1), candidate("dear", 9, 1.0)
    rule = POLICIES["least_eta"](Routing(), SLO_NS, 0)
    assert chosen(rule, cheap, dear) == ("dear", "fastest", 9)
    lane_of(dear).wait_ms = 5
    assert chosen(rule, cheap, dear) == ("cheap", "fastest", 10)
    assert chosen(rule, cheap, dear, deadline_ns=9 * MS) == (None, "late", 10)
    free = candidate("free", 0, 0.1)
    assert chosen(rule, dear, free)[0] == "free"


def test_the_shortest_queue_is_taken() -> None:
    three = [candidate(label, 1, 1) for label in "abc"]
    for one, pending in zip(three, (2, 1, 3), strict=True):
        lane_of(one).pending = pending
    assert chosen(POLICIES["shortest_queue"](Routing(), SLO_NS, 0), *three)[:2] == ("b", "shortest_queue")


def test_of_two_at_random_the_one_with_fewer_requests_is_taken() -> None:
    three = [candidate(label, 1, 1) for label in "abc"]
    for one, pending in zip(three, (0, 1, 2), strict=True):
        lane_of(one).pending = pending
    rule = POLICIES["power_of_two"](Routing(), SLO_NS, 3)
    taken = Counter(chosen(rule, *three)[0] for _ in range(300))
    assert taken["c"] == 0  # the longest of all is never the shorter of two
    assert taken["a"] == pytest.approx(200, abs=30)
    assert chosen(rule, three[2])[:2] == ("c", "power_of_two")


def test_round_robin_takes_each_in_turn_by_name() -> None:
    three = [candidate(label, 1, 1) for label in "bca"]
    rule = POLICIES["round_robin"](Routing(), SLO_NS, 0)
    turns = "".join(str(chosen(rule, *three)[0]) for _ in range(6))
    assert turns in ("abcabc", "bcabca", "cabcab")
    assert chosen(rule, *three)[1] == "round_robin"
