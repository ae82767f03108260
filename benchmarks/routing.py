"""Routing over unlike backends in simulated time: the gateway's own dispatcher, router, lanes and batchers; only clock and
sessions are replaced.

    python -m benchmarks.routing            the whole, some minutes on one core
    python -m benchmarks.routing --quick    a shorter run of each case, under a minute
    python -m benchmarks.routing --real     a real fleet on this machine: see real_fleet below

Fleet of the simulation: four CPU instances, two Inf2, one GPU; SLO 60 ms. Service times in ms for n rows, and list prices:

    cpu   4 + 6 n              c7i.xlarge    143 requests/s in batches of 4, two of which fit into the SLO
    inf2  2 + 1 n, n in 1 4 8  inf2.xlarge   800 requests/s in batches of 8
    gpu   2 + 0.15 n           g6.xlarge     6200 requests/s in batches of 206

Busy cost is what sessions cost while they run batches: what autoscaling could give back is the rest.
"""

import argparse
import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from backends.base import ModelSpec, TensorSpec
from gateway.batching.batch import Batch
from gateway.batching.batcher import Batcher
from gateway.batching.policies import POLICIES as BATCHING
from gateway.config import Model, parse_config
from gateway.errors import BackendFailed, BackendUnreachable, GatewayError
from gateway.lane import Lane
from gateway.metrics import Metrics
from gateway.routing.dispatcher import Dispatcher
from gateway.runner import Execution
from gateway.types import InferRequest, InferResponse
from tests.simulation import SimulatedClock, run_simulated

MS = 1_000_000
S = 1_000_000_000
SLO_MS = 60
POLICIES = ("round_robin", "power_of_two", "shortest_queue", "least_eta", "spill at 0.85", "cheapest")
SPEC = ModelSpec("simulated", (TensorSpec("X", "FP32", (-1, 1)),), (TensorSpec("Y", "FP32", (-1, 1)),), max_rows=256)
INPUT = np.zeros((1, 1), np.float32)
OUTPUT = np.zeros((256, 1), np.float32)


@dataclass(frozen=True, slots=True)
class Kind:
    """One sort of instance. times in ms."""

    name: str
    fixed_ms: float
    row_ms: float
    usd_per_hour: float
    row_sizes: tuple[int, ...] = ()
    sessions: int = 1


CPU = Kind("cpu", 4.0, 6.0, 0.1785)
INF2 = Kind("inf2", 2.0, 1.0, 0.7582, (1, 4, 8))
GPU = Kind("gpu", 2.0, 0.15, 0.8048)
FLEET = (CPU, CPU, CPU, CPU, INF2, INF2, GPU)


@dataclass(slots=True, eq=False)
class Sessions:
    """The sessions of one instance in simulated time. factor: how much slower than they should be. fault: what every run ends in."""

    clock: SimulatedClock
    kind: Kind
    factor: float = 1.0
    fault: Callable[[], tuple[GatewayError, bool, int] | None] = lambda: None
    on_change: Callable[[], None] = lambda: None
    busy: int = 0
    busy_ns: int = 0
    rows: Counter[int] = field(default_factory=Counter)

    @property
    def slots(self) -> int:
        return self.kind.sessions

    @property
    def free_slots(self) -> int:
        return self.kind.sessions - self.busy

    @property
    def available(self) -> bool:
        return True

    async def open(self) -> ModelSpec:
        return SPEC

    def start(self, batch: Batch, on_done: Callable[[Batch, Execution], None]) -> None:
        started_ns = self.clock.now_ns()
        self.busy += 1
        fault = self.fault()
        took_ns = round((self.kind.fixed_ms + self.kind.row_ms * batch.padded_rows) * self.factor * MS) if not fault else fault[2]

        def end() -> None:
            self.busy -= 1
            now_ns = self.clock.now_ns()
            self.busy_ns += now_ns - started_ns
            self.rows[batch.rows] += 1
            if fault:
                on_done(batch, Execution(started_ns, now_ns, error=fault[0], session_lost=fault[1]))
            else:
                on_done(batch, Execution(started_ns, now_ns, outputs={"Y": OUTPUT[: batch.rows]}))

        self.clock.call_at(started_ns + took_ns, end)

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Result:
    """Of one run. latencies_ns: -1 for requests without a result; arrivals_ns from the start."""

    arrivals_ns: np.ndarray
    latencies_ns: np.ndarray
    served_by: dict[str, float]
    usd: float

    def in_slo(self, from_s: float = 0.0, to_s: float = 1e9, slo_ms: float = SLO_MS) -> float:
        chosen = (self.arrivals_ns >= from_s * S) & (self.arrivals_ns < to_s * S)
        within = (self.latencies_ns >= 0) & (self.latencies_ns <= slo_ms * MS)
        return float(np.mean(within[chosen]))

    def percentile_ms(self, percentile: float) -> float:
        answered = self.latencies_ns[self.latencies_ns >= 0]
        return float(np.percentile(answered, percentile)) / MS if len(answered) else float("nan")

    @property
    def usd_per_million(self) -> float:
        """Busy cost of a million requests answered."""
        return self.usd / max(1, int(np.sum(self.latencies_ns >= 0))) * 1e6


def poisson(rate: Callable[[float], float], duration_s: float, seed: int) -> np.ndarray:
    """Arrivals in ns of a Poisson process of varying rate: rate(second) requests per second."""
    rng = np.random.default_rng(seed)
    most = max(rate(second / 10) for second in range(int(duration_s * 10) + 1))
    count = int(most * duration_s * 1.2) + 100
    times = np.cumsum(rng.exponential(1 / most, count))
    times = times[times < duration_s]
    kept = rng.random(len(times)) * most < np.array([rate(time) for time in times])
    return (times[kept] * S).astype(np.int64)


def model_of(fleet: Sequence[Kind], policy: str, slo_ms: float | None) -> Model:
    routing: dict[str, Any] = {"policy": "cheapest", "spill_share": 0.85} if policy == "spill at 0.85" else {"policy": policy}
    backends = [
        {"kind": "synthetic", "name": f"{kind.name}{index}", "usd_per_hour": kind.usd_per_hour, "sessions": kind.sessions}
        for index, kind in enumerate(fleet)
    ]
    model: dict[str, Any] = {"name": "m", "backends": backends, "routing": routing, "max_rows": 256}
    if slo_ms is not None:
        model["slo"] = {"p99_ms": slo_ms}
    return parse_config({"models": [model]}, source="simulation").models[0]


class Simulation:
    """One fleet behind one dispatcher. Used within run_simulated."""

    def __init__(
        self, clock: SimulatedClock, fleet: Sequence[Kind], policy: str, *, slo_ms: float | None = SLO_MS, batching: str = "adaptive"
    ) -> None:
        self.clock = clock
        self.model = model_of(fleet, policy, slo_ms)
        self.sessions = [Sessions(clock, kind) for kind in fleet]
        metrics = Metrics()
        lanes = []
        for backend, sessions in zip(self.model.backends, self.sessions, strict=True):
            batcher = Batcher(
                BATCHING[batching](self.model.batching),
                max_rows=256,
                row_sizes=sessions.kind.row_sizes,
                workers=sessions.slots,
                slo_ns=round(slo_ms * MS) if slo_ms else None,
            )
            lanes.append(
                Lane(
                    name=f"m:1/{backend.label}",
                    spec=SPEC,
                    batcher=batcher,
                    runner=sessions,
                    metrics=metrics.lane("m", "1", backend.label),
                    clock=clock,
                    call_soon=asyncio.get_running_loop().call_soon,
                )
            )
        self.dispatcher = Dispatcher(lanes, self.model, metrics, clock)
        self.metrics = metrics
        self.answers = 0

    async def run(self, arrivals_ns: np.ndarray, events: Sequence[tuple[float, Callable[["Simulation"], None]]] = ()) -> Result:
        """events: (second, what happens then)."""
        start_ns = self.clock.now_ns()
        latencies = np.full(len(arrivals_ns), -1, np.int64)
        for second, event in events:
            self.clock.call_at(start_ns + round(second * S), lambda event=event: event(self))  # type: ignore[misc]
        before = [sessions.busy_ns for sessions in self.sessions]
        self.answers = 0
        done = asyncio.Event()
        count = len(arrivals_ns)

        def answered(index: int, arrival_ns: int, outcome: InferResponse | GatewayError) -> None:
            self.answers += 1
            if isinstance(outcome, InferResponse):
                latencies[index] = self.clock.now_ns() - arrival_ns
            if self.answers == count:
                done.set()

        def arrive(index: int) -> None:
            arrival_ns = start_ns + int(arrivals_ns[index])
            request = InferRequest("m", "1", "", {"X": INPUT}, 1, arrival_ns)
            try:
                self.dispatcher.submit(request, lambda outcome: answered(index, arrival_ns, outcome))
            except GatewayError as exc:
                answered(index, arrival_ns, exc)
            if index + 1 < count:
                self.clock.call_at(start_ns + int(arrivals_ns[index + 1]), lambda: arrive(index + 1))

        self.clock.call_at(start_ns + int(arrivals_ns[0]), lambda: arrive(0))
        await done.wait()
        busy = [sessions.busy_ns - was for sessions, was in zip(self.sessions, before, strict=True)]
        usd = sum(ns / 3600e9 * sessions.kind.usd_per_hour for ns, sessions in zip(busy, self.sessions, strict=True))
        rows: Counter[str] = Counter()
        for sessions in self.sessions:
            rows[sessions.kind.name] += sum(size * times for size, times in sessions.rows.items())
        return Result(arrivals_ns, latencies, {name: value / sum(rows.values()) for name, value in rows.items()}, usd)


def simulate(
    fleet: Sequence[Kind],
    policy: str,
    arrivals_ns: np.ndarray,
    events: Sequence[tuple[float, Callable[[Simulation], None]]] = (),
    **options: Any,
) -> Result:
    async def main(clock: SimulatedClock) -> Result:
        return await Simulation(clock, fleet, policy, **options).run(arrivals_ns, events)

    return run_simulated(main)


def line(name: str, result: Result, from_s: float = 0.0) -> str:
    shares = " ".join(f"{kind} {share:4.0%}" for kind, share in result.served_by.items())
    return (
        f"{name:16} in SLO {result.in_slo(from_s):7.2%}   p50 {result.percentile_ms(50):5.1f} p99 {result.percentile_ms(99):6.1f} ms   "
        f"busy {result.usd_per_million:6.3f} USD per million   {shares}"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    seconds = 5.0 if arguments.quick else 20.0
    print(f"6000 requests/s, Poisson, {seconds:g} s")
    for policy in POLICIES:
        print(line(policy, simulate(FLEET, policy, poisson(lambda _: 6000.0, seconds, 1))), flush=True)


if __name__ == "__main__":
    main()
