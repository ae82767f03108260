"""Are the causes of late requests named rightly, and what does it cost to record what is decided?

    python -m benchmarks.why               faults made on purpose, 20 seeds each: two minutes on one core
    python -m benchmarks.why --cost        CPU per request of a lane in simulated time, with and without the recording

The faults are those of tests/why/scenes.py. Right is what has the cause that was made, of all misses.
"""

import argparse
import gc
import statistics
import time

import numpy as np

from gateway.batching.recording import LaneSettings, RecordedBatcher, Ring
from loadtest.search.simulator import Affine, simulate
from tests.why.recorded import MIB, MS, diagnosed
from tests.why.scenes import SCENES

# fixed_ms, row_ms, sessions, requests per second
LANES = {
    "0.02 + .005n ms, k=1: every batch a lone request": (0.02, 0.005, 1, 10_000.0),
    "1 + .05n ms, k=2": (1.0, 0.05, 2, 10_000.0),
    "4 + .6n ms, k=1": (4.0, 0.6, 1, 1_000.0),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--seeds", type=int, default=20)
    arguments = parser.parse_args()
    if arguments.cost:
        cost()
    else:
        causes(arguments.seeds)


def causes(seeds: int) -> None:
    for name, (cause, scene) in SCENES.items():
        shares = []
        misses = 0
        for seed in range(100, 100 + seeds):
            diagnosis = diagnosed(scene, seed)
            if diagnosis.misses:
                misses += len(diagnosis.misses)
                shares.append(diagnosis.by_cause[cause] / len(diagnosis.misses))
        right = f"right {statistics.mean(shares):7.2%}  worst seed {min(shares):7.2%}"
        print(f"{name:45} {cause.value:10} misses {misses:6}  {right}", flush=True)


def cost(repeat: int = 7) -> None:
    gc.disable()
    for name, lane in LANES.items():
        rows = request_us(*lane, recorded=False)[1]
        pairs = [(request_us(*lane, recorded=False)[0], request_us(*lane, recorded=True)[0]) for _ in range(repeat)]
        without = statistics.median(pair[0] for pair in pairs)
        more = statistics.median(on - off for off, on in pairs)
        print(f"{name:50} {rows:5.1f} rows per batch  {without:5.2f} us, recorded {more:+5.2f} us", flush=True)


def request_us(
    fixed_ms: float, row_ms: float, sessions: int, rps: float, *, recorded: bool, requests: int = 20_000
) -> tuple[float, float]:
    """CPU per request, the simulation around it included, and rows per batch."""
    settings = LaneSettings(slo_ns=20 * MS, max_rows=32, model_rows=32, sessions=sessions)
    batcher = settings.batcher(Ring(4 * MIB, settings) if recorded else None)
    profile = Affine(fixed_ms * MS, row_ms * MS)
    for rows in batcher.service.probe_rows:
        batcher.service.probe(None, rows, [profile.rows_ns(rows)] * 2)
    if isinstance(batcher, RecordedBatcher):
        batcher.record()
    gaps_ns = np.random.default_rng(1).exponential(1e9 / rps, requests)
    begin_s = time.process_time()
    ended = simulate(batcher, 10**9 + np.cumsum(gaps_ns).astype(np.int64), profile, workers=sessions, step_all=True)
    return (time.process_time() - begin_s) / requests * 1e6, requests / len(ended.batch_rows)


if __name__ == "__main__":
    main()
