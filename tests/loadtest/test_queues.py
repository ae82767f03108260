"""The simulated servers that intervals are judged on are what they say."""

import numpy as np
import pytest

from benchmarks.queues import BATCHER, BIMODAL, CONSTANT, EXPONENTIAL, HYPEREXPONENTIAL, RARE_STALLS, Batching, Queue
from gateway.batching.batcher import Batcher
from gateway.batching.policies import Greedy
from loadtest.search.simulator import Affine, simulate


def test_the_fast_batcher_is_the_gateways_own() -> None:
    arrivals = (np.cumsum(np.random.default_rng(0).exponential(1 / 1500, (3, 2000)), axis=1) * 1e9).astype(np.int64)
    found = Batching("", 2e6, 0.5e6, 16).latencies(arrivals.astype(np.float64))
    for one, latencies in zip(arrivals, found, strict=True):
        batcher = Batcher(Greedy(), max_rows=16, workers=1, max_queue_rows=1_000_000)
        assert np.array_equal(latencies, simulate(batcher, one, Affine(2e6, 0.5e6), workers=1).latencies_ns)


@pytest.mark.slow
def test_the_percentile_of_an_exponential_queue_is_the_closed_form() -> None:
    assert EXPONENTIAL.percentile(99, 0.9, seed=0) == pytest.approx(np.log(100) / (1 - 0.9), rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("server", [CONSTANT, EXPONENTIAL, BIMODAL, HYPEREXPONENTIAL, BATCHER])
def test_runs_are_stationary_from_their_first_request_to_their_last(server: Queue | Batching) -> None:
    runs = np.array(list(server.runs(3, 2000, 60, 0.7)))
    limit = np.percentile(runs[:, 25:35], 90)
    for part in (runs[:, :10], runs[:, 50:]):
        assert np.mean(part <= limit) == pytest.approx(0.9, abs=0.02)


def test_a_server_that_stalls_now_and_then_is_late_as_often_as_it_says() -> None:
    limit = RARE_STALLS.percentile(98.9, 0.8, seed=0)
    assert limit == pytest.approx(0.05)
    late = [float(np.mean(latency > limit)) for latency in RARE_STALLS.runs(1, 400, 4000, 0.8)]
    assert np.mean(late) == pytest.approx(0.011, rel=0.15)
    assert np.mean(np.equal(late, 0)) == pytest.approx(np.exp(-1), abs=0.07)  # runs of 10 s
