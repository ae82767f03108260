"""What a search answers when not all goes well: dominated rates, INVALID runs, a budget that was too short."""

import math
from dataclasses import replace

import pytest

from loadtest.search.events import Event, Experiment, Load, Measured, Predicted, Profile, Question
from loadtest.search.ranking import rank
from loadtest.search.standing import SearchOutcome
from loadtest.search.strategy import search
from tests.loadtest.simulated_lab import SimulatedLab, Truth
from tests.loadtest.test_search import entrants, question


class Altered(SimulatedLab):
    """A laboratory some of whose answers are changed."""

    def answer(self, experiment: Experiment) -> Event:
        event = super().answer(experiment)
        return self.altered(experiment, event) if isinstance(experiment, Load) and isinstance(event, Measured) else event

    def altered(self, experiment: Load, event: Measured) -> Event:
        return event


class NeverProven(Altered):
    """c0 holds at every rate, and is never proven."""

    def altered(self, experiment: Load, event: Measured) -> Event:
        return replace(event, verdict="undecided") if experiment.entrant == "c0" and event.verdict == "pass" else event


def test_a_proven_and_cheaper_rate_wins_over_one_that_only_held() -> None:
    asked = question(entrants(1.0, 1.0), minutes=5)
    outcome = NeverProven(asked, {"c0": Truth(410), "c1": Truth(400)}).run()
    assert outcome.winner == "c1"
    assert outcome.standings[1].peak_rps > 0.85 * 400


def test_one_that_is_far_cheaper_wins_also_where_its_rate_only_held() -> None:
    asked = question(entrants(1.0, 2.0), minutes=5)
    outcome = NeverProven(asked, {"c0": Truth(400), "c1": Truth(400)}).run()
    assert outcome.winner == "c0"
    assert outcome.standings[0].peak_rps == 0
    assert outcome.needed_seconds is None  # it was tried in vain often enough: more time would change nothing


@pytest.mark.parametrize("seed", range(8))
def test_the_winner_is_never_dearer_than_another_proven_rate(seed: int) -> None:
    asked = question(entrants(1.0, 1.02, 0.98, 1.1), minutes=3)
    truths = {f"c{i}": Truth(400 + 7 * i, bias) for i, bias in enumerate((0.9, 1.15, 1.0, 1.1))}
    outcome = SimulatedLab(asked, truths, seed=seed).run()
    costs = {s.entrant.name: asked.cost(s.entrant, s.peak_rps) for s in outcome.standings if s.peak_rps}
    assert outcome.winner is not None
    assert costs[outcome.winner] == min(costs.values())
    verdict = rank(asked, outcome, seed=0)
    assert verdict is not None
    assert 0 < verdict.probability_cheapest < 1


class Busy(Altered):
    """The generator does not keep up with c0 above some rate, or other work disturbs its first runs."""

    def __init__(self, asked: Question, truths: dict[str, Truth], *, above_rps: float = math.inf, first: int = 0) -> None:
        super().__init__(asked, truths)
        self._above_rps = above_rps
        self._first = first
        self.tried: list[float] = []

    def altered(self, experiment: Load, event: Measured) -> Event:
        if experiment.entrant != "c0":
            return event
        self.tried.append(experiment.rps)
        disturbed = len(self.tried) <= self._first
        if not disturbed and experiment.rps <= self._above_rps:
            return event
        return replace(event, valid=False, disturbed=disturbed, blocks=(), verdict="undecided", notes=("it was late",))


def test_what_other_work_disturbed_is_measured_again_at_the_same_rate() -> None:
    asked = question(entrants(1.0))
    lab = Busy(asked, {"c0": Truth(400)}, first=2)
    outcome = lab.run()
    assert lab.tried[0] == lab.tried[1] == lab.tried[2]
    assert outcome.winner == "c0"
    assert outcome.standings[0].peak_rps > 0.9 * 400


def test_a_rate_that_the_generator_does_not_keep_up_with_is_lowered() -> None:
    asked = question(entrants(1.0))
    lab = Busy(asked, {"c0": Truth(400)}, above_rps=310)
    outcome = lab.run()
    assert lab.tried[0] == lab.tried[1] > 310
    assert outcome.winner == "c0"
    assert 0 < outcome.standings[0].peak_rps <= 310


def test_one_that_cannot_be_measured_does_not_end_the_search_for_the_rest() -> None:
    asked = question(entrants(1.0, 2.0, 2.2))
    outcome = Busy(asked, {"c0": Truth(400), "c1": Truth(400), "c2": Truth(400)}, above_rps=0).run()
    assert outcome.winner == "c1"
    assert outcome.standings[1].peak_rps > 0.85 * 400
    assert outcome.standings[0].out == "could not be measured: it was late"


def test_from_invalid_runs_nothing_is_concluded_about_the_slo() -> None:
    asked = question(entrants(1.0))
    lab = Busy(asked, {"c0": Truth(400)}, above_rps=0)
    outcome = lab.run()
    assert (outcome.winner, outcome.floor) == (None, None)
    assert outcome.standings[0].out == "could not be measured: it was late"
    assert "floor" not in {experiment.purpose for experiment in lab.experiments if isinstance(experiment, Load)}


def test_more_is_never_offered_than_the_generator_can() -> None:
    class Capped(SimulatedLab):
        def answer(self, experiment: Experiment) -> Event:
            event = super().answer(experiment)
            return replace(event, ceiling_rps=300.0) if isinstance(event, Predicted) else event  # type: ignore[call-arg]

    asked = question(entrants(1.0))
    lab = Capped(asked, {"c0": Truth(5000)})
    outcome = lab.run()
    assert max(experiment.rps for experiment in lab.experiments if isinstance(experiment, Load)) == 300
    assert outcome.standings[0].peak_rps == 300


def resumed(asked: Question, lab: SimulatedLab) -> SearchOutcome:
    steps = search(asked, lab.events)
    try:
        experiment = next(steps)
        while True:
            event = lab.answer(experiment)
            lab.experiments.append(experiment)
            lab.events.append(event)
            experiment = steps.send(event)
    except StopIteration as stop:
        outcome: SearchOutcome = stop.value
        return outcome


def test_a_search_that_proved_nothing_goes_on_where_it_stopped() -> None:
    short = question(entrants(1.0, 1.5), minutes=0.4)
    lab = SimulatedLab(short, {"c0": Truth(400, bias=1.3), "c1": Truth(400, bias=1.3)})
    first = lab.run()
    assert not any(standing.peak_rps for standing in first.standings)
    assert first.needed_seconds is not None
    before = len(lab.experiments)
    second = resumed(replace(short, seconds=first.seconds + 2 * first.needed_seconds), lab)
    assert not any(isinstance(experiment, Profile) for experiment in lab.experiments[before:])
    assert second.winner == "c0"
    assert second.standings[0].peak_rps > 0.7 * 400
    assert second.seconds > first.seconds
