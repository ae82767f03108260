"""Does a run meet its SLO? Pass, fail or undecided, and how many more requests would decide it.

An objective passes when the one-sided 95 % lower bound of its attainment reaches what is required, fails when the upper bound
stays below, and is undecided between. Failed requests miss every objective.

Blocks tell how misses cluster only where some were seen. A server that stops for 200 ms each 10 s or so misses p99<50ms, and
half of all runs of 7 s show no miss at all. So whoever ends a run early passes it only after EARLY_PASS_S; it may fail before.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from loadtest.results import Interval, Objective, ObjectiveResult, SloSpec, Verdict
from loadtest.verdict.statistics import BatchMeans, batch_means, binomial_interval, slowest

CONFIDENCE: Final = 0.95
_RAREST_STALL_S: Final = 10.0  # mean gap between stalls that an early pass is to have met
EARLY_PASS_S: Final = 3 * _RAREST_STALL_S  # the rule of three: of stalls at random 5 % of so long stretches have none
_MOST_LONGER: Final = 4096.0  # beyond this many times the run, more requests are no advice
_HOPE: Final = 2.0  # times a whole run: what would not be shown in that is not waited for


@dataclass(frozen=True, slots=True)
class JudgedRequests:
    """The evaluable requests of a run, in order of their intended send time: arrays of (n,).

    latency_ns, service_ns: int64, until the answer, the failure, or the end of the run. failed: bool. block: int64.
    cut: bool, the end of the run has cut them off: they miss limits that they had waited for, and say nothing of others. None:
    none of them.
    """

    latency_ns: np.ndarray
    service_ns: np.ndarray
    failed: np.ndarray
    block: np.ndarray
    cut: np.ndarray | None = None

    def known(self, objective: Objective) -> "JudgedRequests":
        """Those that are known to have met it, or to have missed it."""
        if self.cut is None:
            return self
        return self._where(~self.cut | (self._metric(objective) > objective.limit_ms * 1e6))

    def ended(self) -> "JudgedRequests":
        """Those that were answered, or failed."""
        return self if self.cut is None else self._where(~self.cut)

    def _where(self, which: np.ndarray) -> "JudgedRequests":
        cut = None if self.cut is None else self.cut[which]
        return JudgedRequests(self.latency_ns[which], self.service_ns[which], self.failed[which], self.block[which], cut)

    def missed(self, objective: Objective) -> np.ndarray:
        """Which requests missed it: (n,) bool."""
        return self.failed | (self._metric(objective) > objective.limit_ms * 1e6)

    def tail(self, objective: Objective, confidence: float) -> np.ndarray | None:
        """Requests that show how misses cluster (`loadtest.verdict.statistics`): (n,) bool.

        None where even half the limit is kept as often as the limit must be, judged by its own misses alone: what is that far
        from the limit is no close call.
        """
        elapsed_ns = self._metric(objective)
        beyond_half = self.failed | (elapsed_ns > objective.limit_ms * 1e6 / 2)
        if _decide(batch_means(self.block, beyond_half), objective.percentile / 100, confidence) == "pass":
            return None
        return slowest(elapsed_ns, objective.percentile)

    def _metric(self, objective: Objective) -> np.ndarray:
        return self.latency_ns if objective.metric == "latency" else self.service_ns


def met(slo: SloSpec | None, requests: JudgedRequests) -> np.ndarray:
    """Which requests succeeded and met every objective: (n,) bool."""
    good = ~requests.failed
    for objective in slo.objectives if slo else ():
        good &= ~requests.missed(objective)
    return good


def attainment(slo: SloSpec, requests: JudgedRequests) -> Interval:
    """The share that met every objective. requests: not empty."""
    tails = [tail for objective in slo.objectives if (tail := requests.tail(objective, CONFIDENCE)) is not None]
    return batch_means(requests.block, ~met(slo, requests), tails[0] if tails else None).interval(CONFIDENCE)


def judge(slo: SloSpec, requests: JudgedRequests, *, confidence: float = CONFIDENCE) -> tuple[ObjectiveResult, ...]:
    """One result per objective of which anything is known, the error rate last. confidence: of each one-sided bound.

    requests: not empty, each of which ended or missed an objective. So if an objective is left out, another was always missed.
    """
    results: list[ObjectiveResult] = []
    for objective in slo.objectives:
        known = requests.known(objective)
        if len(known.block):
            means = batch_means(known.block, known.missed(objective), known.tail(objective, confidence))
            results.append(_judge(str(objective), objective.percentile / 100, means, confidence))
    ended = requests.ended()
    if slo.max_error_rate is not None and len(ended.block):
        means = batch_means(ended.block, ended.failed)
        results.append(_judge(f"errors<{slo.max_error_rate * 100:g}%", 1 - slo.max_error_rate, means, confidence))
    return tuple(results)


def overall(objectives: tuple[ObjectiveResult, ...]) -> Verdict:
    """One failure fails; all must pass to pass."""
    verdicts = {objective.verdict for objective in objectives}
    return "fail" if "fail" in verdicts else "undecided" if "undecided" in verdicts else "pass"


def lost(slo: SloSpec, requests: JudgedRequests, share: float) -> bool:
    """Whether a run will not show that an objective is kept, even if twice as long, if all of it is like what was seen.

    requests: not empty, and ended; those of the run so far, which are `share` of all that it may have.
    """
    judged = [
        (objective.percentile / 100, requests.missed(objective), requests.tail(objective, CONFIDENCE))
        for objective in slo.objectives
    ]
    if slo.max_error_rate is not None:
        judged.append((1 - slo.max_error_rate, requests.failed, None))
    scale = _HOPE / share
    return any(
        _decide(batch_means(requests.block, missed, tail), required, CONFIDENCE, scale=scale) != "pass"
        for required, missed, tail in judged
    )


def _judge(name: str, required: float, means: BatchMeans, confidence: float) -> ObjectiveResult:
    verdict = _decide(means, required, confidence)
    return ObjectiveResult(
        objective=name,
        required=required,
        attainment=means.interval(CONFIDENCE),
        binomial=binomial_interval(means.misses, means.requests, CONFIDENCE),
        design_effect=means.design_effect,
        verdict=verdict,
        requests_needed=0 if verdict != "undecided" else _requests_needed(means, required, confidence),
    )


def _decide(means: BatchMeans, required: float, confidence: float, *, scale: float = 1.0) -> Verdict:
    if required >= 1:  # no error at all is allowed: the count decides, not an estimate
        return "fail" if means.misses else "pass"
    interval = means.interval(2 * confidence - 1, scale=scale)  # two tails, of which each verdict uses one
    return "pass" if interval.lower >= required else "fail" if interval.upper < required else "undecided"


def _requests_needed(means: BatchMeans, required: float, confidence: float) -> int | None:
    enough = 2.0
    while _decide(means, required, confidence, scale=enough) == "undecided":
        enough *= 2
        if enough > _MOST_LONGER:
            return None
    short = enough / 2
    for _ in range(10):  # to a thousandth
        middle = (short + enough) / 2
        if _decide(means, required, confidence, scale=middle) == "undecided":
            short = middle
        else:
            enough = middle
    return int(np.ceil((enough - 1) * means.requests))
