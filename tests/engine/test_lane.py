"""The lane in simulated time: every request ends in exactly one answer or error, whatever the runner does."""

import asyncio
import re
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import numpy as np
import pytest

from gateway.batching.batch import Part
from gateway.batching.batcher import Batcher
from gateway.batching.fairness import SharedWorkers
from gateway.batching.policies import POLICIES
from gateway.clock import Clock, Timer
from gateway.config import Batching
from gateway.engine import lane as lane_module
from gateway.engine.lane import Lane
from gateway.engine.metrics import Metrics
from gateway.errors import BackendFailed, BackendUnreachable, Cancelled, DeadlineExceeded, GatewayError, NotReady, Overloaded
from gateway.types import InferRequest, InferResponse, OutputRequest, ParameterValue
from tests.engine.simulated_runner import SPEC, SimulatedRunner
from tests.simulation import SimulatedClock, run_simulated

MS = 1_000_000


class Bench:
    """One lane over a simulated runner, and what became of each request by its id."""

    def __init__(
        self,
        clock: SimulatedClock,
        *,
        slo_ms: int | None = None,
        max_queue_rows: int = 100,
        lane_clock: Clock | None = None,
        call_soon: Callable[[Callable[[], None]], object] | None = None,
        trace: bool = False,
        shared: SharedWorkers | None = None,
        **runner: int,
    ) -> None:
        """lane_clock, call_soon: the lane's own; None: the runner's clock, and the loop's."""
        self.clock = clock
        self._metrics = Metrics()
        self.runner = SimulatedRunner(clock, **runner)
        batching = Batching(policy="greedy", max_queue_rows=max_queue_rows)
        batcher = Batcher(
            POLICIES["greedy"](batching),
            max_rows=SPEC.max_rows,
            workers=self.runner.slots,
            max_queue_rows=max_queue_rows,
            slo_ns=slo_ms * MS if slo_ms else None,
        )
        self.lane = Lane(
            name="m:1/simulated",
            spec=SPEC,
            batcher=batcher,
            runner=self.runner,
            metrics=self._metrics.lane("m", "1", "simulated"),
            clock=lane_clock or clock,
            call_soon=call_soon or asyncio.get_running_loop().call_soon,
            trace=trace,
            shared=shared,
        )
        self.ended: dict[str, list[InferResponse | GatewayError]] = {}

    def send(self, name: str, rows: int = 1, timeout_ms: int | None = None, **fields: Any) -> InferRequest:
        now_ns = self.clock.now_ns()
        values = np.arange(rows, dtype=np.float32).reshape(rows, 1) + 10 * (len(self.ended) + 1)
        request = InferRequest("m", "1", name, {"X": values}, rows, now_ns, **fields)
        request.deadline_ns = now_ns + timeout_ms * MS if timeout_ms else None
        ended = self.ended.setdefault(name, [])
        self.lane.submit(request, ended.append)
        return request

    def outcome(self, name: str) -> InferResponse | GatewayError:
        (only,) = self.ended[name]
        return only

    def exposed(self, name: str) -> list[tuple[dict[str, str], float]]:
        """Labels and value of each sample of that name, without the lane's own labels."""
        self._metrics.flush()
        _, text = self._metrics.expose()
        found = []
        for labels, value in re.findall(rf"^{name}{{(.*)}} (\S+)$", text.decode(), re.MULTILINE):
            named = dict(re.findall(r'(\w+)="([^"]*)"', labels))
            found.append(({key: named[key] for key in named if key not in ("model", "version", "backend")}, float(value)))
        return found

    def counted(self, name: str) -> float:
        """The one sample of that name."""
        ((_, value),) = self.exposed(name)
        return value

    def dropped(self) -> float:
        return self.counted("gateway_dropped_outputs_total")

    async def pass_ms(self, ms: float) -> None:
        await asyncio.sleep(ms / 1000)


def simulate(main: Callable[[SimulatedClock], Coroutine[Any, Any, None]]) -> None:
    run_simulated(main)


def test_requests_of_one_tick_share_a_batch() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock)
        sent = [bench.send(name) for name in "abc"]
        await bench.pass_ms(2)
        assert [batch.rows for batch in bench.runner.batches] == [3]
        for request in sent:
            outcome = bench.outcome(request.id)
            assert isinstance(outcome, InferResponse)
            assert np.array_equal(outcome.outputs["Y"], request.inputs["X"])

    simulate(main)


def test_what_waits_runs_when_a_worker_frees() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock)
        bench.send("a")
        await bench.pass_ms(0.5)
        bench.send("b")
        bench.send("c")
        await bench.pass_ms(0.6)  # a ends at 1.0
        assert [batch.rows for batch in bench.runner.batches] == [1, 2]
        assert bench.runner.batches[1].closed_ns - bench.runner.batches[0].closed_ns == 1 * MS

    simulate(main)


def test_a_request_larger_than_a_batch_is_split_and_joined_in_order() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock, workers=2)
        request = bench.send("large", rows=10)
        await bench.pass_ms(5)
        assert [batch.rows for batch in bench.runner.batches] == [4, 4, 2]
        outcome = bench.outcome("large")
        assert isinstance(outcome, InferResponse)
        assert np.array_equal(outcome.outputs["Y"], request.inputs["X"])

    simulate(main)


def test_only_the_outputs_asked_for_come_back() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock)
        bench.send("a", outputs=(OutputRequest("Y"),))
        await bench.pass_ms(2)
        outcome = bench.outcome("a")
        assert isinstance(outcome, InferResponse)
        assert list(outcome.outputs) == ["Y"]

    simulate(main)


def test_a_failed_batch_runs_each_request_once_more_alone() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock)
        bench.runner.faults = ["failed", "", "failed"]
        for name in "abc":
            bench.send(name)
        await bench.pass_ms(6)
        assert [batch.rows for batch in bench.runner.batches] == [3, 1, 1, 1]
        assert isinstance(bench.outcome("a"), InferResponse)
        assert isinstance(bench.outcome("b"), BackendFailed)
        assert isinstance(bench.outcome("c"), InferResponse)

    simulate(main)


def test_a_request_that_fails_alone_is_not_run_again() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock)
        bench.runner.faults = ["failed"]
        bench.send("a")
        await bench.pass_ms(3)
        assert len(bench.runner.batches) == 1
        assert isinstance(bench.outcome("a"), BackendFailed)

    simulate(main)


def test_a_lost_session_costs_no_request() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock)
        bench.runner.faults = ["lost"]
        bench.send("a")
        await bench.pass_ms(3)
        assert isinstance(bench.outcome("a"), InferResponse)

    simulate(main)


@pytest.mark.parametrize("told", [{"sequence_id": 5}, {"sequence_id": 0, "sequence_end": True}])
def test_a_request_of_a_sequence_is_not_run_again_and_told_so(told: dict[str, ParameterValue]) -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock)
        bench.runner.faults = ["gone"]
        bench.send("a", parameters=told)
        await bench.pass_ms(3)
        assert len(bench.runner.batches) == 1
        outcome = bench.outcome("a")
        assert isinstance(outcome, BackendUnreachable)
        assert outcome.message == "told to: gone; the request may have run"

    simulate(main)


@pytest.mark.parametrize(
    ("faults", "told"),
    [
        (["unbegun"], None),
        (["unbegun", "unbegun"], "told to: unbegun"),
        (["unbegun", "gone"], "told to: gone; the request may have run"),
    ],
)
@pytest.mark.parametrize("parameters", [{}, {"sequence_id": 5}], ids=["plain", "sequence"])
def test_what_was_never_begun_is_tried_once_more_and_has_not_run(
    parameters: dict[str, ParameterValue], faults: list[str | BaseException], told: str | None
) -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock)
        bench.runner.faults = [*faults]
        bench.send("a", parameters=parameters)
        await bench.pass_ms(4)
        assert len(bench.runner.batches) == 2
        outcome = bench.outcome("a")
        assert told == (None if isinstance(outcome, InferResponse) else str(outcome))

    simulate(main)


def test_what_ran_and_was_not_begun_again_is_told_that_it_may_have_run() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock)
        bench.runner.faults = ["gone", "unbegun"]
        bench.send("a")
        await bench.pass_ms(4)
        assert str(bench.outcome("a")) == "told to: unbegun; the request may have run"

    simulate(main)


def test_what_waits_to_run_again_where_no_session_comes_is_told_that_it_may_have_run() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock, workers=2)
        bench.runner.faults = ["lost"]
        for name in ("ran", "beside"):
            bench.send(name)
            await bench.pass_ms(0.4)
        bench.runner.slots = 1
        await bench.pass_ms(0.4)
        bench.send("new")
        await bench.pass_ms(0)
        bench.runner.available = False
        bench.runner.on_change()
        said = {name: str(bench.outcome(name)) for name in ("ran", "new")}
        told = "backend m:1/simulated has no live session"
        assert said == {"ran": f"{told}; the request may have run", "new": told}

    simulate(main)


def test_between_turns_of_copying_a_split_answer_the_loop_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_module, "_TURN_NS", 2)  # of the clock below: one piece is copied in each turn
    rests: list[int] = []

    class Ticking:
        ticks = 0

        def __init__(self, clock: SimulatedClock) -> None:
            self._clock = clock

        def now_ns(self) -> int:
            self.ticks += 1
            return self._clock.now_ns() + self.ticks

        def call_at(self, when_ns: int, callback: Callable[[], None]) -> Timer:
            if callback.__name__ == "_answer_behind":
                rests.append(when_ns - self._clock.now_ns() - self.ticks)
            return self._clock.call_at(when_ns, callback)

    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock, workers=2, lane_clock=Ticking(clock))
        values = np.arange(8 << 17, dtype=np.float32).reshape(8, 1 << 17)  # two batches, each of eight pieces to copy
        ended: list[InferResponse | GatewayError | None] = []
        bench.lane.submit(InferRequest("m", "1", "long", {"X": values}, 8, clock.now_ns()), ended.append)
        await bench.pass_ms(100)
        (answer,) = ended
        assert isinstance(answer, InferResponse)
        assert np.array_equal(answer.outputs["Y"], values)
        assert len(rests) >= 12
        assert set(rests) == {1_000_000}

    simulate(main)


def test_parts_of_a_split_request_are_retried_each_for_itself() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock, workers=2)
        bench.runner.faults = ["lost", "lost"]  # both parts, side by side
        request = bench.send("large", rows=8)
        await bench.pass_ms(6)
        outcome = bench.outcome("large")
        assert isinstance(outcome, InferResponse)
        assert np.array_equal(outcome.outputs["Y"], request.inputs["X"])

    simulate(main)


def test_a_request_waiting_past_its_deadline_is_answered_then_and_never_run() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock, fixed_ns=10 * MS)
        bench.send("a")
        await bench.pass_ms(1)
        bench.send("late", timeout_ms=3)
        await bench.pass_ms(3.1)
        assert isinstance(bench.outcome("late"), DeadlineExceeded)
        await bench.pass_ms(20)
        assert len(bench.runner.batches) == 1

    simulate(main)


@pytest.mark.parametrize(("answering_ms", "reserved_ms"), [(0, 0), (3, 3), (50, 20)])
def test_time_to_answer_is_set_aside_of_the_slo(answering_ms: int, reserved_ms: int) -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock, slo_ms=100)

        def answer(outcome: object) -> None:
            clock.advance_to(clock.now_ns() + answering_ms * MS)

        for _ in range(200):
            bench.lane.submit(InferRequest("m", "1", "", {"X": np.zeros((1, 1), np.float32)}, 1, clock.now_ns()), answer)
            await bench.pass_ms(5 + answering_ms)
        bench.runner.slots = 0
        bench.send("late")
        await bench.pass_ms(100 - reserved_ms - 1)
        assert bench.ended["late"] == []
        await bench.pass_ms(2)
        assert isinstance(bench.outcome("late"), DeadlineExceeded)

    simulate(main)


def test_a_split_request_that_is_refused_halfway_is_answered_once() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock, fixed_ns=10 * MS)
        bench.runner.faults = ["", "lost"]
        bench.send("large", rows=12, timeout_ms=15)  # batches at 0 and 10; the third, and the retry, would start too late
        await bench.pass_ms(60)
        assert isinstance(bench.outcome("large"), DeadlineExceeded)
        assert len(bench.runner.batches) == 2

    simulate(main)


def test_a_cancelled_request_leaves_the_queue_and_is_never_run() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock, fixed_ns=10 * MS)
        bench.send("a")
        await bench.pass_ms(1)
        gone = bench.send("gone")
        bench.lane.cancel(gone)
        assert isinstance(bench.outcome("gone"), Cancelled)
        await bench.pass_ms(30)
        assert len(bench.runner.batches) == 1

    simulate(main)


def test_a_request_cancelled_while_it_runs_drops_its_result() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock)
        running = bench.send("running")
        await bench.pass_ms(0.5)
        bench.lane.cancel(running)
        bench.lane.cancel(running)
        await bench.pass_ms(0)
        assert bench.runner.cancelled == bench.runner.batches
        await bench.pass_ms(2)
        assert isinstance(bench.outcome("running"), Cancelled)

    simulate(main)


def test_a_batch_is_cancelled_once_nobody_waits_for_any_of_it() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock, fixed_ns=5 * MS)
        first, second = bench.send("first"), bench.send("second")
        await bench.pass_ms(1)
        waiting = bench.send("waiting")
        bench.lane.cancel(waiting)
        bench.lane.cancel(first)
        await bench.pass_ms(0)
        assert bench.runner.cancelled == []
        bench.lane.cancel(second)
        await bench.pass_ms(0)
        assert bench.runner.cancelled == bench.runner.batches
        await bench.pass_ms(20)
        assert len(bench.runner.batches) == 1  # not run once more, as after a failure
        assert bench.lane.pending == 0
        assert [len(ended) for ended in bench.ended.values()] == [1, 1, 1]

    simulate(main)


def test_what_runs_is_looked_through_once_for_all_that_are_cancelled_at_once() -> None:
    looks = 0

    class Looked(list[Part]):
        def __iter__(self) -> Iterator[Part]:
            nonlocal looks
            looks += 1
            return super().__iter__()

    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock, workers=2, fixed_ns=5 * MS)
        sent = [bench.send(f"{number}") for number in range(60)]
        await bench.pass_ms(1)
        running = bench.runner.batches[:]
        for batch in running:
            batch.parts = Looked(batch.parts)
        for request in sent:
            bench.lane.cancel(request)
        await bench.pass_ms(0)
        assert looks == len(running) == 2
        assert sorted(bench.runner.cancelled, key=id) == sorted(running, key=id)
        await bench.pass_ms(10)
        assert bench.runner.batches == running
        assert all(isinstance(bench.outcome(request.id), Cancelled) for request in sent)

    simulate(main)


def test_all_parts_of_a_cancelled_request_are_cancelled() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock, workers=3, fixed_ns=5 * MS)
        other = bench.send("other", rows=1)
        large = bench.send("large", rows=10)
        await bench.pass_ms(1)
        assert [batch.rows for batch in bench.runner.batches] == [4, 4, 3]
        bench.lane.cancel(large)
        await bench.pass_ms(0)
        assert sorted(bench.runner.cancelled, key=id) == sorted(bench.runner.batches[1:], key=id)
        await bench.pass_ms(10)
        assert isinstance(bench.outcome(other.id), InferResponse)

    simulate(main)


def test_a_full_queue_refuses_at_once() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock, max_queue_rows=4)
        bench.send("a", rows=4)
        with pytest.raises(Overloaded):
            bench.send("b")
        assert bench.ended["b"] == []

    simulate(main)


def test_a_runner_without_hope_refuses_what_waits_and_what_comes() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock, fixed_ns=5 * MS)
        bench.send("running")
        await bench.pass_ms(1)
        bench.send("waiting")
        bench.runner.available = False
        bench.runner.on_change()
        assert isinstance(bench.outcome("waiting"), BackendUnreachable)
        with pytest.raises(BackendUnreachable):
            bench.send("new")
        await bench.pass_ms(10)
        assert isinstance(bench.outcome("running"), InferResponse)

    simulate(main)


def test_what_waits_when_the_last_session_goes_to_zero_wakes_the_runner_and_runs_then() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock, fixed_ns=5 * MS)
        bench.send("running")
        await bench.pass_ms(1)
        bench.send("waiting")
        await bench.pass_ms(1)
        bench.runner.slots, bench.runner.cold = 0, True
        bench.runner.on_change()
        assert bench.runner.woken > 0
        await bench.pass_ms(100)
        bench.runner.slots, bench.runner.cold = 1, False
        bench.runner.on_change()
        await bench.pass_ms(10)
        assert isinstance(bench.outcome("waiting"), InferResponse)

    simulate(main)


def test_closing_answers_what_is_here_and_refuses_what_comes() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock)
        for index in range(10):
            bench.send(str(index))
        closing = asyncio.ensure_future(bench.lane.close())
        await asyncio.sleep(0)
        with pytest.raises(NotReady):
            bench.send("new")
        await closing
        assert bench.runner.closed
        assert all(isinstance(bench.outcome(str(index)), InferResponse) for index in range(10))

    simulate(main)


def test_answers_of_a_batch_that_take_long_let_others_in_between() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock)
        answered: list[str] = []

        def ask(name: str, takes_ms: int) -> InferRequest:
            def answer(outcome: InferResponse | GatewayError) -> None:
                answered.append(name if isinstance(outcome, InferResponse) else outcome.code.value)
                clock.advance_to(clock.now_ns() + takes_ms * MS)

            request = InferRequest("m", "1", name, {"X": np.zeros((1, 1), np.float32)}, 1, clock.now_ns())
            bench.lane.submit(request, answer)
            return request

        requests = [ask(f"long {number}", 5) for number in range(4)]
        ask("behind", 0)  # is run in the next batch
        await asyncio.sleep(0.001)
        assert answered == ["long 0"]
        await asyncio.sleep(0)
        assert answered == ["long 0", "long 1"]
        # What is done, and only waits for its turn, is neither refused nor run again; it can be cancelled.
        bench.lane.refuse_waiting(BackendUnreachable("no live session"))
        bench.lane.cancel(requests[2])
        await asyncio.sleep(0.01)
        assert answered == ["long 0", "long 1", "cancelled", "long 3", "behind"]
        assert bench.lane.pending == 0
        assert len(bench.runner.batches) == 2

    run_simulated(main)
