"""Requests through unlike backends in simulated time: each ends in exactly one answer, its own, whatever fails."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.batching.batch import Batch
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
from gateway.routing.dispatcher import Dispatcher
from gateway.types import InferRequest, InferResponse
from tests.router.fleet import MS, Fault, Fleet, Kind, S, Sessions
from tests.simulation import SimulatedClock, run_simulated

CHEAP = Kind("cheap", 2.0, 0.5, 0.1)
DEAR = Kind("dear", 1.0, 0.1, 1.0)
FAILED: Fault = (BackendFailed("no"), False, 1 * MS)
LOST: Fault = (BackendUnreachable("gone"), True, 1 * MS)


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
    fleet.dispatcher.submit(request, outcomes.append)
    await asyncio.sleep(after_ms / 1e3)
    for lane in fleet.lanes:
        lane.cancel(request)
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
        request = fleet.request()
        fleet.dispatcher.submit(request, answers.append)
        for lane in fleet.lanes:
            lane.cancel(request)
        await asyncio.sleep(1)
        assert [type(answer) for answer in answers] == [Cancelled]
        assert ran(fleet) == [0, 0]

    simulated((CHEAP, DEAR), main)


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

        def falsify(batch: Batch, on_done: Any) -> None:
            for part in batch.parts:
                part.request.inputs["X"] += 1  # of the copy, whose arrays are its own
            original(batch, on_done)

        fleet.lanes[1].runner = _Falsifying(fleet.sessions[1], falsify)
        outcome = await fleet.send(5.0)
        assert isinstance(outcome, InferResponse)
        assert outcome.outputs["Y"] == 5.0
        await asyncio.sleep(1)
        assert fleet.counted("gateway_copies_total", backend="shadow1", result="differs") == 1

    simulated((CHEAP, shadow(1.0)), main)


class _Falsifying:
    """A runner whose start is another."""

    def __init__(self, runner: Any, start: Callable[[Batch, Any], None]) -> None:
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


# properties


@st.composite
def mischief(draw: st.DrawFn) -> list[tuple[int, int]]:
    """(after how many of its executions, what then) for each of three backends; see FAULTS."""
    return draw(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 3)), min_size=3, max_size=3))


FAULTS: tuple[Fault | None, ...] = (None, FAILED, LOST, (BackendFailed("slow"), False, 200 * MS))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
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
