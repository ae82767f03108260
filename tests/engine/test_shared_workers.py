"""Models that share the workers of one process, in simulated time: nobody gets more than its part, and no worker idles."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from backends.base import ModelSpec
from gateway.batching.batcher import Batcher
from gateway.batching.fairness import SharedWorkers
from gateway.batching.policies import POLICIES
from gateway.config import Backend, Batching, ModelSection
from gateway.engine.lane import Lane
from gateway.engine.lane_opener import LaneOpener
from gateway.engine.metrics import Metrics
from gateway.errors import Cancelled, DeadlineExceeded, GatewayError
from gateway.types import InferRequest, InferResponse
from tests.engine.simulated_runner import SPEC, SimulatedRunner
from tests.simulation import SimulatedClock, run_simulated

MS = 1_000_000


class SharingModel:
    """A lane of one model, whose requests of one row each take batch_ms per batch, and what became of them."""

    def __init__(
        self,
        clock: SimulatedClock,
        shared: SharedWorkers | None,
        name: str,
        *,
        batch_ms: float,
        sessions: int = 1,
        weight: float = 1.0,
        policy: str = "greedy",
        slo_ms: float | None = None,
        probed: bool = False,
    ) -> None:
        """probed: its speed is known from the start."""
        self.clock = clock
        self.name = name
        self.batch_ms = batch_ms
        self.runner = SimulatedRunner(clock, workers=sessions, fixed_ns=round(batch_ms * MS))
        batcher = Batcher(
            POLICIES[policy](Batching(max_delay_ms=4)),
            max_rows=SPEC.max_rows,
            workers=sessions,
            slo_ns=round(slo_ms * MS) if slo_ms else None,
        )
        for rows in batcher.service.probe_rows if probed else ():
            batcher.service.probe(None, rows, [round(batch_ms * MS)])
        self.lane = Lane(
            name=f"{name}:1/simulated",
            spec=SPEC,
            batcher=batcher,
            runner=self.runner,
            metrics=Metrics().lane(name, "1", "simulated"),
            clock=clock,
            call_soon=asyncio.get_running_loop().call_soon,
            shared=shared,
            share_weight=weight,
        )
        self.sent = 0
        self.ended: list[InferResponse | GatewayError] = []

    def request(self, rows: int = 1) -> InferRequest:
        inputs = {"X": np.zeros((rows, 1), np.float32)}
        return InferRequest(self.name, "1", str(self.sent), inputs, rows, self.clock.now_ns())

    def send(self, rows: int = 1, timeout_ms: float | None = None) -> InferRequest:
        request = self.request(rows)
        request.deadline_ns = request.arrival_ns + round(timeout_ms * MS) if timeout_ms else None
        self.sent += 1
        self.lane.submit(request, self.ended.append)
        return request

    async def flood(self, until_ns: int) -> None:
        """Always have more waiting than one batch takes."""
        while self.clock.now_ns() < until_ns:
            for _ in range(self.lane.batcher.queue_requests, 4 * SPEC.max_rows):
                self.send()
            await pass_ms(0.5)


async def pass_ms(ms: float) -> None:
    await asyncio.sleep(ms / 1000)


def simulate(main: Callable[[SimulatedClock], Coroutine[Any, Any, None]]) -> None:
    run_simulated(main)


async def flooded(clock: SimulatedClock, models: list[SharingModel], ms: float = 2000) -> list[float]:
    """Load all models beyond what they can do, then let them finish; gives the worker time of each while all waited."""
    until_ns = clock.now_ns() + round(ms * MS)
    await asyncio.gather(*(model.flood(until_ns) for model in models))
    worker_ms = [len(model.runner.batches) * model.batch_ms for model in models]
    await asyncio.gather(*(model.lane.close() for model in models))
    assert all(len(model.ended) == model.sent for model in models)
    assert all(isinstance(outcome, InferResponse) for model in models for outcome in model.ended)
    return worker_ms


@pytest.mark.parametrize("policy", ["greedy", "adaptive"])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_slow_and_a_fast_model_get_the_same_worker_time(workers: int, policy: str) -> None:
    async def main(clock: SimulatedClock) -> None:
        shared = SharedWorkers(workers)
        fast = SharingModel(clock, shared, "fast", batch_ms=5, sessions=3, policy=policy)
        slow = SharingModel(clock, shared, "slow", batch_ms=50, sessions=3, policy=policy)
        fast_ms, slow_ms = await flooded(clock, [fast, slow])
        assert fast_ms == pytest.approx(slow_ms, rel=0.1)
        assert fast_ms + slow_ms == pytest.approx(workers * 2000, rel=0.05)

    simulate(main)


def test_weights_divide_the_workers() -> None:
    async def main(clock: SimulatedClock) -> None:
        shared = SharedWorkers(2)
        big = SharingModel(clock, shared, "big", batch_ms=7, sessions=2, weight=3)
        small = SharingModel(clock, shared, "small", batch_ms=4, sessions=2)
        big_ms, small_ms = await flooded(clock, [big, small], 1000)
        assert big_ms == pytest.approx(3 * small_ms, rel=0.1)

    simulate(main)


def test_overloaded_models_keep_their_goodput() -> None:
    async def main(clock: SimulatedClock) -> None:
        # Four rows take 10 ms, so each model's half of the worker is 200 rows a second; 300 come.
        shared = SharedWorkers(1)
        models = [
            SharingModel(clock, shared, name, batch_ms=10, policy="adaptive", slo_ms=60, probed=True) for name in ("a", "b")
        ]
        for _ in range(600):
            for model in models:
                model.send()
            await pass_ms(10 / 3)
        await pass_ms(100)
        for model in models:
            assert len(model.ended) == model.sent
            in_time = sum(isinstance(outcome, InferResponse) for outcome in model.ended)
            assert in_time >= 0.9 * 2 * 200

    simulate(main)


def test_a_model_alone_gets_all_workers() -> None:
    async def main(clock: SimulatedClock) -> None:
        shared = SharedWorkers(2)
        busy = SharingModel(clock, shared, "busy", batch_ms=10, sessions=2)
        SharingModel(clock, shared, "idle", batch_ms=10, sessions=2)
        (busy_ms,) = await flooded(clock, [busy], 1000)
        assert busy_ms == pytest.approx(2 * 1000, rel=0.03)

    simulate(main)


def test_no_more_batches_run_at_once_than_there_are_workers() -> None:
    async def main(clock: SimulatedClock) -> None:
        shared = SharedWorkers(2)
        models = [SharingModel(clock, shared, name, batch_ms=10, sessions=2) for name in "abc"]
        for model in models:
            model.send(rows=SPEC.max_rows)
            model.send(rows=SPEC.max_rows)
        for running in (2, 4, 6, 6):
            await pass_ms(0.1)
            assert sum(len(model.runner.batches) for model in models) == running
            assert all(model.lane.forecast(model.request(), clock.now_ns()).workers for model in models)
            await pass_ms(9.95)

    simulate(main)


def test_a_worker_is_not_kept_for_a_model_that_waits_for_more_requests() -> None:
    async def main(clock: SimulatedClock) -> None:
        shared = SharedWorkers(1)
        patient = SharingModel(clock, shared, "patient", batch_ms=10, policy="fixed")  # holds a single row for 4 ms
        greedy = SharingModel(clock, shared, "greedy", batch_ms=2)
        patient.send()
        await pass_ms(1)
        greedy.send()
        await pass_ms(0.1)
        assert len(greedy.runner.batches) == 1
        await pass_ms(3)
        assert len(patient.runner.batches) == 1

    simulate(main)


def test_what_waits_for_another_models_batch_runs_as_soon_as_that_ends() -> None:
    async def main(clock: SimulatedClock) -> None:
        shared = SharedWorkers(1)
        first = SharingModel(clock, shared, "first", batch_ms=10)
        second = SharingModel(clock, shared, "second", batch_ms=10)
        first.runner.faults = ["lost"]
        first.send()
        await pass_ms(1)
        second.send()
        late = SharingModel(clock, shared, "late", batch_ms=10)
        late.send(timeout_ms=5)
        gone = late.send()
        late.lane.cancel(gone)
        await pass_ms(5.1)
        assert [type(outcome) for outcome in late.ended] == [Cancelled, DeadlineExceeded]
        await pass_ms(40)
        assert [batch.closed_ns - first.runner.batches[0].closed_ns for batch in second.runner.batches] == [10 * MS]
        assert isinstance(first.ended[0], InferResponse)  # run once more, in its turn
        assert not late.runner.batches

    simulate(main)


def test_a_model_that_is_unloaded_gives_its_worker_back() -> None:
    async def main(clock: SimulatedClock) -> None:
        shared = SharedWorkers(1)
        leaving = SharingModel(clock, shared, "leaving", batch_ms=10)
        staying = SharingModel(clock, shared, "staying", batch_ms=10)
        leaving.send()
        await pass_ms(1)
        staying.send()
        await leaving.lane.close()
        await pass_ms(20)
        assert isinstance(leaving.ended[0], InferResponse)
        assert isinstance(staying.ended[0], InferResponse)
        assert shared.free == 1

    simulate(main)


def test_without_sharing_every_model_has_its_own_workers() -> None:
    async def main(clock: SimulatedClock) -> None:
        models = [SharingModel(clock, None, name, batch_ms=10) for name in "ab"]
        for model in models:
            model.send()
        await pass_ms(0.1)
        assert [len(model.runner.batches) for model in models] == [1, 1]

    simulate(main)


def test_what_computes_elsewhere_does_not_share() -> None:
    async def main(clock: SimulatedClock) -> None:
        runners: dict[str, SimulatedRunner] = {}

        def open_runner(model: ModelSection, backend: Backend, declared: ModelSpec) -> SimulatedRunner:
            return runners.setdefault(model.name, SimulatedRunner(clock, fixed_ns=10 * MS))

        backends = {
            "here": {"kind": "synthetic"},
            "here-too": {"kind": "synthetic"},
            "triton": {"kind": "triton", "url": "127.0.0.1:1", "model": "m"},
            "replicas": {"kind": "synthetic", "placement": "replicas"},
        }
        opener = LaneOpener(open_runner, metrics=Metrics(), clock=clock, shared_workers=1)
        for name, backend in backends.items():
            model = ModelSection.model_validate({"name": name, "batching": {"probe_s": 0}, "backends": [backend]})
            ((lane,), _) = await opener.open(model)
            inputs = {"X": np.zeros((1, 1), np.float32)}
            lane.submit(InferRequest(name, "1", "", inputs, 1, clock.now_ns()), lambda outcome: None)
        await pass_ms(1)
        assert {name: len(runner.batches) for name, runner in runners.items()} == {
            "here": 1,
            "here-too": 0,
            "triton": 1,
            "replicas": 1,
        }

    simulate(main)
