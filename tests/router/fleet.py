"""A fleet in simulated time: the gateway's own dispatcher, router, lanes and batchers; only clock and sessions are replaced."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from backends.base import ModelSpec, TensorSpec
from gateway.batching.batch import Batch
from gateway.batching.batcher import Batcher
from gateway.batching.policies import POLICIES
from gateway.config import ModelSection, parse_config
from gateway.engine.dispatcher import Dispatcher
from gateway.engine.lane import Lane
from gateway.engine.metrics import Metrics
from gateway.engine.runner import Execution, OnBatchDone, OnBatchPart
from gateway.errors import GatewayError
from gateway.types import InferRequest, InferResponse
from tests.simulation import SimulatedClock, run_simulated

MS = 1_000_000
S = 1_000_000_000
SLO_MS = 60.0
SPEC = ModelSpec("simulated", (TensorSpec("X", "FP32", (-1, 1)),), (TensorSpec("Y", "FP32", (-1, 1)),), max_rows=256)

Fault = tuple[GatewayError, bool, int] | tuple[GatewayError, bool, int, bool]
"""How a run ends instead of well: its error, whether the session is lost, after how many nanoseconds, and whether it began."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One sort of instance: a run takes fixed_ms + row_ms · padded rows. options: further keys of the backend."""

    name: str
    fixed_ms: float
    row_ms: float
    usd_per_hour: float
    row_sizes: tuple[int, ...] = ()
    sessions: int = 1
    options: tuple[tuple[str, Any], ...] = ()


CPU = Kind("cpu", 4.0, 6.0, 0.1785)
INF2 = Kind("inf2", 2.0, 1.0, 0.7582, (1, 4, 8))
GPU = Kind("gpu", 2.0, 0.15, 0.8048)
FLEET = (CPU, CPU, CPU, CPU, INF2, INF2, GPU)


def no_fault(batch: Batch) -> Fault | None:
    return None


@dataclass(slots=True, eq=False)
class Device:
    """What sessions of several fleets, as in several ingress processes, share: it runs one batch after the other."""

    free_ns: int = 0


@dataclass(slots=True, eq=False)
class Sessions:
    """A `BatchRunner` over one instance. factor: how many times slower than it should be. live: sessions that are there.

    device: None: each session has its own.
    """

    clock: SimulatedClock
    kind: Kind
    live: int
    factor: float = 1.0
    fault: Callable[[Batch], Fault | None] = no_fault
    available: bool = True
    to_zero: bool = False
    cold_start_ns: int | None = None
    device: Device | None = None
    on_change: Callable[[], None] = lambda: None
    on_wake: Callable[[], None] = lambda: None
    # counted
    woken: int = 0
    busy: int = 0
    busy_ns: int = 0
    batches: Counter[int] = field(default_factory=Counter)  # by rows

    @property
    def slots(self) -> int:
        return self.kind.sessions

    @property
    def sessions(self) -> int:
        return self.live

    @property
    def free_slots(self) -> int:
        return max(0, self.live - self.busy)

    @property
    def cold(self) -> bool:
        return self.to_zero and not self.live

    @property
    def lives(self) -> bool:
        return self.live > 0

    def want(self) -> None: ...

    def try_await_begin(self, begun: Callable[[], None]) -> bool:
        return False

    def wake(self) -> None:
        self.woken += 1
        self.on_wake()

    async def open(self) -> ModelSpec:
        return SPEC

    def start(self, batch: Batch, on_done: OnBatchDone, on_part: OnBatchPart | None = None) -> None:
        started_ns = self.clock.now_ns()
        self.busy += 1
        fault = self.fault(batch)
        if fault is None:
            took_ns = round((self.kind.fixed_ms + self.kind.row_ms * batch.padded_rows) * self.factor * MS)
        else:
            took_ns = fault[2]
        if self.device is not None:
            self.device.free_ns = max(self.device.free_ns, started_ns) + took_ns
            took_ns = self.device.free_ns - started_ns

        def end() -> None:
            self.busy -= 1
            now_ns = self.clock.now_ns()
            self.busy_ns += now_ns - started_ns
            self.batches[batch.rows] += 1
            if fault is None:
                on_done(batch, Execution(started_ns, now_ns, outputs={"Y": batch.concat()["X"]}))
            else:
                begun = len(fault) < 4 or fault[-1]
                on_done(batch, Execution(started_ns, now_ns, error=fault[0], session_lost=fault[1], begun=begun))

        self.clock.call_at(started_ns + took_ns, end)

    def cancel(self, batch: Batch) -> None: ...

    async def close(self) -> None: ...


class Fleet:
    """One instance of each kind behind one dispatcher. On a simulated loop."""

    def __init__(
        self,
        clock: SimulatedClock,
        kinds: Sequence[Kind],
        *,
        slo_ms: float | None = SLO_MS,
        batching: str = "adaptive",
        queue_rows: int | None = None,
        routing: dict[str, Any] | None = None,
        ragged: dict[str, Any] | None = None,
        seed: int = 0,
    ) -> None:
        self.clock = clock
        self.metrics = Metrics()
        self.model = _model(kinds, slo_ms, batching, routing or {}, ragged)
        self._queue_rows = queue_rows
        self.sessions = [Sessions(clock, kind, kind.sessions) for kind in kinds]
        self.lanes = [
            self._lane(backend.label, sessions) for backend, sessions in zip(self.model.backends, self.sessions, strict=True)
        ]
        self.dispatcher = Dispatcher(self.lanes, self.model, self.metrics, clock, seed=seed)

    def _lane(self, label: str, sessions: Sessions) -> Lane:
        batching = self.model.batching
        batcher = Batcher(
            POLICIES[batching.policy](batching),
            max_rows=SPEC.max_rows,
            row_sizes=sessions.kind.row_sizes,
            workers=sessions.slots,
            max_queue_rows=self._queue_rows or batching.max_queue_rows,
            ragged=self.model.ragged,
            slo_ns=round(self.model.slo.p99_ms * MS) if self.model.slo else None,
        )
        return Lane(
            name=f"m:1/{label}",
            spec=SPEC,
            batcher=batcher,
            runner=sessions,
            metrics=self.metrics.lane("m", "1", label),
            clock=self.clock,
            call_soon=asyncio.get_running_loop().call_soon,
        )

    def request(self, value: float = 0.0, rows: int = 1, **fields: Any) -> InferRequest:
        inputs = {"X": np.full((rows, 1), value, np.float32)}
        return InferRequest("m", "1", "", inputs, rows, self.clock.now_ns(), **fields)

    async def send(self, value: float = 0.0, rows: int = 1, **fields: Any) -> InferResponse | GatewayError:
        """Submit one request and wait for what becomes of it."""
        answer: asyncio.Future[InferResponse | GatewayError] = asyncio.get_running_loop().create_future()
        try:
            self.dispatcher.submit(self.request(value, rows, **fields), answer.set_result)
        except GatewayError as exc:
            return exc
        return await answer

    async def fill(self, *lanes: int) -> None:
        """Let lanes have a batch of `queue_rows` that runs, and no room behind it, once they know how long that takes."""
        rows = self._queue_rows or 0
        for at in lanes:
            learned: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            self.lanes[at].submit(self.request(rows=rows), learned.set_result)
            await learned
        for at in (*lanes, *lanes):
            self.lanes[at].submit(self.request(rows=rows), lambda outcome: None)
            await asyncio.sleep(0)

    def counted(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels."""
        families = text_string_to_metric_families(self.metrics.expose()[1].decode())
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())


def _model(
    kinds: Sequence[Kind], slo_ms: float | None, batching: str, routing: dict[str, Any], ragged: dict[str, Any] | None
) -> ModelSection:
    names: Counter[str] = Counter()
    backends = []
    for kind in kinds:
        names[kind.name] += 1
        name = f"{kind.name}{names[kind.name]}"
        costs = {"usd_per_hour": kind.usd_per_hour, "sessions": kind.sessions}
        backends.append({"kind": "synthetic", "name": name, **costs, **dict(kind.options)})
    model: dict[str, Any] = {"name": "m", "max_rows": 256, "backends": backends, "routing": routing}
    model["batching"] = {"policy": batching}
    if ragged is not None:
        model["ragged"] = ragged
    if slo_ms is not None:
        model["slo"] = {"p99_ms": slo_ms}
    return parse_config({"models": [model]}, source="fleet").models[0]


@dataclass(frozen=True, slots=True)
class Result:
    """Of one run, by request in order of arrival. latencies_ns: -1 without a result. answers: how often each was answered."""

    arrivals_ns: np.ndarray
    latencies_ns: np.ndarray
    answers: np.ndarray
    shares: dict[str, float]
    usd: float

    def in_slo(self, from_s: float = 0.0, to_s: float = 1e9, slo_ms: float = SLO_MS) -> float:
        """Share of the requests that came in a span and were answered in time."""
        within = (self.latencies_ns >= 0) & (self.latencies_ns <= slo_ms * MS)
        return float(np.mean(within[self._came(from_s, to_s)]))

    def lost(self, from_s: float = 0.0, to_s: float = 1e9) -> int:
        """Requests that came in a span and got no result."""
        return int(np.sum(self.latencies_ns[self._came(from_s, to_s)] < 0))

    def percentile_ms(self, percentile: float) -> float:
        answered = self.latencies_ns[self.latencies_ns >= 0]
        return float(np.percentile(answered, percentile)) / MS if len(answered) else float("nan")

    @property
    def usd_per_million(self) -> float:
        """What sessions cost while they ran, for a million requests answered."""
        return self.usd / max(1, int(np.sum(self.latencies_ns >= 0))) * 1e6

    def _came(self, from_s: float, to_s: float) -> np.ndarray:
        return (self.arrivals_ns >= from_s * S) & (self.arrivals_ns < to_s * S)


Event = tuple[float, Callable[[Fleet], None]]
"""At which second of a run what happens."""


async def drive(fleet: Fleet, arrivals_ns: np.ndarray, events: Sequence[Event] = ()) -> Result:
    """Send a request of one row at each of these times, ascending from 0, and wait for all answers."""
    clock, count = fleet.clock, len(arrivals_ns)
    start_ns = clock.now_ns()
    latencies = np.full(count, -1, np.int64)
    answers = np.zeros(count, np.int64)
    left = count
    done = asyncio.Event()
    value = np.zeros((1, 1), np.float32)

    def happen(event: Callable[[Fleet], None]) -> Callable[[], None]:
        return lambda: event(fleet)

    for second, event in events:
        clock.call_at(start_ns + round(second * S), happen(event))

    def answered(index: int, outcome: InferResponse | GatewayError) -> None:
        nonlocal left
        answers[index] += 1
        if isinstance(outcome, InferResponse):
            latencies[index] = clock.now_ns() - start_ns - int(arrivals_ns[index])
        left -= 1
        if not left:
            done.set()

    def arrive(index: int) -> None:
        request = InferRequest("m", "1", "", {"X": value}, 1, start_ns + int(arrivals_ns[index]))
        try:
            fleet.dispatcher.submit(request, lambda outcome: answered(index, outcome))
        except GatewayError as exc:
            answered(index, exc)
        if index + 1 < count:
            clock.call_at(start_ns + int(arrivals_ns[index + 1]), lambda: arrive(index + 1))

    clock.call_at(start_ns + int(arrivals_ns[0]), lambda: arrive(0))
    await done.wait()
    usd = sum(sessions.busy_ns / 3600e9 * sessions.kind.usd_per_hour / sessions.kind.sessions for sessions in fleet.sessions)
    rows: Counter[str] = Counter()
    for sessions in fleet.sessions:
        rows[sessions.kind.name] += sum(size * times for size, times in sessions.batches.items())
    shares = {name: value / max(1, sum(rows.values())) for name, value in rows.items()}
    return Result(arrivals_ns, latencies, answers, shares, usd)


def simulate(kinds: Sequence[Kind], arrivals_ns: np.ndarray, events: Sequence[Event] = (), **options: Any) -> Result:
    """options: of `Fleet`."""

    async def main(clock: SimulatedClock) -> Result:
        return await drive(Fleet(clock, kinds, **options), arrivals_ns, events)

    return run_simulated(main)


def poisson(rate: Callable[[float], float], duration_s: float, seed: int) -> np.ndarray:
    """Arrivals of a Poisson process. rate: requests per second at a second; steps of a tenth are told apart."""
    rng = np.random.default_rng(seed)
    most = max(rate(tenth / 10) for tenth in range(int(duration_s * 10) + 1))
    times = np.cumsum(rng.exponential(1 / most, int(most * duration_s * 1.2) + 100))
    times = times[times < duration_s]
    kept = rng.random(len(times)) * most < np.array([rate(time) for time in times])
    return (times[kept] * S).astype(np.int64)


def slower(index: int, factor: float) -> Callable[[Fleet], None]:
    def happen(fleet: Fleet) -> None:
        fleet.sessions[index].factor = factor

    return happen


def failing(index: int, fault: Fault | None) -> Callable[[Fleet], None]:
    """fault: None repairs."""

    def happen(fleet: Fleet) -> None:
        fleet.sessions[index].fault = lambda batch: fault

    return happen
