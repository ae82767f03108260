"""What a platform takes back in mid-run is no evidence: it is asked for again, so often, and paid for in every case."""

import asyncio
from typing import Any

import pytest

from loadtest.lab.recommender import MOST_TAKEN_BACK, Lab, question_of
from loadtest.prices.catalogue import load_catalogue
from loadtest.question.spec import SearchSpec
from loadtest.search.events import Agree, Event, Experiment, Load, Measured, Profile, Profiled, TakenBack, Volley
from loadtest.search.strategy import search
from tests.loadtest.examples import TRUTHS, example_spec
from tests.loadtest.simulated_lab import SimulatedLab
from tests.loadtest.test_recommender import FakeLauncher, FakeMeasure


@pytest.fixture(scope="module")
def spec() -> SearchSpec:
    candidate = {"instances": ["c7i.large"], "backend": {"kind": "synthetic"}, "settings": {"sessions": [1, 2]}}
    return example_spec(load_catalogue(), candidates=[candidate], launcher={"kind": "local", "stands_for": {"c7i.large": [0]}})


@pytest.mark.parametrize("kind", [Load, Profile])
def test_a_lab_asks_for_another_machine_twice_then_goes_on_without(spec: SearchSpec, kind: type[Experiment]) -> None:
    launcher = FakeLauncher()
    name = spec.candidates[0].name
    experiment: Any = Load(name, 10, 5, "peak") if kind is Load else Profile(name, "g", (1,), 1, 1.0)

    async def work() -> list[Event]:
        lab = Lab(spec, launcher, FakeMeasure(launcher))
        try:
            found = []
            for _ in range(MOST_TAKEN_BACK + 1):
                launcher.taken_back[name] = True
                found.append(await lab.answer(experiment))
            return found
        finally:
            await lab.close()

    *lost, last = asyncio.run(work())
    assert [type(each) for each in lost] == [TakenBack] * MOST_TAKEN_BACK
    assert all(isinstance(each, TakenBack) and each.why == "taken back" for each in lost)
    assert isinstance(last, Measured | Profiled)
    assert last.failure == "taken back; so it was 2 times before"
    assert launcher.started == [name] * 3
    assert launcher.closed


def test_a_lab_that_goes_on_from_a_journal_counts_what_was_taken_back_before(spec: SearchSpec) -> None:
    launcher = FakeLauncher()
    name = spec.candidates[0].name
    lab = Lab(spec, launcher, FakeMeasure(launcher))
    for _ in range(MOST_TAKEN_BACK):
        lab.remember(TakenBack(name, "taken back"))
    launcher.taken_back[name] = True

    async def work() -> Event:
        try:
            return await lab.answer(Load(name, 10, 5, "peak"))
        finally:
            await lab.close()

    found = asyncio.run(work())
    assert isinstance(found, Measured)
    assert found.failure.startswith("taken back")


class Unlucky(SimulatedLab):
    """Every so-manieth experiment loses its machine."""

    every = 3

    def answer(self, experiment: Experiment) -> Event:
        self.asked = getattr(self, "asked", 0) + 1
        if not self.asked % self.every and isinstance(experiment, Agree | Profile | Load):
            return TakenBack(experiment.entrant, "taken back", seconds=7.0)
        return super().answer(experiment)


def test_a_search_asks_again_and_finds_the_same_winner_for_more() -> None:
    question = question_of(example_spec(), paid=True)
    lucky = SimulatedLab(question, TRUTHS).run()
    lab = Unlucky(question, TRUTHS)
    outcome = lab.run()
    lost = [event for event in lab.events if isinstance(event, TakenBack)]
    assert lost
    assert outcome.winner == lucky.winner
    # Whoever goes on from the journal knows the same.
    steps = search(question, lab.events)
    with pytest.raises(StopIteration) as stop:
        next(steps)
    again = stop.value.value
    assert (again.winner, again.seconds, again.usd) == (outcome.winner, outcome.seconds, outcome.usd)
    assert again.notes == outcome.notes
    assert sum("was taken back" in "".join(note) for note in outcome.notes) == len({event.entrant for event in lost})
    for at, event in enumerate(lab.events):
        assert not isinstance(event, TakenBack) or lab.experiments[at] == lab.experiments[at + 1]


def test_of_a_volley_only_what_was_lost_is_asked_for_again() -> None:
    question = question_of(example_spec(), paid=True, parallel=4)
    lab = SimulatedLab(question, TRUTHS)
    steps = search(question)
    asked = next(steps)
    assert isinstance(asked, Volley)
    first, *others = asked.experiments
    assert others
    again = steps.send((*(lab.answer(each) for each in others), TakenBack(first.entrant, "taken back", seconds=7.0)))
    assert again == first
