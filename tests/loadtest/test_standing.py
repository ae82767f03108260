"""What the runs of one candidate say of its peak."""

import math
from typing import Any

import pytest

from loadtest.search.events import Agreed, Entrant, Measured, Predicted
from loadtest.search.standing import Standing, misses

HELD, MISSED = 1.0, 0.5


def run(rps: float, verdict: str = "undecided", share: float = HELD, purpose: str = "peak", **more: Any) -> Measured:
    """Ten blocks of a hundred requests."""
    blocks = ((100, round(100 * share)),) * 10
    return Measured("c", purpose, rps, verdict, blocks, **{"seconds": 10.0, "p99_ms": 10.0, **more})  # type: ignore[arg-type]


def standing(*runs: Measured, predicted: float | None = None, ceiling_rps: float | None = None, **more: Any) -> Standing:
    predictions = [] if predicted is None else [Predicted("c", predicted, ceiling_rps=ceiling_rps)]
    entrant = Entrant("c", "g", 1.0, 1, 8)
    return Standing(entrant, required=0.99, limit_ms=50.0, predictions=predictions, runs=list(runs), **more)


def test_before_anything_is_known_all_is_open() -> None:
    found = standing()
    assert (found.predicted_rps, found.ceiling_rps) == (0, math.inf)
    assert (found.peak_rps, found.failing_rps, found.held_rps, found.missed_rps, found.claimed_rps) == (0, None, 0, math.inf, 0)
    assert (found.estimated_rps, found.likely_rps, found.tries) == (0, 0, 0)
    assert (found.broken, found.unknown, found.invalid_runs) == (False, False, [])


def test_the_latest_prediction_counts() -> None:
    found = standing(predicted=500.0, ceiling_rps=800.0)
    assert (found.predicted_rps, found.estimated_rps, found.likely_rps) == (500, 500, pytest.approx(550))
    assert found.ceiling_rps == 800
    found.predictions.append(Predicted("c", 790.0, ceiling_rps=800.0))
    assert (found.predicted_rps, found.likely_rps) == (790, 800)  # no more can be offered
    found.predictions.append(Predicted("c", 400.0))
    assert (found.predicted_rps, found.ceiling_rps) == (400, math.inf)


def test_the_peak_is_the_highest_rate_that_passes_below_the_lowest_that_fails() -> None:
    runs = [run(300, "pass"), run(400, "pass"), run(450, "fail", MISSED), run(500, "pass"), run(600, "fail", MISSED)]
    found = standing(*runs)
    assert (found.peak_rps, found.failing_rps, found.claimed_rps) == (400, 450, 400)
    assert standing(run(400, "pass"), run(400, "fail", MISSED)).peak_rps == 0
    assert standing(run(400, "fail", MISSED), run(400, "pass")).peak_rps == 400  # the last of a rate counts
    assert standing(run(400, "pass", purpose="round")).peak_rps == 0  # too short to prove it


def test_what_a_trial_could_not_show_bounds_the_bracket_unless_a_higher_rate_passed() -> None:
    assert standing(run(300, "pass"), run(400)).failing_rps == 400
    assert standing(run(300, "pass"), run(400), run(500, "fail", MISSED)).failing_rps == 400
    assert standing(run(300), run(400, "pass")).failing_rps is None
    assert standing(run(300), run(400, "pass"), run(500, "fail", MISSED)).failing_rps == 500
    assert standing(run(300, "pass"), run(400, purpose="round")).failing_rps is None
    assert standing(run(300, "pass"), run(400, "fail", MISSED, "round")).failing_rps == 400


def test_a_rate_held_in_the_sample_is_claimed_where_none_is_proven() -> None:
    found = standing(run(300), run(400), run(450, share=0.9))
    assert (found.peak_rps, found.held_rps, found.claimed_rps, found.missed_rps) == (0, 400, 400, 450)
    assert standing(run(300, "pass"), run(400)).claimed_rps == 300
    assert standing(run(300, "pass"), run(400)).held_rps == 400
    assert standing(run(400, share=0.99)).held_rps == 400  # just what is required
    assert standing(run(400, share=0.98)).missed_rps == 400


def test_a_rate_at_which_one_of_several_objectives_missed_is_not_held() -> None:
    errors = run(400, share=0.994, overrun=6.0)  # 0.6 % failed, 0.1 % may
    found = standing(run(300, overrun=0.5), errors)
    assert (found.held_rps, found.missed_rps) == (300, 400)
    assert standing(run(400, share=0.6, overrun=0.8)).held_rps == 400  # half must be quick, and 99 % not slow


def test_half_of_the_requests_missing_is_no_collapse_where_half_may() -> None:
    assert standing(run(400, "fail", share=0.45, overrun=1.1), predicted=500.0).estimated_rps == pytest.approx(0.95 * 400)
    assert standing(run(400, "fail", share=0.45, overrun=55.0), predicted=500.0).estimated_rps == pytest.approx(0.87 * 400)


def test_a_proven_rate_is_held_though_a_lower_one_missed() -> None:
    # Shares fall with the rate: those of 300 and 400 are put together.
    found = standing(run(300, share=0.96), run(400, "pass", 0.992))
    assert found.missed_rps == 300
    assert found.held_rps == 400
    apart = standing(run(300, "fail", share=0.8), run(400))
    assert (apart.held_rps, apart.missed_rps) == (0, 300)


def test_evidence_is_what_valid_runs_that_sought_the_peak_say() -> None:
    kept = run(400)
    others = [
        run(300, valid=False),
        run(310, failure="was killed"),
        run(320, purpose="overload"),
        run(330, purpose="recovery"),
        run(340, purpose="floor"),
        Measured("c", "peak", 350, "undecided", (), 1.0),  # nothing was asked
    ]
    found = standing(kept, *others)
    assert found.evidence == [kept]
    assert found.trials == [kept]
    assert found.tries == 2  # the empty one too
    later = run(400, "fail", MISSED)
    assert standing(kept, later).evidence == [later]
    assert standing(kept, later).tries == 2


@pytest.mark.parametrize(("share", "tells"), [(0.88, True), (0.9, False), (0.98, False), (0.99, True)])
def test_a_short_run_that_may_have_met_a_stall_says_nothing(share: float, tells: bool) -> None:
    assert bool(standing(run(400, share=share, purpose="round")).evidence) == tells
    assert standing(run(400, share=share)).evidence  # a long one does


def test_who_failed_while_its_peak_was_sought_is_broken() -> None:
    assert standing(run(400, failure="was killed")).broken
    assert standing(run(400, failure="was killed", purpose="round")).broken
    assert not standing(run(400), run(600, failure="was killed", purpose="overload")).broken


def test_invalid_runs_count_since_the_last_that_was_not() -> None:
    bad = [run(400 + n, valid=False) for n in range(3)]
    assert standing(*bad).invalid_runs == bad
    assert standing(bad[0], run(300), bad[1], bad[2]).invalid_runs == bad[1:]
    assert standing(bad[0], run(300)).invalid_runs == []
    assert standing(bad[0], run(300, valid=False, failure="was killed"), bad[1]).invalid_runs == [bad[1]]
    assert standing(run(300), bad[0], run(600, purpose="overload"), bad[1]).invalid_runs == bad[:2]
    assert standing(run(600, purpose="overload", valid=False)).invalid_runs == []


def test_who_was_tried_and_told_nothing_is_unknown() -> None:
    assert standing(run(400, valid=False)).unknown
    assert not standing(run(400, valid=False), run(400)).unknown
    assert not standing(run(300), run(400, valid=False)).unknown
    disturbed = standing()
    disturbed.predictions.append(Predicted("c", 0.0, disturbed=True))
    assert disturbed.unknown
    disturbed.predictions.append(Predicted("c", 0.0))
    assert not disturbed.unknown


def test_a_bracket_is_estimated_at_its_middle() -> None:
    found = standing(run(400, "pass"), run(484, "fail", MISSED), predicted=900.0)
    assert (found.estimated_rps, found.likely_rps) == (pytest.approx(440), 484)
    near = standing(run(400, "pass"), run(410, "fail", MISSED))
    assert near.likely_rps == 410
    wide = standing(run(300, "pass"), run(400, "fail", 0.8))
    assert (wide.estimated_rps, wide.likely_rps) == (pytest.approx(348), pytest.approx(382.8))


def test_without_an_upper_bound_the_prediction_counts_with_what_others_showed_of_predictions() -> None:
    assert standing(predicted=500.0, bias=0.8).estimated_rps == 400
    assert standing(run(450), predicted=500.0, bias=0.8).estimated_rps == 450  # it held there
    assert standing(run(450), predicted=500.0).estimated_rps == 500
    assert standing(run(450), predicted=500.0, ceiling_rps=480.0).estimated_rps == 480


@pytest.mark.parametrize(("p99_ms", "estimated"), [(45.1, 450), (45.0, 500)])
def test_who_holds_its_limit_by_little_is_at_its_peak(p99_ms: float, estimated: float) -> None:
    assert standing(run(450, p99_ms=p99_ms), predicted=500.0).estimated_rps == estimated
    assert standing(run(450, p99_ms=10), run(440, p99_ms=49), predicted=500.0).estimated_rps == 500


def test_a_short_run_that_missed_by_little_bounds_the_estimate_though_a_stall_may_have_done_it() -> None:
    unclear = run(450, share=0.95, purpose="round", p99_ms=80.0)
    found = standing(unclear, predicted=500.0)
    assert (found.missed_rps, found.estimated_rps, found.likely_rps) == (math.inf, 450, pytest.approx(495))
    assert standing(unclear, run(460), predicted=500.0).estimated_rps == 500  # it was a stall
    assert standing(unclear, run(450, purpose="round"), predicted=500.0).estimated_rps == 500
    assert standing(unclear, run(430), predicted=500.0).estimated_rps == 450


@pytest.mark.parametrize(("share", "factor"), [(0.1, 0.87), (0.8, 0.87), (0.86, 0.87), (0.9, 0.95), (0.98, 0.95)])
def test_who_only_missed_is_estimated_by_what_it_served_in_time(share: float, factor: float) -> None:
    assert standing(run(400, "fail", share), predicted=500.0).estimated_rps == pytest.approx(factor * 400)


def test_the_oftener_a_server_collapsed_the_further_down_its_peak_may_be() -> None:
    assert standing(run(600, "fail", 0.1), run(400, "fail", 0.1)).estimated_rps == pytest.approx(0.87**2 * 400)
    assert standing(run(400, "fail", 0.9), run(600, "fail", 0.1)).estimated_rps == pytest.approx(0.95 * 400)


def test_a_burst_of_misses_that_decides_nothing_is_no_collapse() -> None:
    assert standing(run(400, share=0.83), predicted=500.0).estimated_rps == pytest.approx(0.95 * 400)


@pytest.mark.parametrize(("held_rps", "estimated"), [(200, 348), (300, 348), (310, math.sqrt(310 * 400))])
def test_what_holds_does_not_lower_the_estimate(held_rps: float, estimated: float) -> None:
    assert standing(run(400, "fail", 0.1), run(held_rps, "pass")).estimated_rps == pytest.approx(estimated)


def test_misses_says_why_one_may_not_win() -> None:
    good, bad = Agreed("c", 0.999, 300, "cosine"), Agreed("c", 0.9989, 300, "cosine")
    assert misses(good, 0.999) == ""
    assert misses(bad, 0.999) == "agrees 0.9989 with the reference, 0.999 is asked"
    assert misses(bad, None) == ""
    assert misses(Agreed("c", failure="did not start"), 0.999) == "did not start"
    assert misses(Agreed("c", 1.0, 300, "cosine", failure="died"), 0.999) == "died"
    assert misses(Agreed("c", failure="did not start"), None) == ""
