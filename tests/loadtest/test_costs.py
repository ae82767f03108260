from collections.abc import Callable

import pytest

from loadtest.prices import costs


def test_cost_per_inference_is_the_one_aws_documents() -> None:
    # 0.736 / (1645 · 60)
    assert costs.cost_per_inference(0.736, 1645) == pytest.approx(7.4569e-06, rel=1e-5)


def test_cost_per_million_of_the_golden_case() -> None:
    # 0.7582 / (3600 · 2674) · 1e6 and 0.228 / (3600 · 1181) · 1e6
    assert costs.cost_per_million(0.7582, 2674) == pytest.approx(0.0788, abs=5e-5)
    assert costs.cost_per_million(0.228, 1181) == pytest.approx(0.0536, abs=5e-5)


def test_replicas_round_up_but_not_for_float_dust() -> None:
    assert costs.replicas_for(300, 100) == 3
    assert costs.replicas_for(0.3, 0.1) == 3  # 0.3 / 0.1 is 2.9999999999999996
    assert costs.replicas_for(301, 100) == 4
    assert costs.replicas_for(300, 100, headroom=0.75) == 4
    assert costs.replicas_for(1, 100) == 1


def test_autoscaling_target_starts_at_half_of_the_peak() -> None:
    assert costs.autoscaling_invocations_per_minute(100) == 3000  # 100 · 0.5 · 60


def test_break_even_is_where_the_second_small_instance_is_needed() -> None:
    # One at 1 USD for 100/s against one at 1.5 USD for 1000/s: from the second small one on the large is cheaper.
    assert costs.break_even_rps(1.0, 100, 1.5, 1000, up_to_rps=5000) == pytest.approx(100)
    assert costs.break_even_rps(1.5, 1000, 1.0, 100, up_to_rps=5000) == pytest.approx(100)
    assert costs.break_even_rps(1.0, 100, 3.0, 100, up_to_rps=5000) is None


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_a_rate_that_is_none_has_no_cost(rate: float) -> None:
    with pytest.raises(ValueError, match="max_rps must be above 0"):
        costs.cost_per_million(1.0, rate)


def test_break_even_is_looked_for_on_every_step_up_to_the_last() -> None:
    assert costs.break_even_rps(1.0, 100, 1.5, 1000, up_to_rps=100) == 100
    assert costs.break_even_rps(1.0, 100, 1.5, 1000, up_to_rps=99) is None
    assert costs.break_even_rps(1.0, 100, 2.5, 1000, up_to_rps=5000) == 200  # two cost 2.0, and three 3.0
    assert costs.break_even_rps(1.0, 0.5, 1.5, 5, up_to_rps=10) == 0.5  # instances that serve less than one a second


def test_of_two_at_the_same_price_the_faster_is_never_overtaken() -> None:
    assert costs.break_even_rps(1.0, 100, 1.0, 200, up_to_rps=5000) is None
    assert costs.break_even_rps(1.0, 200, 1.0, 100, up_to_rps=5000) is None
    assert costs.break_even_rps(1.0, 100, 1.0, 100, up_to_rps=5000) is None


def test_a_fleet_is_paid_for_every_instance() -> None:
    assert costs.fleet_usd_per_hour(2.0, 301, 100) == 8
    assert costs.fleet_usd_per_hour(2.0, 0, 100) == 2  # one runs though nobody asks


def test_requests_per_dollar_are_those_of_an_hour_at_full_load() -> None:
    assert costs.requests_per_dollar(0.5, 100) == 720_000


def test_a_month_has_the_hours_that_aws_reckons_with() -> None:
    assert costs.HOURS_PER_MONTH == 730


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("usd_per_hour", lambda: costs.cost_per_inference(0, 1)),
        ("invocations_per_minute", lambda: costs.cost_per_inference(1, 0)),
        ("usd_per_hour", lambda: costs.cost_per_million(0, 1)),
        ("usd_per_hour", lambda: costs.requests_per_dollar(0, 1)),
        ("max_rps", lambda: costs.requests_per_dollar(1, 0)),
        ("headroom", lambda: costs.replicas_for(1, 1, 0)),
        ("max_rps", lambda: costs.replicas_for(1, 0)),
        ("usd_per_hour", lambda: costs.fleet_usd_per_hour(0, 1, 1)),
        ("max_rps", lambda: costs.autoscaling_invocations_per_minute(0)),
    ],
)
def test_what_must_be_above_0_is_named(name: str, call: Callable[[], float]) -> None:
    with pytest.raises(ValueError, match=f"{name} must be above 0, got 0"):
        call()
