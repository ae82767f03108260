"""Servers whose true percentiles are known, simulated fast: what a method is told of each run, and what it should have found.

A queue of one server begins stationary, by Pollaczek and Khinchine: the wait of an arrival is a geometric number of residual
service times. So a run needs no warm-up, and independent draws of the wait give the true percentile. The gateway's batcher has
no such law; there a million requests at a time, of independent runs side by side, come near enough.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

Draw = Callable[[np.random.Generator, int], np.ndarray]


class Server(Protocol):
    """name: for tables. rate_rps: of arrivals at which it is all busy."""

    @property
    def name(self) -> str: ...

    @property
    def rate_rps(self) -> float: ...

    def percentile(self, percentile: float, busy: float, seed: int) -> float:
        """The true percentile of latency, in seconds."""
        ...

    def runs(self, seed: int, runs: int, count: int, busy: float) -> Iterator[np.ndarray]:
        """Latencies of independent runs in the order of arrival, in seconds: (count,) each."""
        ...


@dataclass(frozen=True, slots=True)
class Queue:
    """One server, Poisson arrivals, first come, first served. service, residual: draw seconds; the mean of service is 1."""

    name: str
    service: Draw
    residual: Draw
    rate_rps: float = 1.0

    def percentile(self, percentile: float, busy: float, seed: int) -> float:
        rng = np.random.default_rng([0, seed])
        latency = [self._waits(rng, busy, 250_000) + self.service(rng, 250_000) for _ in range(16)]
        return float(np.percentile(np.concatenate(latency), percentile))

    def runs(self, seed: int, runs: int, count: int, busy: float) -> Iterator[np.ndarray]:
        for run in range(runs):
            rng = np.random.default_rng([1, seed, run])
            service = self.service(rng, count)
            steps = np.concatenate([self._waits(rng, busy, 1), service[:-1] - rng.exponential(1 / busy, count - 1)])
            yield lindley(steps) + service

    def _waits(self, rng: np.random.Generator, busy: float, count: int) -> np.ndarray:
        """Of arrivals that are independent of each other."""
        ahead = rng.geometric(1 - busy, count) - 1
        sums = np.concatenate([[0.0], np.cumsum(self.residual(rng, int(ahead.sum())))])
        ends = np.cumsum(ahead)
        waits: np.ndarray = sums[ends] - sums[ends - ahead]
        return waits


def lindley(steps: np.ndarray) -> np.ndarray:
    """Waits of a single-server queue: the first wait, then service less the gap to the next arrival."""
    walk = np.cumsum(steps)
    waits: np.ndarray = walk - np.minimum(np.minimum.accumulate(walk), 0.0)
    return waits


@dataclass(frozen=True, slots=True)
class Batching:
    """The gateway's batcher with the policy `Greedy` and one worker: a free worker takes all that waits, up to max_rows."""

    name: str
    fixed_s: float
    row_s: float
    max_rows: int

    @property
    def rate_rps(self) -> float:
        return self.max_rows / (self.fixed_s + self.row_s * self.max_rows)

    def percentile(self, percentile: float, busy: float, seed: int) -> float:
        return float(np.percentile(np.concatenate(list(self.runs(seed + 1_000_000, 500, 50_000, busy))), percentile))

    def runs(self, seed: int, runs: int, count: int, busy: float) -> Iterator[np.ndarray]:
        for first in range(0, runs, _SIDE_BY_SIDE):
            rng = np.random.default_rng([2, seed, first])
            side = min(_SIDE_BY_SIDE, runs - first)
            gaps = rng.exponential(1 / (busy * self.rate_rps), (side, _LEAD + count))
            after = rng.exponential(1 / (busy * self.rate_rps), (side, self.max_rows))  # they make the last batches longer
            arrivals = np.cumsum(np.concatenate([gaps, after], axis=1), axis=1)
            yield from self.latencies(arrivals)[:, _LEAD : _LEAD + count]

    def latencies(self, arrivals: np.ndarray) -> np.ndarray:
        """arrivals: (runs, count), seconds, ascending. Returns the same shape, seconds. All runs go on by a batch at a time."""
        runs, count = arrivals.shape
        waiting = np.concatenate([arrivals, np.full((runs, self.max_rows), np.inf)], axis=1)  # nobody is after the last
        done = np.empty((runs, count + self.max_rows))
        every, ahead = np.arange(runs)[:, None], np.arange(self.max_rows)
        head, free = np.zeros(runs, np.int64), np.zeros(runs)
        while every.size:
            place = head[:, None] + ahead
            at = waiting[every, place]
            begin = np.maximum(free, at[:, 0])
            rows = np.count_nonzero(at <= begin[:, None], axis=1)
            free = begin + self.fixed_s + self.row_s * rows
            done[every, place] = free[:, None]  # of those behind the batch, written over by theirs
            head = head + rows
            going = head < count
            if not going.all():
                every, head, free = every[going], head[going], free[going]
        return done[:, :count] - arrivals


@dataclass(frozen=True, slots=True)
class Stalls:
    """Answers at once, but stops at random, once in every_s, for for_s; requests wait until it goes on."""

    name: str
    rate_rps: float
    every_s: float
    for_s: float

    def percentile(self, percentile: float, busy: float, seed: int) -> float:
        """Exact but for stalls that overlap. The percentile must be one that stalls decide."""
        return self.for_s - (1 - percentile / 100) * self.every_s

    def runs(self, seed: int, runs: int, count: int, busy: float) -> Iterator[np.ndarray]:
        for run in range(runs):
            rng = np.random.default_rng([4, seed, run])
            arrivals = np.cumsum(rng.exponential(1 / (busy * self.rate_rps), count))
            span_s = arrivals[-1] + self.for_s
            stops = np.sort(rng.uniform(-self.for_s, arrivals[-1], rng.poisson(span_s / self.every_s)))
            ends = np.concatenate([[-np.inf], stops + self.for_s])[np.searchsorted(stops, arrivals)]  # of the last before
            yield np.maximum(ends - arrivals, 0.1 / self.rate_rps)


_SIDE_BY_SIDE: Final = 250
_LEAD: Final = 4000  # requests until the batcher has forgotten that it began empty


def _two_kinds(fast_s: float, slow_s: float, slow_share: float, draw: Draw) -> tuple[Draw, Draw]:
    """Service of two kinds, each its mean times a draw of mean 1; and the residual, in which the slow weigh by their time."""
    heavy = slow_s * slow_share / (slow_s * slow_share + fast_s * (1 - slow_share))
    uniform = draw is _ones

    def service(rng: np.random.Generator, count: int) -> np.ndarray:
        return np.where(rng.random(count) < slow_share, slow_s, fast_s) * draw(rng, count)

    def residual(rng: np.random.Generator, count: int) -> np.ndarray:
        return np.where(rng.random(count) < heavy, slow_s, fast_s) * (rng.random(count) if uniform else draw(rng, count))

    return service, residual


def _ones(rng: np.random.Generator, count: int) -> np.ndarray:
    return np.ones(count)


def _exponential(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.exponential(1.0, count)


CONSTANT: Final = Queue("M/D/1", _ones, lambda rng, count: rng.random(count))
EXPONENTIAL: Final = Queue("M/M/1", _exponential, _exponential)
BIMODAL: Final = Queue("M/bimodal/1", *_two_kinds(0.5, 5.5, 0.1, _ones))
HYPEREXPONENTIAL: Final = Queue("M/H2/1", *_two_kinds(0.5, 5.5, 0.1, _exponential))
BATCHER: Final = Batching("batcher, 16 rows", 0.002, 0.0005, 16)
RARE_STALLS: Final = Stalls("stalls of 0.16 s, once in 10 s", 500.0, 10.0, 0.16)
LARGE_BATCHER: Final = Batching("batcher, 64 rows", 0.005, 0.0001, 64)
