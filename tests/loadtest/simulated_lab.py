"""A laboratory without hardware: answers the search's experiments from known cost models, with noise from a seed.

Every candidate has a true peak, where attainment falls through the SLO's share, steeply; blocks near the knee scatter more than
independent requests would, as measured ones do.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy.stats import t as student

from loadtest.results import Verdict
from loadtest.search.budget import BLOCK_REQUESTS, BLOCK_SLOS, BLOCKS
from loadtest.search.events import (
    INCOMPARABLE,
    Agree,
    Agreed,
    Event,
    Experiment,
    Load,
    Measured,
    Predict,
    Predicted,
    Profiled,
    Question,
    Timing,
)
from loadtest.search.standing import SearchOutcome
from loadtest.search.strategy import search


@dataclass(frozen=True, slots=True)
class Truth:
    """Of one candidate. bias: predicted over true peak. failure: what it dies of when it is started.

    agreement: of its answers with the reference's; None: they differ in shape.
    """

    peak_rps: float
    bias: float = 1.0
    failure: str = ""
    agreement: float | None = 1.0


@functools.cache
def quantile(degrees: int) -> float:
    return float(student.ppf(0.995, degrees))


class SimulatedLab:
    """events: the journal, in order. start_s: what starting a candidate costs each time another is wanted."""

    def __init__(self, question: Question, truths: Mapping[str, Truth], *, seed: int = 0, start_s: float = 5.0) -> None:
        self._question = question
        self._truths = truths
        self._random = np.random.default_rng(seed)
        self._start_s = start_s
        self._running = ""
        self.experiments: list[Experiment] = []
        self.events: list[Event] = []

    def run(self) -> SearchOutcome:
        steps = search(self._question)
        experiment = next(steps)
        while True:
            event = self.answer(experiment)
            self.experiments.append(experiment)
            self.events.append(event)
            try:
                experiment = steps.send(event)
            except StopIteration as stop:
                outcome: SearchOutcome = stop.value
                return outcome

    def answer(self, experiment: Experiment) -> Event:
        truth = self._truths[experiment.entrant]
        if isinstance(experiment, Predict):
            return Predicted(experiment.entrant, truth.peak_rps * truth.bias)
        start_s = 0.0 if self._running == experiment.entrant else self._start_s
        self._running = experiment.entrant
        if isinstance(experiment, Agree):
            differs = f"{INCOMPARABLE}: its output y is FP32 [1, 3], the reference's FP32 [1, 4]"
            if failure := truth.failure or differs * (truth.agreement is None):
                return Agreed(experiment.entrant, seconds=start_s, failure=failure, reference=experiment.reference)
            found = truth.agreement if experiment.entrant != experiment.reference else 1.0
            return Agreed(experiment.entrant, found, 400, "cosine", start_s + 2.0, reference=experiment.reference)
        if isinstance(experiment, Load):
            if truth.failure:
                return Measured(
                    experiment.entrant, experiment.purpose, experiment.rps, "fail", (), start_s, failure=truth.failure
                )
            return self._load(experiment, truth.peak_rps, start_s)
        if truth.failure:
            return Profiled(experiment.group, seconds=start_s, failure=truth.failure, entrant=experiment.entrant)
        timings = tuple(Timing(rows, 1, 5 + 2.0 * rows) for rows in experiment.rows)
        seconds = start_s + experiment.seconds
        return Profiled(experiment.group, timings, 0.5, seconds, start_s=start_s, entrant=experiment.entrant)

    def _load(self, load: Load, peak_rps: float, start_s: float) -> Measured:
        limit_ms, required = self._question.limit_ms, self._question.required
        block_s = max(BLOCK_SLOS * limit_ms / 1e3, BLOCK_REQUESTS / load.rps)
        count = max(1, int(load.seconds / block_s))
        peak_rps = max(peak_rps, 1e-3)  # a peak of 0: the SLO holds at no rate
        # 1 far below the peak, `required` at it, half of it 10 % above.
        miss = (1 - required) * math.exp(min(35 * (load.rps / peak_rps - 1), 20))
        share = 1 / (1 + miss) if miss < 1 else max(0.0, 0.5 - (load.rps / peak_rps - 1.1))
        spread = 0.5 * (1 - share)
        blocks: list[tuple[int, int]] = []
        verdict: Verdict = "undecided"
        for _ in range(count):
            requests = max(1, round(load.rps * block_s))
            met = min(1.0, max(0.0, self._random.normal(share, spread)))
            blocks.append((requests, round(met * requests)))
            verdict = self._judge(blocks)
            if load.until_decided and verdict != "undecided":
                break
        p99_ms = limit_ms * (0.4 + 0.6 * min(load.rps / peak_rps, 5.0))
        seconds = start_s + len(blocks) * block_s
        goodput = load.rps * share
        return Measured(
            load.entrant,
            load.purpose,
            load.rps,
            verdict,
            tuple(blocks),
            seconds,
            p50_ms=0.4 * p99_ms,
            p95_ms=0.8 * p99_ms,
            p99_ms=p99_ms,
            mean_ms=0.45 * p99_ms,
            goodput_rps=goodput,
            queue_ms=0.2 * p99_ms,
            compute_ms=0.22 * p99_ms,
            overhead_ms=0.03 * p99_ms,
            batch_rows={1: 20, 2: 40, 4: 60, 8: round(load.rps)},
            cpu_percent=min(100.0, 95 * load.rps / peak_rps),
            memory_percent=12.0,
            start_s=start_s,
        )

    def _judge(self, blocks: list[tuple[int, int]]) -> Verdict:
        if len(blocks) < 5:
            return "undecided"
        shares = np.array([met / requests for requests, met in blocks])
        half = quantile(len(shares) - 1) * shares.std(ddof=1) / math.sqrt(len(shares))
        if shares.mean() + half < self._question.required:
            return "fail"
        return "pass" if len(blocks) >= BLOCKS and shares.mean() - half >= self._question.required else "undecided"
