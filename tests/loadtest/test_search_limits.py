"""What ends a search, or a candidate, against laboratories in which nothing else would."""

import math
from dataclasses import replace

import pytest

from loadtest.search.budget import decisive_seconds, profile_seconds, verify_seconds
from loadtest.search.events import (
    EXPECTED,
    UNREACHED,
    Agreed,
    Entrant,
    Event,
    Experiment,
    Load,
    Measured,
    Predicted,
    Profile,
    Profiled,
    Question,
    TakenBack,
)
from loadtest.search.knowledge import Knowledge
from loadtest.search.next_load import MOST_VAIN, PROOF
from tests.loadtest.simulated_lab import SimulatedLab, Truth
from tests.loadtest.test_search import entrants, question
from tests.loadtest.test_search_answers import resumed


def test_money_ends_a_search_that_has_time_left() -> None:
    candidates, truths = entrants(36.0, 36.0), {"c0": Truth(300.0), "c1": Truth(250.0)}  # 0.01 USD per second
    whole = SimulatedLab(question(candidates), truths).run()
    for share in (0.3, 0.6):
        limited = SimulatedLab(question(candidates, max_usd=share * whole.usd), truths).run()
        assert limited.usd <= share * whole.usd
        assert limited.usd > 0.5 * share * whole.usd  # it is spent, not feared
        assert limited.seconds < 0.8 * whole.seconds


@pytest.mark.parametrize("limits", [{"seconds": 1.8}, {"seconds": 12.0}, {"max_usd": 0.05}], ids=str)
def test_whom_the_budget_did_not_reach_is_proven_with_what_is_said_to_be_needed(limits: dict[str, float]) -> None:
    few, dear = entrants(0.1, 8.0)
    asked = replace(question((replace(few, max_count=1), dear), target_rps=1000.0), **limits)  # type: ignore[arg-type]
    lab = SimulatedLab(asked, {"c0": Truth(100.0), "c1": Truth(16000.0)})
    first = resumed(asked, lab)
    assert first.standings[1].unreached
    assert first.needed_seconds is not None
    more_usd = None if asked.max_usd is None else first.usd + first.needed_usd
    second = resumed(replace(asked, seconds=first.seconds + first.needed_seconds, max_usd=more_usd), lab)
    assert second.winner == "c1"
    assert second.standings[1].peak_rps > 0
    assert (second.needed_seconds, second.needed_usd) == (None, 0.0)


def test_answers_that_were_compared_add_nothing_to_what_is_needed() -> None:
    few, dear = entrants(0.1, 8.0)
    plain = question((replace(few, max_count=1), dear), target_rps=1000.0, max_usd=0.03)
    outcomes = []
    for asked in (plain, replace(plain, reference=EXPECTED, min_agreement=0.9)):
        lab = SimulatedLab(asked, {"c0": Truth(100.0), "c1": Truth(16000.0)})
        outcomes.append(resumed(asked, lab))
    assert [outcome.standings[1].unreached for outcome in outcomes] == [True, True]
    assert outcomes[1].seconds > 200  # of which none must be spent again
    assert outcomes[1].needed_seconds == outcomes[0].needed_seconds
    assert outcomes[1].needed_usd == outcomes[0].needed_usd < 0.3


def test_whoever_is_left_to_compare_needs_the_first_half_of_a_budget() -> None:
    asked = replace(question(entrants(1.0, 1.0)), reference=EXPECTED, min_agreement=0.9, seconds=10.0)
    lab = SimulatedLab(asked, {"c0": Truth(400.0), "c1": Truth(400.0)}, start_s=200.0)
    first = resumed(replace(asked, start_s=200.0), lab)
    assert first.standings[1].out == f"was not compared: {UNREACHED}"
    assert first.needed_seconds is not None
    assert first.needed_seconds >= first.seconds
    resumed(replace(asked, seconds=first.seconds + first.needed_seconds), lab)
    assert [event.entrant for event in lab.events if isinstance(event, Agreed)] == ["c0", "c1"]


@pytest.mark.parametrize("prices", [(0.1, 1.0), (0.1, 1.0, 1.0)], ids=str)
def test_a_slow_one_that_was_seen_is_not_waited_for_where_others_were_not_reached(prices: tuple[float, ...]) -> None:
    asked = question(entrants(*prices), max_usd=0.005)
    truths = {"c0": Truth(8.0)} | {f"c{i}": Truth(4000.0) for i in range(1, len(prices))}
    lab = SimulatedLab(asked, truths)
    first = resumed(asked, lab)
    assert first.standings[1].unreached
    assert first.needed_seconds is not None
    assert first.needed_seconds < 200  # a proof of 8/s takes half an hour
    more = replace(asked, seconds=first.seconds + first.needed_seconds, max_usd=first.usd + first.needed_usd)
    assert resumed(more, lab).standings[1].peak_rps > 0


ENDED = f"did not answer before the money ended: {UNREACHED}"


class CutOff(SimulatedLab):
    """The end of the budget cuts off what is the so-manieth of its kind: all of it is spent then."""

    def __init__(self, asked: Question, truths: dict[str, Truth], *, kind: str, number: int = 0) -> None:
        super().__init__(asked, truths)
        self.asked, self.kind, self.number = asked, kind, number

    def answer(self, experiment: Experiment) -> Event:
        event = super().answer(experiment)
        kind = experiment.purpose if isinstance(experiment, Load) else type(experiment).__name__
        if isinstance(event, Predicted | TakenBack) or kind != self.kind:
            return event
        self.number -= 1
        if self.number != -1:
            return event
        known = Knowledge(self.asked, self.events)
        seconds = min(known.left_seconds() + 20.0, known.payable_seconds(self.asked.entrants[0]))
        ended = replace(event, seconds=seconds, failure=ENDED)
        return replace(ended, blocks=(), start_s=0.0, verdict="fail") if isinstance(ended, Measured) else ended


UNPAID = "did not start: its start could exceed --max-usd: $0.010 is left, at $0.50/h"


@pytest.mark.parametrize(
    "words",
    [ENDED, "did not answer before the budget ended", UNPAID, f"cannot be compared: the reference c1 {UNPAID}"],
    ids=["now", "in an old journal", "in another", "of a reference"],
)
@pytest.mark.parametrize("kind", ["Agree", "Profile", "peak"])
@pytest.mark.parametrize("limits", [{"seconds": 120.0}, {"max_usd": 0.05}], ids=str)
def test_what_the_end_of_the_budget_cuts_off_is_asked_again_once_there_is_more(
    limits: dict[str, float], kind: str, words: str
) -> None:
    asked = replace(question(entrants(0.5)), reference=EXPECTED, min_agreement=0.9, **limits)  # type: ignore[arg-type]
    lab = CutOff(asked, {"c0": Truth(1000.0)}, kind=kind)
    first = resumed(asked, lab)
    assert first.winner is None
    assert not first.standings[0].broken
    assert first.lacking
    assert first.needed_seconds is not None
    assert first.needed_at_least == first.standings[0].unreached == (kind != "peak")
    lab.events = [
        event if isinstance(event, Predicted | TakenBack) or not event.failure else replace(event, failure=words)
        for event in lab.events
    ]
    again = resumed(asked, lab)  # with no more of it, as after an interrupt at that moment: nothing new
    assert (again.winner, again.seconds) == (None, first.seconds)
    more_usd = None if asked.max_usd is None else first.usd + first.needed_usd
    second = resumed(replace(asked, seconds=first.seconds + first.needed_seconds, max_usd=more_usd), lab)
    assert second.standings[0].peak_rps > 0


def test_a_later_run_that_is_cut_off_takes_nothing_back() -> None:
    asked = question(entrants(0.5))
    trial = resumed(asked, CutOff(asked, {"c0": Truth(1000.0)}, kind="peak", number=1))
    assert trial.winner == "c0"
    assert trial.standings[0].peak_rps > 0
    check = resumed(asked, CutOff(asked, {"c0": Truth(1000.0)}, kind="overload"))
    assert (check.winner, check.verified, check.notes) == ("c0", None, ())


def test_what_is_needed_reckons_with_the_profiles_and_the_check_of_the_budget_that_will_be() -> None:
    asked = replace(question(entrants(0.5)), seconds=1.8)
    first = resumed(asked, SimulatedLab(asked, {"c0": Truth(1000.0)}))
    assert first.needed_seconds is not None
    seconds = first.seconds + first.needed_seconds
    wanted_s = profile_seconds(replace(asked, seconds=seconds), 1) + 2 * verify_seconds(replace(asked, seconds=seconds))
    assert first.needed_seconds == pytest.approx(PROOF * decisive_seconds(50, math.inf) + wanted_s, abs=1)
    assert first.needed_at_least


class Unlike(SimulatedLab):
    """All but c3 are far slower than predicted."""

    def answer(self, experiment: Experiment) -> Event:
        event = super().answer(experiment)
        return replace(event, rps=100.0) if isinstance(event, Predicted) and event.entrant != "c3" else event


def test_whom_the_money_did_not_reach_is_loaded_once_the_others_were_tried_in_vain() -> None:
    asked = question(entrants(0.1, 0.1, 0.1, 40.0), max_usd=0.15)
    lab = Unlike(asked, {"c0": Truth(0.0), "c1": Truth(0.0), "c2": Truth(0.0), "c3": Truth(16000.0)})
    first = resumed(asked, lab)
    assert first.winner is None
    assert first.standings[3].unreached
    assert first.needed_seconds is not None
    more = replace(asked, seconds=first.seconds + first.needed_seconds, max_usd=first.usd + first.needed_usd)
    second = resumed(more, lab)
    assert second.winner == "c3"
    assert second.standings[3].peak_rps > 0
    assert second.needed_seconds is None


def test_nothing_is_said_to_be_needed_where_all_were_tried_in_vain() -> None:
    asked = question(entrants(0.1, 0.1))
    outcome = Unlike(asked, {"c0": Truth(0.0), "c1": Truth(0.0)}).run()
    assert outcome.winner is None
    assert all(standing.tries == MOST_VAIN for standing in outcome.standings)
    assert outcome.needed_seconds is None


def lacking(candidates: tuple[Entrant, ...], truths: dict[str, Truth], **limits: float) -> tuple[str, ...]:
    asked = replace(question(candidates), **limits)  # type: ignore[arg-type]
    return tuple("".join(told) for told in resumed(asked, SimulatedLab(asked, truths)).lacking)


def test_what_was_not_measured_for_want_of_time_or_money_is_named() -> None:
    cheap, dear = entrants(0.1, 8.0)
    truths = {"c0": Truth(100.0), "c1": Truth(16000.0)}
    assert lacking((cheap, dear), truths) == ()
    assert lacking((cheap, dear), truths, max_usd=0.05) == ("the rest of $0.0500 does not pay for a profile of c1",)
    assert lacking((cheap, dear), truths, seconds=12.0) == ("that is too short for a profile of c1",)
    check = ", and for the check of the winner behind it"
    assert lacking((cheap,), truths, seconds=130.0) == (f"that is too short for a run of c0 at 89.4/s{check}",)
    assert lacking((dear,), truths, max_usd=0.08) == ("the rest of $0.0800 does not pay for a run of c1 at 12,800/s",)
    short, poor = lacking((dear,), truths, max_usd=0.06, seconds=40.0)
    assert short == f"that is too short for a run of c1 at 13,534/s{check}"
    assert poor == "the rest of $0.0600 does not pay for a run of c1 at 13,534/s"


class Unprofilable(SimulatedLab):
    """One group cannot be profiled, though all of it would serve."""

    def answer(self, experiment: Experiment) -> Event:
        if isinstance(experiment, Profile) and experiment.group == "g0":
            return Profiled(experiment.group, seconds=1.0, failure="has no statistics", entrant=experiment.entrant)
        return super().answer(experiment)


def test_a_group_that_cannot_be_profiled_is_out_and_never_loaded() -> None:
    candidates = entrants(1.0, 2.0)
    lab = Unprofilable(question(candidates), {"c0": Truth(500.0), "c1": Truth(300.0)})
    outcome = lab.run()
    assert outcome.winner == "c1"  # though c0 would cost a third
    assert outcome.standings[0].out == "has no statistics"
    assert not [experiment for experiment in lab.experiments if isinstance(experiment, Load) and experiment.entrant == "c0"]


def test_who_does_not_start_to_be_profiled_is_out_alone() -> None:
    narrow, dear = entrants(1.0, 10.0)
    candidates = (narrow, replace(narrow, name="wide", sessions=2), dear)
    failing = Truth(800.0, failure="did not start: out of memory")
    outcome = SimulatedLab(question(candidates), {"c0": Truth(500.0), "wide": failing, "c1": Truth(500.0)}).run()
    assert [standing.out for standing in outcome.standings] == ["", failing.failure, ""]
    assert outcome.winner == "c0"
    # Nor is it asked what it can do with hardly any load.
    outcome = SimulatedLab(question((candidates[1], narrow)), {"c0": Truth(0.0), "wide": failing}).run()
    assert outcome.floor is not None
    assert outcome.floor.entrant == "c0"


def test_who_is_cheapest_but_too_few_loses_to_whom_any_number_can_be_had_of() -> None:
    cheap, plenty = entrants(1.0, 2.0)
    candidates = (replace(cheap, max_count=2), plenty)
    outcome = SimulatedLab(question(candidates, target_rps=5000.0), {"c0": Truth(480.0), "c1": Truth(260.0)}).run()
    assert outcome.winner == "c1"
    assert outcome.standings[1].peak_rps > 0


def test_who_shares_instances_with_a_faster_one_is_not_proven_for_the_fleet() -> None:
    few = tuple(replace(entrant, max_count=2, pool="few") for entrant in entrants(1.0, 1.0))
    candidates = (*few, replace(entrants(1.0, 1.0, 4.0)[2], max_count=2))
    truths = {"c0": Truth(400.0), "c1": Truth(200.0), "c2": Truth(400.0)}
    outcome = SimulatedLab(question(candidates, target_rps=1000.0), truths).run()
    assert [standing.peak_rps > 0 for standing in outcome.standings] == [True, False, True]
    assert outcome.needed_seconds is None


def test_as_many_are_proven_as_a_fleet_takes_of_which_there_are_few() -> None:
    candidates = tuple(replace(entrant, max_count=1) for entrant in entrants(1.0, 2.0, 4.0, 8.0))
    truths = {entrant.name: Truth(400.0) for entrant in candidates}
    three = SimulatedLab(question(candidates, target_rps=650.0), truths).run()  # 0.7 of 400 each
    assert [standing.peak_rps > 0 for standing in three.standings] == [True, True, True, False]
    assert three.winner == "c0"
    assert three.needed_seconds is None
    assert three.standings[3].out == "too few can be had: 1 instance"
    hasty = SimulatedLab(question(candidates, minutes=1.2, target_rps=650.0), truths).run()
    assert hasty.standings[0].peak_rps > 0
    assert hasty.needed_seconds is not None


def test_whoever_makes_a_mix_cheaper_than_the_winner_alone_is_proven() -> None:
    few, slow, fast = entrants(1.0, 3.0, 3.0)
    candidates = (replace(few, max_count=3), slow, fast)
    asked = question(candidates, minutes=60, target_rps=2500.0)
    truths = {"c0": Truth(595.0), "c1": Truth(400.0), "c2": Truth(569.0)}
    outcome = SimulatedLab(asked, truths).run()
    assert outcome.winner == "c2"  # 7 of it: 21 USD
    fleet = asked.fleet((standing.entrant, standing.peak_rps) for standing in outcome.standings)
    assert fleet is not None
    assert (fleet.counts, fleet.usd_per_hour) == ({"c0": 3, "c2": 4}, 15.0)
    assert outcome.hoped is None
    hasty = SimulatedLab(replace(asked, seconds=100.0), truths).run()
    assert hasty.winner == "c2"
    assert hasty.standings[0].peak_rps == 0
    assert hasty.hoped is not None
    assert hasty.hoped.usd_per_hour < 21
