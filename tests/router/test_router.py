"""Who gets a request, a copy, or nothing: decided from stated forecasts."""

import pytest

from gateway.config import Ejection, Routing
from gateway.routing.policies import POLICIES, Candidate, Cheapest
from gateway.routing.router import Router
from tests.router.candidates import MS, candidate, lane_of, request

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
    (copy,) = router.copies(request(), SECOND + 100 * MS)
    router.sent(copy, SECOND + 100 * MS)
    router.returned(copy, SECOND + 100 * MS, 80 * MS, ok=True)
    for later_ms in range(200, 2100, 100):  # it is found idle and too slow all the time
        chosen(router, SECOND + later_ms * MS)
        assert not router.copies(request(), SECOND + later_ms * MS)
    chosen(router, SECOND + 2100 * MS)  # two seconds after the last
    (copy,) = router.copies(request(), SECOND + 2100 * MS)
    assert (copy.candidate, copy.why) == (slow, "learn")


# health


def test_an_ejected_backend_gets_no_requests_until_copies_have_shown_that_it_works() -> None:
    bad, good = candidate("bad", 1, 0.1), candidate("good", 1, 1.0)
    router = router_of(bad, good)
    assert [router.failed(bad, 0, hung=False) for _ in range(3)] == [False, False, True]
    assert chosen(router) == ("good", "cheapest")
    assert not router.copies(request(), 0)
    for now_ns in (SECOND, SECOND + 100 * MS):
        assert chosen(router, now_ns) == ("good", "cheapest")
        (copy,) = router.copies(request(), now_ns)
        assert (copy.candidate, copy.why) == (bad, "probe")
        router.sent(copy, now_ns)
        chosen(router, now_ns + 50 * MS)
        assert not router.copies(request(), now_ns)  # one at a time
        router.returned(copy, now_ns + 60 * MS, MS, ok=True)
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


def test_a_canary_that_is_late_or_ejected_gets_nothing() -> None:
    stable, canary = candidate("stable", 1, 1.0), candidate("canary", 1, 0.01, canary_share=0.5)
    router = router_of(stable, canary)
    lane_of(canary).wait_ms = 100
    assert {chosen(router)[0] for _ in range(10)} == {"stable"}
    lane_of(canary).wait_ms = 0
    assert router.failed(canary, 0, hung=True)
    assert {chosen(router)[0] for _ in range(10)} == {"stable"}


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
