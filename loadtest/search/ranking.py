"""Who is cheapest, by how much, and how certain that is: from the search's evidence, without I/O."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from loadtest.prices.costs import replicas_for
from loadtest.search.events import Question
from loadtest.search.standing import SearchOutcome, Standing
from loadtest.verdict.statistics import falling

_PREDICTION_SPREAD: Final = 0.075  # standard deviation of log(measured / predicted) capacity: 15 % is two of it
_RUN_SPREAD: Final = 0.02  # of log(peak) from one run to the next, which the blocks of one run cannot show
DRAWS: Final = 2000


@dataclass(frozen=True, slots=True)
class Ranking:
    """The winner against the rest.

    margin: how much more the runner-up costs, as a share, both at the rates claimed for them; None if there is none, or too few
        can be had of one of them. Negative only if the runner-up's rate is not proven.
    probability_cheapest: that no other candidate alone is cheaper at its peak, by bootstrap over blocks; candidates without a
        measured bracket enter with their estimate and its usual error. Never 0 or 1: so many draws cannot tell that.
    flip_usd_per_hour: the winner's hourly price from which the runner-up would cost less, at the rates claimed; None as margin.
    """

    probability_cheapest: float
    margin: float | None
    flip_usd_per_hour: float | None


def rank(question: Question, outcome: SearchOutcome, *, seed: int) -> Ranking | None:
    """None if there is no winner."""
    by_name = {standing.entrant.name: standing for standing in outcome.standings}
    if outcome.winner is None:
        return None
    winner = by_name[outcome.winner]
    runner_up = by_name[outcome.runner_up] if outcome.runner_up else None
    margin = flip = None
    if runner_up is not None and all(question.suffices(s.entrant, s.claimed_rps) for s in (winner, runner_up)):
        costs = [question.usd(standing.entrant, standing.claimed_rps) for standing in (winner, runner_up)]
        margin = costs[1] / costs[0] - 1
        flip = flip_usd_per_hour(question, winner, runner_up)
    possible = [s for s in outcome.standings if s.predicted_rps > 0 and not s.broken]
    return Ranking(_probability_cheapest(question, winner, possible, seed), margin, flip)


def flip_usd_per_hour(question: Question, winner: Standing, runner_up: Standing) -> float:
    """The winner's hourly price at which the runner-up costs the same."""
    ours, theirs = winner.claimed_rps, runner_up.claimed_rps
    if question.target_rps is None:
        return runner_up.entrant.usd_per_hour * ours / theirs
    our_count, their_count = (replicas_for(question.target_rps, rps, question.headroom) for rps in (ours, theirs))
    return runner_up.entrant.usd_per_hour * their_count / our_count


def sample_peaks(standing: Standing, required: float, random: np.random.Generator, draws: int = DRAWS) -> np.ndarray:
    """Peaks this candidate might have had, had other blocks been seen; (draws,), requests per second.

    Blocks of each run are drawn with replacement and attainment made to fall with the rate. Where between two measured rates
    it crosses `required` is not known (the curve bends sharply at the knee), so any place in log(rate) is as likely.
    Where nothing brackets it, the estimate is spread by the usual error of predictions, and never below a rate that it held.
    """
    runs = sorted(standing.evidence, key=lambda run: run.rps)
    drift = np.exp(random.normal(0, _RUN_SPREAD, draws))
    likely = standing.estimated_rps * np.exp(random.normal(0, _PREDICTION_SPREAD, draws))
    if len(runs) < 2:
        return np.asarray(drift * np.maximum(likely, standing.held_rps))
    rates = np.log([run.rps for run in runs])
    shares = np.empty((draws, len(runs)))
    for column, run in enumerate(runs):
        blocks = np.array(run.blocks, dtype=float)
        weights = random.multinomial(len(blocks), np.full(len(blocks), 1 / len(blocks)), size=draws)
        missed = 1 - (weights @ blocks[:, 1]) / np.maximum(weights @ blocks[:, 0], 1)
        seen = 1 - (run.attainment or 0.0)
        # What of several objectives was missed is scattered over the blocks as all misses are.
        shares[:, column] = 1 - missed * ((1 - run.share(required)) / seen if seen else 1.0)
    weight = [run.requests for run in runs]
    places = random.random(draws)
    found = [
        _crossing(rates, falling(row, weight), required, place, math.log(above))
        for row, place, above in zip(shares, places, np.maximum(likely, runs[-1].rps), strict=True)
    ]
    return np.asarray(drift * np.exp(found))


def _probability_cheapest(question: Question, winner: Standing, possible: Sequence[Standing], seed: int) -> float:
    random = np.random.default_rng(seed)
    costs: dict[str, np.ndarray] = {}
    for standing in possible:
        peaks = sample_peaks(standing, question.required, random)
        costs[standing.entrant.name] = np.array([question.usd(standing.entrant, peak) for peak in peaks])
    rest = [cost for name, cost in costs.items() if name != winner.entrant.name]
    cheapest = DRAWS if not rest else int(np.count_nonzero(costs[winner.entrant.name] <= np.min(rest, axis=0)))
    return (cheapest + 1) / (DRAWS + 2)  # the rule of succession


def _crossing(log_rates: np.ndarray, shares: np.ndarray, required: float, place: float, beyond: float) -> float:
    """log(rate) at which falling shares cross `required`; place: where in the bracket, 0 to 1; beyond: where all rates hold."""
    above = np.flatnonzero(shares >= required)
    if len(above) == len(shares):
        return beyond
    if not len(above):
        return float(log_rates[0] + math.log(max(0.5, float(shares[0]) / required)))
    left = above[-1]
    return float(log_rates[left] + place * (log_rates[left + 1] - log_rates[left]))
