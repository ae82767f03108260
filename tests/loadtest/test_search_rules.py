"""What a search asks for next, by what is known: one rule of docs/loadtest.md each, with its figures."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from loadtest.search.budget import decisive_seconds, profile_seconds
from loadtest.search.events import (
    CUT_OFF,
    UNREACHED,
    Agree,
    Agreed,
    Entrant,
    Event,
    Experiment,
    Load,
    Measured,
    Predict,
    Predicted,
    Profile,
    Profiled,
    Question,
    Timing,
)
from loadtest.search.knowledge import Knowledge
from loadtest.search.standing import SearchOutcome
from loadtest.search.strategy import powers_up_to, search

START_S = 5.0  # of every candidate
DECISIVE_S = 12.5  # at 50 ms and 400/s and more: 25 blocks of half a second
HELD, MISSED = 1.0, 0.5  # shares within the SLO


def asking(*prices: float, seconds: float = 1800.0, **more: Any) -> Question:
    entrants = tuple(Entrant(f"c{n}", f"g{n}", price, 1, 8) for n, price in enumerate(prices))
    return Question(entrants, **{"required": 0.99, "limit_ms": 50.0, "seconds": seconds, **more})


def run(name: str, rps: float, verdict: str = "undecided", share: float = HELD, purpose: str = "peak", **more: Any) -> Measured:
    """Ten blocks of a hundred requests, at no cost."""
    blocks = ((100, round(100 * share)),) * 10
    return Measured(name, purpose, rps, verdict, blocks, **{"seconds": 0.0, "p99_ms": 10.0, **more})  # type: ignore[arg-type]


def known(
    asked: Question, left_s: float, predicted: Sequence[float], *runs: Measured, ceiling_rps: float | None = None
) -> list[Event]:
    """All candidates profiled, loaded as told, predicted at those rates; left_s: of the budget."""
    spent_s = [asked.seconds - left_s, *[0.0] * len(asked.entrants)]
    profiles = [
        Profiled(entrant.group, (Timing(1, 1, 5.0),), 0.5, seconds, start_s=START_S if seconds else 0.0)
        for entrant, seconds in zip(asked.entrants, spent_s, strict=False)
    ]
    rates = zip(asked.entrants, predicted, strict=True)
    return [*profiles, *runs, *(Predicted(entrant.name, rps, ceiling_rps=ceiling_rps) for entrant, rps in rates)]


def asked_next(asked: Question, events: Sequence[Event]) -> Experiment | SearchOutcome:
    """What it asks for first; its outcome, if it asks for nothing."""
    steps = search(asked, events)
    try:
        return next(steps)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]


def load(asked: Question, events: Sequence[Event]) -> Load:
    found = asked_next(asked, events)
    assert isinstance(found, Load)
    return found


def brief(found: Experiment | SearchOutcome) -> tuple[Any, ...]:
    assert isinstance(found, Load), found
    return found.entrant, pytest.approx(found.rps, rel=1e-3), found.purpose


def answered(asked: Question, events: Sequence[Event]) -> SearchOutcome:
    """The outcome, if every further load ends INVALID, and free of charge."""
    steps = search(asked, events)
    try:
        experiment = next(steps)
        while True:
            assert isinstance(experiment, Load)
            experiment = steps.send(run(experiment.entrant, experiment.rps, purpose=experiment.purpose, valid=False))
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]


# Before traffic.


@pytest.mark.parametrize(("seconds", "groups", "each_s"), [(1800, 1, 30), (200, 2, 10), (30, 3, 2), (600, 2, 30), (580, 2, 29)])
def test_profiles_take_a_tenth_of_the_budget_in_all(seconds: float, groups: int, each_s: float) -> None:
    assert profile_seconds(asking(1.0, seconds=seconds), groups) == each_s


def test_sizes_are_powers_of_two_and_the_most() -> None:
    assert [powers_up_to(most) for most in (1, 2, 6, 8)] == [(1,), (1, 2), (1, 2, 4, 6), (1, 2, 4, 8)]


def test_a_decisive_run_is_25_blocks_of_ten_limits_or_200_requests() -> None:
    assert decisive_seconds(50, 1000) == 25 * 0.5
    assert decisive_seconds(50, 100) == 25 * 2.0
    assert decisive_seconds(1000, 1000) == 25 * 10.0


def test_a_group_is_profiled_on_its_widest_and_on_those_of_more_rows() -> None:
    """A server splits requests of more rows than its batches have: of them it tells nothing."""
    entrants = (
        *(Entrant("a", "g", 1.0, 1, 16), Entrant("less", "g", 1.0, 4, 2), Entrant("b", "g", 1.0, 4, 6)),
        Entrant("c", "h", 1.0, 1, 2),
    )
    asked = Question(entrants, 0.99, 50, 300)
    of_b = Profiled("g", (Timing(1, 1, 5.0), Timing(6, 4, 9.0)), saturated_rps=100.0, entrant="b")
    of_a = Profiled("g", (Timing(1, 1, 6.0), Timing(16, 1, 8.0)), saturated_rps=90.0, entrant="a", disturbed=True)
    of_c = Profiled("h", (Timing(1, 1, 5.0),), entrant="c")
    assert asked_next(asked, ()) == Profile("b", "g", (1, 2, 4, 6), 4, 10.0)
    assert asked_next(asked, [of_b]) == Profile("c", "h", (1, 2), 1, 10.0)
    assert asked_next(asked, [of_b, of_c]) == Profile("a", "g", (1, 2, 4, 8, 16), 1, 10.0)
    assert asked_next(asked, [of_b, of_c, of_a]) == Predict("a")
    both = Knowledge(asked, [of_b, of_a]).profiles["g"]
    assert both.timings == (Timing(1, 1, 6.0), Timing(6, 4, 9.0), Timing(16, 1, 8.0))
    assert (both.saturated_rps, both.disturbed) == (100, True)
    assert of_b.beside(of_a).disturbed


@pytest.mark.parametrize(("spent_s", "more"), [(80, True), (81, False)])
def test_a_group_that_has_a_profile_gets_another_only_in_the_first_part_of_a_budget(spent_s: float, more: bool) -> None:
    entrants = (Entrant("a", "g", 1.0, 1, 16), Entrant("b", "g", 1.0, 4, 6))
    asked = Question(entrants, 0.99, 50, 200)
    of_b = Profiled("g", (Timing(1, 1, 5.0),), seconds=spent_s, entrant="b")
    assert asked_next(asked, [of_b]) == (Profile("a", "g", (1, 2, 4, 8, 16), 1, 10.0) if more else Predict("a"))


@pytest.mark.parametrize(
    "left_s", [52.5, 52.4]
)  # twice 5 s for a start, 10 for the profile, 12.5 for a proof, twice 10 to check
def test_where_a_server_failed_another_is_profiled_before_loads_only_if_a_proof_has_its_time(left_s: float) -> None:
    entrants = (Entrant("a", "g", 1.0, 1, 8), Entrant("wide", "h", 1.0, 2, 8), Entrant("narrow", "h", 1.0, 1, 8))
    asked = Question(entrants, 0.99, 50, 200)
    of_a = Profiled("g", (Timing(1, 1, 5.0),), seconds=200 - left_s, start_s=START_S, entrant="a")
    known = [of_a, Profiled("h", failure="did not start: out of memory", entrant="wide")]
    narrow = Profile("narrow", "h", (1, 2, 4, 8), 1, 10.0)
    steps = search(asked, known)
    assert next(steps) == (narrow if left_s == 52.5 else Predict("a"))
    if left_s == 52.4:  # where nothing can be proven of the others, it has what is left
        assert steps.send(Predicted("a", 0.0)) == narrow


def test_where_the_widest_cannot_be_profiled_the_narrowest_is_and_then_those_between() -> None:
    entrants = tuple(Entrant(f"c{sessions}", "g", 1.0, sessions, 8) for sessions in (1, 4, 2))
    asked, failure = Question(entrants, 0.99, 50, 200), "did not start: out of memory"
    older = Profiled("g", failure=failure)  # as an older journal has it: of the widest
    narrow, between = (Profile(f"c{sessions}", "g", (1, 2, 4, 8), sessions, 20.0) for sessions in (1, 2))
    assert asked_next(asked, [older]) == narrow
    before = [older, Profiled("g", failure=failure, entrant="c2")]  # one by one, as the version before asked
    assert asked_next(asked, before) == narrow
    cut = Profiled("g", failure=f"{CUT_OFF} time ended: {UNREACHED}", entrant="c1")
    steps = search(asked, [older])
    next(steps)
    with pytest.raises(StopIteration) as stop:
        steps.send(cut)
    assert [standing.out for standing in stop.value.value.standings] == [cut.failure, failure, cut.failure]
    # What is known of the narrowest remains, whatever becomes of those between.
    known = [older, Profiled("g", (Timing(1, 1, 5.0),), entrant="c1")]
    assert asked_next(asked, known) == between
    for failed in (Profiled("g", failure=failure, entrant="c2"), replace(cut, entrant="c2")):
        steps = search(asked, known)
        next(steps)
        assert steps.send(failed) == Predict("c1")
    assert asked_next(asked, [*known, Profiled("g", (Timing(1, 1, 5.0),), entrant="c2")]) == Predict("c1")


@pytest.mark.parametrize(("left_s", "reached"), [(7.0, True), (6.9, False)])
def test_a_profile_needs_time_for_its_start_as_well(left_s: float, reached: bool) -> None:
    asked = asking(1.0, 1.0, seconds=40)  # 2 s each
    first = Profiled("g0", (Timing(1, 1, 5.0),), seconds=40 - left_s, start_s=START_S)
    found = asked_next(asked, [first])
    assert isinstance(found, Profile if reached else Predict)
    if not reached:
        outcome = answered(asked, [first, Predicted("c0", 100.0)])
        assert outcome.standings[1].out == "the budget did not reach it"
        assert outcome.standings[0].out == "the budget ended before it was tried"


def test_a_profile_that_money_does_not_reach_is_not_taken() -> None:
    asked = asking(36.0, seconds=1800, max_usd=0.29)  # 0.01 USD a second; it would take 30 s
    outcome = asked_next(asked, ())
    assert isinstance(outcome, SearchOutcome)
    assert outcome.standings[0].out == "the budget did not reach it"
    assert isinstance(asked_next(replace(asked, max_usd=0.31), ()), Profile)


def test_everyone_is_predicted_and_again_after_the_first_run_under_load() -> None:
    asked = asking(1.0, 2.0)
    profiles = known(asked, 1700, (500.0, 500.0))[:2]
    assert asked_next(asked, profiles) == Predict("c0")
    assert asked_next(asked, [*profiles, Predicted("c0", 500.0)]) == Predict("c1")
    both = [*profiles, Predicted("c0", 500.0), Predicted("c1", 500.0)]
    assert isinstance(asked_next(asked, both), Load)
    assert asked_next(asked, [*both, run("c0", 450)]) == Predict("c0")
    assert isinstance(asked_next(asked, [*both, run("c0", 450), run("c0", 460)]), Load)
    assert isinstance(asked_next(asked, [*both, run("c0", 450, valid=False)]), Load)
    assert asked_next(asked, [*both, run("c0", 450, valid=False), run("c0", 450)]) == Predict("c0")


def test_who_is_predicted_at_no_rate_is_out_with_the_reason() -> None:
    asked = asking(1.0, 2.0)
    profiles = known(asked, 1700, (500.0, 500.0))[:2]
    events = [*profiles, Predicted("c0", 0.0, why="one request alone takes 80 ms"), Predicted("c1", 0.0)]
    steps = search(asked, events)
    experiment = next(steps)
    assert isinstance(experiment, Load)
    assert experiment.purpose == "floor"
    with pytest.raises(StopIteration) as stop:
        steps.send(run("c0", experiment.rps, "fail", MISSED, "floor"))
    outs = [standing.out for standing in stop.value.value.standings]
    assert outs == ["one request alone takes 80 ms", "by its profile it misses the SLO even alone"]


# The first rate to prove.


def test_the_first_rate_to_prove_is_sure_to_pass_and_has_three_times_the_decisive_time() -> None:
    asked = asking(1.0)
    assert load(asked, known(asked, 1790, (500.0,))) == Load("c0", 400.0, 3 * DECISIVE_S, "peak")
    # Of 79 s half, less its start, is less than three times the decisive time.
    assert load(asked, known(asked, 79, (500.0,))) == Load("c0", 400.0, 37.0, "peak")


def test_a_trial_is_never_shorter_than_what_can_decide() -> None:
    wide = asking(1.0, 1.02)
    beside = run("c0", 490, "pass"), run("c0", 500, "fail", MISSED)
    for left_s, seconds in ((5 + 40 + 13, DECISIVE_S), (5 + 40 + 26, 13.0)):
        found = load(wide, known(wide, left_s, (500.0, 500.0), *beside, run("c1", 400, purpose="round")))
        assert (found.entrant, found.seconds) == ("c1", seconds)


def test_with_time_for_one_trial_it_is_as_long_as_can_be() -> None:
    asked = asking(1.0)  # 4.5 times 17.5 s are 78.75 s
    assert load(asked, known(asked, 78.8, (500.0,))).seconds == pytest.approx(36.9)
    assert load(asked, known(asked, 78.7, (500.0,))).seconds == pytest.approx(73.7)


def test_who_runs_already_needs_no_time_to_start() -> None:
    asked = asking(1.0, seconds=90)
    steps = search(asked)
    assert isinstance(next(steps), Profile)
    assert isinstance(steps.send(Profiled("g0", (Timing(1, 1, 5.0),), 0.5, 20.0, start_s=START_S)), Predict)
    # 70 s are left: 4.5 times 12.5 s are less, 4.5 times 17.5 s would be more.
    assert steps.send(Predicted("c0", 500.0)) == Load("c0", 400.0, 35.0, "peak")
    dead = steps.send(run("c0", 400, valid=False))
    assert dead == Load("c0", 400.0, 35.0, "peak")


def test_the_oftener_it_fails_the_further_down_it_is_tried() -> None:
    asked = asking(1.0)

    def tried(*runs: Measured) -> float:
        return load(asked, known(asked, 1700, (500.0,), *runs)).rps

    near = [run("c0", 425), run("c0", 410), run("c0", 380)]  # held, and were not proven
    assert tried(near[0]) == pytest.approx(425 / 1.1)
    assert tried(*near[:2]) == pytest.approx(410 / 1.1)
    assert tried(*near) == pytest.approx(380 / 1.1**2)
    missed = [run("c0", rps, "fail", 0.98) for rps in (460, 430, 400)]
    assert tried(*missed[:1]) == pytest.approx(0.8 * 0.95 * 460)
    assert tried(*missed[:2]) == pytest.approx(0.8 * 0.95 * 430)
    assert tried(*missed) == pytest.approx(0.8 * 0.95 * 400)
    assert tried(*missed, run("c0", 390, purpose="round")) == pytest.approx(0.8 * math.sqrt(390 * 400))
    assert tried(*missed[:2], run("c0", 300)) == pytest.approx(300 / 1.1**2)


def test_after_four_vain_tries_the_next_candidate_is_tried() -> None:
    asked = asking(1.0, 1.5)
    runs = [run("c1", 400, purpose="round"), *(run("c0", 460 - 20 * n) for n in range(4))]
    assert load(asked, known(asked, 1700, (500.0, 500.0), *runs[:-1])).entrant == "c0"
    found = load(asked, known(asked, 1700, (500.0, 500.0), *runs))
    assert (found.entrant, found.rps) == ("c1", pytest.approx(400))


# A short run of each.


@pytest.mark.parametrize(
    ("budget_s", "seconds", "purpose"), [(1800, 20, "peak"), (600, 18, "peak"), (300, 9, "round"), (120, 4, "round")]
)
def test_each_that_may_be_the_cheapest_gets_a_short_run(budget_s: float, seconds: float, purpose: str) -> None:
    asked = asking(1.0, 1.1, seconds=budget_s)
    assert load(asked, known(asked, 110, (500.0, 500.0))) == Load("c0", 450.0, pytest.approx(seconds), purpose)  # type: ignore[arg-type]


def test_a_short_run_that_is_long_enough_to_decide_may_decide() -> None:
    asked = asking(1.0, 1.1, limit_ms=80.0)  # decisive in 20 s
    assert load(asked, known(asked, 1700, (500.0, 500.0))).purpose == "peak"
    longer = replace(asked, limit_ms=81.0)
    assert load(longer, known(longer, 1700, (500.0, 500.0))).purpose == "round"


def test_proving_one_rate_comes_before_short_runs() -> None:
    asked = asking(1.0, 1.1, seconds=300)  # short runs of 9 s
    first = [known(asked, left_s, (500.0, 500.0)) for left_s in (31.6, 31.4)]  # 5 + 12.5 for the proof, and 9 + 5
    assert [load(asked, events).purpose for events in first] == ["round", "peak"]
    seen = run("c0", 450, purpose="round")
    second = [load(asked, known(asked, left_s, (500.0, 500.0), seen)) for left_s in (44.1, 43.9)]  # and 12.5 for another
    assert [(found.entrant, found.purpose) for found in second] == [("c1", "round"), ("c0", "peak")]


def test_one_candidate_alone_needs_no_short_run() -> None:
    asked = asking(1.0, seconds=300)
    assert load(asked, known(asked, 280, (500.0,))).purpose == "peak"


def test_the_two_cheapest_are_measured_and_others_that_are_predicted_near_them() -> None:
    def scouted(*prices: float) -> set[str]:
        asked = asking(*prices)
        runs: list[Measured] = []
        while True:
            found = asked_next(asked, known(asked, 1700, (500.0,) * len(prices), *runs))
            assert isinstance(found, Load)
            if found.entrant in {one.entrant for one in runs}:
                return {one.entrant for one in runs}
            runs.append(run(found.entrant, found.rps, purpose="round"))

    assert scouted(1.0, 2.0, 1 / 0.86, 1 / 0.84) == {"c0", "c2"}
    assert scouted(1.0, 1.1, 1 / 0.86, 1 / 0.84) == {"c0", "c1", "c2"}
    assert scouted(1.0, 1.01, 1.02, 1.03, 1.04, 1.05) == {"c0", "c1", "c2", "c3", "c4"}


def test_what_predictions_left_out_for_one_they_leave_out_for_all() -> None:
    asked = asking(1.0, 1.0, 1.0)
    failed = run("c0", 400, "fail", MISSED)
    found = load(asked, known(asked, 1700, (500.0, 500.0, 500.0), failed))
    assert brief(found) == ("c1", 0.9 * 500 * 0.8, "peak")
    both = (failed, run("c1", 250, "fail", MISSED))
    found = load(asked, known(asked, 1700, (500.0, 500.0, 500.0), *both))
    assert brief(found) == ("c2", 0.9 * 500 * math.sqrt(0.8 * 0.5), "peak")
    passed = run("c0", 600, "pass")
    assert brief(load(asked, known(asked, 1700, (500.0, 500.0, 500.0), passed))) == ("c1", 0.9 * 500 * 1.2, "peak")
    unclear = run("c0", 600)  # beyond what was predicted, and no more is known
    assert brief(load(asked, known(asked, 1700, (500.0, 500.0, 500.0), unclear))) == ("c1", 0.9 * 500 * 1.2, "peak")
    low = run("c0", 300, "pass")  # below it nothing is left out
    assert brief(load(asked, known(asked, 1700, (500.0, 500.0, 500.0), low))) == ("c1", 0.9 * 500, "peak")


# What is INVALID is measured again.


def test_an_invalid_run_is_repeated_and_then_asks_less_of_the_generator() -> None:
    asked = asking(1.0)
    late = run("c0", 460, valid=False)
    once, twice = (known(asked, 1790, (500.0,), *[late] * count) for count in (1, 2))
    assert load(asked, once) == Load("c0", 460.0, 37.5, "peak")
    assert load(asked, twice) == Load("c0", pytest.approx(368), pytest.approx(3 * 25 * 200 / 368), "peak")
    disturbed = [late, replace(late, disturbed=True)]
    assert load(asked, known(asked, 1790, (500.0,), *disturbed)).rps == 460.0


def test_an_invalid_short_run_is_repeated_as_short() -> None:
    asked = asking(1.0, 1.1, seconds=300)
    short = run("c0", 450, purpose="round", valid=False)
    assert load(asked, known(asked, 280, (500.0, 500.0), short)) == Load("c0", 450.0, 9.0, "round")


def test_after_three_invalid_runs_the_others_come_first() -> None:
    asked = asking(1.0, 3.0)
    late = run("c0", 460, valid=False, notes=("the first",))
    last = replace(late, notes=("it was late", "by 9 ms"))
    assert load(asked, known(asked, 1700, (500.0, 500.0), late, late)).entrant == "c0"
    assert load(asked, known(asked, 1700, (500.0, 500.0), late, late, last)).entrant == "c1"
    assert answered(asked, known(asked, 20, (500.0, 500.0), late, late, last)).standings[0].out == (
        "could not be measured: it was late; by 9 ms"
    )


def test_what_was_seen_of_one_without_an_answer_is_told_before_why_there_is_none() -> None:
    asked = asking(1.0, seconds=300)
    short = run("c0", 450, purpose="round", verdict="undecided", share=0.96)
    missed = run("c0", 450, purpose="round", verdict="fail", share=0.7)
    late = run("c0", 300, valid=False, notes=("it was late",))

    def why(*runs: Measured) -> str:
        outcome = asked_next(asked, known(asked, 1, (500.0,), *runs))
        assert isinstance(outcome, SearchOutcome)
        return outcome.standings[0].out

    tried = "450/s was tried for a short time: 96.00 % in the SLO, undecided"
    assert why(late, late, short) == f"{tried}; the budget ended before more"
    assert why(short, late) == f"{tried}; 300/s could not be measured: it was late"
    assert why(missed, late) == (
        "misses the SLO at 450/s, the lowest rate that was measured; 300/s could not be measured: it was late"
    )
    assert why(missed) == "misses the SLO at 450/s, the lowest rate that was tried"
    assert why(late) == "could not be measured: it was late"


# Higher, cheaper, closer.


def test_a_claim_far_below_the_estimate_is_raised_with_half_of_the_time() -> None:
    asked = asking(1.0)
    found = load(asked, known(asked, 1700, (500.0,), run("c0", 400, "pass")))
    # 40 s are kept for the overload and the recovery.
    assert found == Load("c0", pytest.approx(math.sqrt(400 * 500)), pytest.approx(0.5 * (1700 - 5 - 40)), "peak")


def test_what_is_left_for_one_trial_only_goes_into_that_one() -> None:
    asked = asking(1.0)  # 5 s are for its start, 40 s for the overload and the recovery; 4.5 times 17.5 s are 78.75 s
    for left_s, seconds in ((118.8, 0.5 * 73.8), (118.7, 73.7)):
        found = load(asked, known(asked, left_s, (500.0,), run("c0", 400, "pass")))
        assert (found.rps, found.seconds) == (pytest.approx(math.sqrt(400 * 500)), pytest.approx(seconds, rel=0.02))


@pytest.mark.parametrize(("peak_rps", "next_rps"), [(476, 500), (480, 500), (481, 1.1 * 481)])
def test_a_claim_near_the_estimate_is_first_tried_at_the_estimate_and_then_above(peak_rps: float, next_rps: float) -> None:
    asked = asking(1.0)
    found = load(asked, known(asked, 1700, (500.0,), run("c0", peak_rps, "pass")))
    assert brief(found) == ("c0", next_rps, "peak")
    assert found.seconds == 3 * DECISIVE_S


def test_a_rate_that_may_only_have_lacked_time_is_tried_again_for_longer() -> None:
    asked = asking(1.0)
    passed, unproven = run("c0", 400, "pass"), run("c0", 430)
    found = load(asked, known(asked, 1700, (500.0,), passed, unproven))
    assert brief(found) == ("c0", 430, "peak")
    assert found.seconds > 800
    # Within 4 % of the claim nothing is gained: the search is at its end.
    ended = load(asked, known(asked, 1700, (500.0,), passed, run("c0", 415)))
    assert (ended.purpose, ended.rps) == ("overload", 600)


def test_a_rate_that_had_as_much_time_in_all_is_not_tried_again_but_one_nearer_to_the_claim() -> None:
    asked = asking(1.0)
    runs = run("c0", 400, "pass"), run("c0", 440, seconds=61.0, start_s=1.0)
    other_s = 61 + 1 + 40  # spent on that run; for a start and to verify

    def tried(left_s: float) -> tuple[Any, ...]:
        return brief(load(asked, known(asked, other_s + left_s, (500.0,), *runs)))

    assert tried(119) == ("c0", math.sqrt(400 * 440), "peak")  # half of it is shorter than 60 s
    assert tried(121) == ("c0", 440, "peak")
    runs = *runs, run("c0", 440, seconds=21.0, start_s=1.0)
    other_s += 21  # and a second run, of 20 s
    assert tried(159) == ("c0", math.sqrt(400 * 440), "peak")
    assert tried(161) == ("c0", 440, "peak")


def test_a_bracket_is_halved_until_it_is_within_4_percent() -> None:
    asked = asking(1.0)

    def after(failing_rps: float) -> Load:
        return load(asked, known(asked, 1700, (500.0,), run("c0", 400, "pass"), run("c0", failing_rps, "fail", MISSED)))

    assert brief(after(440)) == ("c0", math.sqrt(400 * 440), "peak")
    assert brief(after(420)) == ("c0", math.sqrt(400 * 420), "peak")
    assert after(415).purpose == "overload"


def test_a_candidate_is_tried_ten_times_at_most() -> None:
    asked = asking(1.0)
    trials = [run("c0", 390 + n, "pass") for n in range(8)]
    assert load(asked, known(asked, 1700, (500.0,), *trials, run("c0", 400, "pass"))).purpose == "peak"
    assert (
        load(asked, known(asked, 1700, (500.0,), *trials, run("c0", 400, "pass"), run("c0", 400, "pass"))).purpose == "overload"
    )


def test_whoever_may_be_cheaper_is_tried_at_the_rate_that_would_make_it_so() -> None:
    asked = asking(1.0, 1.5)
    leader = [run("c0", 490, "pass"), run("c0", 500, "fail", MISSED)]  # known well enough

    def after(predicted_rps: float, *more: Measured) -> Load:
        short = run("c1", 0.5 * predicted_rps, purpose="round")
        return load(asked, known(asked, 1700, (500.0, predicted_rps), *leader, short, *more))

    # 490/s for 1 USD are 735/s for 1.5; one hundredth more, as far as 1.1 times what is predicted.
    assert brief(after(690)) == ("c1", 1.01 * 735, "peak")
    assert after(690).seconds == 3 * DECISIVE_S
    assert after(670).purpose == "overload"
    # Proven there it is the cheapest, and its own bracket is what is open.
    assert brief(after(690, run("c1", 745, "pass"))) == ("c1", 1.1 * 745, "peak")
    # What could not be shown there is not tried there again.
    assert after(690, run("c1", 742)).purpose == "overload"


def test_whoever_may_make_a_mix_cheaper_is_tried_at_the_rate_that_would_make_it_so() -> None:
    asked = asking(1.0, 0.6, 0.6, target_rps=1500.0)  # three of c0, 0.7 of 800/s each
    asked = replace(asked, entrants=tuple(replace(each, max_count=1) if each.name != "c0" else each for each in asked.entrants))
    leader = [run("c0", 800, "pass"), run("c0", 810, "fail", MISSED)]  # known well enough

    def after(predicted_rps: float, *more: Measured) -> Load:
        seen = [run(name, 0.5 * predicted_rps, purpose="round") for name in ("c1", "c2")]
        return load(asked, known(asked, 1700, (800.0, predicted_rps, 200.0), *leader, *seen, *more))

    # Two of c0 carry 1120/s: 380/s are left for c1, 0.7 of its rate.
    assert brief(after(640)) == ("c1", pytest.approx(380 / 0.7, rel=0.01), "peak")
    assert brief(after(700)) == ("c1", 0.8 * 700, "peak")  # that sure it is
    assert after(530).purpose == "overload"  # it would not do
    # The mix is proven then, and what is open is how far c1 goes.
    assert brief(after(640, run("c1", 545, "pass"))) == ("c1", 640, "peak")
    assert after(640, run("c1", 545, "fail", MISSED)).purpose == "overload"


def test_the_cheapest_is_raised_before_a_mix_that_would_save_less_is_tried() -> None:
    asked = asking(1.0, 0.75, target_rps=1500.0)
    asked = replace(asked, entrants=(asked.entrants[0], replace(asked.entrants[1], max_count=1)))
    # Five of c0 at 0.7 of 505/s each; four at 540/s, or four and c1, which is 5 % less.
    seen = [run("c0", 505, "pass"), run("c1", 200, purpose="round")]
    assert brief(load(asked, known(asked, 1700, (540.0, 400.0), *seen))) == ("c0", 540, "peak")
    # It goes no further: then the mix is tried.
    assert load(asked, known(asked, 1700, (540.0, 400.0), *seen, run("c0", 520, "fail", MISSED))).entrant == "c1"
    # Without the time for it, what it may yet save is told.
    alone = asking(1.0, target_rps=1500.0)
    ended = asked_next(alone, known(alone, 0, (540.0,), seen[0]))
    assert isinstance(ended, SearchOutcome)
    assert ended.hoped is not None
    assert ended.hoped.counts == {"c0": 4}


def test_no_rate_is_proven_at_which_another_would_still_be_cheaper() -> None:
    asked = asking(1.0, 1.0)
    seen = run("c1", 250, purpose="round")
    found = load(asked, known(asked, 1700, (450.0, 500.0), run("c0", 440, "pass"), seen))
    assert brief(found) == ("c1", 1.01 * 440, "peak")  # and not 0.8 of 500
    found = load(asked, known(asked, 1700, (450.0, 560.0), run("c0", 440, "pass"), seen))
    assert brief(found) == ("c1", 0.8 * 560, "peak")


def test_the_bracket_of_the_cheapest_is_closed_before_others_are_tried_above_their_estimates() -> None:
    asked = asking(1.0, 1.0)
    passed, failed, seen = run("c0", 470, "pass"), run("c0", 485, "fail", MISSED), run("c1", 230, purpose="round")

    def after(predicted_rps: float, *more: Measured) -> tuple[Any, ...]:
        return brief(load(asked, known(asked, 1700, (500.0, predicted_rps), passed, seen, *more)))

    assert after(480) == ("c1", 1.01 * 470, "peak")
    assert after(465) == ("c0", 500, "peak")
    assert after(465, failed) == ("c1", 1.01 * 470, "peak")


def test_the_brackets_of_the_two_cheapest_are_closed_and_no_other() -> None:
    asked = asking(1.0, 1.02, 1.04)
    narrow = [run("c0", 490, "pass"), run("c0", 500, "fail", MISSED)]
    wide = [(run(name, 460, "pass"), run(name, 492, "fail", MISSED)) for name in ("c1", "c2")]
    events = known(asked, 1700, (500.0,) * 3, *narrow, *wide[0], *wide[1])
    assert brief(load(asked, events)) == ("c1", math.sqrt(460 * 492), "peak")
    closed = known(asked, 1700, (500.0,) * 3, *narrow, *wide[0], run("c1", 474, "fail", MISSED), *wide[1])
    assert load(asked, closed).purpose == "overload"


def test_nothing_is_sought_above_what_the_generator_can_offer() -> None:
    asked = asking(1.0)
    assert load(asked, known(asked, 1700, (500.0,), ceiling_rps=300.0)).rps == pytest.approx(0.8 * 300)
    for proven in ([run("c0", 300, "pass")], [run("c0", 240, "pass"), run("c0", 245, "fail", MISSED)]):
        # 300/s are no more than a peak that is kept to 0.8: an overload would be none, and nothing to recover from.
        ended = asked_next(asked, known(asked, 1700, (500.0,), *proven, ceiling_rps=300.0))
        assert isinstance(ended, SearchOutcome)
        assert (ended.winner, ended.verified) == ("c0", None)
    sought = load(asked, known(asked, 1700, (500.0,), run("c0", 295, "pass"), ceiling_rps=300.0))
    assert (sought.purpose, sought.rps) == ("peak", 300)


# Time and money.


def test_where_nothing_is_proven_a_hurried_trial_is_better_than_none() -> None:
    asked = asking(1.0)
    seen = run("c0", 460)
    # At 0.8 of 500/s: 12.5 s, of which 0.6 will do, behind a start of 5 s.
    for left_s, again in ((12.6, True), (12.4, False)):
        found = asked_next(asked, known(asked, left_s, (500.0,), seen))
        assert isinstance(found, Load if again else SearchOutcome)
    unseen = load(asked, known(asked, 9.1, (500.0,)))  # whatever there is time for
    assert (unseen.rps, unseen.seconds) == (pytest.approx(400), pytest.approx(4.1))
    assert isinstance(asked_next(asked, known(asked, 8.9, (500.0,))), SearchOutcome)  # less than 4 s tell nothing


def test_behind_a_proven_rate_a_whole_trial_must_fit_before_the_overload() -> None:
    asked = asking(1.0, seconds=300)  # 15 s for each of the two at the end
    for left_s, purpose in ((47.6, "peak"), (47.4, "overload")):
        assert load(asked, known(asked, left_s, (500.0,), run("c0", 490, "pass"))).purpose == purpose


def test_a_load_is_as_long_as_money_lasts() -> None:
    asked = asking(36.0, max_usd=0.4)  # 40 s
    events = known(asked, 1800.0, (500.0,), run("c0", 200, "undecided", valid=False, seconds=10.0))
    assert load(asked, events).seconds == pytest.approx(30)
    paid = replace(asked, max_usd=0.28)  # 18 s are left
    beside = replace(asked, beside_usd_per_hour=12.0)  # of the 0.30 USD that are left
    assert load(beside, events).seconds == pytest.approx(22.5)
    found = load(paid, [Profiled("g0", (Timing(1, 1, 5.0),), 0.5, 10.0, start_s=START_S), Predicted("c0", 500.0)])
    assert found.seconds == pytest.approx(13)  # behind its start


# The end.


def test_at_the_end_the_winner_is_overloaded_and_must_recover() -> None:
    asked = asking(1.0, seconds=300)
    events = known(asked, 40, (500.0,), run("c0", 490, "pass"))
    steps = search(asked, events)
    overload = next(steps)
    assert overload == Load("c0", 735.0, pytest.approx(16.0), "overload", until_decided=False)  # 0.4 of what is left
    recovery = steps.send(run("c0", 735, "fail", MISSED, "overload", seconds=16.0))
    assert recovery == Load("c0", pytest.approx(392), pytest.approx(16.0), "recovery")
    with pytest.raises(StopIteration) as stop:
        steps.send(run("c0", 392, "pass", purpose="recovery"))
    assert stop.value.value.verified is True
    assert stop.value.value.needed_seconds is None


@pytest.mark.parametrize(("left_s", "seconds"), [(1700, 60), (38, 15.2), (35, 15), (25, 10), (13.2, 4.1)])
def test_the_overload_is_as_long_as_what_is_left_allows(left_s: float, seconds: float) -> None:
    asked = asking(1.0, seconds=300 if left_s < 300 else 1800)
    events = known(asked, left_s, (500.0,), run("c0", 490, "pass"), run("c0", 500, "fail", MISSED))
    assert load(asked, events).seconds == pytest.approx(seconds)


def test_what_was_verified_is_not_verified_again_unless_another_rate_is_claimed() -> None:
    asked = asking(1.0)
    runs = [run("c0", 490, "pass"), run("c0", 500, "fail", MISSED)]
    after = [run("c0", 735, "fail", MISSED, "overload"), run("c0", 392, "undecided", purpose="recovery")]
    done = asked_next(asked, known(asked, 1700, (500.0,), *runs, *after))
    assert isinstance(done, SearchOutcome)
    assert (done.verified, done.notes) == (True, ())
    other = [after[0], replace(after[1], rps=380.0)]
    assert load(asked, known(asked, 1700, (500.0,), *runs, *other)).purpose == "overload"
    invalid = [after[0], replace(after[1], valid=False)]
    assert load(asked, known(asked, 1700, (500.0,), *runs, *invalid)).purpose == "overload"
    assert load(asked, known(asked, 1700, (500.0,), *runs, after[0])).purpose == "overload"


def test_recovery_is_seen_behind_an_overload_and_where_the_slo_held() -> None:
    asked = asking(1.0)
    runs = [run("c0", 490, "pass"), run("c0", 500, "fail", MISSED)]
    overload, missed = run("c0", 735, "fail", MISSED, "overload"), run("c0", 392, "undecided", MISSED, "recovery")
    for after in ([overload, missed], [run("c0", 392, "pass", purpose="recovery")]):
        outcome = answered(asked, known(asked, 1700, (500.0,), *runs, *after))
        assert (outcome.winner, outcome.verified, outcome.notes) == ("c0", None, ())


def test_what_overload_did_is_told_once_in_words() -> None:
    asked = asking(1.0)
    runs = [run("c0", 490, "pass"), run("c0", 500, "fail", MISSED)]
    slow = [run("c0", 735, "fail", MISSED, "overload"), run("c0", 392, "fail", MISSED, "recovery")]
    outcome = asked_next(asked, known(asked, 1700, (500.0,), *runs, *slow))
    assert isinstance(outcome, SearchOutcome)
    told = "after an overload ", "c0", " misses the SLO at 0.8 of its claimed peak"
    assert (outcome.verified, outcome.notes) == (False, (told,))
    died = run("c0", 735, "fail", MISSED, "overload", failure="was killed")
    outcome = asked_next(asked, known(asked, 1700, (500.0,), *runs, died))
    assert isinstance(outcome, SearchOutcome)
    assert (outcome.verified, outcome.notes) == (False, (("under overload ", "c0", " failed: was killed"),))


def test_what_a_proof_would_take_is_a_trial_and_two_starts_and_ends() -> None:
    asked = asking(1.0, seconds=300)
    outcome = asked_next(asked, known(asked, 10, (500.0,), run("c0", 460)))
    assert isinstance(outcome, SearchOutcome)
    assert outcome.winner == "c0"
    # A check of 5 % of the budget that will be, and of 20 s at most.
    assert outcome.needed_seconds == pytest.approx(3 * DECISIVE_S + 2 * (5 + 0.05 * (290 + 84)), abs=0.5)
    far = replace(asked, limit_ms=500.0)
    outcome = asked_next(far, known(far, 10, (500.0,), run("c0", 460)))
    assert isinstance(outcome, SearchOutcome)
    assert outcome.needed_seconds == pytest.approx(3 * 125 + 2 * (5 + 20))


def test_without_a_winner_the_nearest_tells_what_it_would_take() -> None:
    asked = asking(5.0, 1.0, seconds=300, limit_ms=500.0)
    untried = asked_next(asked, known(asked, 8, (500.0, 100.0)))
    assert isinstance(untried, SearchOutcome)
    # Blocks are of 5 s, ten limits.
    assert untried.needed_seconds == pytest.approx(3 * 125 + 2 * (5 + 20))
    assert [standing.out for standing in untried.standings] == ["the budget ended before it was tried"] * 2


def test_where_nothing_is_proven_what_held_is_compared_as_it_is() -> None:
    asked = asking(0.0892, 0.0798, target_rps=1000.0)
    # Loaded to 70 %, four of either; at 0.8 of these rates it would be four, and five.
    events = known(asked, 5, (460.0, 380.0), run("c0", 447), run("c1", 365))
    outcome = asked_next(asked, events)
    assert isinstance(outcome, SearchOutcome)
    assert (outcome.winner, outcome.runner_up) == ("c1", "c0")


def test_a_rate_is_told_without_an_exponent() -> None:
    asked = asking(1.0, 1.0)
    failed = [run("c1", 19_218, "fail", MISSED, purpose) for purpose in ("round", "peak")]
    outcome = answered(asked, known(asked, 10, (500.0, 500.0), run("c0", 460), *failed))
    assert outcome.standings[1].out == "misses the SLO at 19,218/s, the lowest rate that was tried"


def test_of_a_rate_at_which_nothing_succeeded_the_errors_are_told() -> None:
    asked = asking(1.0)
    failed = run(
        "c0", 12, "fail", 0.0, p99_ms=0.0, errors={"timeout": 900, "http 500": 100}, error_samples={"http 500": "boom"}
    )
    (standing,) = answered(asked, known(asked, 0.5, (500.0,), failed)).standings
    told = "1,000 of 1,000 failed: 900 × timeout, 100 × http 500: boom"
    assert standing.out == f"misses the SLO at 12.0/s, the lowest rate that was tried: {told}"


def test_why_each_of_the_others_is_not_ranked() -> None:
    asked = asking(1.0, 1.3, 1.4, 1.0)
    events = known(
        asked,
        10,
        (500.0, 500.0, 500.0, 500.0),
        run("c0", 460),
        run("c3", 90, "fail", MISSED, "round"),
        run("c3", 70, "fail", MISSED, "round"),
    )
    outcome = asked_next(asked, events)
    assert isinstance(outcome, SearchOutcome)
    assert [standing.out for standing in outcome.standings] == [
        "",
        "predicted at 77% of the best per dollar",
        "predicted at 71% of the best per dollar",
        "misses the SLO at 70.0/s, the lowest rate that was tried",
    ]


def test_for_a_target_rate_it_is_the_fleet_that_costs_more() -> None:
    asked = asking(1.0, 1.8, target_rps=300.0)  # one of each does, and c1 gives more per dollar
    outcome = asked_next(asked, known(asked, 10, (500.0, 1000.0), run("c0", 460)))
    assert isinstance(outcome, SearchOutcome)
    assert [standing.out for standing in outcome.standings] == [
        "",
        "its fleet for 300/s is predicted to cost 1.8 times the best one's",
    ]


def test_the_floor_is_a_tenth_of_what_one_session_of_the_quickest_does_alone() -> None:
    asked = asking(1.0, 1.0, 1.0)
    profiles = [
        Profiled("g0", (Timing(1, 1, 90.0), Timing(1, 2, 80.0), Timing(2, 1, 10.0)), 5.0),
        Profiled("g1", (Timing(1, 1, 82.0),), 1.0),
        Profiled("g2", (Timing(1, 1, 70.0),), 40.0),
    ]
    events = [*profiles, *(Predicted(f"c{n}", 0.0) for n in range(3))]
    found = asked_next(asked, events)
    assert found == Load("c1", pytest.approx(100 / 83), 20.0, "floor", until_decided=False)
    outcome = asked_next(replace(asked, seconds=0.001), events)
    assert isinstance(outcome, SearchOutcome)
    assert (outcome.floor, outcome.winner) == (None, None)


def test_the_floor_that_was_found_is_told_where_there_is_no_winner() -> None:
    asked = asking(1.0)
    before = [Profiled("g0", (Timing(1, 1, 90.0),), 5.0, 8.0), Predicted("c0", 0.0)]
    steps = search(asked, before)
    experiment = next(steps)
    assert isinstance(experiment, Load)
    measured = run("c0", experiment.rps, "fail", MISSED, "floor", seconds=21.0)
    with pytest.raises(StopIteration) as stop:
        steps.send(measured)
    assert stop.value.value.floor == measured
    assert stop.value.value.seconds == 29.0
    again = asked_next(asked, [*before, measured])  # as after a kill
    assert isinstance(again, SearchOutcome)
    assert again.floor == measured
    assert asked_next(asked, [*before, replace(measured, valid=False)]) == experiment
    assert asked_next(asked, [*before, replace(measured, seconds=10.0)]) == experiment  # there was no time for more


def test_a_rate_that_only_held_counts_for_four_fifths_beside_a_proven_one() -> None:
    def winner(held_rps: float) -> str | None:
        asked = asking(1.0, 1.0)
        runs = (run("c0", held_rps), run("c1", 400, "pass"))
        outcome = asked_next(asked, known(asked, 1.0, (500.0, 500.0), *runs))
        assert isinstance(outcome, SearchOutcome)
        return outcome.winner

    assert winner(505) == "c0"  # 404
    assert winner(495) == "c1"  # 396


# Agreement.


def comparing(seconds: float = 1800.0, **more: Any) -> Question:
    entrants = (Entrant("a", "a", 36.0, 1, 8, "n"), Entrant("a wide", "a", 36.0, 2, 8, "n"), Entrant("b", "b", 36.0, 1, 8))
    return Question(entrants, 0.99, 50.0, seconds, **{"reference": "a", "min_agreement": 0.999, **more})


@pytest.mark.parametrize(("budget_s", "seconds"), [(1800, 60), (200, 40), (15, 4)])
def test_a_comparison_takes_a_fifth_of_what_is_left_and_a_minute_at_most(budget_s: float, seconds: float) -> None:
    assert asked_next(comparing(budget_s), ()) == Agree("a", "a", seconds)


def test_the_widest_of_a_numerics_is_asked_and_one_without_stands_for_itself() -> None:
    asked = comparing(reference="b")
    itself = Agreed("b", 1.0, 300, "cosine")
    assert asked_next(asked, [itself]) == Agree("a wide", "b", 60.0)
    found = asked_next(asked, [itself, Agreed("a wide", 0.5, 300, "cosine")])
    assert isinstance(found, Profile)
    assert found.entrant == "b"


@pytest.mark.parametrize(("spent_s", "compared"), [(100.0, True), (100.1, False)])
def test_after_half_of_the_budget_nobody_new_is_compared(spent_s: float, compared: bool) -> None:
    asked = comparing(200)
    found = asked_next(asked, [Agreed("a", 1.0, 300, "cosine", spent_s)])
    assert isinstance(found, Agree) == compared


@pytest.mark.parametrize(("usd", "compared"), [(0.141, True), (0.139, False)])
def test_a_comparison_needs_money_for_four_seconds(usd: float, compared: bool) -> None:
    found = asked_next(comparing(max_usd=usd), [Agreed("a", 1.0, 300, "cosine", 10.0)])  # 0.1 USD
    assert isinstance(found, Agree) == compared


def test_a_reference_that_does_not_agree_with_itself_is_told() -> None:
    asked = comparing()
    outcome = asked_next(
        asked, [Agreed("a", 0.5, 300, "cosine"), Agreed("b", 1.0, 300, "cosine"), Profiled("b", failure="gone")]
    )
    assert isinstance(outcome, SearchOutcome)
    told = "the reference ", "a", " agrees only 0.5 with itself: its answers differ from one time to the next"
    assert outcome.notes == (told,)
    assert outcome.standings[1].agreement is outcome.standings[0].agreement
    assert outcome.standings[1].out == "agrees 0.5 with the reference, 0.999 is asked"
