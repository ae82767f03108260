"""What commands and events say of themselves, and what measuring costs."""

import math
from dataclasses import replace

import pytest

from loadtest.search.events import Agreed, Entrant, Measured, Predicted, Profiled, Question, Spent, Timing

CHEAP, DEAR = Entrant("cheap", "g", 3.6, 1, 8), Entrant("dear", "g", 36.0, 4, 8)


def test_a_run_counts_its_requests_and_how_many_met_the_slo() -> None:
    found = Measured("c", "peak", 100.0, "undecided", ((100, 99), (300, 201)), 10.0)
    assert (found.requests, found.attainment) == (400, 0.75)
    assert Measured("c", "peak", 100.0, "undecided", (), 10.0).attainment is None


def test_what_was_not_measured_is_nothing_or_not_known() -> None:
    bare = Measured("c", "peak", 100.0, "undecided", (), 10.0)
    figures = ("p50", "p95", "p99", "mean", "p99_low", "p99_high", "reference")
    assert {getattr(bare, f"{name}_ms") for name in figures} == {0.0}
    assert (bare.goodput_rps, bare.error_rate, bare.start_s, bare.slowdown, bare.batch_rows, bare.notes) == (0, 0, 0, 1, {}, ())
    unknown = (bare.queue_ms, bare.compute_ms, bare.overhead_ms, bare.cpu_percent, bare.memory_percent)
    assert unknown == (None,) * 5
    assert (bare.valid, bare.failure, bare.disturbed) == (True, "", False)
    profiled = Profiled("g")
    assert (profiled.timings, profiled.overhead_ms, profiled.seconds, profiled.reference_ms, profiled.start_s) == (
        (),
        0,
        0,
        0,
        0,
    )
    assert (profiled.failure, profiled.saturated_rps, profiled.disturbed) == ("", None, False)
    predicted = Predicted("c", 5.0)
    assert (predicted.seconds, predicted.why, predicted.ceiling_rps, predicted.disturbed) == (0, "", None, False)
    assert Timing(1, 1, 5.0).spread == 0


def test_without_a_target_rate_a_million_requests_are_what_is_minimised() -> None:
    asked = Question((CHEAP,), 0.99, 50.0, 600.0)
    assert asked.cost(CHEAP, 100.0) == pytest.approx(10.0)
    assert asked.cost(CHEAP, 0.5) == pytest.approx(2000.0)
    assert asked.cost(CHEAP, 0.0) == math.inf


def test_with_a_target_rate_it_is_whole_instances_with_some_to_spare() -> None:
    asked = Question((CHEAP,), 0.99, 50.0, 600.0, target_rps=150.0)
    assert asked.headroom == 0.7
    assert asked.cost(CHEAP, 110.0) == pytest.approx(2 * 3.6, rel=1e-3)
    assert asked.cost(CHEAP, 107.0) == pytest.approx(3 * 3.6, rel=1e-3)  # 150 are more than 0.7 of two
    assert asked.cost(CHEAP, 0.0) == math.inf
    # Of as many instances the faster ones are better, by little.
    assert asked.cost(CHEAP, 120.0) < asked.cost(CHEAP, 110.0) < asked.cost(CHEAP, 120.0) + 1e-4


def test_a_fleet_of_more_instances_than_can_be_had_costs_more_than_any_other() -> None:
    few = replace(CHEAP, max_count=2)
    asked = Question((few, DEAR), 0.99, 50.0, 600.0, target_rps=150.0)
    assert asked.cost(few, 110.0) == asked.cost(CHEAP, 110.0)
    assert (asked.suffices(few, 110.0), asked.suffices(few, 107.0), asked.suffices(CHEAP, 0.0)) == (True, False, False)
    assert asked.cost(few, 107.0) > asked.cost(DEAR, 1.0)
    assert asked.cost(few, 107.0) < asked.cost(few, 50.0)  # and yet there is an order
    unasked = replace(asked, target_rps=None)
    assert unasked.cost(few, 1.0) == unasked.cost(CHEAP, 1.0)


def test_few_instances_of_each_carry_what_one_kind_does_not() -> None:
    few, fewer = replace(CHEAP, max_count=2), replace(DEAR, max_count=1)
    asked = Question((few, fewer), 0.99, 50.0, 600.0, target_rps=140.0)
    assert asked.carried_rps([(few, 50.0), (fewer, 100.0), (CHEAP, 0.0)]) == pytest.approx(140.0)
    assert asked.carries([(few, 50.0), (fewer, 100.0)])
    assert not asked.carries([(few, 50.0), (fewer, 99.0)])
    assert asked.carries([(CHEAP, 1.0)])


def test_of_one_pool_the_fastest_carries() -> None:
    slow, fast = (replace(CHEAP, name=name, max_count=2, pool="large") for name in ("slow", "fast"))
    asked = Question((slow, fast), 0.99, 50.0, 600.0, target_rps=140.0)
    assert asked.carried_rps([(slow, 90.0), (fast, 100.0)]) == pytest.approx(140.0)
    assert asked.carried_rps([(fast, 100.0), (slow, 90.0), (replace(DEAR, max_count=1), 10.0)]) == pytest.approx(147.0)


def test_measuring_is_paid_for_by_the_hour_of_whoever_runs() -> None:
    spent = Spent(Question((DEAR, CHEAP), 0.99, 50.0, 600.0))
    spent.add(Agreed("cheap", 1.0, 300, "cosine", 10.0))
    assert (spent.seconds, spent.usd) == (10, pytest.approx(0.01))
    narrow = Spent(Question((replace(DEAR, name="narrow", sessions=1, usd_per_hour=3.6), DEAR), 0.99, 50.0, 600.0))
    narrow.add(Profiled("g", (), 0.0, 10.0, entrant="narrow"))
    assert narrow.usd == pytest.approx(0.01)
    spent.add(Profiled("g", (), 0.0, 10.0))  # on the widest of the group, in an older journal
    assert (spent.seconds, spent.usd) == (20, pytest.approx(0.11))
    spent.add(Predicted("dear", 100.0, 5.0))  # nothing runs
    assert (spent.seconds, spent.usd) == (25, pytest.approx(0.11))
    spent.add(Measured("dear", "peak", 100.0, "pass", (), 20.0))
    assert (spent.seconds, spent.usd) == (45, pytest.approx(0.31))
    nothing = Agreed("cheap", failure="was not compared")
    assert (nothing.agreement, nothing.inputs, nothing.statistic) == (None, 0, "")
    for free in (nothing, Profiled("g", failure="did not start"), Predicted("cheap", 0.0)):
        spent.add(free)
    assert (spent.seconds, spent.usd) == (45, pytest.approx(0.31))
