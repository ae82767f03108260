"""AWS's published measurements of BERT-base at sequence length 128 (LMI and Neuron benchmarks): what must come out of them."""

import pytest

from loadtest.prices.costs import cost_per_million
from loadtest.search.events import Entrant, Event, Experiment, Load, Measured, Predict, Predicted, Profiled, Question, Timing
from loadtest.search.ranking import rank
from loadtest.search.standing import SearchOutcome
from loadtest.search.strategy import search

# throughput per second, p99 in ms, on-demand USD per hour
PUBLISHED = {"inf2.xlarge": (2674.0, 6.2, 0.7582), "inf1.xlarge": (1181.0, 45.0, 0.228)}


def answer(experiment: Experiment, limit_ms: float) -> Event:
    """As published: up to its throughput an instance has its p99, above it none."""
    rate, p99_ms, _ = PUBLISHED[experiment.entrant]
    if isinstance(experiment, Predict):
        return Predicted(experiment.entrant, rate if p99_ms <= limit_ms else 0.0)
    if isinstance(experiment, Load):
        good = experiment.rps <= rate and p99_ms <= limit_ms
        blocks = ((1000, 1000 if good else 500),) * 20
        return Measured(
            experiment.entrant, experiment.purpose, experiment.rps, "pass" if good else "fail", blocks, 20.0, p99_ms=p99_ms
        )
    return Profiled(experiment.group, (Timing(1, 1, p99_ms),), 0.0, 10.0)


def recommend(limit_ms: float) -> tuple[Question, SearchOutcome]:
    entrants = tuple(Entrant(name, name, usd, 1, 8) for name, (_, _, usd) in PUBLISHED.items())
    question = Question(entrants, 0.99, limit_ms, 3600)
    steps = search(question)
    experiment = next(steps)
    while True:
        try:
            experiment = steps.send(answer(experiment, limit_ms))
        except StopIteration as stop:
            return question, stop.value


@pytest.mark.parametrize(("limit_ms", "winner", "usd"), [(10, "inf2.xlarge", 0.0788), (50, "inf1.xlarge", 0.0536)])
def test_the_slo_decides_between_inf2_and_inf1(limit_ms: float, winner: str, usd: float) -> None:
    _, outcome = recommend(limit_ms)
    assert outcome.winner == winner
    standing = next(standing for standing in outcome.standings if standing.entrant.name == winner)
    assert standing.peak_rps == pytest.approx(PUBLISHED[winner][0], rel=0.01)
    assert cost_per_million(standing.entrant.usd_per_hour, standing.peak_rps) == pytest.approx(usd, rel=0.01)


def test_at_50_ms_the_price_that_turns_the_answer_is_told() -> None:
    question, outcome = recommend(50)
    verdict = rank(question, outcome, seed=0)
    assert verdict is not None
    assert verdict.flip_usd_per_hour == pytest.approx(0.7582 * 1181 / 2674, rel=0.01)  # 0.3349
    assert verdict.margin == pytest.approx(0.0788 / 0.0536 - 1, abs=0.02)
