"""One core in simulated time: a server that answers one request after the other, others who take it, and what a meter sees."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from loadtest.verdict.stalls import Recording, Side

TICK_NS: Final = 100_000
PERIOD_NS: Final = 10_000_000
MS: Final = 1_000_000

Stretch = tuple[float, float]  # s: from, until


@dataclass(frozen=True)
class Run:
    """intended, done: (m,) ns."""

    intended: np.ndarray
    done: np.ndarray
    recording: Recording

    @property
    def latency_ms(self) -> np.ndarray:
        return (self.done - self.intended) / MS


def core(
    intended: np.ndarray,
    *,
    work_ms: float,
    seconds: float,
    taken: Sequence[Stretch] = (),
    burns: Sequence[Stretch] = (),
    sleeps: Sequence[Stretch] = (),
    elsewhere: Sequence[Stretch] = (),
    background: float = 0.0,
) -> Run:
    """A server that needs work_ms of its only core for each request.

    taken: others have the core. burns: the server uses it for something else. sleeps: it does not use it, whoever waits.
    elsewhere: others work on a core that the server cannot use, though nobody knows on which. background: share of each period
    that daemons take.
    """
    ticks = int(seconds * 1e9) // TICK_NS
    by_others, by_itself, asleep, any_core = (_mask(which, ticks) for which in (taken, burns, sleeps, elsewhere))
    per_period = PERIOD_NS // TICK_NS
    by_others |= np.arange(ticks) % per_period < background * per_period
    work = round(work_ms * MS / TICK_NS)
    arrivals = intended // TICK_NS
    done = np.zeros(len(intended), np.int64)
    used, waited = np.zeros(ticks, bool), np.zeros(ticks, bool)
    head, left, tick = 0, work, 0
    for tick in range(ticks):
        waiting = head < len(arrivals) and arrivals[head] <= tick
        if by_others[tick]:
            waited[tick] = (waiting and not asleep[tick]) or by_itself[tick]
        elif by_itself[tick]:
            used[tick] = True
        elif waiting and not asleep[tick]:
            used[tick] = True
            left -= 1
            if left == 0:
                done[head] = (tick + 1) * TICK_NS
                head, left = head + 1, work
    done[head:] = ticks * TICK_NS + np.arange(1, len(done) - head + 1) * work * TICK_NS
    moments = np.arange(0, ticks + 1, per_period) * TICK_NS
    others = by_others | any_core

    def sums(which: np.ndarray) -> np.ndarray:
        return which.reshape(-1, per_period).sum(axis=1) * TICK_NS

    none = np.zeros(len(moments) - 1, np.int64)
    return Run(
        intended,
        done,
        Recording(
            moments,
            Side((0,), sums(used), sums(waited), sums(others), none),
            Side((1,), none, none, none, none),
            none,
            np.zeros((0, 3), np.int64),
            (("neighbour", int(sums(others).sum())),),
        ),
    )


def poisson(rate_rps: float, seconds: float, seed: int = 0) -> np.ndarray:
    """(m,) ns, ascending, so that all are answered within the time if the server keeps up."""
    gaps = np.random.default_rng(seed).exponential(1e9 / rate_rps, int(rate_rps * seconds * 1.2))
    times = np.cumsum(gaps).astype(np.int64)
    return times[times < (seconds - 0.5) * 1e9]


def each_second(at_s: float, long_s: float, seconds: float) -> list[Stretch]:
    return [(second + at_s, second + at_s + long_s) for second in range(int(seconds))]


def _mask(stretches: Sequence[Stretch], ticks: int) -> np.ndarray:
    found = np.zeros(ticks, bool)
    for start_s, end_s in stretches:
        found[int(start_s * 1e9) // TICK_NS : int(end_s * 1e9) // TICK_NS] = True
    return found
