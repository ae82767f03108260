"""Intervals, percentiles and warm-up: the arithmetic of a measurement, without any I/O.

Requests near the knee are not independent: one slow batch makes many slow requests. So the interval of a share comes from block
means. The variance between blocks gives the design effect: how many requests weigh as one independent. The exact binomial
interval is taken at the effective sample size, corrected for the degrees of freedom [1]. What neighbouring blocks still share
is added as for a first-order autoregression, times (1 + r) / (1 - r) [2].

A few misses cannot show how dependent they are: at p99 a run often holds one burst of them or none, and the interval then
covers the truth in 25 to 90 % of runs instead of 95. The slowest requests of a run, three times as many as may miss, tell in
every run, as they cluster like misses. So their design effect is a floor under that of the misses.

A run that had luck saw few bursts and small ones, so it thinks too well of its misses and of their dependence. So each share in
question is tested with the design effect of a run that shows that share: a score interval. Where bursts come at random and
their sizes are exponential, the design effect goes with the square root of the share (the sum of squared sizes with its power
of 1.5, by least squares). `python -m benchmarks.coverage` tells how often the interval holds.

[1] Korn and Graubard, "Confidence intervals for proportions with small expected number of positive counts estimated from survey
    data", Survey Methodology 24, 1998
[2] Tafazzoli, Steiger and Wilson, "N-Skart: a nonsequential skewness- and autoregression-adjusted batch-means procedure", IEEE
    Transactions on Automatic Control 56, 2011
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy import special

from loadtest.results import Interval, Percentiles

_TAIL: Final = 3  # times as many requests as may miss
_MOST_CORRELATION: Final = 0.8  # of neighbouring blocks: beyond it the estimate is noise
_BEYOND_CHANCE: Final = 2.0  # standard errors of the correlation of independent batches, 1 / sqrt(batches)
_LEAST_BATCHES: Final = 8
_EVENT_BATCHES: Final = 20
_LEAST_FREEDOM: Final = 2.0
_FEWER, _MORE = 0.25, 2.0  # times the share seen, up to which the design effect of another share is extrapolated
_NOISE_BATCHES: Final = 20


def percentiles(latencies_ns: np.ndarray) -> Percentiles:
    """Exact percentiles (nearest rank) of (n,) int64 nanoseconds."""
    count = len(latencies_ns)
    if count == 0:
        return Percentiles(0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    ordered = np.sort(latencies_ns)
    p50, p90, p95, p99, p999, most = (
        float(ordered[nearest_rank(level, count) - 1]) / 1e6 for level in (50, 90, 95, 99, 99.9, 100)
    )
    return Percentiles(count, float(ordered.mean()) / 1e6, p50, p90, p95, p99, p999, most)


def nearest_rank(percentile: float, count: int) -> int:
    """The nearest rank, from 1."""
    return max(1, math.ceil(percentile / 100 * count - 1e-9))  # 99.9 / 100 · 1000 is a little over 999


def histogram(latencies_ns: np.ndarray) -> tuple[tuple[int, int], ...]:
    """Count (n,) int64 nanoseconds in log-linear cells, as an HDR histogram does: (upper edge in ns, count), ascending.

    Each octave has 2048 cells, so an edge is at most 0.05 % above the values under it. Histograms of the same form are merged
    exactly by adding the counts of equal edges.
    """
    values = np.maximum(latencies_ns, 1)
    octave = np.maximum(np.frexp(values.astype(np.float64))[1] - 12, 0)  # values below 4096 ns are exact
    edges, counts = np.unique((((values >> octave) + 1) << octave) - 1, return_counts=True)
    return tuple(zip(edges.tolist(), counts.tolist(), strict=True))


def binomial_interval(misses: float, n: float, confidence: float) -> Interval:
    """Clopper-Pearson for the share of requests that did not miss; misses and n may be effective (fractional) counts."""
    tail = (1 - confidence) / 2
    if n <= 0:
        return Interval(0.0, 0.0, 1.0, confidence)
    lower_miss = float(special.betaincinv(misses, n - misses + 1, tail)) if misses > 0 else 0.0
    upper_miss = float(special.betaincinv(misses + 1, n - misses, 1 - tail)) if misses < n else 1.0
    return Interval(1 - misses / n, 1 - upper_miss, 1 - lower_miss, confidence)


@dataclass(frozen=True, slots=True)
class BatchMeans:
    """A share estimated from blocks. design_effect: at least 1. blocks: those that have requests."""

    misses: int
    requests: int
    design_effect: float
    blocks: int

    def interval(self, confidence: float, *, scale: float = 1.0) -> Interval:
        """Of the share that did not miss. scale: as if the run had been so many times longer with the same outcome."""
        seen = self.misses / self.requests
        if self.design_effect <= 1:
            return binomial_interval(self.misses * scale, self.requests * scale, confidence)
        tail = (1 - confidence) / 2
        most = _root(lambda share: self._as_few(share, seen, confidence, scale) - tail, seen, 1.0) if seen < 1 else 1.0
        least = _root(lambda share: self._as_many(share, seen, confidence, scale) - tail, 0.0, seen) if seen > 0 else 0.0
        return Interval(1 - seen, 1 - most, 1 - least, confidence)

    def seen_shares(self, share: float, confidence: float) -> tuple[float, float]:
        """Between which shares of misses a run like this one sees, if the true one is `share`."""
        tail = (1 - confidence) / 2
        as_few = self._as_few(share, 0.0, confidence) - tail
        least = 0.0 if as_few > 0 else _root(lambda seen: self._as_few(share, seen, confidence) - tail, 0.0, share)
        as_many = self._as_many(share, 1.0, confidence) - tail
        return least, 1.0 if as_many > 0 else _root(lambda seen: self._as_many(share, seen, confidence) - tail, share, 1.0)

    def _as_few(self, share: float, seen: float, confidence: float, scale: float = 1.0) -> float:
        """The chance to see at most this share of misses, below 1, where the true one is `share`."""
        n = self._effective(share, seen, confidence, scale)
        return float(special.betaincc(seen * n + 1, (1 - seen) * n, share))

    def _as_many(self, share: float, seen: float, confidence: float, scale: float = 1.0) -> float:
        """The chance to see at least this share of misses, above 0."""
        n = self._effective(share, seen, confidence, scale)
        return float(special.betainc(seen * n, (1 - seen) * n + 1, share))

    def _effective(self, share: float, seen: float, confidence: float, scale: float) -> float:
        """How many independent requests would tell as much about `share`."""
        requests = self.requests * scale
        if self.design_effect <= 1:
            return requests
        times = min(max(share / seen, _FEWER), _MORE) if seen > 0 else _MORE
        effect = 1 + (self.design_effect - 1) * math.sqrt(times)
        # Korn and Graubard's correction for the degrees of freedom of the variance estimate.
        tail = 1 - (1 - confidence) / 2
        spread = special.stdtrit(max(requests - 1, 1), tail) / special.stdtrit(max(self.blocks * scale - 1, 1), tail)
        return requests / effect * float(spread) ** 2


def _root(rises_or_falls: Callable[[float], float], low: float, high: float) -> float:
    """By Ridders' method (IEEE Transactions on Circuits and Systems 26, 1979): importing SciPy's takes half a second.

    Precise to 1e-12, and a billionth of the root.
    """
    at_low, at_high = rises_or_falls(low), rises_or_falls(high)
    if at_low == 0 or at_high == 0:
        return low if at_low == 0 else high
    found = math.inf
    while True:
        middle = (low + high) / 2
        at_middle = rises_or_falls(middle)
        step = (middle - low) * at_middle / math.sqrt(at_middle**2 - at_low * at_high)
        before, found = found, middle + math.copysign(step, (at_low - at_high) * at_middle)
        at_found = rises_or_falls(found)
        if at_found == 0 or abs(found - before) <= 1e-12 + 1e-9 * abs(found):
            return found
        if at_middle * at_found < 0:
            (low, at_low), (high, at_high) = sorted(((middle, at_middle), (found, at_found)))
        elif at_low * at_found < 0:
            high, at_high = found, at_found
        else:
            low, at_low = found, at_found


def latency_interval(latencies_ns: np.ndarray, block: np.ndarray, percentile: float, confidence: float) -> tuple[float, float]:
    """Between which ms a percentile lies, two-sided, though requests depend on each other: (lower, upper).

    Every limit between them is one of which the interval of the share within it holds the percentile: order statistics, at the
    effective sample size. latencies_ns: (n,) int64, n at least 1. block: as for `batch_means`. percentile: between 0 and 100.
    lower is 0 and upper infinite where the run is too short to tell.
    """
    ordered = np.sort(latencies_ns)
    count = len(ordered)
    beyond = latencies_ns > ordered[nearest_rank(percentile, count) - 1]
    means = batch_means(block, beyond, slowest(latencies_ns, percentile))
    least, most = means.seen_shares(1 - percentile / 100, confidence)
    within = math.ceil((1 - most) * count)
    lower = float(ordered[within - 1]) / 1e6 if within > 0 else 0.0
    return lower, float(ordered[math.floor((1 - least) * count)]) / 1e6 if least > 0 else math.inf


def slowest(latencies: np.ndarray, percentile: float) -> np.ndarray:
    """Which of (n,) latencies are among the slowest, _TAIL times as many as may miss an objective of that percentile."""
    share = min(0.5, _TAIL * (1 - percentile / 100))
    found: np.ndarray = latencies > np.quantile(latencies, 1 - share)
    return found


def batch_means(block: np.ndarray, missed: np.ndarray, tail: np.ndarray | None = None) -> BatchMeans:
    """Estimate a share of misses and how dependent requests are.

    block: (n,) ints, ascending: which block each request is in. missed: (n,) bool. tail: (n,) bool whose design effect is
    a floor (`slowest`), or None. n is at least 1.
    """
    counts = np.bincount(block).astype(np.float64)
    used = counts > 0
    marks = [which.astype(np.float64) for which in (missed, tail) if which is not None]
    effect = max(_design_effect(counts[used], np.bincount(block, values)[used], values) for values in marks)
    return BatchMeans(int(np.count_nonzero(missed)), len(missed), effect, int(np.count_nonzero(used)))


def _design_effect(counts: np.ndarray, sums: np.ndarray, values: np.ndarray) -> float:
    """How many values weigh as one independent. counts, sums: (blocks,) of values: (n,)."""
    spread, mean, blocks = float(values.var()), float(values.mean()), len(counts)
    if spread == 0 or blocks < 2:
        return 1.0
    # Variance of a ratio estimator (Cochran, Sampling Techniques, 1977, 2.11), over that of independent values.
    residuals = sums - mean * counts
    variance = blocks / (blocks - 1) * float(residuals @ residuals) / len(values) ** 2
    alike = min(_correlation(sums / counts), _MOST_CORRELATION)
    return max(1.0, variance * len(values) / spread * (1 + alike) / (1 - alike))


def _correlation(means: np.ndarray) -> float:
    """How alike neighbours are, by von Neumann's ratio of successive differences: 0 to 1, 0 where they rather differ."""
    deviations, differences = means - means.mean(), np.diff(means)
    squares = float(deviations @ deviations)
    return max(0.0, 1 - float(differences @ differences) / (2 * squares)) if squares > 0 else 0.0


def mean_error(series: np.ndarray) -> tuple[float, float]:
    """The standard error of a mean, though neighbours depend on each other, and its degrees of freedom.

    series: (n,) in order of time, n at least 2. As N-Skart does [2]: neighbours are joined to batches until von Neumann's test
    takes those for independent, or too few would be left; what they still share is added as for a first-order autoregression.
    """
    batches, alike = _joined(series, _LEAST_BATCHES)
    alike = min(alike, _MOST_CORRELATION)
    wider = (1 + alike) / (1 - alike)
    error = math.sqrt(float(batches.var(ddof=1)) / len(batches) * wider)
    return error, max(_LEAST_FREEDOM, (len(batches) - 1) / wider)


def event_error(series: np.ndarray) -> tuple[float, float]:
    """As `mean_error`, where a series may hold one event, such as an outage, that must not pass for chance however long it is.

    So only what is shorter than a batch of _EVENT_BATCHES is one event; what batches still share is not added.
    """
    batches, _ = _joined(series, _EVENT_BATCHES)
    return independent_error(batches)


def independent_error(series: np.ndarray) -> tuple[float, float]:
    """As `mean_error`, of what does not carry over from one to the next."""
    return float(series.std(ddof=1)) / math.sqrt(len(series)), len(series) - 1


def _joined(series: np.ndarray, least: int) -> tuple[np.ndarray, float]:
    """Means of so many neighbours that they pass for independent, or that `least` are left, and how alike those still are."""
    batches, length = series, 1
    while (alike := _correlation(batches)) > _BEYOND_CHANCE / math.sqrt(len(batches)):
        length += 1
        count = len(series) // length
        if count < least:
            break
        batches = series[-count * length :].reshape(count, length).mean(axis=1)
    return batches, alike


def falling(shares: Sequence[float] | np.ndarray, weights: Sequence[float]) -> np.ndarray:
    """The closest non-increasing sequence: (n,), n at least 1. weights: (n,), above 0."""
    from scipy.optimize import isotonic_regression  # half a second

    found: np.ndarray = isotonic_regression(shares, weights=weights, increasing=False).x
    return found


def mser5(series: np.ndarray, most: float = 0.2) -> tuple[int, bool]:
    """Find the warm-up: how many leading values to drop, and whether what is left looks steady.

    MSER-5 (White, "An effective truncation heuristic for bias reduction in simulation output", Simulation 69, 1997): over means
    of 5, the cut that minimises the squared standard error of the rest. The minimum of a noisy series lies anywhere, so a cut
    counts only if what it drops differs from the rest by more than noise. most: share of the series that may be dropped; where
    the cut wants more, that much is dropped and the answer is not steady.
    """
    means = series[: len(series) // 5 * 5].reshape(-1, 5).mean(axis=1)
    count = len(means)
    if count < 2 * _NOISE_BATCHES:
        return 0, True
    left = count - np.arange(count // 2)
    # Sums of the tails, from the back.
    centred = means - means.mean()
    sums = np.cumsum(centred[::-1])[::-1][: count // 2]
    squares = np.cumsum((centred * centred)[::-1])[::-1][: count // 2]
    cut = int(np.argmin((squares - sums * sums / left) / left**2))
    if cut == 0 or not _differs(means[:cut], means[cut:]):
        return 0, True
    bound = int(count * most)
    return min(cut, bound) * 5, cut <= bound


def _differs(dropped: np.ndarray, rest: np.ndarray) -> bool:
    """Whether two stretches differ in their mean by over 3 standard errors, judged by the batch means of the rest."""
    length = len(rest) // _NOISE_BATCHES
    batches = rest[: length * _NOISE_BATCHES].reshape(_NOISE_BATCHES, length).mean(axis=1)
    error = float(batches.std(ddof=1)) * math.sqrt(length * (1 / len(dropped) + 1 / len(rest)))
    return abs(float(dropped.mean()) - float(rest.mean())) > 3 * error
