"""What the adaptive policy rehearses, and that it serves by what did best."""

from dataclasses import dataclass

import numpy as np

from gateway.batching.adaptive import Adaptive
from gateway.batching.batcher import Batcher
from gateway.batching.recording import LaneSettings, RecordedBatcher, Ring
from gateway.batching.replay import replay
from gateway.batching.stances import PLANNED, Stance
from loadtest.search.simulator import Simulated, simulate
from tests.batching.test_recording import read, same

MS = 1_000_000


@dataclass
class Noisy:
    """Flat and noisy: t = 7 + .2·rows ms, times e^N(0, .3)."""

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(5)

    def __call__(self, batch: object, busy: int, now_ns: int) -> int:
        rows: int = batch.padded_rows  # type: ignore[attr-defined]
        return round((7 + 0.2 * rows) * MS * float(np.exp(self._random.normal(-0.045, 0.3))))


def arrivals_ns(rate: float, count: int) -> np.ndarray:
    return np.cumsum(np.random.default_rng(3).exponential(1e9 / rate, count)).astype(np.int64)


def served(stance: Stance | None, slo_ns: int, rate: float, workers: int = 1) -> tuple[Adaptive, Simulated]:
    policy = Adaptive(stance)
    batcher = Batcher(policy, max_rows=32, workers=workers, slo_ns=slo_ns)
    for rows in policy.service.probe_rows:
        policy.service.probe(None, rows, [round((7 + 0.2 * rows) * MS)] * 2)
    return policy, simulate(batcher, arrivals_ns(rate, 8000), Noisy(), workers=workers)


def test_where_another_rule_does_better_it_is_followed() -> None:
    slo_ns = 18 * MS
    _, planned = served(PLANNED, slo_ns, 1800)
    _, rehearsed = served(None, slo_ns, 1800)
    assert rehearsed.attainment(slo_ns) > planned.attainment(slo_ns) + 0.015


def test_with_time_enough_nothing_is_rehearsed() -> None:
    slo_ns = 80 * MS
    _, planned = served(PLANNED, slo_ns, 2000)
    _, rehearsed = served(None, slo_ns, 2000)
    assert np.array_equal(rehearsed.latencies_ns, planned.latencies_ns)


def test_what_is_rehearsed_is_replayed() -> None:
    """Begun in the middle of one, too: a recording begins with none."""
    made = LaneSettings(slo_ns=18 * MS, max_rows=32, model_rows=32, sessions=1)
    batcher = made.batcher(Ring(600_000, made))
    assert isinstance(batcher, RecordedBatcher)
    batcher.record()
    simulate(batcher, arrivals_ns(1500, 8000), Noisy(), workers=1)
    recorded = read(batcher)
    assert len(recorded["segments"]) > 2
    same(replay(recorded))
