import pytest

from loadtest import costs


def test_cost_per_inference_is_the_one_aws_documents() -> None:
    # 0.736 / (1645 · 60)
    assert costs.cost_per_inference(0.736, 1645) == pytest.approx(7.4569e-06, rel=1e-5)


def test_cost_per_million_of_the_golden_case() -> None:
    # 0.7582 / (3600 · 2674) · 1e6 and 0.228 / (3600 · 1181) · 1e6
    assert costs.cost_per_million(0.7582, 2674) == pytest.approx(0.0788, abs=5e-5)
    assert costs.cost_per_million(0.228, 1181) == pytest.approx(0.0536, abs=5e-5)


def test_half_the_utilisation_doubles_the_cost() -> None:
    assert costs.cost_per_million(1.0, 100, 0.5) == pytest.approx(2 * costs.cost_per_million(1.0, 100))


def test_replicas_round_up_but_not_for_float_dust() -> None:
    assert costs.replicas_for(300, 100) == 3
    assert costs.replicas_for(0.3, 0.1) == 3  # 0.3 / 0.1 is 2.9999999999999996
    assert costs.replicas_for(301, 100) == 4
    assert costs.replicas_for(300, 100, headroom=0.75) == 4
    assert costs.replicas_for(1, 100, min_replicas=2) == 2


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
