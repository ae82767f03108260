"""Requests through unlike backends in simulated time: each ends in exactly one answer, its own, whatever fails."""

import asyncio
import gc
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.batching.batch import Batch
from gateway.clock import Timer
from gateway.engine.dispatcher import Dispatcher
from gateway.engine.place import OnAnswer, OnAnswerPart, Place
from gateway.engine.runner import Execution, OnBatchDone, OnBatchPart
from gateway.errors import (
    BackendFailed,
    BackendUnreachable,
    Cancelled,
    DeadlineExceeded,
    GatewayError,
    InvalidArgument,
    NotReady,
    Overloaded,
)
from gateway.types import InferRequest, InferResponse, OutputRequest
from tests.router.fleet import MS, Fault, Fleet, Kind, S, Sessions
from tests.simulation import SimulatedClock, run_simulated

CHEAP = Kind("cheap", 2.0, 0.5, 0.1)
DEAR = Kind("dear", 1.0, 0.1, 1.0)
FAILED: Fault = (BackendFailed("no"), False, 1 * MS)
LOST: Fault = (BackendUnreachable("gone"), True, 1 * MS)
UNBEGUN: Fault = (*LOST[:2], 1 * MS, False)
LOST_LATE: Fault = (*LOST[:2], 1000 * MS)


def shadow(share: float, **more: Any) -> Kind:
    return Kind("shadow", 1.0, 0.1, 0.5, options=(("shadow_share", share), *more.items()))


def simulated(kinds: tuple[Kind, ...], main: Callable[[Fleet], Coroutine[Any, Any, None]], **options: Any) -> None:
    async def run(clock: SimulatedClock) -> None:
        fleet = Fleet(clock, kinds, **options)
        await asyncio.gather(*(warm(fleet, index) for index in range(len(kinds))))
        await main(fleet)

    run_simulated(run)


async def warm(fleet: Fleet, index: int) -> None:
    """Let a lane learn its speed."""
    for _ in range(3):
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        fleet.lanes[index].submit(fleet.request(), done.set_result)
        await done


def ran(fleet: Fleet) -> list[int]:
    """Executions by lane, without the warm-up."""
    return [sum(sessions.batches.values()) - 3 for sessions in fleet.sessions]


def always(fault: Fault | None) -> Callable[[Batch], Fault | None]:
    return lambda batch: fault


@pytest.mark.parametrize("fault", [FAILED, LOST], ids=["failed", "lost"])
def test_what_one_backend_fails_another_serves(fault: Fault) -> None:
    async def main(fleet: Fleet) -> None:
        fleet.sessions[0].fault = always(fault)
        outcome = await fleet.send(7.0)
        assert isinstance(outcome, InferResponse)
        assert outcome.outputs["Y"] == 7.0
        assert ran(fleet) == [1, 1]
        assert fleet.counted("gateway_routed_total", backend="dear1", reason="fallback") == 1

    simulated((CHEAP, DEAR), main)


@pytest.mark.parametrize("fault", [FAILED, LOST], ids=["failed", "lost"])
def test_what_has_run_of_a_sequence_no_other_backend_runs_again(fault: Fault) -> None:
    async def main(fleet: Fleet) -> None:
        fleet.sessions[0].fault = always(fault)
        assert isinstance(await fleet.send(7.0, parameters={"sequence_id": 5}), type(fault[0]))
        assert ran(fleet) == [1, 0]

    simulated((CHEAP, DEAR), main)


def test_what_was_never_begun_has_not_run_and_goes_to_another_backend_also_of_a_sequence() -> None:
    async def main(fleet: Fleet) -> None:
        cheap, dear = fleet.sessions
        cheap.fault = always(UNBEGUN)
        assert isinstance(await fleet.send(7.0, parameters={"sequence_id": 5}), InferResponse)
        dear.fault = always(UNBEGUN)
        said = await fleet.send(7.0, parameters={"sequence_id": 5})
        assert isinstance(said, BackendUnreachable)
        assert said.message == "gone"

    simulated((CHEAP, DEAR), main)


def test_inputs_of_a_sequence_that_have_ended_a_session_run_on_one_other_backend_alone() -> None:
    async def main(fleet: Fleet) -> None:
        fleet.lanes[0]._killers.add(fleet.request(7.0, parameters={"sequence_id": 5}), fleet.clock.now_ns())
        assert isinstance(await fleet.send(7.0, parameters={"sequence_id": 5}), InferResponse)
        assert ran(fleet) == [0, 1, 0]
        fleet.sessions[1].fault = always(FAILED)
        assert str(await fleet.send(7.0, parameters={"sequence_id": 5})) == "no"
        assert ran(fleet) == [0, 2, 0]

    simulated((CHEAP, DEAR, Kind("dearer", 1.0, 0.1, 2.0)), main)


def test_inputs_that_have_ended_a_session_before_are_not_told_that_they_may_have_run_where_they_have_not() -> None:
    async def main(fleet: Fleet) -> None:
        _, dear = fleet.sessions
        fleet.lanes[0]._killers.add(fleet.request(7.0), fleet.clock.now_ns())
        dear.live = 0
        outcome = asyncio.ensure_future(fleet.send(7.0, deadline_ns=None))
        await asyncio.sleep(0.005)
        dear.available = False
        dear.on_change()
        assert str(await outcome) == "backend m:1/dear1 has no live session"
        assert ran(fleet) == [0, 0]

    simulated((CHEAP, DEAR), main, slo_ms=None)


def test_what_has_run_at_one_backend_and_waits_at_another_that_loses_its_session_is_told_that_it_may_have_run() -> None:
    async def main(fleet: Fleet) -> None:
        cheap, dear = fleet.sessions
        cheap.fault = always(LOST)
        dear.factor = 20.0
        fleet.lanes[1].submit(fleet.request(), lambda outcome: None)  # what it is busy with
        await asyncio.sleep(0)
        outcome = asyncio.ensure_future(fleet.send(7.0, deadline_ns=None))
        await asyncio.sleep(0.005)
        assert ran(fleet)[0] == 1
        cheap.available = dear.available = False
        dear.on_change()
        said = await outcome
        assert isinstance(said, BackendUnreachable)
        assert said.message == "backend m:1/dear1 has no live session; the request may have run"

    simulated((CHEAP, DEAR), main, slo_ms=None)


def test_only_between_equivalents() -> None:
    async def main(fleet: Fleet) -> None:
        fleet.sessions[0].fault = always(FAILED)
        assert isinstance(await fleet.send(), BackendFailed)
        assert ran(fleet) == [1, 0]

    simulated((CHEAP, DEAR), main, routing={"equivalent": [["cheap1"], ["dear1"]]})


def test_a_lost_session_with_no_other_backend_in_time_runs_the_request_once_more_there() -> None:
    async def main(fleet: Fleet) -> None:
        faults = [LOST]
        fleet.sessions[0].fault = lambda batch: faults.pop() if faults else None
        fleet.sessions[1].available = False
        assert isinstance(await fleet.send(), InferResponse)
        assert ran(fleet) == [2, 0]

    simulated((CHEAP, DEAR), main)


def test_a_retry_in_a_lane_that_loses_its_last_session_is_served_elsewhere() -> None:
    async def main(fleet: Fleet) -> None:
        cheap = fleet.sessions[0]
        ends: list[Fault | None] = [FAILED, LOST]

        def fault(batch: Batch) -> Fault | None:
            end = ends.pop(0) if ends else None
            if end is LOST:
                cheap.live = 0
            return end

        cheap.fault = fault
        outcomes = await asyncio.gather(*(asyncio.ensure_future(fleet.send(value, deadline_ns=None)) for value in (1.0, 2.0)))
        assert [type(outcome) for outcome in outcomes] == [
            InferResponse
        ] * 2  # one fell back with its loss, one was handed over
        assert fleet.counted("gateway_routed_total", backend="dear1", reason="fallback") == 2

    simulated((CHEAP, DEAR), main)


async def give_up(fleet: Fleet, after_ms: float) -> None:
    """A client that sends a request and cancels it."""
    request = fleet.request()
    outcomes: list[InferResponse | GatewayError] = []
    place = fleet.dispatcher.submit(request, outcomes.append)
    await asyncio.sleep(after_ms / 1e3)
    place.cancel()
    assert [type(outcome) for outcome in outcomes] == [Cancelled]


def test_clients_that_cancel_eject_nobody() -> None:
    async def main(fleet: Fleet) -> None:
        fleet.sessions[0].fault = always((Cancelled("the call was cancelled"), False, 2 * MS))
        for _ in range(30):
            await give_up(fleet, after_ms=1)
            await asyncio.sleep(0.005)
        assert fleet.counted("gateway_ejections_total") == 0
        assert fleet.counted("gateway_failed_executions_total") == 0
        assert ran(fleet) == [30, 0]

    simulated((CHEAP, DEAR), main)


def test_a_backend_that_hangs_until_clients_cancel_is_ejected() -> None:
    async def main(fleet: Fleet) -> None:
        fleet.sessions[0].fault = always((Cancelled("the call was cancelled"), False, 1 * S))
        await give_up(fleet, after_ms=999)
        await asyncio.sleep(0.005)
        assert fleet.counted("gateway_ejections_total", backend="cheap1") == 1
        assert isinstance(await fleet.send(), InferResponse)

    simulated((CHEAP, DEAR), main)


def test_a_first_batch_that_takes_long_is_not_taken_to_hang_when_its_client_cancels() -> None:
    async def run(clock: SimulatedClock) -> None:
        fleet = Fleet(clock, (CHEAP, DEAR))
        for sessions in fleet.sessions:
            sessions.fault = always((Cancelled("the call was cancelled"), False, 1 * S))
        await give_up(fleet, after_ms=999)  # nothing was predicted
        await asyncio.sleep(0.005)
        assert fleet.counted("gateway_ejections_total") == 0

    run_simulated(run)


def test_a_request_that_fails_everywhere_is_answered_once_and_ejects_nobody() -> None:
    async def main(fleet: Fleet) -> None:
        for sessions in fleet.sessions:
            sessions.fault = lambda batch: FAILED if any(part.request.inputs["X"][0, 0] == 13 for part in batch.parts) else None
        for _ in range(10):
            assert isinstance(await fleet.send(13.0), BackendFailed)
        assert ran(fleet) == [10, 10]
        assert fleet.counted("gateway_ejections_total") == 0
        assert isinstance(await fleet.send(1.0), InferResponse)

    simulated((CHEAP, DEAR), main)


def test_a_backend_that_fails_what_others_serve_is_ejected_and_comes_back_once_repaired() -> None:
    async def main(fleet: Fleet) -> None:
        fleet.sessions[0].fault = always(FAILED)
        for _ in range(5):
            assert isinstance(await fleet.send(), InferResponse)
        assert fleet.counted("gateway_ejections_total", backend="cheap1") == 1
        assert fleet.counted("gateway_ejected", backend="cheap1") == 1
        assert ran(fleet) == [3, 5]
        for _ in range(60):  # the pauses: 1, 2 and 4 s
            await asyncio.sleep(0.1)
            assert isinstance(await fleet.send(), InferResponse)
        assert fleet.counted("gateway_copies_total", backend="cheap1", why="probe", result="failed") == 2
        fleet.sessions[0].fault = always(None)
        for _ in range(40):
            await asyncio.sleep(0.1)
            assert isinstance(await fleet.send(), InferResponse)
        assert fleet.counted("gateway_ejected", backend="cheap1") == 0
        before = ran(fleet)
        await fleet.send()
        assert ran(fleet) == [before[0] + 1, before[1]]

    simulated((CHEAP, DEAR), main)


def test_a_malformed_request_is_nobodys_fault_and_is_not_tried_elsewhere() -> None:
    async def main(fleet: Fleet) -> None:
        fleet.sessions[0].fault = always((InvalidArgument("no such token"), False, MS))
        assert isinstance(await fleet.send(), InvalidArgument)
        assert ran(fleet) == [1, 0]

    simulated((CHEAP, DEAR), main)


def test_what_waits_behind_a_stalled_batch_goes_elsewhere_in_time() -> None:
    async def main(fleet: Fleet) -> None:
        fleet.sessions[0].factor = 1000.0
        stalled = asyncio.ensure_future(fleet.send())
        await asyncio.sleep(0.001)
        behind = [asyncio.ensure_future(fleet.send()) for _ in range(5)]
        started_ns = fleet.clock.now_ns()
        assert all(isinstance(outcome, InferResponse) for outcome in await asyncio.gather(*behind))
        assert fleet.clock.now_ns() - started_ns < 60 * MS
        assert isinstance(await stalled, InferResponse)

    simulated((CHEAP, DEAR), main)


def test_a_full_queue_sends_the_next_elsewhere_and_refuses_only_if_all_are_full() -> None:
    async def main(fleet: Fleet) -> None:
        sent = [asyncio.ensure_future(fleet.send(rows=rows)) for rows in (2048, 1, 2048, 1, 100)]
        outcomes = await asyncio.gather(*sent)
        assert [type(outcome) for outcome in outcomes] == [InferResponse] * 5
        assert fleet.counted("gateway_routed_total", reason="fallback") == 1
        sent = [asyncio.ensure_future(fleet.send(rows=rows)) for rows in (2048, 2048, 2048, 2048, 100)]
        outcomes = await asyncio.gather(*sent)
        assert [type(outcome) for outcome in outcomes] == [InferResponse] * 4 + [Overloaded]

    simulated((CHEAP, DEAR), main, slo_ms=None, routing={"policy": "round_robin"})


@pytest.mark.parametrize("regular", [1, 2])
def test_under_overload_a_canary_gets_its_share_and_nothing_else(regular: int) -> None:
    async def main(fleet: Fleet) -> None:
        sent = []
        for _ in range(1000):
            sent.append(asyncio.ensure_future(fleet.send()))
            await asyncio.sleep(0.002)
        outcomes = await asyncio.gather(*sent)
        assert sum(isinstance(outcome, Overloaded) for outcome in outcomes) > 300
        assert ran(fleet)[-1] <= 20
        assert fleet.counted("gateway_routed_total", backend="canary1", reason="fallback") == 0

    kinds = (Kind("slow", 0.0, 10.0, 0.1),) * regular + (Kind("canary", 5.0, 0.0, 0.3, options=(("canary_share", 0.02),)),)
    simulated(kinds, main, slo_ms=200, queue_rows=6)


def test_what_waits_behind_a_stalled_batch_is_no_canarys() -> None:
    async def main(fleet: Fleet) -> None:
        fleet.sessions[0].factor = 100.0
        sent = [asyncio.ensure_future(fleet.send())]
        await asyncio.sleep(0.001)
        sent += [asyncio.ensure_future(fleet.send()) for _ in range(5)]
        await asyncio.gather(*sent)
        assert ran(fleet)[1] == 0

    simulated((CHEAP, Kind("canary", 1.0, 0.1, 1.0, options=(("canary_share", 0.01),))), main)


@pytest.mark.parametrize("sessions", [1, 2])
def test_without_an_slo_a_canary_gets_its_share_of_requests_of_many_batches_too(sessions: int) -> None:
    async def main(fleet: Fleet) -> None:
        for _ in range(10):
            await fleet.send(rows=5 * 256)
        assert fleet.counted("gateway_routed_total", reason="canary") == 5
        sent = []
        for _ in range(5):
            sent.append(asyncio.ensure_future(fleet.send(rows=5 * 256)))
            await asyncio.sleep(0)
        assert fleet.counted("gateway_routed_total", reason="canary") == 6  # of another's batches more than one is ahead
        await asyncio.gather(*sent)

    canary = Kind("canary", 2.0, 0.5, 0.1, sessions=sessions, options=(("canary_share", 0.5),))
    simulated((CHEAP, canary), main, slo_ms=None)


def test_without_an_slo_a_canary_that_hangs_soon_gets_no_more_requests() -> None:
    async def main(fleet: Fleet) -> None:
        fleet.sessions[1].fault = always((FAILED[0], False, 10 * S))
        sent = []
        for _ in range(200):
            sent.append(asyncio.ensure_future(fleet.send()))
            await asyncio.sleep(0.02)
        await asyncio.sleep(1)
        assert sum(not each.done() for each in sent) <= 8  # of forty that are its share

    canary = Kind("canary", 2.0, 0.5, 0.1, options=(("canary_share", 0.2),))
    simulated((CHEAP, canary), main, slo_ms=None)


def test_what_waits_at_the_last_regular_backend_goes_to_a_canary_once_it_is_ejected() -> None:
    async def main(fleet: Fleet) -> None:
        faults = [(LOST[0], True, 20 * MS)]
        fleet.sessions[0].fault = lambda batch: faults.pop() if faults else None
        sent = [asyncio.ensure_future(fleet.send())]
        await asyncio.sleep(0.001)
        sent += [asyncio.ensure_future(fleet.send()) for _ in range(3)]
        assert [type(outcome) for outcome in await asyncio.gather(*sent)] == [InferResponse] * 4
        assert fleet.counted("gateway_routed_total", backend="canary1", reason="fallback") == 4

    canary = Kind("canary", 1.0, 0.1, 1.0, options=(("canary_share", 0.01),))
    simulated((CHEAP, canary), main, slo_ms=None, routing={"ejection": {"consecutive_failures": 1}})


THREE = (Kind("first", 100.0, 0.0, 0.1), Kind("next", 100.0, 0.0, 0.2), Kind("idle", 2.0, 0.0, 50.0))


def test_what_a_full_backend_refuses_goes_past_another_that_is_full_to_one_that_is_not() -> None:
    async def main(fleet: Fleet) -> None:
        await fleet.fill(0, 1)
        assert isinstance(await fleet.send(7.0), InferResponse)
        assert fleet.counted("gateway_routed_total", backend="idle1", reason="fallback") == 1

    simulated(THREE, main, slo_ms=5000, queue_rows=256)


def test_what_waits_behind_a_stalled_batch_goes_past_a_full_backend_to_one_that_is_not() -> None:
    async def main(fleet: Fleet) -> None:
        fleet.sessions[0].factor = 1000.0
        stalled = asyncio.ensure_future(fleet.send())
        await asyncio.sleep(0.001)
        behind = [asyncio.ensure_future(fleet.send()) for _ in range(5)]
        await fleet.fill(1)
        assert fleet.lanes[0].pending == 6
        while not all(each.done() for each in behind):
            await asyncio.sleep(0.05)
            with suppress(Overloaded):
                fleet.lanes[1].submit(fleet.request(rows=256), lambda outcome: None)
        assert [type(each.result()) for each in behind] == [InferResponse] * 5
        assert fleet.clock.now_ns() < 5 * S
        assert fleet.counted("gateway_routed_total", backend="idle1", reason="fallback") == 5
        await stalled

    simulated(THREE, main, slo_ms=5000, queue_rows=256)


def test_what_a_backend_fails_goes_past_a_full_one_to_one_that_is_not() -> None:
    async def main(fleet: Fleet) -> None:
        fleet.sessions[0].fault = always(FAILED)
        await fleet.fill(1)
        assert isinstance(await fleet.send(), InferResponse)
        assert fleet.counted("gateway_routed_total", backend="idle1", reason="fallback") == 1

    simulated(THREE, main, slo_ms=5000, queue_rows=256)


def test_what_one_refused_and_the_next_failed_a_third_serves() -> None:
    async def main(fleet: Fleet) -> None:
        await fleet.fill(0)
        fleet.sessions[1].fault = always(FAILED)
        assert isinstance(await fleet.send(), InferResponse)
        assert ran(fleet)[1:] == [1, 1]

    simulated(THREE, main, slo_ms=5000, queue_rows=256)


FAILING = (Kind("stalled", 2.0, 0.5, 0.1), Kind("failing", 2.0, 0.5, 0.2), Kind("good", 2.0, 0.5, 0.3))


async def behind_a_run(fleet: Fleet, requests: int) -> tuple[asyncio.Future[Any], list[asyncio.Future[Any]]]:
    """A request that runs in the first lane, and others that wait behind it."""
    running = asyncio.ensure_future(fleet.send(9.0))
    await asyncio.sleep(0.001)
    return running, [asyncio.ensure_future(fleet.send(float(value))) for value in range(requests)]


def test_what_waited_behind_a_stalled_batch_and_the_next_failed_a_third_serves() -> None:
    async def main(fleet: Fleet) -> None:
        fleet.sessions[0].factor = 1000.0
        fleet.sessions[1].fault = always(FAILED)
        stalled, behind = await behind_a_run(fleet, 12)
        assert [outcome.outputs["Y"] for outcome in await asyncio.gather(*behind)] == list(range(12))
        assert fleet.counted("gateway_ejections_total", backend="failing1") == 1
        assert fleet.counted("gateway_ejections_total") == 1
        await stalled

    simulated(FAILING, main, slo_ms=200)


def test_what_waited_where_the_session_was_lost_and_the_next_failed_a_third_serves() -> None:
    async def main(fleet: Fleet) -> None:
        stalled = fleet.sessions[0]

        def lost(batch: Batch) -> Fault:
            stalled.live = 0
            return LOST[0], True, 20 * MS

        stalled.fault = lost
        fleet.sessions[1].fault = lambda batch: (
            FAILED if any(part.request.inputs["X"][0, 0] < 9 for part in batch.parts) else None
        )
        running, behind = await behind_a_run(fleet, 5)
        assert [outcome.outputs["Y"] for outcome in await asyncio.gather(running, *behind)] == [9, *range(5)]
        assert fleet.counted("gateway_ejections_total", backend="failing1") == 1

    simulated(FAILING, main, slo_ms=200)


def test_what_waited_at_an_ejected_backend_and_the_next_failed_a_third_serves() -> None:
    async def main(fleet: Fleet) -> None:
        fleet.sessions[0].fault = always((LOST[0], True, 20 * MS))
        fleet.sessions[1].fault = always(FAILED)
        _, behind = await behind_a_run(fleet, 5)
        assert [outcome.outputs["Y"] for outcome in await asyncio.gather(*behind)] == list(range(5))
        assert fleet.counted("gateway_ejections_total", backend="stalled1") == 1

    simulated(FAILING, main, slo_ms=200, routing={"ejection": {"consecutive_failures": 1}})


def test_what_was_moved_to_a_backend_that_is_ejected_moves_on() -> None:
    async def main(fleet: Fleet) -> None:
        fleet.sessions[0].factor = 1000.0
        fleet.sessions[1].fault = always((LOST[0], True, 20 * MS))
        stalled, behind = await behind_a_run(fleet, 12)
        assert [outcome.outputs["Y"] for outcome in await asyncio.gather(*behind)] == list(range(12))
        assert ran(fleet)[1] == 1
        await stalled

    routing = {"ejection": {"consecutive_failures": 1}}
    simulated(FAILING, main, slo_ms=200, routing=routing)


def test_what_made_room_for_a_higher_class_and_the_next_failed_a_third_serves() -> None:
    async def main(fleet: Fleet) -> None:
        fleet.sessions[1].fault = always(FAILED)
        low = None
        for _ in range(2):  # the second waits
            low = asyncio.ensure_future(fleet.send(7.0, rows=256, priority=4))
            await asyncio.sleep(0)
        high = asyncio.ensure_future(fleet.send(1.0, priority=1))
        assert low is not None
        outcome = await low
        assert isinstance(outcome, InferResponse)
        assert outcome.outputs["Y"][0] == 7.0
        assert fleet.counted("gateway_routed_total", backend="good1", reason="fallback") == 1
        assert isinstance(await high, InferResponse)

    simulated(FAILING, main, slo_ms=5000, queue_rows=256)


def test_what_ran_in_two_backends_is_not_run_in_a_third() -> None:
    async def main(fleet: Fleet) -> None:
        for sessions in fleet.sessions[:2]:
            sessions.fault = always(FAILED)
        assert isinstance(await fleet.send(), BackendFailed)
        assert ran(fleet) == [1, 1, 0]

    simulated(FAILING, main)


def test_what_waits_behind_slow_batches_everywhere_is_moved_once() -> None:
    async def main(fleet: Fleet) -> None:
        for sessions in fleet.sessions:
            sessions.factor = 1000.0
        for lane in fleet.lanes:
            lane.submit(fleet.request(), lambda outcome: None)
        await asyncio.sleep(0.001)
        outcome = await fleet.send(deadline_ns=fleet.clock.now_ns() + 1 * S)
        assert isinstance(outcome, (DeadlineExceeded, Overloaded))
        assert fleet.counted("gateway_routed_total", reason="fallback") == 1

    simulated(FAILING, main, slo_ms=2000, routing={"policy": "shortest_queue"})


def test_past_every_deadline_a_request_is_refused_with_the_time_to_come_back() -> None:
    async def main(fleet: Fleet) -> None:
        sent = [asyncio.ensure_future(fleet.send(rows=200)) for _ in range(50)]
        await asyncio.sleep(0)
        outcomes = [each.result() for each in sent if each.done()]
        assert outcomes
        assert all(isinstance(outcome, Overloaded) and outcome.retry_after_s is not None for outcome in outcomes)
        assert isinstance(await fleet.send(deadline_ns=fleet.clock.now_ns() - 1), DeadlineExceeded)
        await asyncio.gather(*sent)

    simulated((CHEAP, DEAR), main)


def test_with_no_backend_left_the_answer_says_so_at_once() -> None:
    async def main(fleet: Fleet) -> None:
        for sessions in fleet.sessions:
            sessions.available = False
        assert isinstance(await fleet.send(), BackendUnreachable)

    simulated((CHEAP, DEAR), main)


def test_a_cancelled_request_is_not_tried_elsewhere() -> None:
    async def main(fleet: Fleet) -> None:
        answers: list[InferResponse | GatewayError] = []
        fleet.dispatcher.submit(fleet.request(), answers.append).cancel()
        await asyncio.sleep(1)
        assert [type(answer) for answer in answers] == [Cancelled]
        assert ran(fleet) == [0, 0]

    simulated((CHEAP, DEAR), main)


def test_a_request_that_fell_back_is_cancelled_where_it_is_now() -> None:
    async def main(fleet: Fleet) -> None:
        fleet.sessions[0].fault = always(FAILED)
        answers: list[InferResponse | GatewayError] = []
        place = fleet.dispatcher.submit(fleet.request(), answers.append)
        await asyncio.sleep(0.0012)
        assert [lane.pending for lane in fleet.lanes] == [0, 1]
        place.cancel()
        assert [type(answer) for answer in answers] == [Cancelled]
        place.cancel()
        await asyncio.sleep(1)
        assert [lane.pending for lane in fleet.lanes] == [0, 0]
        assert len(answers) == 1

    simulated((CHEAP, DEAR), main)


def test_a_request_whose_wait_cannot_be_watched_is_served_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    async def main(fleet: Fleet) -> None:
        class Stopped:
            """A clock that sets no timers."""

            now_ns = staticmethod(fleet.clock.now_ns)

            def call_at(self, when_ns: int, callback: Callable[[], None]) -> Timer:
                raise MemoryError("injected")

        dispatcher = Dispatcher(fleet.lanes, fleet.model, fleet.metrics, Stopped())
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        dispatcher.submit(fleet.request(), done.set_result)
        assert isinstance(await done, InferResponse)

    simulated((CHEAP, DEAR), main)
    assert "MemoryError: injected" in caplog.text


def test_requests_of_lanes_that_close_are_refused_and_what_runs_is_answered() -> None:
    async def main(fleet: Fleet) -> None:
        running = asyncio.ensure_future(fleet.send())
        await asyncio.sleep(0)
        closing = asyncio.gather(*(lane.close() for lane in fleet.lanes))
        await asyncio.sleep(0)
        assert isinstance(await fleet.send(), (BackendUnreachable, NotReady))
        assert isinstance(await running, InferResponse)
        await closing

    simulated((CHEAP, DEAR), main)


# copies


def test_a_shadows_answers_are_compared_and_never_given() -> None:
    async def main(fleet: Fleet) -> None:
        outcomes = [await fleet.send(float(value)) for value in range(20)]
        assert all(isinstance(outcome, InferResponse) for outcome in outcomes)
        await asyncio.sleep(1)
        assert ran(fleet) == [20, 10]
        assert fleet.counted("gateway_copies_total", backend="shadow1", result="match") == 10

    simulated((CHEAP, shadow(0.5)), main)


def test_a_shadow_that_answers_otherwise_is_counted_so() -> None:
    async def main(fleet: Fleet) -> None:
        original = fleet.sessions[1].start

        def falsify(batch: Batch, on_done: Any, on_part: OnBatchPart | None = None) -> None:
            for part in batch.parts:
                part.request.inputs["X"] += 1  # of the copy, whose arrays are its own
            original(batch, on_done)

        fleet.lanes[1].runs.runner = _Falsifying(fleet.sessions[1], falsify)
        outcome = await fleet.send(5.0)
        assert isinstance(outcome, InferResponse)
        assert outcome.outputs["Y"] == 5.0
        await asyncio.sleep(1)
        assert fleet.counted("gateway_copies_total", backend="shadow1", result="differs") == 1

    simulated((CHEAP, shadow(1.0)), main)


class _Falsifying:
    """A runner whose start is another."""

    def __init__(self, runner: Any, start: Callable[[Batch, Any, Any], None]) -> None:
        self._runner = runner
        self.start = start

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


@pytest.mark.parametrize("fault", [FAILED, LOST, (BackendFailed("slow"), False, 10 * S)], ids=["failed", "lost", "slow"])
def test_a_shadow_that_fails_or_hangs_delays_nobody(fault: Fault) -> None:
    async def main(fleet: Fleet) -> None:
        fleet.sessions[1].fault = always(fault)
        for _ in range(20):
            started_ns = fleet.clock.now_ns()
            assert isinstance(await fleet.send(), InferResponse)
            assert fleet.clock.now_ns() - started_ns == 2_500_000  # 2 + 0.5, as alone
        await asyncio.sleep(20)
        assert ran(fleet)[1] <= 3  # ejected, or busy

    simulated((CHEAP, shadow(1.0)), main)


def test_copies_share_no_memory_with_the_request() -> None:
    async def main(fleet: Fleet) -> None:
        request = fleet.request(3.0)
        answers: list[Any] = []
        fleet.dispatcher.submit(request, answers.append)
        request.inputs["X"][:] = 99.0  # as a client may do with a shared region once it has its answer
        seen: list[float] = []
        fleet.sessions[1].fault = lambda batch: seen.append(float(batch.concat()["X"][0, 0]))  # type: ignore[func-returns-value]
        await asyncio.sleep(1)
        assert seen == [3.0]

    simulated((CHEAP, shadow(1.0)), main)


# what fails beside a request is nothing to it


class Uncopyable(np.ndarray[Any, Any]):
    """For which there is no memory left once it was sent."""

    def copy(self, order: Any = "C") -> Any:
        raise MemoryError


def test_a_request_that_cannot_be_copied_is_answered_once() -> None:
    async def main(fleet: Fleet) -> None:
        request = fleet.request(7.0)
        request.inputs["X"] = request.inputs["X"].view(Uncopyable)
        answers: list[InferResponse | GatewayError] = []
        fleet.dispatcher.submit(request, answers.append)
        await asyncio.sleep(1)
        assert [type(answer) for answer in answers] == [InferResponse]
        assert ran(fleet) == [1, 0]
        assert isinstance(await fleet.send(), InferResponse)
        await asyncio.sleep(1)
        assert ran(fleet) == [2, 1]

    simulated((CHEAP, shadow(1.0)), main)


@pytest.mark.parametrize("kind", [OSError, GeneratorExit, asyncio.CancelledError])
def test_a_request_whose_backend_cannot_be_woken_is_answered_once(
    kind: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    async def main(fleet: Fleet) -> None:
        (sessions,) = fleet.sessions
        go(sessions, live=0)

        def fail() -> None:
            raise kind

        sessions.on_wake = fail
        answers: list[InferResponse | GatewayError] = []
        fleet.dispatcher.submit(fleet.request(7.0), answers.append)
        assert sessions.woken == 1
        go(sessions, live=1)
        await asyncio.sleep(1)
        assert [type(answer) for answer in answers] == [InferResponse]
        assert [record.message for record in caplog.records] == ["a request sent to m:1/cheap1 could not be accounted for"]

    simulated((CHEAP,), main, slo_ms=None)


def pairs(array: np.ndarray) -> dict[str, np.ndarray]:
    """An output of a type that has no numbers to compare."""
    return {"Y": np.zeros(array.shape, [("one", np.float32), ("other", np.float32)])}


@pytest.mark.parametrize("slower", [0, 1], ids=["request", "copy"])
def test_a_request_whose_answer_cannot_be_compared_is_answered_once(slower: int) -> None:
    async def main(fleet: Fleet) -> None:
        for lane in fleet.lanes:
            lane.runner = lane.runs.runner = Altering(lane.runner, pairs)
        fleet.sessions[slower].factor = 10.0  # and is the last to end, which compares
        answers: list[InferResponse | GatewayError] = []
        fleet.dispatcher.submit(fleet.request(), answers.append)
        await asyncio.sleep(1)
        assert [type(answer) for answer in answers] == [InferResponse]
        assert ran(fleet) == [1, 1]
        assert [lane.pending for lane in fleet.lanes] == [0, 0]

    simulated((CHEAP, shadow(1.0)), main)


# who is asked, and who is to blame


def health(fleet: Fleet, index: int) -> str:
    lanes = {lane["backend"]: lane["health"] for lane in fleet.dispatcher.explain()["lanes"]}
    return str(lanes[fleet.model.backends[index].label])


def test_a_request_is_tried_at_two_backends_and_not_at_a_third() -> None:
    async def main(fleet: Fleet) -> None:
        for sessions in fleet.sessions:
            sessions.fault = always(FAILED)
        assert isinstance(await fleet.send(), BackendFailed)
        assert ran(fleet) == [1, 1, 0]

    simulated((CHEAP, Kind("next", 2.0, 0.5, 0.2), DEAR), main)


def test_the_second_backend_runs_a_request_once_more_if_it_loses_its_session() -> None:
    async def main(fleet: Fleet) -> None:
        faults = [LOST]
        fleet.sessions[0].fault = always(LOST)
        fleet.sessions[1].fault = lambda batch: faults.pop() if faults else None
        assert isinstance(await fleet.send(), InferResponse)
        assert ran(fleet) == [1, 2, 0]

    simulated((CHEAP, Kind("next", 2.0, 0.5, 0.2), DEAR), main)


def test_past_its_deadline_a_failed_request_is_not_tried_elsewhere() -> None:
    async def main(fleet: Fleet) -> None:
        fleet.sessions[0].fault = always((BackendFailed("slow"), False, 61 * MS))
        assert isinstance(await fleet.send(), BackendFailed)
        assert ran(fleet) == [1, 0]

    simulated((CHEAP, DEAR), main)


def test_served_elsewhere_it_was_the_backend_and_failed_elsewhere_the_request() -> None:
    async def main(fleet: Fleet) -> None:
        fleet.sessions[0].fault = always(FAILED)
        await fleet.send()
        assert health(fleet, 0).startswith("live, 1 failure in a row, 1 of the last")
        assert health(fleet, 1).startswith("live, 0 failures in a row")
        fleet.sessions[1].fault = always(FAILED)
        await fleet.send()
        assert health(fleet, 0).startswith("live, 1 failure in a row")
        assert health(fleet, 1).startswith("live, 0 failures in a row")
        fleet.sessions[1].available = False  # nobody is left to tell
        await fleet.send()
        assert health(fleet, 0).startswith("live, 2 failures in a row")

    simulated((CHEAP, DEAR), main)


def test_one_request_that_hangs_alone_ejects_a_backend_once_its_time_to_be_saved_has_passed() -> None:
    async def main(fleet: Fleet) -> None:
        fleet.sessions[0].fault = always((BackendFailed("hung"), False, 300 * MS))
        assert isinstance(await fleet.send(), GatewayError)
        assert fleet.counted("gateway_ejections_total", backend="cheap1") == 1
        assert fleet.counted("gateway_ejections_total") == 1

    simulated((CHEAP, DEAR), main)


def test_one_request_that_hangs_wherever_it_runs_alone_ejects_nobody() -> None:
    async def main(fleet: Fleet) -> None:
        for sessions in fleet.sessions:
            sessions.fault = always((BackendFailed("hung"), False, 2 * S))
        assert isinstance(await fleet.send(), BackendFailed)
        assert ran(fleet) == [1, 1]
        assert fleet.counted("gateway_ejections_total") == 0
        assert (health(fleet, 0), health(fleet, 1)) == ("live, 0 failures in a row, 0 of the last 3",) * 2

    simulated((CHEAP, DEAR), main, slo_ms=None)


def test_a_batch_that_fails_soon_excuses_nobody_for_the_one_that_hung() -> None:
    async def main(fleet: Fleet) -> None:
        cheap, dear = fleet.sessions
        cheap.fault = always((BackendFailed("hung"), False, 2 * S))
        dear.factor = 1000.0
        hung = asyncio.ensure_future(fleet.send())
        await asyncio.sleep(2.1)  # it is with the other now
        cheap.fault = lambda batch: FAILED if len(batch.parts) > 1 else None
        done: list[InferResponse | GatewayError] = []
        for _ in range(2):
            fleet.lanes[0].submit(fleet.request(), done.append)
        await asyncio.sleep(0.5)
        assert [type(outcome) for outcome in done] == [InferResponse] * 2
        assert cheap.batches[2] == 1
        assert not hung.done()
        assert isinstance(await hung, InferResponse)
        assert fleet.counted("gateway_ejections_total", backend="cheap1") == 1

    simulated((CHEAP, DEAR), main, slo_ms=None, batching="greedy")


@pytest.mark.parametrize("requests", [2, 3])
def test_a_batch_that_hangs_ejects_a_backend_and_one_that_fails_soon_does_not(requests: int) -> None:
    async def main(fleet: Fleet) -> None:
        fleet.sessions[0].fault = lambda batch: FAILED if len(batch.parts) > 1 else None
        for _ in range(5):
            outcomes = await asyncio.gather(*(fleet.send() for _ in range(requests)))
            assert all(isinstance(outcome, InferResponse) for outcome in outcomes)
        assert fleet.counted("gateway_ejections_total") == 0
        assert health(fleet, 0) == f"live, 0 failures in a row, 0 of the last {3 + 5 * requests}"
        fleet.sessions[0].fault = always((BackendFailed("hung"), False, 300 * MS))
        await asyncio.gather(*(fleet.send() for _ in range(requests)))
        assert fleet.counted("gateway_ejections_total", backend="cheap1") == 1

    simulated((CHEAP, DEAR), main)


def test_lost_sessions_eject_whatever_they_ran() -> None:
    async def main(fleet: Fleet) -> None:
        fleet.sessions[0].fault = always(LOST)
        for lost in (1, 2):
            await fleet.send()
            assert health(fleet, 0).startswith(f"live, {lost} failure")
        await fleet.send()
        assert fleet.counted("gateway_ejections_total", backend="cheap1") == 1

    simulated((CHEAP, DEAR), main)


@pytest.mark.parametrize(("fault", "what"), [(LOST, "is"), (LOST_LATE, "hung, and is")])
def test_it_is_logged_who_is_ejected_why_and_who_is_back(fault: Fault, what: str, caplog: pytest.LogCaptureFixture) -> None:
    async def main(fleet: Fleet) -> None:
        fleet.sessions[0].fault = always(fault)
        await fleet.send()
        told = f"m:1/cheap1 {what} ejected for 1 s after 1 failure in a row, 1 of the last 4; 0 of 2 probes"
        assert caplog.messages == [told]
        fleet.sessions[0].fault = always(None)
        for _ in range(15):
            await asyncio.sleep(0.1)
            await fleet.send()
        assert caplog.messages[1:] == ["m:1/cheap1 is back"]

    simulated((CHEAP, DEAR), main, routing={"ejection": {"consecutive_failures": 1}})


def test_an_ejected_backend_that_takes_long_is_probed_with_one_copy_at_a_time() -> None:
    async def main(fleet: Fleet) -> None:
        fleet.sessions[0].fault = always(LOST)
        await fleet.send()
        fleet.sessions[0].fault = always((BackendFailed("slow"), False, 900 * MS))
        before = ran(fleet)[0]
        for _ in range(180):  # for 1.8 s, of which it pauses for one
            await asyncio.sleep(0.01)
            await fleet.send()
        await asyncio.sleep(2.0)
        assert ran(fleet)[0] == before + 1
        assert fleet.counted("gateway_copies_total", why="probe") == 1

    simulated((CHEAP, DEAR), main, routing={"ejection": {"consecutive_failures": 1}})


def test_the_start_that_a_copy_asked_for_is_noticed_though_nobody_comes_by() -> None:
    async def main(fleet: Fleet) -> None:
        _, dear = fleet.sessions
        go(dear, live=0)
        for _ in range(3):  # 35 ms of an SLO of 60, by what is known: in time, but not comfortably
            await fleet.send(rows=14)
            await asyncio.sleep(0.1)
        assert dear.woken > 0
        assert ran(fleet)[0] == 3
        await asyncio.sleep(3.0)
        go(dear, live=1)
        await asyncio.sleep(100.0)
        go(dear, live=0)
        cold = {lane["backend"]: lane["cold_start_ms"] for lane in fleet.dispatcher.explain()["lanes"]}
        assert cold["dear1"] == pytest.approx(3200, abs=200)

    simulated((CHEAP, DEAR), main)


async def full(fleet: Fleet) -> None:
    """The dear backend's queue is full for 26 s."""
    fleet.sessions[1].factor = 1000.0
    for rows in (256, 2048, 2048):
        fleet.lanes[1].submit(fleet.request(rows=rows), lambda outcome: None)
        await asyncio.sleep(0.0001)


async def refusing(fleet: Fleet) -> None:
    """The dear backend takes nothing, though it looks idle."""

    def submit(request: InferRequest, on_answer: OnAnswer, on_answer_part: OnAnswerPart | None = None) -> Place:
        raise Overloaded("told to")

    fleet.lanes[1].submit = submit  # type: ignore[method-assign]  # the lane is the test's to spoil


@pytest.mark.parametrize("elsewhere", [full, refusing])
def test_what_no_other_backend_takes_waits_for_the_next_session(
    elsewhere: Callable[[Fleet], Coroutine[Any, Any, None]],
) -> None:
    async def main(fleet: Fleet) -> None:
        cheap = fleet.sessions[0]
        await elsewhere(fleet)

        def rebuilt() -> None:
            cheap.live = 1
            cheap.on_change()

        def fault(batch: Batch) -> Fault | None:
            cheap.fault = always(None)
            cheap.live = 0
            fleet.clock.call_at(fleet.clock.now_ns() + 100 * MS, rebuilt)
            return LOST

        cheap.fault = fault
        runs = asyncio.ensure_future(fleet.send(1.0))
        await asyncio.sleep(0.0001)
        waits = [asyncio.ensure_future(fleet.send(value)) for value in (2.0, 3.0)]
        for value, outcome in enumerate(await asyncio.gather(runs, *waits), start=1):
            assert isinstance(outcome, InferResponse)
            assert outcome.outputs["Y"] == value
        assert fleet.counted("gateway_routed_total", backend="dear1", reason="fallback") == 0
        assert fleet.counted("gateway_retries_total", backend="cheap1") == 1

    simulated((CHEAP, DEAR), main, slo_ms=None)


def test_under_overload_what_is_of_a_higher_class_is_in_time() -> None:
    async def main(fleet: Fleet) -> None:
        sent = []
        for at in range(2000):  # 800/s, a quarter of it of the higher class, where about 140/s can be served
            sent.append(asyncio.ensure_future(fleet.send(priority=1 if at % 16 == 0 else 3)))
            await asyncio.sleep(1 / 800)
        outcomes = [type(outcome) for outcome in await asyncio.gather(*sent)]
        high, low = outcomes[::16], [each for at, each in enumerate(outcomes) if at % 16]
        assert high.count(InferResponse) > 0.95 * len(high)
        assert low.count(InferResponse) < 0.3 * len(low)

    slow = Kind("slow", 20.0, 10.0, 0.5)
    simulated((slow, slow), main, slo_ms=200)


def test_a_request_that_moves_makes_room_among_lower_classes() -> None:
    async def main(fleet: Fleet) -> None:
        await full(fleet)
        fleet.sessions[0].fault = always(LOST)
        sent = asyncio.ensure_future(fleet.send(priority=1))
        await asyncio.sleep(0.01)
        assert fleet.counted("gateway_routed_total", backend="dear1", reason="fallback") == 1
        assert isinstance(await sent, InferResponse)

    simulated((CHEAP, DEAR), main, slo_ms=None)


def test_what_waits_at_a_backend_that_is_ejected_goes_elsewhere_at_once() -> None:
    async def main(fleet: Fleet) -> None:
        faults = [(LOST[0], True, 20 * MS)]
        fleet.sessions[0].fault = lambda batch: faults.pop() if faults else None
        running = asyncio.ensure_future(fleet.send())
        await asyncio.sleep(0.001)
        behind = [asyncio.ensure_future(fleet.send()) for _ in range(3)]
        await asyncio.sleep(0.02)
        assert fleet.counted("gateway_ejections_total", backend="cheap1") == 1
        await asyncio.gather(running, *behind)
        assert ran(fleet)[0] == 1
        assert fleet.counted("gateway_routed_total", backend="dear1", reason="fallback") == 4

    simulated((CHEAP, DEAR), main, slo_ms=None, routing={"ejection": {"consecutive_failures": 1}})


def test_every_routed_request_and_the_price_of_every_execution_is_counted() -> None:
    async def main(fleet: Fleet) -> None:
        for _ in range(4):
            await fleet.send()
        assert fleet.counted("gateway_routed_total", backend="cheap1", reason="cheapest") == 4
        assert fleet.counted("gateway_routed_total") == 4
        # with the three of the warm-up: two sessions at 3.6 $/h, so 1.8 for each, busy for 2.5 ms each time
        assert fleet.counted("gateway_busy_usd_total", backend="cheap1") == pytest.approx(7 * 1.8 / 3600 * 0.0025)

    simulated((Kind("cheap", 2.0, 0.5, 3.6, sessions=2), Kind("dear", 1.0, 0.1, 360.0)), main)


def test_the_one_backend_of_a_model_is_not_routed() -> None:
    async def main(fleet: Fleet) -> None:
        assert isinstance(await fleet.send(), InferResponse)
        assert ran(fleet) == [1]
        assert fleet.counted("gateway_routed_total") == 0

    simulated((CHEAP,), main)


def test_a_backend_that_was_missing_gets_requests_once_it_has_joined() -> None:
    async def main(fleet: Fleet) -> None:
        dispatcher = Dispatcher(fleet.lanes[1:], fleet.model, fleet.metrics, fleet.clock)
        fleet.dispatcher = dispatcher
        await fleet.send()
        assert ran(fleet) == [0, 1]
        assert fleet.counted("gateway_routed_total", backend="dear1") == 1
        dispatcher.join(fleet.lanes[0])
        fleet.sessions[1].fault = always(FAILED)
        assert isinstance(await fleet.send(), InferResponse)
        await asyncio.sleep(0.2)
        await fleet.send()
        assert ran(fleet)[0] >= 1
        assert fleet.counted("gateway_routed_total", backend="cheap1") >= 1

    simulated((CHEAP, DEAR), main)


def test_what_came_before_a_missing_backend_joined_is_served_by_it_if_the_session_is_lost() -> None:
    async def main(fleet: Fleet) -> None:
        cheap = fleet.sessions[0]

        def fault(batch: Batch) -> Fault | None:
            cheap.live = 0
            return LOST

        cheap.fault = fault
        fleet.dispatcher = Dispatcher(fleet.lanes[:1], fleet.model, fleet.metrics, fleet.clock)
        runs = asyncio.ensure_future(fleet.send(1.0))
        await asyncio.sleep(0)
        await asyncio.sleep(0.0001)
        waits = asyncio.ensure_future(fleet.send(2.0))
        await asyncio.sleep(0)
        fleet.dispatcher.join(fleet.lanes[1])
        for value, outcome in enumerate(await asyncio.gather(runs, waits), start=1):
            assert isinstance(outcome, InferResponse)
            assert outcome.outputs["Y"] == value
        assert ran(fleet)[0] == 1
        assert fleet.counted("gateway_routed_total", backend="dear1", reason="fallback") == 2

    simulated((CHEAP, DEAR), main, slo_ms=None)


def test_nothing_of_an_answered_request_stays() -> None:
    def requests() -> int:
        gc.collect()
        return sum(type(one) is InferRequest for one in gc.get_objects())

    async def main(fleet: Fleet) -> None:
        before = requests()
        fleet.sessions[0].fault = always(FAILED)
        for _ in range(3):
            assert isinstance(await fleet.send(), InferResponse)
        await asyncio.sleep(1)
        assert requests() <= before

    simulated((CHEAP, DEAR, shadow(1.0)), main)


@pytest.mark.parametrize("fault", [None, FAILED], ids=["served", "fell back"])
def test_an_answered_request_is_freed_without_the_collector(fault: Fault | None) -> None:
    def requests() -> int:
        return sum(type(one) is InferRequest for one in gc.get_objects())

    async def main(fleet: Fleet) -> None:
        fleet.sessions[0].fault = always(fault)
        await fleet.send()
        gc.collect()
        before = requests()
        gc.disable()
        try:
            for _ in range(3):
                assert isinstance(await fleet.send(), InferResponse)
            await asyncio.sleep(1)
            assert requests() <= before
        finally:
            gc.enable()

    simulated((CHEAP, DEAR), main)


def test_what_one_backend_has_failed_and_the_next_gives_up_unrun_is_told_that_it_failed() -> None:
    async def main(fleet: Fleet) -> None:
        fleet.sessions[0].fault = always(FAILED)
        fleet.lanes[1].submit(fleet.request(rows=256), lambda outcome: None)  # runs for long
        await asyncio.sleep(0.001)
        asked = asyncio.ensure_future(fleet.send(rows=200, priority=4))
        await asyncio.sleep(0.004)
        assert (ran(fleet), fleet.lanes[1].pending) == ([1, 0], 2)
        fleet.lanes[1].submit(fleet.request(rows=200, priority=1), lambda outcome: None)  # makes room
        assert await asked is FAILED[0]

    simulated((CHEAP, DEAR), main, slo_ms=5000, queue_rows=256)


class Looked(set[Batch]):
    """Counts how often all of it is looked at."""

    looks = 0

    def __iter__(self) -> Iterator[Batch]:
        self.looks += 1
        return super().__iter__()


def test_what_runs_is_not_looked_through_for_each_request_that_is_handed_over() -> None:
    async def main(fleet: Fleet) -> None:
        busy, other = fleet.lanes
        fleet.sessions[0].factor = 1000
        asked = [asyncio.ensure_future(fleet.send(rows=rows)) for rows in (256, *[2] * 8)]
        await asyncio.sleep(0.001)
        assert (busy.pending, len(busy.runs.running), other.pending) == (9, 1, 0)
        busy.runs.running = running = Looked(busy.runs.running)
        busy.hand_over_all(fleet.clock.now_ns())
        assert (busy.pending, other.pending, running.looks) == (1, 8, 0)
        await asyncio.gather(*asked)

    simulated((CHEAP, DEAR), main, slo_ms=None, routing={"policy": "cheapest"})


def test_what_is_given_up_goes_to_no_other_backend() -> None:
    async def main(fleet: Fleet) -> None:
        asked = [asyncio.ensure_future(fleet.send()) for _ in range(8)]
        await asyncio.sleep(0)
        assert all(lane.pending for lane in fleet.lanes)
        for lane in fleet.lanes:
            lane.give_up()
        assert {type(outcome) for outcome in await asyncio.gather(*asked)} == {NotReady}

    simulated((CHEAP, CHEAP), main, routing={"policy": "shortest_queue"}, slo_ms=None)


@pytest.mark.parametrize("fault", [FAILED, LOST], ids=["failed", "lost"])
def test_what_one_backend_has_run_and_another_gives_up_before_it_runs_is_told_that_it_may_have_run(fault: Fault) -> None:
    async def main(fleet: Fleet) -> None:
        fleet.sessions[0].fault = always(fault)
        fleet.sessions[1].live = 0  # and will be
        moved = asyncio.ensure_future(fleet.send(deadline_ns=None))
        await asyncio.sleep(0.01)
        assert [lane.pending for lane in fleet.lanes] == [0, 1]
        for lane in fleet.lanes:
            lane.give_up()
        assert isinstance(await moved, DeadlineExceeded)
        assert ran(fleet) == [1, 0]

    simulated((CHEAP, DEAR), main, slo_ms=None)


def test_closed_it_counts_nobody_as_ejected_and_nothing_more() -> None:
    async def main(fleet: Fleet) -> None:
        fleet.sessions[0].fault = always(LOST)
        for _ in range(3):
            await fleet.send()
        assert fleet.counted("gateway_ejected", backend="cheap1") == 1
        routed = fleet.counted("gateway_routed_total")
        fleet.dispatcher.close()
        assert fleet.counted("gateway_ejected") == 0
        assert all(lane.observer is None for lane in fleet.lanes)
        await fleet.send()
        assert fleet.counted("gateway_routed_total") == routed

    simulated((CHEAP, DEAR), main)


# refusals


def test_what_is_refused_is_told_how_late_it_would_have_been() -> None:
    async def main(fleet: Fleet) -> None:
        for lane in fleet.lanes:
            lane.submit(fleet.request(), lambda outcome: None)
        await asyncio.sleep(0)
        outcome = await fleet.send(deadline_ns=fleet.clock.now_ns() + 10 * MS)
        assert isinstance(outcome, Overloaded)
        assert outcome.retry_after_s == pytest.approx(0.040)
        assert outcome.message == "model 'm': overloaded, every backend would answer after the deadline, the first 40 ms late"
        assert fleet.counted("gateway_routed_total", backend="", reason="late") == 1

    simulated((Kind("slower", 28.0, 2.0, 0.1), Kind("slow", 20.0, 5.0, 1.0)), main)


def test_with_nobody_left_the_refusal_says_when_to_come_back_and_is_counted() -> None:
    async def main(fleet: Fleet) -> None:
        for sessions in fleet.sessions:
            sessions.available = False
        outcome = await fleet.send()
        assert isinstance(outcome, BackendUnreachable)
        assert (outcome.message, outcome.retry_after_s) == ("model 'm': no backend has a live session", 1.0)
        assert fleet.counted("gateway_routed_total", backend="", reason="down") == 1

    simulated((CHEAP, DEAR), main)


def test_a_request_that_came_after_its_deadline_is_told_so_and_wakes_nobody() -> None:
    async def main(fleet: Fleet) -> None:
        for sessions in fleet.sessions:
            go(sessions, live=0)
        outcome = await fleet.send(deadline_ns=fleet.clock.now_ns() - 1)
        assert isinstance(outcome, DeadlineExceeded)
        assert outcome.message == "model 'm': the request came after its deadline"
        assert [sessions.woken for sessions in fleet.sessions] == [0, 0]
        assert fleet.counted("gateway_routed_total") == 0

    simulated((CHEAP, DEAR), main)


def test_what_finds_all_backends_at_zero_wakes_them_but_no_shadow() -> None:
    async def main(fleet: Fleet) -> None:
        for sessions in fleet.sessions:
            go(sessions, live=0)
        outcome = await fleet.send()
        assert isinstance(outcome, BackendUnreachable)
        assert outcome.message == "model 'm': is starting, an answer would come 9.9 s after the deadline"
        assert [sessions.woken for sessions in fleet.sessions] == [1, 1, 0]

    simulated((CHEAP, DEAR, shadow(1.0)), main)


class NotingClock(SimulatedClock):
    """Notes for how long each timer is set."""

    def __init__(self, loop: Any) -> None:
        super().__init__(loop)
        self.delays_ns: list[int] = []

    def call_at(self, when_ns: int, callback: Callable[[], None]) -> Timer:
        self.delays_ns.append(when_ns - self.now_ns())
        return super().call_at(when_ns, callback)


def noted(main: Callable[[Fleet, list[int]], Coroutine[Any, Any, None]], **options: Any) -> None:
    """As simulated, with for how long each timer is set."""

    async def run(clock: SimulatedClock) -> None:
        noting = NotingClock(asyncio.get_running_loop())
        fleet = Fleet(noting, (CHEAP, DEAR), **options)
        await asyncio.gather(*(warm(fleet, index) for index in range(2)))
        noting.delays_ns.clear()
        await main(fleet, noting.delays_ns)

    run_simulated(run)


def test_with_nothing_left_to_look_at_no_timer_is_set() -> None:
    async def main(fleet: Fleet, delays_ns: list[int]) -> None:
        for sessions in fleet.sessions:
            go(sessions, live=0)
        assert isinstance(await fleet.send(), BackendUnreachable)
        await asyncio.sleep(1.0)
        delays_ns.clear()
        await asyncio.sleep(1.0)
        assert len(delays_ns) == pytest.approx(1000 / 3.75, abs=2)  # whether they have started
        for sessions in fleet.sessions:
            go(sessions, live=1)
        await asyncio.sleep(1.0)
        assert isinstance(await fleet.send(), InferResponse)
        await asyncio.sleep(1.0)
        delays_ns.clear()
        await asyncio.sleep(100.0)
        assert delays_ns == []

    noted(main)


def test_a_closed_dispatcher_looks_at_nothing() -> None:
    async def main(fleet: Fleet, delays_ns: list[int]) -> None:
        for sessions in fleet.sessions:
            go(sessions, live=0)
        await fleet.send()
        fleet.dispatcher.close()
        await asyncio.sleep(0.1)
        delays_ns.clear()
        await asyncio.sleep(1.0)
        assert delays_ns == []

    noted(main)


@pytest.mark.parametrize(("slo_ms", "look_ns"), [(8.0, MS), (60.0, 3_750_000), (None, 3_125_000), (4000.0, 50 * MS)])
def test_what_waits_is_looked_at_every_sixteenth_of_the_slo_within_bounds(slo_ms: float | None, look_ns: int) -> None:
    async def main(fleet: Fleet, delays_ns: list[int]) -> None:
        fleet.sessions[0].fault = always((BackendFailed("slow"), False, 6 * S))
        sent = [asyncio.ensure_future(fleet.send()) for _ in range(5)]
        await asyncio.sleep(0.0001)
        assert delays_ns.count(look_ns) == 1  # one for all
        await asyncio.sleep(10.5 * look_ns / 1e9)
        assert delays_ns.count(look_ns) == 11
        await asyncio.gather(*sent)

    noted(main, slo_ms=slo_ms)


def test_a_second_stall_is_noticed_as_the_first_was() -> None:
    async def main(fleet: Fleet) -> None:
        for _ in range(2):
            fleet.sessions[0].factor = 1000.0
            stalled = asyncio.ensure_future(fleet.send())
            await asyncio.sleep(0.001)
            behind = [asyncio.ensure_future(fleet.send()) for _ in range(3)]
            started_ns = fleet.clock.now_ns()
            assert all(isinstance(outcome, InferResponse) for outcome in await asyncio.gather(*behind))
            assert fleet.clock.now_ns() - started_ns < 60 * MS
            assert isinstance(await stalled, InferResponse)
            fleet.sessions[0].factor = 1.0
            for _ in range(30):
                await warm(fleet, 0)  # it is as fast as it was, and known to be
            await asyncio.sleep(1)

    simulated((CHEAP, DEAR), main)


def test_one_that_is_slow_beyond_all_prediction_is_ejected_and_counted() -> None:
    async def main(fleet: Fleet) -> None:
        fleet.sessions[0].factor = 100.0
        for _ in range(3):
            await fleet.send()
        assert fleet.counted("gateway_ejections_total", backend="cheap1") == 1
        assert fleet.counted("gateway_ejections_total") == 1

    simulated((CHEAP, DEAR), main, routing={"policy": "round_robin", "ejection": {"consecutive_failures": 1}})


@pytest.mark.parametrize("first_fails", [False, True])
def test_the_start_of_one_that_a_request_waits_for_is_counted_from_then_on(first_fails: bool) -> None:
    async def main(fleet: Fleet) -> None:
        go(fleet.sessions[1], live=0)
        if first_fails:
            fleet.sessions[0].fault = always((BackendFailed("no"), False, MS))
        else:
            fleet.sessions[0].available = False
        answer = asyncio.ensure_future(fleet.send())
        await asyncio.sleep(4.0)
        assert not answer.done()
        cold = {lane["backend"]: lane["cold_start_ms"] for lane in fleet.dispatcher.explain()["lanes"]}
        assert cold["dear1"] == pytest.approx(6000, abs=10)  # of the ten that are guessed
        go(fleet.sessions[1], live=1)
        assert isinstance(await answer, InferResponse)

    simulated((CHEAP, DEAR), main, slo_ms=None)


# copies, and what they are compared by


class Altering:
    """A runner whose outputs a test alters."""

    def __init__(self, runner: Any, change: Callable[[np.ndarray], dict[str, np.ndarray]]) -> None:
        self._runner = runner
        self._change = change

    def start(self, batch: Batch, on_done: OnBatchDone, on_part: OnBatchPart | None = None) -> None:
        def done(batch: Batch, execution: Execution) -> None:
            assert execution.outputs is not None
            on_done(batch, msgspec.structs.replace(execution, outputs=self._change(execution.outputs["Y"])))

        self._runner.start(batch, done)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


def large(array: np.ndarray, *, differs_at: int) -> dict[str, np.ndarray]:
    """An output of a row beyond what is compared, unlike the other backend's at one place."""
    changed = np.zeros((1, 1 << 19), np.float32)
    changed[0, differs_at] = 1.0
    return {"Y": changed}


@pytest.mark.parametrize(
    ("regular", "copied", "result"),
    [
        (lambda y: {"Y": y}, lambda y: {"Y": y + 0.0009}, "match"),
        (lambda y: {"Y": y}, lambda y: {"Y": y + 0.0011}, "differs"),
        (lambda y: {"Y": y + 1000}, lambda y: {"Y": y + 1000.9}, "match"),  # relative to what it is
        (lambda y: {"Y": y + 1000}, lambda y: {"Y": y + 1001.1}, "differs"),
        (lambda y: {"Y": y * np.nan}, lambda y: {"Y": y * np.nan}, "match"),
        (lambda y: {"Y": y}, lambda y: {"Y": y * np.nan}, "differs"),
        (lambda y: {"Y": y.astype(np.int64)}, lambda y: {"Y": y.astype(np.int64)}, "match"),
        (lambda y: {"Y": y.astype(np.int64)}, lambda y: {"Y": y.astype(np.int64) + 1}, "differs"),
        (lambda y: {"Y": y}, lambda y: {"Y": y.astype(np.float64)}, "differs"),
        (lambda y: {"Y": y}, lambda y: {"Y": y[:, None]}, "differs"),
        (lambda y: {"Y": y}, lambda y: {"Y": y, "Z": y}, "differs"),
        (lambda y: {"Y": y, "Z": y}, lambda y: {"Y": y, "Z": y + 1}, "differs"),
        (lambda y: {"Y": y.astype(ml_dtypes.bfloat16)}, lambda y: {"Y": y.astype(ml_dtypes.bfloat16)}, "match"),
        (lambda y: {"Y": y.astype(ml_dtypes.bfloat16)}, lambda y: {"Y": (y + 1).astype(ml_dtypes.bfloat16)}, "differs"),
        (partial(large, differs_at=1 << 18), partial(large, differs_at=(1 << 18) - 1), "differs"),
        (partial(large, differs_at=1 << 18), partial(large, differs_at=(1 << 18) + 1), "match"),  # beyond 1 MiB
    ],
)  # fmt: skip
def test_answers_are_compared_by_names_types_shapes_and_values(
    regular: Callable[[np.ndarray], dict[str, np.ndarray]], copied: Callable[[np.ndarray], dict[str, np.ndarray]], result: str
) -> None:
    async def main(fleet: Fleet) -> None:
        for lane, change in zip(fleet.lanes, (regular, copied), strict=True):
            lane.runner = lane.runs.runner = Altering(lane.runner, change)
        assert isinstance(await fleet.send(), InferResponse)
        await asyncio.sleep(1)
        assert fleet.counted("gateway_copies_total", why="shadow", result=result) == 1
        assert fleet.counted("gateway_copies_total") == 1

    simulated((CHEAP, shadow(1.0)), main)


def test_a_copy_to_a_shadow_whose_request_failed_is_counted_as_unpaired_and_one_refused_or_failed_as_that() -> None:
    async def main(fleet: Fleet) -> None:
        fleet.sessions[0].fault = always((InvalidArgument("no"), False, MS))
        await fleet.send()
        await asyncio.sleep(1)
        assert fleet.counted("gateway_copies_total", backend="shadow1", result="unpaired") == 1
        fleet.sessions[0].fault = always(None)
        fleet.sessions[1].fault = always((InvalidArgument("no"), False, MS))
        await fleet.send()
        await asyncio.sleep(1)
        assert fleet.counted("gateway_copies_total", backend="shadow1", why="shadow", result="failed") == 1
        for _ in range(4096 // 256):  # its queue is full, and no step is due
            fleet.lanes[1].batcher.add(fleet.request(rows=256), fleet.clock.now_ns())
        await fleet.send()
        assert fleet.counted("gateway_copies_total", backend="shadow1", why="shadow", result="refused") == 1
        assert fleet.counted("gateway_copies_total") == 3

    simulated((CHEAP, shadow(1.0)), main, slo_ms=None)


def test_a_copy_is_the_request_but_for_its_deadline_and_its_class() -> None:
    async def main(fleet: Fleet) -> None:
        seen: list[InferRequest] = []
        fleet.sessions[1].fault = lambda batch: seen.extend(part.request for part in batch.parts)  # type: ignore[func-returns-value]
        fields = {"outputs": (OutputRequest("Y"),), "parameters": {"k": 1}, "priority": 1, "shape_key": "s"}
        await fleet.send(3.0, rows=2, deadline_ns=fleet.clock.now_ns() + S, **fields)
        await asyncio.sleep(1)
        (copy,) = seen
        assert (copy.model, copy.version, copy.id, copy.rows, copy.priority) == ("m", "1", "", 2, 4)
        assert (copy.outputs, copy.parameters, copy.shape_key, copy.deadline_ns) == (fields["outputs"], {"k": 1}, "s", None)

    simulated((CHEAP, shadow(1.0)), main)


def test_a_probe_is_counted_and_none_goes_where_the_request_itself_went() -> None:
    async def main(fleet: Fleet) -> None:
        fresh = Fleet(fleet.clock, (CHEAP, DEAR))  # of unknown speed both: the first request teaches one of them
        assert isinstance(await fresh.send(), InferResponse)
        await asyncio.sleep(1)
        assert [sum(sessions.batches.values()) for sessions in fresh.sessions] == [1, 1]
        assert fresh.counted("gateway_copies_total", backend="dear1", why="learn", result="ok") == 1
        assert fresh.counted("gateway_copies_total") == 1

    simulated((CHEAP, DEAR), main)


def test_a_lost_copy_is_not_run_again() -> None:
    async def main(fleet: Fleet) -> None:
        fleet.sessions[1].fault = always(LOST)
        await fleet.send()
        await asyncio.sleep(1)
        assert ran(fleet) == [1, 1]

    simulated((CHEAP, shadow(1.0)), main)


def test_a_lost_copy_is_not_run_again_though_no_other_backend_may_stand_in() -> None:
    async def main(fleet: Fleet) -> None:
        fleet.sessions[1].fault = always(LOST)
        assert isinstance(await fleet.send(), InferResponse)
        await asyncio.sleep(1)
        assert ran(fleet) == [1, 1]

    simulated((CHEAP, shadow(1.0)), main, routing={"equivalent": [["cheap1"], ["shadow1"]]})


def test_an_explanation_names_the_model_its_promise_and_its_policy() -> None:
    async def main(fleet: Fleet) -> None:
        told = fleet.dispatcher.explain(4)
        assert {key: told[key] for key in ("model", "version", "rows", "slo_ms", "policy", "spill_share")} == {
            "model": "m", "version": "1", "rows": 4, "slo_ms": 60.0, "policy": "cheapest", "spill_share": 0.4,
        }  # fmt: skip
        assert (told["backend"], told["reason"]) == ("cheap1", "cheapest")
        own = {lane["backend"]: lane["own_ms"] for lane in told["lanes"]}
        assert own["cheap1"] == pytest.approx(4 * 2.5)  # only one row was seen: as four of them
        assert fleet.dispatcher.explain()["rows"] == 1

    simulated((CHEAP, DEAR), main, routing={"spill_share": 0.4})
    simulated((CHEAP, DEAR), _explained_without_slo, slo_ms=None)


def test_an_explanation_is_for_the_least_length_of_a_ragged_model() -> None:
    async def run(clock: SimulatedClock) -> None:
        fleet = Fleet(clock, (CHEAP,), ragged={"pad": {"X": 0}, "buckets": [1, 16]})
        await warm(fleet, 0)  # with requests of length 1
        fleet.sessions[0].factor = 8.0
        long = msgspec.structs.replace(fleet.request(), inputs={"X": np.zeros((1, 16), np.float32)})
        fleet.lanes[0].submit(long, lambda outcome: None)
        await asyncio.sleep(1)
        (lane,) = fleet.dispatcher.explain()["lanes"]
        assert lane["own_ms"] == pytest.approx(2.5)

    run_simulated(run)


async def _explained_without_slo(fleet: Fleet) -> None:
    assert fleet.dispatcher.explain()["slo_ms"] is None


# properties


@st.composite
def mischief(draw: st.DrawFn) -> list[tuple[int, int]]:
    """(after how many of its executions, what then) for each of three backends; see FAULTS."""
    return draw(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 3)), min_size=3, max_size=3))


FAULTS: tuple[Fault | None, ...] = (None, FAILED, LOST, (BackendFailed("slow"), False, 200 * MS))


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(
    troubles=mischief(),
    gaps_ms=st.lists(st.sampled_from([0.0, 0.1, 1.0, 20.0]), min_size=20, max_size=60),
    rows=st.integers(1, 300),
    cancelled=st.sets(st.integers(0, 59)),
    slo_ms=st.sampled_from([None, 20.0, 60.0]),
)
@pytest.mark.slow
def test_nothing_is_lost_or_answered_twice(
    troubles: list[tuple[int, int]], gaps_ms: list[float], rows: int, cancelled: set[int], slo_ms: float | None
) -> None:
    answers: list[list[InferResponse | GatewayError]] = [[] for _ in gaps_ms]

    async def main(clock: SimulatedClock) -> None:
        canary = Kind("canary", 1.0, 0.2, 0.3, options=(("canary_share", 0.2),))
        fleet = Fleet(clock, (CHEAP, DEAR, canary, shadow(0.3)), slo_ms=slo_ms)
        for sessions, (after, what) in zip(fleet.sessions, troubles, strict=False):
            sessions.fault = _from(after, FAULTS[what])
        sent: list[InferRequest] = []
        for index, gap_ms in enumerate(gaps_ms):
            request = fleet.request(float(index), rows=rows if index % 5 == 0 else 1)
            sent.append(request)
            try:
                fleet.dispatcher.submit(request, answers[index].append)
            except GatewayError as exc:
                assert not answers[index]
                answers[index].append(exc)
            if index in cancelled:
                for lane in fleet.lanes:
                    lane.cancel(sent[index // 2])
            await asyncio.sleep(gap_ms / 1000)
        await asyncio.sleep(30)
        assert all(lane.pending == 0 for lane in fleet.lanes)

    run_simulated(main)
    for index, got in enumerate(answers):
        (only,) = got
        if isinstance(only, InferResponse):
            assert np.all(only.outputs["Y"] == index)


def _from(after: int, fault: Fault | None) -> Callable[[Batch], Fault | None]:
    seen = 0

    def decide(batch: Batch) -> Fault | None:
        nonlocal seen
        seen += 1
        return fault if after < seen <= after + 20 else None

    return decide


# to zero and back


def go(sessions: Sessions, *, live: int) -> None:
    sessions.to_zero = True
    sessions.live = live
    sessions.on_change()


def test_at_zero_a_request_that_cannot_wait_so_long_is_refused_until_the_backend_it_woke_has_started() -> None:
    async def main(fleet: Fleet) -> None:
        (sessions,) = fleet.sessions
        go(sessions, live=0)
        refused = await fleet.send()
        assert isinstance(refused, BackendUnreachable)
        assert refused.retry_after_s == pytest.approx(10.0, abs=0.1)  # the first guess, less the SLO of 60 ms
        assert sessions.woken == 1
        await asyncio.sleep(4.0)
        later = await fleet.send()
        assert isinstance(later, BackendUnreachable)
        assert later.retry_after_s == pytest.approx(6.0, abs=0.1)
        go(sessions, live=1)
        assert isinstance(await fleet.send(), InferResponse)

    simulated((CHEAP,), main)


def test_the_next_start_is_taken_to_last_as_long_as_the_last_though_nobody_came_when_it_ended() -> None:
    async def main(fleet: Fleet) -> None:
        (sessions,) = fleet.sessions
        go(sessions, live=0)
        await fleet.send()
        await asyncio.sleep(3.0)
        go(sessions, live=1)
        await asyncio.sleep(100.0)
        go(sessions, live=0)
        refused = await fleet.send()
        assert isinstance(refused, BackendUnreachable)
        assert refused.retry_after_s == pytest.approx(3.0, abs=0.1)

    simulated((CHEAP,), main)


def test_the_first_start_is_taken_to_last_as_long_as_the_one_when_the_model_was_loaded() -> None:
    async def main(fleet: Fleet) -> None:
        (sessions,) = fleet.sessions
        sessions.cold_start_ns = 2 * S
        fleet.dispatcher = Dispatcher(fleet.lanes, fleet.model, fleet.metrics, fleet.clock)
        go(sessions, live=0)
        refused = await fleet.send()
        assert isinstance(refused, BackendUnreachable)
        assert refused.retry_after_s == pytest.approx(2.0, abs=0.1)

    simulated((CHEAP,), main)


def test_at_zero_a_request_that_can_wait_does() -> None:
    async def main(fleet: Fleet) -> None:
        (sessions,) = fleet.sessions
        go(sessions, live=0)
        answer = asyncio.ensure_future(fleet.send(7.0))
        await asyncio.sleep(60.0)
        assert sessions.woken >= 1
        assert not answer.done()
        go(sessions, live=1)
        assert isinstance(await answer, InferResponse)

    simulated((CHEAP,), main, slo_ms=None)


def test_a_backend_at_zero_is_left_there_while_others_are_in_time_and_woken_when_none_is() -> None:
    async def main(fleet: Fleet) -> None:
        _, dear = fleet.sessions
        go(dear, live=0)
        assert isinstance(await fleet.send(), InferResponse)
        assert dear.woken == 0
        sent = await asyncio.gather(*(fleet.send() for _ in range(600)))
        assert any(isinstance(outcome, Overloaded) for outcome in sent)
        assert dear.woken > 0
        assert ran(fleet)[1] == 0
        go(dear, live=1)
        await asyncio.gather(*(fleet.send() for _ in range(600)))
        assert ran(fleet)[1] > 0

    simulated((CHEAP, DEAR), main)


@pytest.mark.parametrize("ejected", [False, True], ids=["slow", "slow and ejected"])
def test_after_a_slow_spell_of_all_backends_they_are_found_to_be_fast_again(ejected: bool) -> None:
    async def main(fleet: Fleet) -> None:
        for sessions in fleet.sessions:
            sessions.factor = 200.0
        if ejected:
            fleet.sessions[0].fault = always(LOST)
        for _ in range(100):
            await fleet.send()
            await asyncio.sleep(0.01)
        assert isinstance((await asyncio.gather(*(fleet.send() for _ in range(10))))[-1], Overloaded)
        for sessions in fleet.sessions:
            sessions.factor = 1.0
            sessions.fault = always(None)
        for _ in range(1000):  # 10 s
            await fleet.send()
            await asyncio.sleep(0.01)
        outcomes = [await fleet.send() for _ in range(10)]
        assert all(isinstance(outcome, InferResponse) for outcome in outcomes), outcomes[0]

    simulated((CHEAP, DEAR), main)


@pytest.mark.parametrize("gap_s", [0.1, 10.0])
def test_idle_backends_that_were_slow_now_and_then_refuse_nothing(gap_s: float) -> None:
    async def main(fleet: Fleet) -> None:
        for at in range(60):
            for sessions in fleet.sessions:
                sessions.factor = 20.0 if at % 3 == 2 else 1.0
            await fleet.send()
            await asyncio.sleep(0.05)
        for sessions in fleet.sessions:
            sessions.factor = 1.0
        for _ in range(30):
            await asyncio.sleep(gap_s)
            assert isinstance(await fleet.send(), InferResponse)
        assert not fleet.counted("gateway_routed_total", reason="late")

    simulated((Kind("a", 4.5, 0.5, 1.0), Kind("b", 4.5, 0.5, 1.0)), main)


@pytest.mark.parametrize("factor", [6.0, 30.0])
def test_a_cheap_backend_that_was_slow_for_a_while_is_used_again_once_it_is_well(factor: float) -> None:
    async def main(fleet: Fleet) -> None:
        async def send(requests: int) -> float:
            """Fifty a second. Gives the share that the cheap one ran."""
            before = ran(fleet)
            sent = []
            for _ in range(requests):
                sent.append(asyncio.ensure_future(fleet.send()))
                await asyncio.sleep(0.02)
            await asyncio.gather(*sent)
            return (ran(fleet)[0] - before[0]) / requests

        assert await send(100) > 0.9
        fleet.sessions[0].factor = factor
        assert await send(150) < 0.3
        fleet.sessions[0].factor = 1.0
        await send(1500)
        assert await send(100) > 0.9

    simulated((Kind("cheap", 5.0, 0.0, 0.1), Kind("dear", 2.0, 0.0, 1.0)), main, slo_ms=400)


def test_a_large_request_whose_rest_is_given_up_goes_to_a_backend_that_is_free() -> None:
    cheap, dear = Kind("a", 2.0, 0.05, 0.1), Kind("b", 1.0, 0.01, 1.0)

    async def main(fleet: Fleet) -> None:
        for lane in fleet.lanes:
            for rows in (1, 256, 256, 128, 64, 256):
                learned = asyncio.get_running_loop().create_future()
                lane.submit(fleet.request(rows=rows), learned.set_result)
                await learned
        fleet.sessions[0].factor, fleet.sessions[1].factor = 3.0, 10.0
        for _ in range(12):  # for as long as the other is chosen
            fleet.lanes[1].submit(fleet.request(rows=256), lambda _: None)
        await asyncio.sleep(0)
        fleet.sessions[1].factor = 0.1
        assert isinstance(await fleet.send(7.0, rows=600), InferResponse)

    simulated((cheap, dear), main)
