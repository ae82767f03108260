"""Who gets a request, a copy, or nothing: decided from stated forecasts."""

import pytest

from gateway.config import Ejection, Routing
from gateway.routing.health import Health
from gateway.routing.policies import POLICIES, Candidate, Cheapest, Route
from gateway.routing.router import Copy, Router
from tests.router.candidates import MS, StatedLane, candidate, lane_of, request

SLO_NS = 100 * MS
SECOND = 1000 * MS


def router_of(*candidates: Candidate, policy: str = "cheapest", slo_ns: int | None = SLO_NS, **ejection: float) -> Router:
    made = POLICIES[policy](Routing(), slo_ns, 0) if policy != "cheapest" else Cheapest(slo_ns, 0.5)
    return Router(candidates, made, Ejection(**ejection), slo_ns)


def chosen(router: Router, now_ns: int = 0, **options: Candidate) -> tuple[str | None, str]:
    route = router.route(request(now_ns), now_ns, **options)
    return (route.candidate.label if route.candidate else None, route.reason)


# the rule


def test_the_cheapest_per_row_is_taken_although_others_are_faster() -> None:
    slow = candidate("slow", own_ms=40, usd=0.1)  # 40 · 0.1 = 4
    fast = candidate("fast", own_ms=5, usd=1.0)  # 5 · 1.0 = 5
    assert chosen(router_of(fast, slow)) == ("slow", "cheapest")


def test_past_half_the_slo_the_next_in_price_is_taken() -> None:
    cheap, dear = candidate("cheap", 10, 0.1), candidate("dear", 10, 1.0)
    router = router_of(cheap, dear)
    lane_of(cheap).wait_ms = 40
    assert chosen(router) == ("cheap", "cheapest")  # 40 + 10 <= 50
    lane_of(cheap).wait_ms = 41
    assert chosen(router) == ("dear", "spill")


def test_if_none_is_comfortably_in_time_the_least_eta_is_taken_and_past_the_deadline_none() -> None:
    cheap, dear = candidate("cheap", 10, 0.1), candidate("dear", 10, 1.0)
    router = router_of(cheap, dear)
    lane_of(cheap).wait_ms, lane_of(dear).wait_ms = 60, 70
    assert chosen(router) == ("cheap", "fastest")
    lane_of(cheap).wait_ms = 91
    assert chosen(router) == ("dear", "fastest")
    lane_of(dear).wait_ms = 91
    assert chosen(router) == (None, "late")


def test_past_the_deadline_one_that_is_idle_gets_the_request_and_none_that_is_moved() -> None:
    cheap, dear = candidate("cheap", 10, 0.1, equivalents=("dear",)), candidate("dear", 10, 1.0, equivalents=("cheap",))
    router = router_of(cheap, dear)
    lane_of(cheap).own_ms, lane_of(dear).own_ms = 130, 120
    for _ in range(2):
        assert chosen(router) == ("dear", "idle")
        told = router.explain(request(), 0)
        assert (told["backend"], told["reason"]) == ("dear", "idle")
        assert router.route(request(), 0, failed=cheap) == Route(None, "late", 120 * MS)
        cheap.health.eject(0)  # so is one of those that remain
    dear.health.eject(0)
    assert chosen(router) == ("dear", "panic")
    for busy in ({"wait_ms": 1.0}, {"workers": 0}):
        dear.lane = StatedLane(120, **busy)
        assert chosen(router) == ("cheap", "panic")
    lane_of(dear).pending = 1
    assert chosen(router)[0] is None


@pytest.mark.parametrize("slo_ns", [SLO_NS, None])
def test_what_has_little_time_is_tried_on_no_idle_one_while_others_would_be_in_time(slo_ns: int | None) -> None:
    router = router_of(candidate("cheap", 60, 0.1), candidate("dear", 50, 1.0), slo_ns=slo_ns)
    assert router.route(request(deadline_ns=30 * MS), 0).reason == "late"


def test_a_clients_own_deadline_counts_as_the_slo_does() -> None:
    cheap, dear = candidate("cheap", 30, 0.1), candidate("dear", 10, 1.0)
    route = router_of(cheap, dear).route(request(deadline_ns=50 * MS), 0)
    assert (route.candidate, route.reason) == (dear, "spill")  # 30 > 0.5 · 50


def test_without_any_deadline_a_backend_is_passed_over_once_a_batch_would_wait_besides_the_one_that_runs() -> None:
    cheap, dear = candidate("cheap", 10, 0.1), candidate("dear", 10, 1.0)
    router = router_of(cheap, dear, slo_ns=None)
    lane_of(cheap).wait_ms = 10
    assert chosen(router) == ("cheap", "cheapest")
    lane_of(cheap).wait_ms = 11
    assert chosen(router) == ("dear", "spill")
    lane_of(dear).wait_ms = 5000
    assert chosen(router) == ("cheap", "fastest")


def test_the_price_is_that_of_the_usual_batch() -> None:
    batches = candidate("batches", 10, 1.0)
    alone = candidate("alone", 5, 0.2)  # 5 · 0.2 = 1 per row
    router = router_of(alone, batches)
    assert chosen(router) == ("alone", "cheapest")
    for _ in range(50):
        batches.executed(32, 20 * MS)  # 20 · 1.0 / 32 = 0.6 per row
    assert chosen(router, SECOND) == ("batches", "cheapest")


def test_a_backend_of_unknown_speed_learns_from_a_copy_and_not_from_a_caller() -> None:
    known, unknown = candidate("known", 10, 1.0), candidate("unknown", 10, 0.1)
    lane_of(unknown).known = False
    router = router_of(unknown, known)
    assert chosen(router) == ("known", "spill")
    (copy,) = router.copies(request(), 0)
    assert (copy.candidate, copy.why) == (unknown, "learn")


def test_while_no_speed_is_known_the_requests_spread() -> None:
    one, other = candidate("one", 1, 0.1), candidate("other", 1, 0.2)
    for each in (one, other):
        lane_of(each).known = False
    router = router_of(one, other)
    assert chosen(router) == ("one", "unknown")
    lane_of(one).pending = 1
    assert chosen(router) == ("other", "unknown")


def test_one_found_idle_and_too_slow_gets_copies_until_it_is_as_slow_as_believed() -> None:
    slow, other = candidate("slow", 80, 0.01), candidate("other", 10, 1.0)
    router = router_of(slow, other)
    chosen(router)
    assert not router.copies(request(), 0)  # it is only now found to be slow
    chosen(router, SECOND)
    (copy,) = router.copies(request(), SECOND)
    assert (copy.candidate, copy.why) == (slow, "learn")
    router.sent(copy, SECOND)
    router.returned(copy, SECOND, 20 * MS, ok=True)  # four times faster than believed
    chosen(router, SECOND + 100 * MS)
    router.executed(other, 1, 10 * MS, 10 * MS, SECOND + 100 * MS)
    (copy,) = router.copies(request(), SECOND + 100 * MS)
    router.sent(copy, SECOND + 100 * MS)
    router.returned(copy, SECOND + 100 * MS, 80 * MS, ok=True)
    for later_ms in range(200, 2100, 100):  # it is found idle and too slow all the time
        chosen(router, SECOND + later_ms * MS)
        router.executed(other, 1, 10 * MS, 10 * MS, SECOND + later_ms * MS)
        assert not router.copies(request(), SECOND + later_ms * MS)
    chosen(router, SECOND + 2100 * MS)  # two seconds after the last
    (copy,) = router.copies(request(), SECOND + 2100 * MS)
    assert (copy.candidate, copy.why) == (slow, "learn")


def used(router: Router, one: Candidate, until_s: int) -> int:
    """Let it run fifty requests a second, each alone and for 10 ms. Gives how many copies others got, of 20 ms each."""
    copies = 0
    for at in range(until_s * 50):
        now_ns = at * 20 * MS
        assert chosen(router, now_ns)[0] == one.label
        for copy in router.copies(request(), now_ns):
            assert copy.why == "learn"
            copies += 1
            router.sent(copy, now_ns)
            router.executed(copy.candidate, 1, 20 * MS, 20 * MS, now_ns, copied=True)
            router.returned(copy, now_ns, 20 * MS, ok=True)
        router.executed(one, 1, 10 * MS, 10 * MS, now_ns)
    return copies


def test_copies_to_one_that_is_dearer_cost_a_hundredth_of_what_all_cost() -> None:
    cheap, dear = candidate("cheap", 10, 0.1), candidate("dear", 20, 1.0)
    copies = used(router_of(cheap, dear), cheap, until_s=100)
    assert 0.5 < copies * 20 * 1.0 / (100 * 50 * 10 * 0.1) / 0.01 < 1.5


def test_no_copy_tells_the_price_of_one_that_has_none_or_is_behind_one_that_has_none_or_that_scales_to_zero() -> None:
    free, priced = candidate("free", 10, 0.0), candidate("priced", 20, 1.0)
    assert used(router_of(free, priced), free, until_s=20) == 0
    free, other = candidate("free", 10, 0.0), candidate("other", 20, 0.0)
    assert used(router_of(free, other), free, until_s=20) == 0
    cheap, zero = candidate("cheap", 10, 0.1), candidate("zero", 20, 1.0, to_zero=True)
    assert used(router_of(cheap, zero), cheap, until_s=20) == 0


def test_the_price_of_one_that_is_unused_follows_what_is_known_of_its_speed_with_its_usual_batch() -> None:
    used_one, other = candidate("used", 10, 0.1), candidate("other", 20, 1.0)
    router = router_of(used_one, other)
    other.rows, other.busy_ns = 8.0, 400.0 * MS  # as it once was
    used(router, used_one, until_s=20)
    assert other.rows == 8.0
    assert other.busy_ns == pytest.approx(20 * MS, rel=0.01)  # what its lane says of any batch


def test_the_price_of_one_that_is_unused_is_of_the_mean_as_that_of_one_that_is_used() -> None:
    used_one, other = candidate("used", 10, 0.1), candidate("other", 20, 0.1)
    lane_of(other).own_ms, lane_of(other).spread = 24, 3.0  # 8 on average
    fresh = Candidate("fresh", StatedLane(30, spread=3.0), Health(Ejection()), 0.1)
    router = router_of(used_one, other, fresh)
    used(router, used_one, until_s=2)
    assert fresh.alone_row_ns == 10 * MS
    for at in range(100):
        router.route(request(3 * SECOND + at * 100 * MS), 3 * SECOND + at * 100 * MS)
    assert other.busy_ns == pytest.approx(8 * MS, rel=0.01)
    assert chosen(router, 20 * SECOND) == ("other", "cheapest")


def test_the_price_of_one_that_is_unused_holds_what_came_after_the_first_part_of_its_answers() -> None:
    cheap, other = candidate("cheap", 100, 1.0), candidate("other", 4, 4.0)
    router = router_of(cheap, other)
    lane_of(cheap).own_ms, lane_of(other).own_ms = 4, 5  # to the first part, as a lane forecasts it
    for _ in range(100):
        router.executed(other, 1, 100 * MS, 4 * MS, 0, streamed_ns=96 * MS)
    for at in range(100):
        router.route(request(3 * SECOND + at * 100 * MS), 3 * SECOND + at * 100 * MS)
        router.executed(cheap, 1, 100 * MS, 4 * MS, 3 * SECOND + at * 100 * MS, streamed_ns=96 * MS)
    assert other.busy_ns == pytest.approx(101 * MS, rel=0.01)
    assert chosen(router, 13 * SECOND) == ("cheap", "cheapest")


# health


def test_an_ejected_backend_gets_no_requests_until_copies_have_shown_that_it_works() -> None:
    bad, good = candidate("bad", 1, 0.1), candidate("good", 1, 1.0)
    router = router_of(bad, good)
    assert [router.failed(bad, 0, hung=False) for _ in range(3)] == [False, False, True]
    assert chosen(router) == ("good", "cheapest")
    assert not router.copies(request(), 0)
    for now_ns in (SECOND, SECOND + 300 * MS):
        assert chosen(router, now_ns) == ("good", "cheapest")
        (copy,) = router.copies(request(), now_ns)
        assert (copy.candidate, copy.why) == (bad, "probe")
        router.sent(copy, now_ns)
        chosen(router, now_ns + 100 * MS)
        assert not router.copies(request(), now_ns + 100 * MS)  # one at a time
        router.returned(copy, now_ns + 150 * MS, MS, ok=True)
    assert chosen(router, 2 * SECOND) == ("bad", "cheapest")


def test_a_probe_that_answers_after_the_slo_is_a_bad_one() -> None:
    bad, good = candidate("bad", 1, 0.1), candidate("good", 1, 1.0)
    router = router_of(bad, good)
    router.failed(bad, 0, hung=True)
    chosen(router, SECOND)
    (copy,) = router.copies(request(), SECOND)
    router.returned(copy, SECOND, SLO_NS + 1, ok=True)
    assert not bad.health.may_probe(3 * SECOND - 1)  # two more seconds, from then


def test_the_last_backend_is_never_ejected() -> None:
    one, other = candidate("one", 1, 0.1), candidate("other", 1, 1.0)
    router = router_of(one, other)
    assert router.failed(one, 0, hung=True)
    assert not router.failed(other, 0, hung=True)
    assert chosen(router) == ("other", "cheapest")


def test_one_that_cannot_be_reached_counts_as_out_when_another_is_to_be_ejected() -> None:
    one, other = candidate("one", 1, 0.1), candidate("other", 1, 1.0)
    router = router_of(one, other)
    lane_of(one).available = False
    assert not router.failed(other, 0, hung=True)


def test_no_more_than_the_share_is_ejected() -> None:
    several = [candidate(str(index), 1, 1.0) for index in range(4)]
    router = router_of(*several, max_share=0.5)
    assert [router.failed(each, 0, hung=True) for each in several] == [True, True, False, False]


def test_with_a_share_of_none_nobody_is_ejected() -> None:
    one, other = candidate("one", 1, 0.1), candidate("other", 1, 1.0)
    router = router_of(one, other, max_share=0.0)
    assert not router.failed(one, 0, hung=True)
    assert chosen(router) == ("one", "cheapest")


def test_with_all_others_gone_the_ejected_serve_again() -> None:
    one, other = candidate("one", 1, 0.1), candidate("other", 1, 1.0)
    router = router_of(one, other)
    router.failed(one, 0, hung=True)
    lane_of(other).available = False
    assert chosen(router) == ("one", "panic")
    lane_of(one).available = False
    assert chosen(router) == (None, "down")


def test_one_that_is_ten_times_slower_than_predicted_again_and_again_is_ejected() -> None:
    one, other = candidate("one", 1, 0.1), candidate("other", 1, 1.0)
    router = router_of(one, other)
    verdicts = [router.executed(one, 1, busy_ns=150 * MS, expected_ns=10 * MS, now_ns=0) for _ in range(3)]
    assert verdicts == [False, False, True]


def test_a_failure_after_long_is_one_too_many() -> None:
    router = router_of(candidate("one", 1, 0.1), slo_ns=100 * MS)
    assert router.hung(101 * MS, expected_ns=0)
    assert not router.hung(101 * MS, expected_ns=40 * MS)  # of 3 · 40
    assert router_of(candidate("one", 1, 0.1), slo_ns=None).hung(501 * MS, expected_ns=0)


# shares


def test_a_canary_gets_its_share_and_nothing_else() -> None:
    stable, canary = candidate("stable", 1, 1.0), candidate("canary", 1, 0.01, canary_share=0.1)
    router = router_of(stable, canary)
    labels = [chosen(router)[0] for _ in range(100)]
    assert labels.count("canary") == 10
    lane_of(stable).wait_ms = 90
    assert [chosen(router)[0] for _ in range(9)] == ["stable"] * 9


@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.1, 0.1), (0.3, 0.3, 0.3)])
def test_each_of_several_canaries_gets_its_share_of_all_requests(shares: tuple[float, ...]) -> None:
    canaries = [candidate(f"canary {at}", 1, 0.01, canary_share=share) for at, share in enumerate(shares)]
    router = router_of(candidate("stable", 1, 1.0), *canaries)
    labels = [chosen(router)[0] for _ in range(1000)]
    for at, share in enumerate(shares):
        assert abs(labels.count(f"canary {at}") - 1000 * share) <= 2
    assert abs(labels.count("stable") - 1000 * (1 - sum(shares))) <= 2 * len(shares)


def test_a_canary_that_is_late_or_ejected_gets_nothing() -> None:
    stable, canary = candidate("stable", 1, 1.0), candidate("canary", 1, 0.01, canary_share=0.5)
    router = router_of(stable, canary)
    lane_of(canary).wait_ms = 100
    assert {chosen(router)[0] for _ in range(10)} == {"stable"}
    lane_of(canary).wait_ms = 0
    assert router.failed(canary, 0, hung=True)
    assert {chosen(router)[0] for _ in range(10)} == {"stable"}


def test_without_any_deadline_a_canary_gets_nothing_once_more_than_a_batch_is_ahead_of_it() -> None:
    stable, canary = candidate("stable", 1, 1.0), candidate("canary", 10, 0.01, canary_share=0.5)
    router = router_of(stable, canary, slo_ns=None)
    lane_of(canary).wait_ms = 10
    assert [chosen(router)[0] for _ in range(4)] == ["stable", "canary"] * 2
    lane_of(canary).wait_ms = 11  # as that of a batch that is overdue by so much
    assert {chosen(router)[0] for _ in range(10)} == {"stable"}
    lane_of(canary).wait_ms = 5
    lane_of(canary).ahead_ms = 6
    assert {chosen(router)[0] for _ in range(10)} == {"stable"}
    lane_of(canary).wait_ms = lane_of(canary).ahead_ms = 0
    assert chosen(router)[0] == "canary"


def test_without_any_deadline_a_canary_without_a_session_gets_its_share_which_starts_one() -> None:
    stable, canary = candidate("stable", 1, 1.0), candidate("canary", 10, 0.01, canary_share=0.5)
    router = router_of(stable, canary, slo_ns=None)
    lane_of(canary).workers = 0
    assert [chosen(router)[0] for _ in range(4)] == ["stable", "canary"] * 2


def test_a_shadow_gets_copies_of_its_share_only_while_it_is_idle_and_never_a_request() -> None:
    stable, shadow = candidate("stable", 1, 1.0), candidate("shadow", 1, 0.01, shadow_share=0.25)
    router = router_of(stable, shadow)
    copies = 0
    for _ in range(100):
        assert chosen(router)[0] == "stable"
        copies += len(router.copies(request(), 0))
    assert copies == 25
    lane_of(shadow).wait_ms = 1
    for _ in range(100):
        copies += len(router.copies(request(), 0))
    assert copies == 25
    lane_of(stable).available = False
    assert chosen(router) == (None, "down")


# failed elsewhere


def test_only_equivalents_take_over_what_failed() -> None:
    failed = candidate("failed", 1, 0.1, equivalents=("dear",))
    other = candidate("other", 1, 0.2)
    dear = candidate("dear", 1, 1.0)
    router = router_of(failed, other, dear)
    assert chosen(router, failed=failed) == ("dear", "cheapest")
    assert chosen(router, failed=other) == (None, "down")


# cold


def test_a_backend_without_sessions_is_its_cold_start_away() -> None:
    cold = candidate("cold", 1, 0.1, cold_start_ns=20 * SECOND)
    warm = candidate("warm", 1, 1.0)
    lane_of(cold).workers = 0
    router = router_of(cold, warm)
    assert chosen(router) == ("warm", "spill")
    assert not router.copies(request(), 0)
    lane_of(warm).wait_ms, lane_of(warm).pending = 200, 9
    assert chosen(router) == (None, "late")
    chosen(router, SECOND)
    (copy,) = router.copies(request(), SECOND)
    assert (copy.candidate, copy.why) == (cold, "wake")
    router.sent(copy, SECOND)
    assert cold.start_ns(0, 6 * SECOND) == 15 * SECOND
    lane_of(cold).workers = 1
    assert chosen(router, 8 * SECOND) == ("cold", "cheapest")
    assert cold.learned_cold_ns == 7 * SECOND


def test_without_a_deadline_a_request_waits_for_the_cold_start_if_nothing_is_warm() -> None:
    cold = candidate("cold", 1, 0.1)
    lane_of(cold).workers = 0
    other = candidate("other", 1, 1.0)
    lane_of(other).available = False
    assert chosen(router_of(cold, other, slo_ns=None)) == ("cold", "fastest")


# the rules it is measured against


@pytest.mark.parametrize("policy", ["round_robin", "power_of_two", "shortest_queue", "least_eta"])
def test_the_other_policies_choose_by_their_own_measure(policy: str) -> None:
    cheap, dear = candidate("cheap", 20, 0.1), candidate("dear", 10, 1.0)
    lane_of(cheap).pending = 5
    router = router_of(cheap, dear, policy=policy)
    labels = [chosen(router)[0] for _ in range(10)]
    assert labels.count("dear") == (5 if policy == "round_robin" else 10)


def test_explaining_names_the_parts_for_every_candidate() -> None:
    cheap, dear = candidate("cheap", 10, 0.1), candidate("dear", 10, 1.0)
    lane_of(cheap).wait_ms = 45
    told = router_of(cheap, dear).explain(request(), 0)
    assert (told["backend"], told["reason"]) == ("dear", "spill")
    assert [lane["backend"] for lane in told["lanes"]] == ["cheap", "dear"]
    first = told["lanes"][0]
    assert (first["wait_ms"], first["own_ms"], first["eta_ms"], first["in_time"]) == (45, 10, 55, True)
    assert first["usd_per_million_rows"] == pytest.approx(0.1 * 0.01 / 3600 * 1e6)


# looks: ten a second


def looked(router: Router, now_ns: int) -> list[tuple[str, str]]:
    """Route a request, and who is to get a copy of it."""
    router.route(request(now_ns), now_ns)
    return [(copy.candidate.label, copy.why) for copy in router.copies(request(now_ns), now_ns)]


def test_prices_are_compared_ten_times_a_second() -> None:
    one, other = candidate("one", 10, 0.1), candidate("other", 10, 0.2)
    router = router_of(one, other)
    assert chosen(router, 0) == ("one", "cheapest")
    for _ in range(50):
        one.executed(1, 30 * MS)
    assert chosen(router, 100 * MS - 1) == ("one", "cheapest")
    assert chosen(router, 100 * MS) == ("other", "cheapest")


def test_equal_prices_are_told_apart_by_the_price_of_a_session() -> None:
    dear, cheap = candidate("dear", 5, 0.2), candidate("cheap", 10, 0.1)  # equal per row
    assert chosen(router_of(dear, cheap)) == ("cheap", "cheapest")


def test_one_that_has_not_run_yet_costs_what_a_request_alone_would() -> None:
    def fresh(label: str, usd: float) -> Candidate:
        return Candidate(label, StatedLane(10), Health(Ejection()), usd)

    one, other = fresh("one", 0.2), fresh("other", 0.3)
    router = router_of(one, other)
    router.route(request(rows=4), 0)
    assert [each.alone_row_ns for each in (one, other)] == [2.5 * MS, 2.5 * MS]
    lane_of(one).own_ms, lane_of(one).pending = 99, 1  # what waits says nothing of one alone
    lane_of(other).own_ms, lane_of(other).known = 1, False
    chosen(router, SECOND)
    assert [each.alone_row_ns for each in (one, other)] == [2.5 * MS, 2.5 * MS]


def test_a_copy_that_is_out_is_the_only_one() -> None:
    bad, good = candidate("bad", 1, 0.1), candidate("good", 1, 1.0)
    router = router_of(bad, good)
    router.failed(bad, 0, hung=True)
    router.route(request(SECOND), SECOND)
    (copy,) = router.copies(request(SECOND), SECOND)
    assert router.copies(request(SECOND), SECOND) == ()  # it is not due twice
    router.sent(copy, SECOND)
    assert [looked(router, SECOND + ms * MS) for ms in (100, 200, 300)] == [[], [], []]
    router.returned(copy, SECOND + 350 * MS, MS, ok=True)
    assert looked(router, SECOND + 400 * MS) == [("bad", "probe")]


def test_what_cannot_be_reached_gets_no_copies() -> None:
    bad, good = candidate("bad", 1, 0.1), candidate("good", 1, 1.0)
    router = router_of(bad, good)
    router.failed(bad, 0, hung=True)
    lane_of(bad).available = False
    assert looked(router, SECOND) == []
    lane_of(bad).available = True
    assert looked(router, SECOND + 100 * MS) == [("bad", "probe")]


def test_one_of_unknown_speed_that_has_something_to_do_learns_from_that() -> None:
    known, unknown = candidate("known", 10, 1.0), candidate("unknown", 10, 0.1)
    lane_of(unknown).known = False
    lane_of(unknown).pending = 1
    router = router_of(unknown, known)
    assert looked(router, 0) == []
    lane_of(unknown).pending = 0
    assert looked(router, 100 * MS) == [("unknown", "learn")]


def test_a_backend_alone_gets_no_copies_of_its_own_requests() -> None:
    only = candidate("only", 10, 1.0)
    lane_of(only).known = False
    assert looked(router_of(only), 0) == []


def test_a_copy_to_learn_says_what_was_forecast_and_one_that_was_slow_is_not_sent_again_at_once() -> None:
    slow, other = candidate("slow", 80, 0.01), candidate("other", 10, 1.0)
    lane_of(slow).ahead_ms = 5
    router = router_of(slow, other)
    chosen(router)
    chosen(router, SECOND)
    (copy,) = router.copies(request(), SECOND)
    assert copy.expected_ns == 85 * MS
    router.sent(copy, SECOND)
    router.returned(copy, SECOND, round(42.5 * MS), ok=True)  # half of it is scatter still
    assert not slow.doubted
    assert slow.next_copy_ns == SECOND + 2 * SECOND
    fresh = candidate("fresh", 1, 0.01)
    lane_of(fresh).known = False
    (copy,) = _copies(router_of(fresh, other), 0)
    assert copy.expected_ns == 0


def test_a_copy_that_failed_has_shown_nothing_to_be_faster() -> None:
    slow, other = candidate("slow", 80, 0.01), candidate("other", 10, 1.0)
    router = router_of(slow, other)
    chosen(router)
    (copy,) = _copies(router, SECOND)
    router.sent(copy, SECOND)
    router.returned(copy, SECOND, 1 * MS, ok=False)
    assert not slow.doubted
    assert [looked(router, SECOND + ms * MS) for ms in (100, 200, 300)] == [[], [], []]


def _copies(router: Router, now_ns: int) -> list[Copy]:
    router.route(request(now_ns), now_ns)
    return list(router.copies(request(now_ns), now_ns))


def test_one_without_a_session_is_woken_only_when_requests_find_no_room() -> None:
    cold, warm = candidate("cold", 1, 0.1), candidate("warm", 10, 1.0)
    lane_of(cold).workers = 0
    router = router_of(cold, warm)
    assert [looked(router, ms * MS) for ms in (0, 100, 200)] == [[], [], []]
    lane_of(warm).wait_ms, lane_of(warm).pending = 60, 1  # no longer comfortably in time
    assert looked(router, 250 * MS) == []
    lane_of(warm).wait_ms = 0
    assert looked(router, 300 * MS) == [("cold", "wake")]  # one found no room since the last look
    assert looked(router, 400 * MS) == []


def test_one_that_was_woken_is_seen_to_live_though_no_request_goes_there() -> None:
    cheap, cold = candidate("cheap", 1, 0.1), candidate("cold", 1, 1.0)
    lane_of(cold).workers = 0
    router = router_of(cheap, cold)
    cold.woken(0)
    chosen(router)
    lane_of(cold).workers = 1
    assert chosen(router, 7 * SECOND) == ("cheap", "cheapest")
    assert cold.learned_cold_ns == 7 * SECOND


def test_a_copy_that_woke_one_says_nothing_of_its_speed() -> None:
    cold, warm = candidate("cold", 80, 0.1), candidate("warm", 10, 1.0)
    lane_of(cold).workers = 0
    lane_of(warm).wait_ms, lane_of(warm).pending = 60, 1
    router = router_of(cold, warm)
    chosen(router)
    (copy,) = _copies(router, 100 * MS)
    assert copy.why == "wake"
    router.sent(copy, 100 * MS)
    lane_of(cold).workers = 1
    router.returned(copy, 200 * MS, 80 * MS, ok=True)
    lane_of(warm).wait_ms = 0
    assert looked(router, 200 * MS) == []  # now it is found idle, and slow
    assert looked(router, 300 * MS) == [("cold", "learn")]


def test_a_shadow_without_a_session_is_not_woken_for_callers() -> None:
    shadow, warm = candidate("shadow", 1, 0.1, shadow_share=0.01), candidate("warm", 10, 1.0)
    lane_of(shadow).workers = 0
    lane_of(warm).wait_ms, lane_of(warm).pending = 60, 1
    router = router_of(shadow, warm)
    assert [looked(router, ms * MS) for ms in (0, 100, 200)] == [[], [], []]


# more on health


@pytest.mark.parametrize(
    ("slo_ns", "took_ns", "ok", "good"),
    [
        (SLO_NS, SLO_NS, True, True),
        (SLO_NS, SLO_NS + 1, True, False),
        (SLO_NS, 1, False, False),
        (None, 100 * SECOND, True, True),
        (None, 1, False, False),
    ],
)
def test_a_probe_must_be_answered_well_and_within_the_slo_if_there_is_one(
    slo_ns: int | None, took_ns: int, ok: bool, good: bool
) -> None:
    bad, other = candidate("bad", 1, 0.1), candidate("other", 1, 1.0)
    router = router_of(bad, other, slo_ns=slo_ns)
    router.failed(bad, 0, hung=True)
    (copy,) = _copies(router, SECOND)
    router.sent(copy, SECOND)
    router.returned(copy, SECOND, took_ns, ok=ok)
    assert bad.health.may_probe(SECOND) is good  # not ejected anew


def test_executions_are_outliers_beyond_ten_predictions_and_the_slo() -> None:
    def ejected(slo_ns: int | None, busy_ns: int, expected_ns: int) -> bool:
        one, other = candidate("one", 1, 0.1), candidate("other", 1, 1.0)
        router = router_of(one, other, slo_ns=slo_ns)
        return any(router.executed(one, 1, busy_ns, expected_ns, 0) for _ in range(10))

    assert not ejected(SLO_NS, 100 * MS, 1 * MS)  # within the SLO
    assert ejected(SLO_NS, 100 * MS + 1, 1 * MS)
    assert not ejected(SLO_NS, 200 * MS, 20 * MS)  # ten times
    assert ejected(SLO_NS, 200 * MS + 1, 20 * MS)
    assert not ejected(SLO_NS, 900 * MS, 0)  # nothing was predicted
    assert not ejected(None, 1000 * MS, 1 * MS)
    assert ejected(None, 1000 * MS + 1, 1 * MS)


def test_a_good_execution_ends_a_row_of_failures_but_not_for_one_that_is_ejected() -> None:
    one, other = candidate("one", 1, 0.1), candidate("other", 1, 1.0)
    router = router_of(one, other)
    for _ in range(2):
        router.failed(one, 0, hung=False)
    router.executed(one, 1, 1 * MS, 1 * MS, 0)
    assert [router.failed(one, 0, hung=False) for _ in range(3)] == [False, False, True]
    before = str(one.health)
    router.executed(one, 1, 1 * MS, 1 * MS, 0)
    assert one.health.ejected
    assert str(one.health) == before
    for now_ns in (SECOND, 2 * SECOND):
        one.health.probed(True, now_ns)
    assert str(one.health) == "live, 0 failures in a row, 0 of the last 0"


@pytest.mark.parametrize(
    ("slo_ns", "expected_ms", "hung_after_ms"), [(100 * MS, 0, 100), (100 * MS, 40, 120), (900 * MS, 0, 500), (None, 200, 600)]
)
def test_a_failure_tells_that_it_hung_after_three_predictions_and_the_slo_or_half_a_second(
    slo_ns: int | None, expected_ms: int, hung_after_ms: int
) -> None:
    router = router_of(candidate("one", 1, 0.1), slo_ns=slo_ns)
    assert not router.hung(hung_after_ms * MS, expected_ms * MS)
    assert router.hung(hung_after_ms * MS + 1, expected_ms * MS)


def test_the_share_of_ejected_ones_is_of_those_that_serve() -> None:
    several = [candidate(str(index), 1, 1.0) for index in range(4)]
    shadow = candidate("shadow", 1, 1.0, shadow_share=0.5)
    router = router_of(*several, shadow, max_share=0.25)
    assert router.failed(shadow, 0, hung=True)  # callers lose nothing by it
    assert [router.failed(each, 0, hung=True) for each in several] == [True, False, False, False]
    two = router_of(candidate("a", 1, 1.0), candidate("b", 1, 1.0), max_share=0.1)
    assert two.failed(two.candidates[0], 0, hung=True)  # one may always be, if another is left
    lonely = router_of(candidate("a", 1, 1.0), candidate("s", 1, 1.0, shadow_share=1.0))
    assert not lonely.failed(lonely.candidates[0], 0, hung=True)  # a shadow is nobody to fall back on


def test_what_failed_elsewhere_goes_to_no_ejected_one_even_if_all_others_are() -> None:
    failed, other, stranger = (candidate("failed", 1, 0.1, equivalents=("other",)), candidate("other", 1, 0.2),
                               candidate("stranger", 1, 0.3))  # fmt: skip
    router = router_of(failed, other, stranger)
    assert router.failed(other, 0, hung=True)
    assert chosen(router, failed=failed) == (None, "down")
    lane_of(stranger).available = False
    lane_of(failed).available = False
    assert chosen(router) == ("other", "panic")
    assert chosen(router, failed=failed) == (None, "down")


def test_what_failed_at_a_canarys_side_is_no_request_for_the_canary() -> None:
    stable, canary = candidate("stable", 1, 1.0, equivalents=("canary",)), candidate("canary", 1, 0.01, canary_share=1.0)
    router = router_of(stable, canary)
    assert chosen(router) == ("canary", "canary")
    assert chosen(router, failed=canary) == (None, "down")
    lane_of(stable).available = False
    assert chosen(router, failed=stable) == ("canary", "panic")  # nothing else is left


def test_a_canary_takes_over_nothing_while_a_regular_one_is_up_however_full() -> None:
    mates = {"first": ("next", "canary"), "next": ("first", "canary")}
    first, other = (candidate(label, 1, 1.0, equivalents=others) for label, others in mates.items())
    canary, shadow = candidate("canary", 1, 0.01, canary_share=0.1), candidate("shadow", 1, 0.01, shadow_share=0.1)
    router = router_of(first, other, canary, shadow)

    def instead(*full: Candidate) -> str | None:
        chosen = router.route(request(), 0, failed=first, full=full).candidate
        return chosen.label if chosen else None

    assert instead(first) == "next"
    assert instead(first, other) is None
    assert instead(other) is None  # it has failed the request, and the other is full
    lane_of(other).available = False
    assert instead(first) is None
    assert instead() == "canary"  # the only one that may serve it has failed it
    lane_of(first).available = False
    assert instead(first) == "canary"
    assert instead(first, canary) is None
    lane_of(first).available = True
    assert router.failed(first, 0, hung=True)
    assert instead(first) == "canary"


# more on shares


def test_a_canary_is_in_time_up_to_the_deadline_and_with_its_cold_start() -> None:
    stable, canary = candidate("stable", 1, 1.0), candidate("canary", 10, 0.01, canary_share=1.0, cold_start_ns=50 * MS)
    router = router_of(stable, canary)
    lane_of(canary).wait_ms = 90
    route = router.route(request(), 0)
    assert (route.candidate, route.reason, route.eta_ns) == (canary, "canary", 100 * MS)
    lane_of(canary).ahead_ms = 1
    assert chosen(router) == ("stable", "cheapest")
    lane_of(canary).wait_ms, lane_of(canary).ahead_ms, lane_of(canary).workers = 40, 0, 0
    assert chosen(router) == ("canary", "canary")
    lane_of(canary).wait_ms = 41
    assert chosen(router) == ("stable", "cheapest")
    assert chosen(router_of(stable, canary, slo_ns=None)) == ("canary", "canary")  # there is no deadline


def test_a_canary_that_was_away_makes_up_for_two_requests_only() -> None:
    stable, canary = candidate("stable", 1, 1.0), candidate("canary", 1, 0.01, canary_share=0.25)
    router = router_of(stable, canary)
    lane_of(canary).available = False
    assert {chosen(router)[0] for _ in range(100)} == {"stable"}
    lane_of(canary).available = True
    labels = [chosen(router)[0] for _ in range(9)]
    assert [index for index, label in enumerate(labels) if label == "canary"] == [0, 1, 4, 8]


@pytest.mark.parametrize("state", ["ejected", "away", "cold", "busy"])
def test_a_shadow_that_cannot_take_its_copy_loses_it(state: str) -> None:
    stable, shadow = candidate("stable", 1, 1.0), candidate("shadow", 1, 0.01, shadow_share=1.0)
    router = router_of(stable, shadow)
    match state:
        case "ejected":
            router.failed(shadow, 0, hung=True)
        case "away":
            lane_of(shadow).available = False
        case "cold":
            lane_of(shadow).workers = 0
        case "busy":
            lane_of(shadow).wait_ms = 0.001
    chosen(router)
    assert [list(router.copies(request(), 0)) for _ in range(5)] == [[]] * 5
    shadow.health = Health(Ejection())
    lane_of(shadow).available, lane_of(shadow).workers, lane_of(shadow).wait_ms = True, 1, 0
    assert [len(router.copies(request(), 0)) for _ in range(5)] == [1] * 5  # no more than its share


def test_copies_to_a_shadow_may_overlap() -> None:
    stable, shadow = candidate("stable", 1, 1.0), candidate("shadow", 1, 0.01, shadow_share=1.0)
    router = router_of(stable, shadow)
    chosen(router)
    (copy,) = router.copies(request(), 0)
    assert (copy.candidate, copy.why) == (shadow, "shadow")
    router.sent(copy, 0)
    assert not shadow.copy_out
    (second,) = router.copies(request(), 0)
    router.returned(copy, 0, SECOND, ok=False)
    router.returned(second, 0, SECOND, ok=False)
    assert not shadow.health.ejected


def test_one_that_joins_gets_its_part() -> None:
    first = candidate("first", 10, 1.0)
    router = router_of(first)
    assert chosen(router) == ("first", "cheapest")
    router.join(candidate("cheap", 10, 0.1))
    assert chosen(router) == ("cheap", "cheapest")
    router.join(candidate("canary", 10, 0.1, canary_share=1.0))
    assert chosen(router) == ("canary", "canary")
    router.join(candidate("shadow", 10, 0.1, shadow_share=1.0))
    assert [copy.candidate.label for copy in router.copies(request(), 0)] == ["shadow"]
    assert [each.label for each in router.candidates] == ["first", "cheap", "canary", "shadow"]


# explained


def test_every_part_of_an_explanation_is_in_its_unit() -> None:
    regular = candidate("regular", 10, 3.6)
    canary = candidate("canary", 20, 36.0, canary_share=0.1)
    shadow = Candidate("shadow", StatedLane(known=False), Health(Ejection()), 72.0, shadow_share=0.1)
    cold = Candidate("cold", StatedLane(5, workers=0), Health(Ejection()), 72.5, cold_start_ns=200 * MS)
    lane_of(regular).wait_ms, lane_of(regular).ahead_ms, lane_of(regular).pending = 3.25, 4.5, 2
    lane_of(canary).available = False
    router = router_of(shadow, canary, cold, regular)
    told = router.explain(request(), 0)
    assert (told["backend"], told["reason"]) == ("regular", "cheapest")
    assert told["lanes"] == [
        {
            "backend": "regular", "role": "regular", "usd_per_million_rows": pytest.approx(10.0), "usual_batch_rows": 1.0,
            "eta_ms": 17.75, "cold_start_ms": 0.0, "wait_ms": 3.25, "ahead_ms": 4.5, "own_ms": 10.0, "in_time": True,
            "sessions": 1, "pending": 2, "available": True, "health": "live, 0 failures in a row, 0 of the last 0",
        },
        {
            "backend": "canary", "role": "canary", "usd_per_million_rows": pytest.approx(200.0), "usual_batch_rows": 1.0,
            "eta_ms": 20.0, "cold_start_ms": 0.0, "wait_ms": 0.0, "ahead_ms": 0.0, "own_ms": 20.0, "in_time": True,
            "sessions": 1, "pending": 0, "available": False, "health": "live, 0 failures in a row, 0 of the last 0",
        },
        {
            "backend": "shadow", "role": "shadow", "usd_per_million_rows": None, "usual_batch_rows": None,
            "eta_ms": None, "cold_start_ms": 0.0, "wait_ms": 0.0, "ahead_ms": 0.0, "own_ms": None, "in_time": None,
            "sessions": 1, "pending": 0, "available": True, "health": "live, 0 failures in a row, 0 of the last 0",
        },
        {
            "backend": "cold", "role": "regular", "usd_per_million_rows": None, "usual_batch_rows": None,
            "eta_ms": 205.0, "cold_start_ms": 200.0, "wait_ms": 0.0, "ahead_ms": 0.0, "own_ms": 5.0, "in_time": False,
            "sessions": 0, "pending": 0, "available": True, "health": "live, 0 failures in a row, 0 of the last 0",
        },
    ]  # fmt: skip
    lane_of(regular).wait_ms = 85.5
    assert router.explain(request(), 0)["lanes"][0]["in_time"] is True  # at the deadline
    lane_of(regular).wait_ms = 87
    assert router.explain(request(), 0)["lanes"][0]["in_time"] is False


def test_an_explanation_of_a_model_that_nobody_serves_says_so() -> None:
    one, other = candidate("one", 1, 0.1), candidate("other", 1, 1.0)
    router = router_of(one, other)
    lane_of(other).available = False
    one.health.eject(0)
    told = router.explain(request(), 0)
    assert (told["backend"], told["reason"]) == (None, "down")
    assert [lane["backend"] for lane in told["lanes"]] == ["one", "other"]
