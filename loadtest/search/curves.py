"""What a candidate's runs say together: latency and goodput against rate, the cliff in it, and what it costs to be faster.

Latency does not fall as the rate rises. So before a jump is looked for, the p99 of noisy runs is made to rise: by isotonic
regression of its logarithm (SciPy), each run as heavy as its requests.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from loadtest.results import Verdict
from loadtest.search.events import Measured
from loadtest.verdict.decision import CONFIDENCE
from loadtest.verdict.statistics import batch_means

_CURVE: Final = ("round", "peak", "overload", "floor")  # a recovery run tells what came before it
_JUMP: Final = 1.5  # times the p99 is a jump …
_STEEP: Final = 3.0  # … where it also grows by this power of the rate: a queue that fills does not, half to nine tenths busy


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One offered rate. p99_low_ms, p99_high_ms: the interval of the p99; 0 where it is not known.

    attainment: the share that met the SLO, with its two-sided 95 % interval from the blocks.
    """

    offered_rps: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    p99_low_ms: float
    p99_high_ms: float
    goodput_rps: float
    attainment: float
    attainment_low: float
    attainment_high: float
    requests: int
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Cliff:
    """Two neighbouring rates between which p99 jumps: about below_p99_ms up to the one, above_p99_ms from the other on."""

    below_rps: float
    above_rps: float
    below_p99_ms: float
    above_p99_ms: float


@dataclass(frozen=True, slots=True)
class FrontPoint:
    """One end of a trade: nothing measured is both cheaper and better. value: p99 in ms, or agreement."""

    candidate: str
    offered_rps: float
    usd_per_million: float
    value: float


def curve(runs: Iterable[Measured]) -> tuple[CurvePoint, ...]:
    """Valid runs, rate ascending. A rate measured again counts by its last run."""
    last = {run.rps: run for run in runs if run.purpose in _CURVE and run.valid and not run.failure and run.requests}
    return tuple(_point(run) for _, run in sorted(last.items()) if run.p99_ms > 0)


def cliff(points: Sequence[CurvePoint]) -> Cliff | None:
    """The largest jump of p99; None where it grows without one."""
    if len(points) < 2:
        return None
    from scipy.optimize import isotonic_regression  # half a second

    logs = np.log([point.p99_ms for point in points])
    fitted = np.exp(isotonic_regression(logs, weights=[point.requests for point in points]).x)
    found, highest = None, _JUMP
    for (one, low_ms), (other, high_ms) in pairwise(zip(points, fitted.tolist(), strict=True)):
        grown = high_ms / low_ms
        if grown >= highest and math.log(grown) >= _STEEP * math.log(other.offered_rps / one.offered_rps):
            found, highest = Cliff(one.offered_rps, other.offered_rps, low_ms, high_ms), grown
    return found


def front(points: Iterable[FrontPoint], *, rising: bool = False) -> tuple[FrontPoint, ...]:
    """Those that no other beats in both price and value. rising: more of the value is better, as of agreement."""
    sign = -1 if rising else 1
    kept: list[FrontPoint] = []
    for point in sorted(points, key=lambda point: (sign * point.value, point.usd_per_million)):
        if not kept or point.usd_per_million < kept[-1].usd_per_million:
            kept.append(point)
    return tuple(kept)


def _point(run: Measured) -> CurvePoint:
    met = np.array([met for _, met in run.blocks])
    missed = np.array([requests for requests, _ in run.blocks]) - met
    # One row per outcome: so many met, then so many missed, block after block.
    pattern = np.tile([False, True], len(met))
    counts = np.stack([met, missed], axis=1).ravel()
    blocks = np.repeat(np.arange(len(met)).repeat(2), counts)
    share = batch_means(blocks, np.repeat(pattern, counts)).interval(CONFIDENCE)
    return CurvePoint(
        offered_rps=run.rps,
        p50_ms=run.p50_ms,
        p95_ms=run.p95_ms,
        p99_ms=run.p99_ms,
        p99_low_ms=run.p99_low_ms,
        p99_high_ms=run.p99_high_ms,
        goodput_rps=run.goodput_rps,
        attainment=share.estimate,
        attainment_low=share.lower,
        attainment_high=share.upper,
        requests=run.requests,
        verdict=run.verdict,
    )
