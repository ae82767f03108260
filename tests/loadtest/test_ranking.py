"""Who is cheapest, by how much, and how certain that is: on evidence made by hand."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from loadtest.search.events import Entrant, Measured, Predicted, Question
from loadtest.search.ranking import DRAWS, Ranking, flip_usd_per_hour, rank, sample_peaks
from loadtest.search.standing import SearchOutcome, Standing

REQUIRED = 0.99
ALL, HALF = ((100, 100),) * 10, ((100, 50),) * 10


def run(name: str, rps: float, verdict: str, blocks: Sequence[tuple[int, int]], **more: Any) -> Measured:
    return Measured(name, "peak", rps, verdict, tuple(blocks), 10.0, p99_ms=10.0, **more)  # type: ignore[arg-type]


def standing(name: str, usd_per_hour: float, *runs: Measured, predicted: float = 500.0, **more: Any) -> Standing:
    entrant = Entrant(name, name, usd_per_hour, 1, 8)
    return Standing(entrant, REQUIRED, 50.0, predictions=[Predicted(name, predicted)], runs=list(runs), **more)


def bracket(name: str, low_rps: float, high_rps: float) -> tuple[Measured, Measured]:
    return run(name, low_rps, "pass", ALL), run(name, high_rps, "fail", HALF)


def judged(*standings: Standing, winner: str | None = "a", seed: int = 0, target_rps: float | None = None) -> Ranking | None:
    """The second is the runner-up, if it holds any rate."""
    question = Question(tuple(one.entrant for one in standings), REQUIRED, 50.0, 600.0, target_rps=target_rps)
    runner_up = standings[1].entrant.name if len(standings) > 1 and standings[1].claimed_rps else None
    outcome = SearchOutcome(standings, {}, winner, runner_up, None, None, 0.0, 0.0, ())
    return rank(question, outcome, seed=seed)


def probability(*standings: Standing, **how: Any) -> float:
    verdict = judged(*standings, **how)
    assert verdict is not None
    return verdict.probability_cheapest


def test_without_a_winner_there_is_no_verdict() -> None:
    assert judged(standing("a", 1.0), winner=None) is None


def test_who_is_alone_is_the_cheapest_as_far_as_draws_can_tell() -> None:
    assert judged(standing("a", 1.0, *bracket("a", 400, 420))) == Ranking((DRAWS + 1) / (DRAWS + 2), None, None)


def test_the_margin_is_what_the_runner_up_costs_more_at_the_rates_claimed() -> None:
    a, b = standing("a", 1.0, *bracket("a", 400, 420)), standing("b", 1.5, *bracket("b", 500, 520))
    verdict = judged(a, b)
    assert verdict is not None
    assert verdict.margin == pytest.approx(1.5 / 500 * 400 - 1)
    assert verdict.flip_usd_per_hour == pytest.approx(1.5 * 400 / 500)
    fleets = judged(a, b, target_rps=1000.0)  # four of a, three of b, as 0.7 of each is used
    assert fleets is not None
    assert fleets.margin == pytest.approx(3 * 1.5 / (4 * 1.0) - 1, abs=1e-4)
    assert fleets.flip_usd_per_hour == pytest.approx(3 * 1.5 / 4)


def test_there_is_no_margin_to_a_runner_up_of_which_too_few_can_be_had() -> None:
    a, b = standing("a", 1.0, *bracket("a", 400, 420)), standing("b", 1.5, *bracket("b", 500, 520))
    b.entrant = replace(b.entrant, max_count=2)
    verdict = judged(a, b, target_rps=1000.0)
    assert verdict is not None
    assert (verdict.margin, verdict.flip_usd_per_hour) == (None, None)
    assert verdict.probability_cheapest > 0.99


def test_at_a_target_rate_whole_instances_decide_the_price_that_flips() -> None:
    a, b = standing("a", 1.0, *bracket("a", 400, 420)), standing("b", 1.5, *bracket("b", 500, 520))
    question = Question((a.entrant, b.entrant), REQUIRED, 50.0, 600.0, target_rps=300.0)
    assert flip_usd_per_hour(question, a, b) == pytest.approx(1.5 / 2)  # two of a, one of b


def test_a_clear_lead_is_certain_and_a_hopeless_one_is_not() -> None:
    a, b = standing("a", 1.0, *bracket("a", 400, 420)), standing("b", 1.0, *bracket("b", 200, 210))
    assert probability(a, b) == (DRAWS + 1) / (DRAWS + 2)
    assert probability(a, b, winner="b") == 1 / (DRAWS + 2)


def test_all_others_are_beaten_or_none_is() -> None:
    a, b = standing("a", 1.0, *bracket("a", 400, 420)), standing("b", 1.0, *bracket("b", 200, 210))
    c = standing("c", 1.0, *bracket("c", 400, 420))
    assert probability(a, b, c) == pytest.approx(0.5, abs=0.05)
    d = standing("d", 1.0, *bracket("d", 400, 420))
    assert probability(a, b, c, d) == pytest.approx(1 / 3, abs=0.05)


def test_whoever_is_broken_or_cannot_keep_the_slo_is_no_rival() -> None:
    a = standing("a", 1.0, *bracket("a", 400, 420))
    rival = bracket("b", 800, 840)
    assert probability(a, standing("b", 1.0, *rival)) < 0.01
    assert probability(a, standing("b", 1.0, *rival, run("b", 900, "fail", (), failure="was killed"))) > 0.99
    assert probability(a, standing("b", 1.0, predicted=0.0)) > 0.99


def test_who_was_only_predicted_may_be_cheaper_by_the_usual_error() -> None:
    a = standing("a", 1.0, *bracket("a", 495, 505))
    assert probability(a, standing("b", 1.0)) == pytest.approx(0.5, abs=0.05)
    # 15 % less is two of the usual deviations away.
    assert probability(a, standing("b", 1.0, predicted=430.0)) == pytest.approx(0.97, abs=0.02)


def test_one_seed_draws_the_same() -> None:
    a, b = standing("a", 1.0, *bracket("a", 400, 420)), standing("b", 1.0, *bracket("b", 395, 425))
    assert probability(a, b) == probability(a, b)
    assert probability(a, b) != probability(a, b, seed=1)


def peaks(*runs: Measured, draws: int = 2000, **more: Any) -> np.ndarray:
    """Logarithms of rates."""
    found = sample_peaks(standing("a", 1.0, *runs, **more), REQUIRED, np.random.default_rng(0), draws)
    assert found.shape == (draws,)
    return np.log(found)


HELD = run("a", 400, "pass", ALL), run("a", 420, "pass", ALL)


@pytest.mark.parametrize("runs", [(), HELD[1:], HELD])
def test_what_nothing_brackets_is_spread_by_the_usual_error_of_predictions(runs: tuple[Measured, ...]) -> None:
    found = peaks(*runs)
    assert found.mean() == pytest.approx(math.log(500), abs=0.01)
    assert found.std() == pytest.approx(0.075, rel=0.1)


def test_less_than_a_request_a_second_is_spread_as_well() -> None:
    assert peaks(predicted=0.5).mean() == pytest.approx(math.log(0.5), abs=0.01)
    found = peaks(*bracket("a", 1.5, 3.0))
    assert found.mean() == pytest.approx((math.log(1.5) + math.log(3)) / 2, abs=0.02)


def test_any_place_in_the_bracket_is_as_likely() -> None:
    low, high = math.log(400), math.log(800)
    found = peaks(*bracket("a", 400, 800))
    assert found.mean() == pytest.approx((low + high) / 2, abs=0.02)
    assert found.std() == pytest.approx((high - low) / math.sqrt(12), rel=0.05)
    assert low - 0.1 < found.min() < low + 0.05
    assert high - 0.05 < found.max() < high + 0.1


def test_the_order_of_runs_does_not_matter() -> None:
    assert np.array_equal(peaks(*bracket("a", 400, 800)), peaks(*reversed(bracket("a", 400, 800))))


def test_another_run_may_differ_by_two_percent_though_the_blocks_are_alike() -> None:
    held = peaks(*bracket("a", 450, 451))
    assert held.mean() == pytest.approx(math.log(450.5), abs=0.005)
    assert held.std() == pytest.approx(0.02, rel=0.1)


def test_two_that_held_whatever_was_tried_are_as_likely_the_cheapest() -> None:
    a = standing("a", 1.0, run("a", 450, "pass", ALL), run("a", 420, "pass", ALL))
    once, twice = run("b", 450, "pass", ALL), run("b", 400, "pass", ALL)
    for b in (standing("b", 1.0, once), standing("b", 1.0, once, twice)):
        assert probability(a, b) == pytest.approx(0.5, abs=0.05)
        assert probability(a, b, winner="b") == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("runs", [HELD[1:], HELD])
def test_who_held_more_than_was_predicted_peaks_no_lower(runs: tuple[Measured, ...]) -> None:
    found = peaks(*runs, predicted=300.0)
    assert found.min() > math.log(420) - 0.1  # five times what runs differ by
    assert np.mean(found > math.log(420)) > 0.5


def test_who_held_nowhere_peaks_below_by_what_was_missed() -> None:
    some = ((100, 80),) * 10
    found = peaks(run("a", 400, "fail", some), run("a", 450, "fail", HALF))
    assert found.mean() == pytest.approx(math.log(400 * 0.8 / 0.99), abs=0.005)
    little = ((100, 20),) * 10
    found = peaks(run("a", 400, "fail", little), run("a", 450, "fail", little))
    assert found.mean() == pytest.approx(math.log(200), abs=0.005)  # half at least


def test_of_several_objectives_peaks_are_drawn_by_the_one_that_is_kept_worst() -> None:
    some = ((100, 60),) * 10
    held, missed = (replace(run("a", rps, "undecided", some), overrun=overrun) for rps, overrun in ((400, 0.9), (800, 1.1)))
    assert math.log(400) < peaks(held, missed).mean() < math.log(800)


def test_one_request_is_evidence_too() -> None:
    found = peaks(run("a", 400, "undecided", ((1, 1),)), run("a", 800, "fail", HALF))
    assert found.mean() > math.log(500)


def test_blocks_that_differ_leave_the_peak_in_doubt() -> None:
    # Of ten blocks with 98 or 100 of 100, 0.99 are seen in 62 % of the draws, as five good ones do.
    doubtful = run("a", 400, "undecided", (*(((100, 98),) * 5), *(((100, 100),) * 5)))
    found = peaks(doubtful, run("a", 1600, "fail", HALF))
    assert np.mean(found > math.log(450)) == pytest.approx(0.62 * (1 - math.log(450 / 400) / math.log(4)), abs=0.04)
    # Of unequal blocks each counts by its requests: no draw with a bad one of a thousand comes near.
    heavy = run("a", 400, "undecided", ((1000, 900), *(((100, 100),) * 9)))
    found = peaks(heavy, run("a", 1600, "fail", HALF))
    assert np.mean(found > math.log(450)) == pytest.approx(0.9**10 * (1 - math.log(450 / 400) / math.log(4)), abs=0.04)


def test_shares_that_rise_with_the_rate_are_put_together_by_their_requests() -> None:
    # 9000 requests of 0.98 and 1000 of 1: together 0.982 of the first two rates, so that nothing is held.
    odd = [run("a", 400, "undecided", ((900, 882),) * 10), run("a", 420, "undecided", ALL), run("a", 440, "fail", HALF)]
    assert peaks(*odd).mean() == pytest.approx(math.log(400 * 0.982 / 0.99), abs=0.005)
