"""A decoupled model's lane in simulated time: parts in order, then one end, whatever becomes of the run and of the client."""

import asyncio
import re

import msgspec
import numpy as np
import pytest

from gateway.batching.batch import Batch
from gateway.batching.batcher import Batcher
from gateway.batching.policies import POLICIES
from gateway.batching.recording import LaneSettings, RecordedBatcher, Ring, as_read
from gateway.batching.replay import History, replay
from gateway.config import Batching
from gateway.engine.lane import Lane
from gateway.engine.metrics import Metrics
from gateway.engine.place import OnAnswer, Place
from gateway.engine.runner import PARTS_AHEAD, Execution
from gateway.errors import BackendFailed, BackendUnreachable, Cancelled, DeadlineExceeded, GatewayError, InternalError, NotReady
from gateway.types import InferRequest, InferResponse
from tests.engine.simulated_runner import IN_PARTS, StreamingRunner
from tests.engine.test_lane import MS, simulate
from tests.simulation import SimulatedClock


class Client:
    """One request. parts: the number of each; ends: what on_answer got. reads: takes each part at once."""

    def __init__(self, *, reads: bool = True, fault: BaseException | None = None) -> None:
        self.parts: list[float] = []
        self.ends: list[InferResponse | GatewayError | None] = []
        self.reads = reads
        self.fault = fault  # raised for the second part
        self.place: Place

    def part(self, response: InferResponse) -> None:
        if self.fault is not None and self.parts:
            raise self.fault
        self.parts.append(float(response.outputs["Y"][0, 0]))
        if self.reads:
            self.place.taken()

    @property
    def end(self) -> InferResponse | GatewayError | None:
        (only,) = self.ends
        return only


class Watch:
    """An observer that takes nothing over."""

    def __init__(self) -> None:
        self.ended: list[tuple[Execution, bool]] = []
        self.gave_up = 0

    def executed(self, batch: Batch, execution: Execution, now_ns: int, failed: bool) -> None:
        self.ended.append((execution, failed))

    def cancelled(self, batch: Batch, now_ns: int) -> None:
        self.gave_up += 1

    def takes_over(self, request: InferRequest, on_answer: OnAnswer, now_ns: int) -> bool:
        return False


class Bench:
    def __init__(self, clock: SimulatedClock, batcher: Batcher | None = None, **runner: int) -> None:
        self.clock = clock
        self.metrics = Metrics()
        self.runner = StreamingRunner(clock, **runner)
        batcher = batcher or Batcher(
            POLICIES["greedy"](Batching(policy="greedy")), max_rows=0, workers=self.runner.slots, max_queue_rows=100
        )
        self.lane = Lane(
            name="m:1/simulated",
            spec=IN_PARTS,
            batcher=batcher,
            runner=self.runner,
            metrics=self.metrics.lane("m", "1", "simulated"),
            clock=clock,
            call_soon=asyncio.get_running_loop().call_soon,
        )

    def ask(self, client: Client, *, timeout_ms: int | None = None, copy: bool = False) -> InferRequest:
        now_ns = self.clock.now_ns()
        request = InferRequest("m", "1", "", {"X": np.zeros((1, 1), np.float32)}, 1, now_ns)
        request.deadline_ns = now_ns + timeout_ms * MS if timeout_ms else None
        client.place = self.lane.submit(request, client.ends.append, None if copy else client.part)
        return request

    def dropped(self) -> float:
        return self.counted("gateway_dropped_outputs_total")

    def counted(self, name: str) -> float:
        self.metrics.flush()
        _, text = self.metrics.expose()
        found = re.findall(rf"^{name}{{.*}} (\S+)$", text.decode(), re.MULTILINE)
        return sum(map(float, found))


async def pass_ms(ms: float) -> None:
    await asyncio.sleep(ms / 1000)


def test_parts_come_in_order_and_then_one_end_and_nothing_is_counted_as_dropped() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench, client = Bench(clock), Client()
        bench.ask(client)
        await pass_ms(2.5)
        assert client.parts == [0, 1]
        assert not client.ends
        await pass_ms(10)
        assert client.parts == [0, 1, 2]
        assert client.end is None
        assert bench.dropped() == 0
        assert bench.lane.pending == 0

    simulate(main)


def test_no_parts_are_an_answer_as_well() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench, client = Bench(clock, parts=0), Client()
        bench.ask(client)
        await pass_ms(10)
        assert client.parts == []
        assert client.end is None

    simulate(main)


def test_requests_are_run_one_by_one_and_none_waits_for_a_batch() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench, clients = Bench(clock, workers=2), [Client() for _ in range(3)]
        for client in clients:
            bench.ask(client)
        await pass_ms(1.5)
        assert [client.parts for client in clients] == [[0], [0], []]
        await pass_ms(20)
        assert [client.parts for client in clients] == [[0, 1, 2]] * 3
        assert [batch.rows for batch in bench.runner.batches] == [1, 1, 1]

    simulate(main)


def test_a_client_that_takes_nothing_makes_the_session_wait_and_then_go_on() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench, client = Bench(clock, parts=20), Client(reads=False)
        bench.ask(client)
        await pass_ms(1000)
        assert len(client.parts) == PARTS_AHEAD
        client.reads = True
        client.place.taken()
        await pass_ms(2)
        assert len(client.parts) > PARTS_AHEAD
        await pass_ms(1000)
        for _ in range(PARTS_AHEAD):
            client.place.taken()
        await pass_ms(1000)
        assert client.parts == list(range(20))
        assert client.end is None
        client.place.taken()  # late: of no request any more

    simulate(main)


@pytest.mark.parametrize("fault", ["lost", "killed", "failed"])
@pytest.mark.parametrize("after", [1, 2])
def test_nothing_is_run_again_after_a_part_has_left(fault: str, after: int) -> None:
    async def main(clock: SimulatedClock) -> None:
        bench, client = Bench(clock), Client()
        bench.runner.faults = [f"{fault} {after}"]
        bench.ask(client)
        await pass_ms(50)
        assert client.parts == list(range(after))
        assert isinstance(client.end, BackendUnreachable if fault == "lost" else BackendFailed)
        assert len(bench.runner.batches) == 1
        assert bench.runner.free_slots == 1

    simulate(main)


def test_a_session_that_is_lost_before_the_first_part_costs_nothing_but_time() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench, client = Bench(clock), Client()
        bench.runner.faults = ["lost 0"]
        bench.ask(client)
        await pass_ms(50)
        assert client.parts == [0, 1, 2]
        assert client.end is None
        assert len(bench.runner.batches) == 2

    simulate(main)


def test_a_part_that_is_not_taken_ends_the_request_with_one_error_and_frees_the_session(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main(clock: SimulatedClock) -> None:
        bench, client = Bench(clock, parts=1_000_000), Client(fault=SystemExit(3))
        bench.ask(client)
        await pass_ms(50)
        assert client.parts == [0]
        assert isinstance(client.end, InternalError)
        assert bench.runner.free_slots == 1
        assert bench.runner.made[bench.runner.batches[0]] == 2

    simulate(main)
    assert "a part of an answer was not taken" in caplog.text


def test_a_deadline_before_the_first_part_ends_the_request_and_the_run() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench, client = Bench(clock, parts=1_000_000, fixed_ns=20 * MS), Client(reads=False)
        bench.ask(client, timeout_ms=5)
        await pass_ms(6)
        assert isinstance(client.end, DeadlineExceeded)
        await pass_ms(50)
        assert client.parts == []
        assert bench.runner.free_slots == 1  # else it would wait for a client that has left

    simulate(main)


def test_a_deadline_after_the_first_part_says_nothing() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench, client, late = Bench(clock, parts=20), Client(), Client()
        bench.ask(client, timeout_ms=5)
        bench.ask(late, timeout_ms=10)  # behind it: not begun by then
        await pass_ms(15)
        assert isinstance(late.end, DeadlineExceeded)
        await pass_ms(50)
        assert client.parts == list(range(20))
        assert client.end is None

    simulate(main)


@pytest.mark.parametrize(("after_ms", "reads"), [(0, True), (0.5, True), (3.5, True), (100, False)])
def test_a_client_that_leaves_frees_the_session(after_ms: float, reads: bool) -> None:
    """Waiting, running before the first part, between parts, and while the session waits for it."""

    async def main(clock: SimulatedClock) -> None:
        bench, client, other = Bench(clock, parts=1_000_000), Client(reads=reads), Client()
        bench.ask(client)
        await pass_ms(after_ms)
        client.place.cancel()
        assert isinstance(client.end, Cancelled)
        parts = list(client.parts)
        bench.ask(other)
        await pass_ms(5)
        assert client.parts == parts
        assert other.parts
        other.place.cancel()
        await pass_ms(5)
        assert bench.runner.free_slots == 1

    simulate(main)


def test_a_run_that_was_not_cancelled_when_told_to_is_told_again_by_its_next_part() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench, client = Bench(clock, parts=1_000_000), Client()
        bench.ask(client)
        await pass_ms(1.5)
        bench.runner.cancel_fault = ValueError("not now")
        client.place.cancel()
        await pass_ms(5)
        assert bench.runner.free_slots == 1

    simulate(main)


def test_a_lane_that_gives_up_ends_its_streams_with_one_error_each_and_then_closes() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench, clients = Bench(clock, parts=1_000_000, workers=2), [Client(), Client(reads=False), Client()]
        for client in clients:
            bench.ask(client)
        await pass_ms(50)
        closing = asyncio.ensure_future(bench.lane.close())
        await pass_ms(50)
        assert not closing.done()
        bench.lane.give_up()
        assert [type(client.end) for client in clients] == [DeadlineExceeded, DeadlineExceeded, NotReady]
        await closing

    simulate(main)


@pytest.mark.parametrize("parts", [0, 2])
def test_a_failure_that_is_told_early_ends_its_request_and_nothing_takes_the_session_before_the_run_ends(parts: int) -> None:
    async def main(clock: SimulatedClock) -> None:
        bench, client, after, watch = Bench(clock, parts=9), Client(), Client(), Watch()
        bench.lane.observer = watch
        bench.runner.faults = [f"early {parts}"]
        request = bench.ask(client, timeout_ms=50)
        await pass_ms(10)
        assert len(client.parts) == parts
        assert isinstance(client.end, BackendFailed)
        bench.ask(after)
        await pass_ms(80)  # its own deadline passes meanwhile
        assert not after.parts
        ((execution, failed),) = watch.ended
        assert failed
        assert execution.finished_ns - execution.streamed_ns - execution.started_ns == MS
        assert not bench.runner.cancelled
        assert bench.lane.forecast(msgspec.structs.replace(request), clock.now_ns()).workers == 1
        await pass_ms(100)
        assert after.end is None
        assert [failed for _, failed in watch.ended] == [True, False]
        assert isinstance(client.end, BackendFailed)  # once

    simulate(main)


def test_a_recording_has_as_failed_what_was_told_early_and_as_cancelled_what_its_client_left() -> None:
    settings = LaneSettings(policy="greedy", max_rows=0)
    ring = Ring(1 << 20, settings)
    batcher = settings.batcher(ring)
    assert isinstance(batcher, RecordedBatcher)
    batcher.record()

    def history() -> History:
        history = replay(as_read(ring.dump()))
        assert history.difference is None, str(history.difference)
        return history

    def fates() -> list[str]:
        return [request.fate for request in history().requests]

    async def main(clock: SimulatedClock) -> None:
        bench, clients = Bench(clock, batcher, parts=9), [Client() for _ in range(4)]
        bench.runner.faults = ["early 0", "early 2"]
        for client in clients[:2]:
            bench.ask(client)
            await pass_ms(10)
            assert isinstance(client.end, BackendFailed)
            assert fates()[-1] == "failed"  # its run goes on
            await pass_ms(200)
        for client in clients[2:]:
            bench.ask(client)
        await pass_ms(0.5)
        clients[2].place.cancel()
        await pass_ms(200)
        assert fates() == ["failed", "failed", "cancelled", "answered"]
        begun_ns = [batch.begun_ns and batch.begun_ns - batch.closed_ns for batch in history().batches]
        assert begun_ns == [None, MS, None, MS]

    simulate(main)


def test_a_copy_ends_with_its_first_part_and_counts_as_well_run() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench, copy, watch = Bench(clock, parts=1_000_000, fixed_ns=4 * MS), Client(), Watch()
        bench.lane.observer = watch
        request = bench.ask(copy, copy=True)
        await pass_ms(50)
        assert copy.end is None
        assert bench.runner.free_slots == 1
        ((execution, failed),) = watch.ended
        assert not failed
        assert execution.error is not None
        assert bench.lane.forecast(msgspec.structs.replace(request), clock.now_ns()).own_ns == pytest.approx(4 * MS)

    simulate(main)


def test_what_is_learned_and_told_of_a_stream_is_its_first_part() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench, client, watch = Bench(clock, parts=100, fixed_ns=4 * MS), Client(), Watch()
        bench.lane.observer = watch
        request = bench.ask(client)
        await pass_ms(500)
        assert client.end is None
        ((execution, failed),) = watch.ended
        assert not failed
        assert execution.streamed_ns == 100 * MS
        assert bench.lane.forecast(msgspec.structs.replace(request), clock.now_ns()).own_ns == pytest.approx(4 * MS)

    simulate(main)


def test_a_client_that_leaves_after_a_part_says_nothing_bad_of_the_backend() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench, client, watch = Bench(clock, parts=1_000_000), Client(), Watch()
        bench.lane.observer = watch
        bench.ask(client)
        await pass_ms(10_000)
        client.place.cancel()
        await pass_ms(5)
        assert watch.gave_up == 0
        assert [failed for _, failed in watch.ended] == [False]

    simulate(main)


def test_an_answer_that_was_cancelled_after_a_part_is_no_row_inferred_with_success() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench, client, whole = Bench(clock, parts=20), Client(), Client()
        bench.ask(whole)
        await pass_ms(50)
        bench.ask(client)
        await pass_ms(5)
        assert client.parts
        client.place.cancel()
        await pass_ms(50)
        assert whole.end is None
        assert bench.counted("gateway_executions_total") == 2
        assert bench.counted("gateway_rows_total") == 1
        assert bench.counted("gateway_failed_executions_total") == 0

    simulate(main)
