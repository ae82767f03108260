"""Decoupled models behind a dispatcher: which backend's parts a client gets, and what a stream says of its backend."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from gateway.batching.batcher import Batcher
from gateway.batching.fairness import SharedWorkers
from gateway.batching.policies import POLICIES
from gateway.engine.lane import Lane
from gateway.engine.place import Place
from gateway.errors import BackendFailed, BackendUnreachable, Cancelled, GatewayError, Overloaded
from gateway.types import InferResponse
from tests.engine.simulated_runner import IN_PARTS, StreamingRunner
from tests.router.fleet import MS, Fleet, Kind, Sessions
from tests.simulation import SimulatedClock, run_simulated

CHEAP = Kind("cheap", 2.0, 0.0, 0.1)
DEAR = Kind("dear", 2.0, 0.0, 1.0)


class Streams(Fleet):
    """Each backend gives 3 parts, the first after 2 ms, then one every 50 ms: more than the SLO, which is of the first."""

    def __init__(
        self, clock: SimulatedClock, kinds: Sequence[Kind], *, shared: SharedWorkers | None = None, **options: Any
    ) -> None:
        """shared: the workers of all but the dear ones."""
        self.shared = shared
        self.runners: list[StreamingRunner] = []
        super().__init__(clock, kinds, **options)

    def _lane(self, label: str, sessions: Sessions) -> Lane:
        runner = StreamingRunner(self.clock, fixed_ns=2 * MS, part_ns=50 * MS, workers=2)
        self.runners.append(runner)
        batcher = Batcher(
            POLICIES["greedy"](self.model.batching),
            max_rows=0,
            workers=runner.slots,
            max_queue_rows=100,
            slo_ns=round(self.model.slo.p99_ms * MS) if self.model.slo else None,
        )
        return Lane(
            name=f"m:1/{label}",
            spec=IN_PARTS,
            batcher=batcher,
            runner=runner,
            metrics=self.metrics.lane("m", "1", label),
            clock=self.clock,
            call_soon=asyncio.get_running_loop().call_soon,
            shared=None if label.startswith("dear") else self.shared,
        )

    def ran(self) -> list[int]:
        return [len(runner.batches) for runner in self.runners]

    @property
    def ejected(self) -> list[bool]:
        return [candidate.health.ejected for candidate in self.dispatcher.router.candidates]

    async def warm(self) -> None:
        """Let each lane learn its speed."""
        for lane in self.lanes:
            for _ in range(3):
                done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
                lane.submit(self.request(), done.set_result)
                await done
        await asyncio.sleep(1)
        for runner in self.runners:
            assert runner.free_slots == runner.slots
            runner.batches.clear()


class Client:
    def __init__(self, fleet: Streams, lane: Lane | None = None) -> None:
        """lane: to ask; None: the dispatcher."""
        self.parts: list[float] = []
        self.end: asyncio.Future[InferResponse | GatewayError | None] = asyncio.get_running_loop().create_future()
        self.place: Place = (lane or fleet.dispatcher).submit(fleet.request(), self.end.set_result, self.part)

    def part(self, response: InferResponse) -> None:
        self.parts.append(float(response.outputs["Y"][0, 0]))
        self.place.taken()


def simulated(kinds: Sequence[Kind], main: Callable[[Streams], Coroutine[Any, Any, None]], **options: Any) -> None:
    async def run(clock: SimulatedClock) -> None:
        fleet = Streams(clock, kinds, **options)
        await fleet.warm()
        await main(fleet)

    run_simulated(run)


@pytest.mark.parametrize("fault", ["lost", "failed"])
def test_a_backend_that_fails_before_its_first_part_is_stood_in_for(fault: str) -> None:
    async def main(fleet: Streams) -> None:
        fleet.runners[0].faults = [f"{fault} 0"]
        client = Client(fleet)
        assert await client.end is None
        assert client.parts == [0, 1, 2]
        assert fleet.ran() == [1, 1]

    simulated((CHEAP, DEAR), main)


@pytest.mark.parametrize(("fault", "kind"), [("lost", BackendUnreachable), ("failed", BackendFailed)])
def test_no_other_backend_goes_on_with_an_answer_that_has_begun(fault: str, kind: type[GatewayError]) -> None:
    async def main(fleet: Streams) -> None:
        fleet.runners[0].faults = [f"{fault} 2"]
        client = Client(fleet)
        assert isinstance(await client.end, kind)
        assert client.parts == [0, 1]
        assert fleet.ran() == [1, 0]

    simulated((CHEAP, DEAR), main)


def test_a_backend_that_fails_in_mid_stream_again_and_again_is_ejected() -> None:
    async def main(fleet: Streams) -> None:
        fleet.runners[0].faults = ["failed 1"] * 3
        for _ in range(3):
            assert isinstance(await Client(fleet).end, BackendFailed)
        assert fleet.ejected == [True, False]

    simulated((CHEAP, DEAR), main)


def test_long_streams_and_clients_that_leave_them_say_nothing_bad_of_a_backend() -> None:
    async def main(fleet: Streams) -> None:
        for _ in range(5):
            assert await Client(fleet).end is None
        for _ in range(5):
            leaving = Client(fleet)
            await asyncio.sleep(0.1)
            leaving.place.cancel()
            assert isinstance(await leaving.end, Cancelled)
            await asyncio.sleep(0.1)
        assert fleet.ejected == [False, False]
        assert fleet.ran() == [10, 1]  # a copy to see whether the dear one is still dear

    simulated((CHEAP, DEAR), main)


def test_the_price_of_a_stream_is_not_learned_from_copies_that_end_with_their_first_part() -> None:
    async def main(fleet: Streams) -> None:
        dear = fleet.dispatcher.router.candidates[1]
        dear.executed(1, 152 * MS, 150 * MS)
        price = dear.usd_per_row
        for _ in range(100):
            assert await Client(fleet).end is None
        assert fleet.counted("gateway_copies_total", backend="dear1", why="learn", result="ok") > 3
        assert dear.usd_per_row == pytest.approx(price)

    simulated((CHEAP, DEAR), main)


async def begun(fleet: Streams, streams: int) -> list[Client]:
    """So many that have given a first part, once each backend has run one to its end."""
    for lane in fleet.lanes:
        assert await Client(fleet, lane).end is None
    for runner in fleet.runners:
        runner.batches.clear()
    clients = [Client(fleet) for _ in range(streams)]
    await asyncio.sleep(0.003)
    assert all(client.parts for client in clients)
    return clients


@pytest.mark.parametrize("slo_ms", [60.0, None])
def test_nobody_waits_for_streams_to_end_while_another_backend_is_idle(slo_ms: float | None) -> None:
    async def main(fleet: Streams) -> None:
        await begun(fleet, 2)
        assert fleet.ran() == [2, 0]
        client = Client(fleet)
        await asyncio.sleep(0.003)
        assert client.parts == [0]
        assert fleet.ran() == [2, 1]

    simulated((CHEAP, DEAR), main, slo_ms=slo_ms)


def test_a_stream_that_is_about_to_end_is_waited_for() -> None:
    async def main(fleet: Streams) -> None:
        await begun(fleet, 2)
        await asyncio.sleep(0.13)
        assert await Client(fleet).end is None
        assert fleet.ran() == [3, 0]

    simulated((CHEAP, DEAR), main)


def test_nobody_waits_for_the_streams_of_a_canary_which_gets_its_share_once_they_have_ended() -> None:
    async def main(fleet: Streams) -> None:
        await begun(fleet, 0)
        for _ in range(2):
            Client(fleet, fleet.lanes[1])
        await asyncio.sleep(0.003)
        clients = [Client(fleet) for _ in range(2)]
        await asyncio.sleep(0.003)
        assert [client.parts for client in clients] == [[0], [0]]
        assert fleet.ran() == [2, 2]
        for client in clients:
            assert await client.end is None
        assert await Client(fleet).end is None
        assert fleet.ran() == [2, 3]

    simulated((DEAR, Kind("canary", 2.0, 0.0, 0.1, options=(("canary_share", 0.5),))), main, slo_ms=None)


def test_who_would_wait_for_a_stream_beyond_the_deadline_is_refused_at_once() -> None:
    async def main(fleet: Streams) -> None:
        await begun(fleet, 2)
        for _ in range(2):
            Client(fleet)
        await asyncio.sleep(0.003)
        assert fleet.ran() == [2, 2]
        await asyncio.sleep(0.05)
        with pytest.raises(Overloaded, match="every backend would answer after the deadline"):
            Client(fleet)

    simulated((CHEAP, DEAR), main)


def test_who_would_wait_for_a_stream_of_another_model_beyond_the_deadline_is_refused_at_once() -> None:
    async def main(fleet: Streams) -> None:
        other = fleet._lane("other", fleet.sessions[0])
        assert await Client(fleet, other).end is None
        streaming = Client(fleet, other)
        await asyncio.sleep(0.05)
        with pytest.raises(Overloaded, match="every backend would answer after the deadline"):
            Client(fleet)
        await asyncio.sleep(0.07)  # it is about to end
        client = Client(fleet)
        assert await client.end is None
        assert client.parts == [0, 1, 2]
        assert await streaming.end is None

    simulated((CHEAP, CHEAP), main, shared=SharedWorkers(1))


def test_what_waits_for_a_stream_of_another_model_that_goes_on_is_handed_over() -> None:
    async def main(fleet: Streams) -> None:
        other = fleet._lane("other", fleet.sessions[0])
        assert await Client(fleet, other).end is None
        fleet.runners[2]._parts = 100
        streaming = Client(fleet, other)
        await asyncio.sleep(0.14)  # as if it were about to end
        client = Client(fleet)
        await asyncio.sleep(0.01)
        assert [lane.pending for lane in fleet.lanes] == [1, 0]
        assert await client.end is None
        assert client.parts == [0, 1, 2]
        assert fleet.ran() == [0, 1, 2]
        streaming.place.cancel()

    simulated((CHEAP, DEAR), main, shared=SharedWorkers(1))


def test_a_shadow_gets_copies_that_end_with_their_first_part() -> None:
    async def main(fleet: Streams) -> None:
        fleet.runners[1]._parts = 1_000_000
        client = Client(fleet)
        assert await client.end is None
        assert client.parts == [0, 1, 2]
        assert fleet.ran() == [1, 1]
        assert fleet.runners[1].free_slots == 2
        assert fleet.counted("gateway_copies_total", backend="shadow1", result="ok") == 1

    simulated((CHEAP, Kind("shadow", 2.0, 0.0, 1.0, options=(("shadow_share", 1.0),))), main)


def test_an_ejected_backend_comes_back_by_the_first_parts_of_copies() -> None:
    async def main(fleet: Streams) -> None:
        fleet.runners[0].faults = ["failed 1"] * 3
        for _ in range(3):
            await Client(fleet).end
        assert fleet.ejected[0]
        for _ in range(10):
            await asyncio.sleep(1)
            assert await Client(fleet).end is None
        assert fleet.ejected == [False, False]

    simulated((CHEAP, DEAR), main)


async def failed_early(fleet: Streams, after: int) -> None:
    """The first backend tells of a failure after so many parts; its run ends only after the other has answered, if it does."""
    runner, other = fleet.runners
    runner.faults = [f"early {after}"]
    other._part_ns = 5 * MS
    assert isinstance(await Client(fleet).end, BackendFailed if after else type(None))
    assert runner.free_slots == 1
    await asyncio.sleep(0.2)
    assert runner.free_slots == 2


def test_a_backend_that_fails_early_once_it_has_hung_is_ejected_as_it_fails() -> None:
    async def main(fleet: Streams) -> None:
        fleet.runners[0]._fixed_ns = 800 * MS
        await failed_early(fleet, 0)
        assert fleet.ejected == [True, False]

    simulated((CHEAP, DEAR), main, slo_ms=None)


def test_early_failures_that_come_soon_or_in_mid_stream_eject_only_as_they_come_again_and_again() -> None:
    async def main(fleet: Streams) -> None:
        await failed_early(fleet, 0)
        assert fleet.ejected == [False, False]
        fleet.runners[0]._part_ns = 900 * MS  # between the first part and the failure
        await failed_early(fleet, 1)
        assert fleet.ejected == [False, False]
        await failed_early(fleet, 0)
        assert fleet.ejected == [True, False]

    simulated((CHEAP, DEAR), main, slo_ms=None)
