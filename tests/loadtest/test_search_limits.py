"""What ends a search, or a candidate, against laboratories in which nothing else would."""

from loadtest.search.events import Event, Experiment, Load, Profile, Profiled
from tests.loadtest.simulated_lab import SimulatedLab, Truth
from tests.loadtest.test_search import entrants, question


def test_money_ends_a_search_that_has_time_left() -> None:
    candidates, truths = entrants(36.0, 36.0), {"c0": Truth(300.0), "c1": Truth(250.0)}  # 0.01 USD per second
    whole = SimulatedLab(question(candidates), truths).run()
    for share in (0.3, 0.6):
        limited = SimulatedLab(question(candidates, max_usd=share * whole.usd), truths).run()
        assert limited.usd <= share * whole.usd
        assert limited.usd > 0.5 * share * whole.usd  # it is spent, not feared
        assert limited.seconds < 0.8 * whole.seconds


class Unprofilable(SimulatedLab):
    """One group cannot be profiled, though all of it would serve."""

    def answer(self, experiment: Experiment) -> Event:
        if isinstance(experiment, Profile) and experiment.group == "g0":
            return Profiled(experiment.group, seconds=1.0, failure="has no statistics")
        return super().answer(experiment)


def test_a_group_that_cannot_be_profiled_is_out_and_never_loaded() -> None:
    candidates = entrants(1.0, 2.0)
    lab = Unprofilable(question(candidates), {"c0": Truth(500.0), "c1": Truth(300.0)})
    outcome = lab.run()
    assert outcome.winner == "c1"  # though c0 would cost a third
    assert outcome.standings[0].out == "has no statistics"
    assert not [experiment for experiment in lab.experiments if isinstance(experiment, Load) and experiment.entrant == "c0"]
