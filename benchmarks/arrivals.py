"""When requests arrive, for simulations: Poisson, bursts, days and replayed traces, at any mean rate."""

import csv
import functools
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import numpy as np

Seed = int | Sequence[int]


def arrivals_ns(shape: str, rate: float, requests: int, dwell_ns: float, seed: Seed) -> np.ndarray:
    """Ascending int64 (requests,) at the mean rate per second.

    shape: poisson, mmpp, diurnal, or the path of a CSV whose first column are timestamps. dwell_ns: mean length of a burst.
    """
    rng = np.random.default_rng(seed)
    if shape == "poisson":
        gaps = rng.exponential(1e9 / rate, requests)
    elif shape == "mmpp":
        gaps = _bursty_gaps(rate, requests, dwell_ns, rng)
    elif shape == "diurnal":
        day = np.sin(np.linspace(0, 4 * np.pi, requests))
        gaps = rng.exponential(1e9 / rate, requests) / (1 + 0.5 * day)
    else:
        gaps = _replayed_gaps(shape, rate, requests, rng)
    return np.cumsum(gaps).astype(np.int64) + 1


def _bursty_gaps(rate: float, requests: int, dwell_ns: float, rng: np.random.Generator) -> np.ndarray:
    """Two-state Markov-modulated Poisson: 0.5 and 1.5 times the rate, changing after `dwell_ns` in the mean."""
    gaps: list[np.ndarray] = []
    made, fast = 0, False
    while made < requests:
        in_state = rate * (1.5 if fast else 0.5)
        count = max(1, rng.poisson(in_state * rng.exponential(dwell_ns) / 1e9))
        gaps.append(rng.exponential(1e9 / in_state, count))
        made += count
        fast = not fast
    return np.concatenate(gaps)[:requests]


def _replayed_gaps(path: str, rate: float, requests: int, rng: np.random.Generator) -> np.ndarray:
    """Counts per second of a trace as a rate function, scaled to the mean rate; time is not compressed."""
    counts = _counts_per_second(path)
    seconds = max(2, round(requests / rate))
    start = int(rng.integers(0, max(1, len(counts) - seconds)))
    window = np.resize(counts[start : start + seconds], seconds).astype(float)
    window *= rate / max(window.mean(), 1e-9)
    drawn = rng.poisson(window)
    times = np.concatenate([np.sort(rng.uniform(i, i + 1, count)) for i, count in enumerate(drawn)])
    return np.diff(times, prepend=0.0) * 1e9


@functools.cache
def _counts_per_second(path: str) -> np.ndarray:
    with Path(path).open(newline="") as file:
        rows = list(csv.reader(file))[1:]
    seconds = np.array([datetime.fromisoformat(row[0][:26]).timestamp() for row in rows])
    return np.bincount((seconds - seconds[0]).astype(int))
