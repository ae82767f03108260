"""What is judged, and how, from requests made so that the answer is known."""

import numpy as np
import pytest
from scipy import stats

from loadtest.results import Objective, ObjectiveResult, SloSpec, Verdict
from loadtest.verdict.decision import CONFIDENCE, JudgedRequests, attainment, judge, lost, met, overall
from loadtest.verdict.statistics import batch_means, binomial_interval

SLO = SloSpec.parse("p99<50ms")


def alike(misses: int, count: int, *, blocks: int = 20, late_ms: float = 60.0, early_ms: float = 1.0) -> JudgedRequests:
    """So many misses, spread evenly: every block is like every other, so that they count as independent."""
    late = (np.arange(count) * misses) // count != ((np.arange(count) - 1) * misses) // count
    ns = (np.where(late, late_ms, early_ms) * 1e6).astype(np.int64)
    return JudgedRequests(ns, ns, np.zeros(count, bool), np.arange(count) * blocks // count)


def result(verdict: Verdict) -> ObjectiveResult:
    interval = binomial_interval(0, 10, 0.95)
    return ObjectiveResult("o", 0.99, interval, interval, 1.0, verdict, 0)


def test_a_pass_is_proven_at_95_percent_of_one_side() -> None:
    assert CONFIDENCE == 0.95
    assert 0.99**298 > 0.05 > 0.99**299  # so many without a miss leave 5 %
    assert [judge(SLO, alike(0, count))[0].verdict for count in (298, 299)] == ["undecided", "pass"]
    assert [judge(SLO, alike(0, count), confidence=0.99)[0].verdict for count in (458, 459)] == ["undecided", "pass"]


def test_a_fail_is_proven_at_95_percent_of_one_side() -> None:
    count = 1000
    least = next(misses for misses in range(10, 50) if stats.binom.sf(misses - 1, count, 0.01) < 0.05)
    assert judge(SLO, alike(least, count))[0].verdict == "fail"
    assert judge(SLO, alike(least - 1, count))[0].verdict == "undecided"


def test_what_is_shown_is_the_two_sided_interval_whatever_decides() -> None:
    requests = alike(4, 2000)
    for confidence in (0.95, 0.995):
        shown = judge(SLO, requests, confidence=confidence)[0]
        means = batch_means(requests.block, requests.missed(SLO.objectives[0]), requests.tail(SLO.objectives[0], confidence))
        assert shown.attainment == means.interval(0.95)
        assert shown.binomial == binomial_interval(4, 2000, 0.95)
        assert (shown.objective, shown.required, shown.design_effect) == ("p99<50ms", 0.99, means.design_effect)


def test_how_many_more_requests_would_decide_is_told_to_a_thousandth() -> None:
    few = judge(SLO, alike(0, 100))[0]
    assert few.requests_needed is not None
    assert 100 + few.requests_needed == pytest.approx(299, abs=2)
    assert judge(SLO, alike(0, 2000))[0].requests_needed == 0
    assert judge(SLO, alike(20, 2000))[0].requests_needed is None  # exactly what may miss: never


def test_the_limit_itself_is_kept() -> None:
    assert judge(SLO, alike(1000, 2000, late_ms=50.0))[0].verdict == "pass"
    assert judge(SLO, alike(1000, 2000, late_ms=50.000001))[0].verdict == "fail"


def test_service_is_judged_by_the_time_since_it_was_sent() -> None:
    late, soon = np.full(2000, 60_000_000), np.full(2000, 1_000_000)
    requests = JudgedRequests(late, soon, np.zeros(2000, bool), np.arange(2000) // 100)
    assert [found.verdict for found in judge(SloSpec.parse("p99<50ms,service.p99<50ms"), requests)] == ["fail", "pass"]


def test_what_failed_meets_nothing_and_what_succeeds_all_that_is_asked() -> None:
    ns = np.array([10, 10, 40, 60], np.int64) * 1_000_000
    requests = JudgedRequests(ns, ns // 2, np.array([False, True, False, False]), np.zeros(4, np.int64))
    assert met(None, requests).tolist() == [True, False, True, True]
    assert met(SLO, requests).tolist() == [True, False, True, False]
    assert met(SloSpec.parse("p99<50ms,service.p50<15ms"), requests).tolist() == [True, False, False, False]
    assert attainment(SLO, requests).estimate == 0.5


def test_what_was_cut_off_missed_the_limits_it_had_waited_for_and_tells_nothing_of_others() -> None:
    ns, cut = np.full(4000, 1_000_000), np.arange(4000) % 20 == 0
    ns[cut] = 60_000_000  # of 50 and of 100 ms
    requests = JudgedRequests(ns, ns, np.zeros(4000, bool), np.arange(4000) // 200, cut)
    found = judge(SloSpec.parse("p99<50ms,p99<100ms,errors<1%"), requests)
    assert [(one.verdict, one.attainment.estimate) for one in found] == [("fail", 0.95), ("pass", 1.0), ("pass", 1.0)]
    alone = JudgedRequests(ns[cut], ns[cut], np.zeros(200, bool), np.arange(200) // 10, cut[cut])
    assert [(one.objective, one.verdict) for one in judge(SloSpec.parse("p99<50ms,p99<100ms,errors<1%"), alone)] == [
        ("p99<50ms", "fail")
    ]


def test_failures_count_as_if_they_were_slow() -> None:
    ns = np.ones(4000, np.int64)
    failed = np.zeros(4000, bool)
    failed[1000:1200] = True  # together, in one of 20 blocks
    found = judge(SloSpec.parse("p99<50ms,errors<1%"), JudgedRequests(ns, ns, failed, np.arange(4000) // 200))
    assert [one.verdict for one in found] == ["undecided", "undecided"]
    assert [one.design_effect > 100 for one in found] == [True, True]
    assert found[1].objective == "errors<1%"
    assert found[1].required == 0.99
    assert found[1].attainment.estimate == 0.95


def test_how_the_slowest_cluster_counts_only_where_the_limit_is_near() -> None:
    # One stretch of 100 requests is slow: of 3 % that may be slowest all stand together.
    ns = np.full(4000, 1_000_000)
    ns[1000:1100] = 40_000_000
    requests = JudgedRequests(ns, ns, np.zeros(4000, bool), np.arange(4000) // 200)
    near, far = (judge(SloSpec.parse(text), requests)[0] for text in ("p99<50ms", "p99<90ms"))
    assert (near.verdict, far.verdict) == ("undecided", "pass")
    assert near.design_effect > 50
    assert far.design_effect == 1
    assert requests.tail(Objective("latency", 99, 90), 0.95) is None
    assert attainment(SloSpec.parse("p99<50ms"), requests).lower < 0.99 < attainment(SloSpec.parse("p99<90ms"), requests).lower


def test_far_from_the_limit_means_that_half_of_it_is_proven_to_be_kept() -> None:
    objective = Objective("latency", 99, 50)
    assert alike(0, 299).tail(objective, 0.95) is None
    assert alike(0, 298).tail(objective, 0.95) is not None
    assert alike(0, 299).tail(objective, 0.99) is not None
    assert alike(30, 3000, late_ms=25.0).tail(objective, 0.95) is None
    assert alike(30, 3000, late_ms=25.1).tail(objective, 0.95) is not None


@pytest.mark.parametrize(
    ("verdicts", "all_of_them"),
    [
        (["pass", "pass"], "pass"),
        (["pass", "undecided"], "undecided"),
        (["undecided", "fail"], "fail"),
        (["pass", "fail"], "fail"),
    ],
)
def test_one_failure_fails_and_all_must_pass(verdicts: list[Verdict], all_of_them: Verdict) -> None:
    assert overall(tuple(result(verdict) for verdict in verdicts)) == all_of_them


def test_no_error_allowed_needs_no_more_requests() -> None:
    found = judge(SloSpec.parse("errors<0%"), alike(0, 5))[0]
    assert (found.verdict, found.requests_needed) == ("pass", 0)


def test_every_objective_of_an_error_rate_alone_is_the_error_rate() -> None:
    found = judge(SloSpec.parse("errors<2%"), alike(1000, 2000))
    assert [(one.objective, one.required, one.verdict) for one in found] == [("errors<2%", 0.98, "pass")]
    assert judge(SloSpec.parse("p99<50ms"), alike(0, 500))[-1].objective == "p99<50ms"


@pytest.mark.parametrize(("misses", "share", "found"), [(7, 0.5, False), (8, 0.5, True), (8, 0.2, False), (9, 0.2, True)])
def test_a_run_is_lost_once_twice_its_length_of_the_same_would_not_pass(misses: int, share: float, found: bool) -> None:
    # Of 1000, which are half of a run: 28 of 4000 pass, 32 do not; which are a fifth: 80 of 10,000 and 90.
    assert lost(SLO, alike(misses, 1000), share) is found
    assert lost(SloSpec.parse("p50<50ms"), alike(misses, 1000), share) is False
    assert lost(SloSpec.parse("p50<50ms,p99<50ms"), alike(misses, 1000), share) is found  # one objective will do


def test_failed_requests_lose_a_run_by_the_error_rate_too() -> None:
    requests = alike(0, 1000)
    requests.failed[::200] = True
    assert not lost(SLO, requests, 0.5)
    assert lost(SloSpec.parse("p99<50ms,errors<0.3%"), requests, 0.5)
