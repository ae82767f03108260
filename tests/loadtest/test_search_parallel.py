"""Searches with several candidates up at once: whatever order they end in, answer, budget and journal stay right."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from loadtest.lab.journal import fingerprint
from loadtest.search.events import Entrant, Event, Load, Paid, Profile, Profiled, Question, Spent, Volley
from loadtest.search.knowledge import Knowledge
from loadtest.search.standing import SearchOutcome
from loadtest.search.strategy import search
from tests.loadtest.simulated_lab import SimulatedLab, Truth

COUNT = 5
TRUTHS = {f"c{number}": Truth(300 + 60 * number) for number in range(COUNT)}
ENTRANTS = tuple(Entrant(f"c{number}", f"g{number}", 1.0 - 0.05 * number, 1, 8) for number in range(COUNT))
START_S = 300.0


def question(parallel: int = 3, minutes: float = 90, **keys: object) -> Question:
    asked = Question(ENTRANTS, required=0.99, limit_ms=50, seconds=60 * minutes, parallel=parallel)
    return replace(asked, **keys)  # type: ignore[arg-type]  # any of its fields


class ParallelLab(SimulatedLab):
    """Answers a volley in an order of its own; what its experiments share counts once."""

    def __init__(self, question: Question, *, seed: int = 0) -> None:
        super().__init__(question, TRUTHS, seed=seed, start_s=START_S)
        self._order = np.random.default_rng(seed)
        self.volleys: list[Volley] = []

    def go_on(self, known: Sequence[Event] = ()) -> SearchOutcome:
        """From what an earlier search found."""
        steps = search(self._question, known)
        try:
            asked = next(steps)
            while True:
                if not isinstance(asked, Volley):
                    event = self.answer(asked)
                    self.events.append(event)
                    asked = steps.send(event)
                    continue
                self.volleys.append(asked)
                events = [self.answer(experiment) for experiment in asked.experiments]
                self._order.shuffle(events)  # type: ignore[arg-type]  # a list will do
                events = [
                    replace(event, overlap_s=max(0.0, event.seconds - (START_S if place == 0 else 30.0)))  # type: ignore[call-arg]
                    for place, event in enumerate(events)
                ]
                self.events += events
                asked = steps.send(tuple(events))
        except StopIteration as stop:
            outcome: SearchOutcome = stop.value
            return outcome


@pytest.mark.parametrize("seed", range(2))
def test_the_answer_is_that_of_one_after_another_in_less_time(seed: int) -> None:
    alone, together = ParallelLab(question(1), seed=seed), ParallelLab(question(3), seed=seed)
    first, second = alone.go_on(), together.go_on()
    assert first.winner == second.winner == "c4"  # the cheapest, with the highest peak
    assert alone.volleys == []
    assert together.volleys
    profiled_s = [sum(e.seconds - e.overlap_s for e in lab.events if isinstance(e, Profiled)) for lab in (alone, together)]
    assert profiled_s[1] < 0.6 * profiled_s[0]


def test_a_volley_has_different_entrants_no_more_than_may_be_up_the_cheapest_first() -> None:
    lab = ParallelLab(question(3))
    lab.go_on()
    prices = {entrant.name: entrant.usd_per_hour for entrant in ENTRANTS}
    first, second = (volley.experiments for volley in lab.volleys[:2])
    assert [experiment.entrant for experiment in first] == ["c4", "c3", "c2"]
    assert [experiment.entrant for experiment in second] == ["c1", "c0"]
    assert all(isinstance(experiment, Profile) for experiment in (*first, *second))
    for volley in lab.volleys:
        names = [experiment.entrant for experiment in volley.experiments]
        assert len(names) == len(set(names)) <= 3
    loads = [volley.experiments for volley in lab.volleys if isinstance(volley.experiments[0], Load)]
    assert len(loads) == 1
    assert prices[loads[0][0].entrant] == min(prices.values())


@pytest.mark.parametrize("parallel", [1, 2, 5])
def test_a_search_goes_on_from_any_event_in_its_journal(parallel: int) -> None:
    whole = ParallelLab(question(parallel))
    outcome = whole.go_on()
    for cut in range(0, len(whole.events), 6):  # in the middle of volleys too
        known = whole.events[:cut]
        rest = ParallelLab(question(parallel))
        assert rest.go_on(known).winner == outcome.winner
        groups = [event.group for event in (*known, *rest.events) if isinstance(event, Profiled)]
        assert len(groups) == len(set(groups)), "a profile is paid for once"


def test_what_is_known_does_not_depend_on_the_order_in_which_a_volley_ended() -> None:
    lab = ParallelLab(question(3))
    lab.go_on()
    profiles = [event for event in lab.events if isinstance(event, Profiled)][:3]
    seen = {
        (
            msgspec.json.encode(sorted(known.profiles.items())),
            round(known.spent.seconds, 6),
            tuple((name, standing.out) for name, standing in known.standings.items()),
        )
        for order in itertools.permutations(profiles)
        for known in [Knowledge(question(3), order)]
    }
    assert len(seen) == 1


def test_time_that_is_shared_counts_once_and_money_for_each() -> None:
    spent = Spent(question())
    spent.add(Profiled("g0", seconds=330.0))
    spent.add(Profiled("g1", seconds=360.0, overlap_s=330.0, beside_usd=0.01))
    spent.add(Paid(0.5))
    assert spent.seconds == 360.0
    # 330 s at 1 $/h, 360 s at 0.95 $/h, and what stood beside them
    assert spent.usd == pytest.approx(330 / 3600 + 0.95 * 360 / 3600 + 0.01 + 0.5)


def test_a_volley_is_no_larger_than_the_money() -> None:
    lab = ParallelLab(question(5, max_usd=0.06))
    lab.go_on()
    # 30 s of a profile at 0.8 to 1 $/h, before anybody knows how long a start takes: five of them cost 0.04
    assert sum(len(volley.experiments) for volley in lab.volleys[:1]) <= 5
    spent = ParallelLab(question(5, max_usd=0.005))
    outcome = spent.go_on()
    assert spent.volleys == []
    assert outcome.winner is None


def test_how_many_are_up_at_once_is_no_other_question() -> None:
    assert fingerprint(question(1)) == fingerprint(question(5))
