"""What the lane does when what it calls raises, sessions die of requests, and deadlines pass while the model runs."""

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from gateway.batching.batch import Batch
from gateway.batching.policy import Decision
from gateway.batching.queue import Queue, State
from gateway.clock import Timer
from gateway.engine import lane as lane_module
from gateway.engine.killers import Killers
from gateway.engine.place import OnAnswer
from gateway.engine.runner import Execution
from gateway.errors import (
    BackendFailed,
    BackendUnreachable,
    Cancelled,
    DeadlineExceeded,
    InternalError,
    NotReady,
    Overloaded,
)
from gateway.types import InferRequest, InferResponse, OutputRequest
from tests.engine.test_lane import MS, Bench, simulate
from tests.simulation import SimulatedClock

RAISED = [ZeroDivisionError("injected"), KeyboardInterrupt("injected"), SystemExit(3), GeneratorExit()]
raised = pytest.mark.parametrize("raised", RAISED, ids=[type(exc).__name__ for exc in RAISED])


class Observer:
    """Takes over what `takes` says, and raises what `raises` says whenever a batch ends."""

    def __init__(
        self, takes: Callable[[InferRequest], bool] = lambda request: False, raises: BaseException | None = None
    ) -> None:
        self.takes = takes
        self.raises = raises

    def executed(self, batch: Batch, execution: Execution, now_ns: int, failed: bool) -> None:
        if self.raises is not None:
            raise self.raises

    def cancelled(self, batch: Batch, now_ns: int) -> None: ...

    def takes_over(self, request: InferRequest, on_answer: OnAnswer, now_ns: int) -> bool:
        return self.takes(request)


def one_each(bench: Bench) -> list[type]:
    """What became of each, in order of sending; each exactly once."""
    return [type(bench.outcome(name)) for name in bench.ended]


# what raises


@raised
def test_an_answer_that_is_not_taken_costs_only_its_own_request(
    raised: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock)

        def not_taken(outcome: object) -> None:
            raise raised

        bench.send("a")
        bench.lane.submit(InferRequest("m", "1", "x", {"X": np.zeros((1, 1), np.float32)}, 1, 0), not_taken)
        bench.send("b")
        await bench.pass_ms(2)
        bench.send("c")
        await bench.pass_ms(2)
        assert one_each(bench) == [InferResponse] * 3
        assert bench.lane.pending == 0
        await bench.lane.close()

    simulate(main)
    assert "was not taken" in caplog.text


@raised
def test_a_batch_that_cannot_be_started_ends_with_an_error_for_each(
    raised: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock)
        bench.runner.faults = [raised] * 3  # each of the two is tried once more, alone
        bench.send("a")
        bench.send("b")
        await bench.pass_ms(2)
        bench.send("c")
        await bench.pass_ms(2)
        assert one_each(bench) == [InternalError, InternalError, InferResponse]
        assert bench.lane.batcher.forecast(bench.send("d"), clock.now_ns(), 1).wait_ns == 0  # nothing seems to run

    simulate(main)
    assert "could not be started" in caplog.text


@raised
def test_a_policy_that_fails_has_what_waits_refused_and_the_next_served(
    raised: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock, fixed_ns=5 * MS)
        bench.send("running")
        await bench.pass_ms(1)
        policy = bench.lane.batcher.policy
        decide = policy.decide
        failing = [raised]

        def failing_decide(queue: Queue, state: State, now_ns: int, free_slots: int) -> Decision:
            if failing:
                raise failing.pop()
            return decide(queue, state, now_ns, free_slots)

        policy.decide = failing_decide  # type: ignore[method-assign]  # the policy is the test's to choose
        bench.send("a")
        bench.send("b")
        await bench.pass_ms(5)
        bench.send("c")
        await bench.pass_ms(10)
        assert one_each(bench) == [InferResponse, InternalError, InternalError, InferResponse]

    simulate(main)
    assert "policy failed" in caplog.text


@raised
def test_who_watches_batches_cannot_keep_their_answers_back(raised: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock)
        bench.lane.observer = Observer(raises=raised)
        bench.runner.faults = ["", "failed"]
        for name in "abc":
            bench.send(name)
            await bench.pass_ms(2)
        assert one_each(bench) == [InferResponse, BackendFailed, InferResponse]

    simulate(main)
    assert "could not be accounted for" in caplog.text


@raised
def test_who_takes_over_cannot_keep_an_answer_back(raised: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    def takes(request: InferRequest) -> bool:
        raise raised

    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock)
        bench.lane.observer = Observer(takes)
        bench.runner.faults = ["lost"]
        bench.send("a")
        bench.send("b")
        await bench.pass_ms(2)
        bench.send("c")
        await bench.pass_ms(2)
        assert one_each(bench) == [BackendFailed, BackendFailed, InferResponse]

    simulate(main)
    assert "could not be run again" in caplog.text


def test_who_takes_over_cannot_keep_what_waits_from_its_session(caplog: pytest.LogCaptureFixture) -> None:
    def takes(request: InferRequest) -> bool:
        raise MemoryError

    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock, fixed_ns=5 * MS)
        bench.lane.observer = Observer(takes)
        bench.send("runs")
        await bench.pass_ms(1)
        bench.send("waits")
        bench.lane.hand_over_all(clock.now_ns())
        await bench.pass_ms(20)
        assert one_each(bench) == [InferResponse] * 2

    simulate(main)
    assert "could not be handed over" in caplog.text


@raised
def test_inputs_that_cannot_be_noted_do_not_keep_an_answer_back(
    raised: BaseException, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def add(killers: Killers, request: InferRequest, now_ns: int) -> None:
        raise raised

    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock)
        monkeypatch.setattr(Killers, "add", add)
        bench.runner.faults = ["killed"]
        bench.send("poison")
        await bench.pass_ms(0.5)
        bench.send("waits")
        await bench.pass_ms(5)
        assert one_each(bench) == [BackendFailed, InferResponse]
        await bench.lane.close()

    simulate(main)
    assert "could not be noted" in caplog.text


@raised
@pytest.mark.parametrize(("part", "fault"), [("failed", "failed"), ("done", "")])
def test_who_gives_the_answers_of_a_batch_cannot_keep_them_or_what_waits_back(
    part: str, fault: str, raised: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    def raises(*about: object) -> None:
        raise raised

    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock)
        answers = getattr(bench.lane, part)
        setattr(bench.lane, part, raises)
        bench.runner.faults = [fault]
        bench.send("a")
        bench.send("b")
        await bench.pass_ms(0.5)
        bench.send("waits")
        await bench.pass_ms(1)
        setattr(bench.lane, part, answers)
        await bench.pass_ms(5)
        assert one_each(bench) == [BackendFailed if fault else InternalError] * 2 + [InferResponse]
        assert not bench.lane.runs.answering
        await bench.lane.close()

    simulate(main)
    assert "of a failed batch could not be decided" in caplog.text or "a batch could not be answered" in caplog.text


@raised
def test_a_next_batch_that_cannot_be_waited_for_keeps_no_answer_back(
    raised: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    def raises(begun: Callable[[], None]) -> bool:
        raise raised

    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock, fixed_ns=5 * MS)
        bench.runner.try_await_begin = raises  # type: ignore[method-assign]  # the runner is the test's to spoil
        bench.send("a")
        await bench.pass_ms(1)
        bench.send("b")
        await bench.pass_ms(20)
        assert one_each(bench) == [InferResponse] * 2

    simulate(main)
    assert "could not be waited for" in caplog.text


def test_answers_that_no_further_turn_can_be_had_for_are_given_in_this_one(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane_module, "_TURN_NS", -1)  # all but the first answer are left for the next turn

    async def main(clock: SimulatedClock) -> None:
        loop = asyncio.get_running_loop()

        def call_soon(callback: Callable[[], None]) -> object:
            if callback.__name__ == "_answer_behind":
                raise MemoryError
            return loop.call_soon(callback)

        bench = Bench(clock, call_soon=call_soon)
        for name in "abc":
            bench.send(name)
        await bench.pass_ms(5)
        assert one_each(bench) == [InferResponse] * 3

    simulate(main)
    assert "another turn could not be had" in caplog.text


def test_deadlines_that_cannot_be_looked_after_keep_no_other_batch_from_starting(caplog: pytest.LogCaptureFixture) -> None:
    async def main(clock: SimulatedClock) -> None:
        class Short:
            def now_ns(self) -> int:
                return clock.now_ns()

            def call_at(self, when_ns: int, callback: Callable[[], None]) -> Timer:
                if callback.__name__ == "_deadline_passed":
                    raise MemoryError
                return clock.call_at(when_ns, callback)

        bench = Bench(clock, lane_clock=Short(), workers=2)
        for name in ("a", "b"):
            bench.send(name, rows=4, timeout_ms=1000)
        await bench.pass_ms(5)
        assert one_each(bench) == [InferResponse] * 2

    simulate(main)
    assert "could not be looked after" in caplog.text


def test_outputs_that_lack_what_was_asked_for_fail_that_request_only(caplog: pytest.LogCaptureFixture) -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock)
        bench.send("a", outputs=(OutputRequest("Z"),))
        bench.send("b")
        await bench.pass_ms(5)
        assert one_each(bench) == [BackendFailed, InferResponse]

    simulate(main)
    assert "could not be put together" in caplog.text


# sessions that die of requests


def send_content(bench: Bench, name: str, value: float) -> None:
    """Send one row that is the same whenever the value is."""
    request = InferRequest("m", "1", name, {"X": np.full((1, 1), value, np.float32)}, 1, bench.clock.now_ns())
    bench.lane.submit(request, bench.ended.setdefault(name, []).append)


def test_a_request_that_kills_its_session_alone_is_not_run_again() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock)
        bench.runner.faults = ["killed"]
        bench.send("poison")
        await bench.pass_ms(5)
        assert isinstance(bench.outcome("poison"), BackendFailed)
        assert len(bench.runner.batches) == 1

    simulate(main)


def test_what_has_killed_a_session_is_refused_for_a_minute_and_nothing_else_is() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock)
        bench.runner.faults = ["killed"]
        send_content(bench, "poison", 666)
        await bench.pass_ms(5)
        with pytest.raises(BackendFailed, match="ended a session"):
            send_content(bench, "again", 666)
        send_content(bench, "other", 667)
        await bench.pass_ms(59_000)
        with pytest.raises(BackendFailed, match="ended a session"):
            send_content(bench, "again", 666)
        await bench.pass_ms(1_000)
        send_content(bench, "forgiven", 666)
        await bench.pass_ms(5)
        assert isinstance(bench.outcome("other"), InferResponse)
        assert isinstance(bench.outcome("forgiven"), InferResponse)

    simulate(main)


def test_of_a_batch_that_kills_its_session_only_the_one_to_blame_fails_and_is_remembered() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock)
        bench.runner.faults = ["killed", "", "killed", ""]
        for value, name in enumerate("abc"):
            send_content(bench, name, value)
        await bench.pass_ms(10)
        assert one_each(bench) == [InferResponse, BackendFailed, InferResponse]
        assert [batch.rows for batch in bench.runner.batches] == [3, 1, 1, 1]
        with pytest.raises(BackendFailed, match="ended a session"):
            send_content(bench, "again", 1)
        send_content(bench, "innocent", 0)
        await bench.pass_ms(5)
        assert isinstance(bench.outcome("innocent"), InferResponse)

    simulate(main)


def test_a_request_whose_session_is_lost_each_time_is_run_twice_and_no_more() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock)
        bench.runner.faults = ["lost"] * 5
        bench.send("a")
        await bench.pass_ms(20)
        assert isinstance(bench.outcome("a"), BackendFailed)
        assert len(bench.runner.batches) == 2

    simulate(main)


def test_each_part_of_a_split_request_is_run_twice_and_no_more() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock, workers=2)
        bench.runner.faults = ["lost"] * 9
        bench.send("large", rows=8)
        await bench.pass_ms(20)
        assert isinstance(bench.outcome("large"), BackendFailed)
        assert len(bench.runner.batches) <= 4

    simulate(main)


# no session left


def test_without_a_live_session_what_waits_goes_where_it_can_be_run_and_the_rest_stays() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock, fixed_ns=5 * MS)
        bench.lane.observer = Observer(lambda request: request.id in ("retried", "elsewhere"))
        bench.runner.faults = ["lost"]
        bench.send("retried")
        await bench.pass_ms(1)
        for name in ("here", "elsewhere"):
            bench.send(name)
        await bench.pass_ms(3)
        bench.runner.slots = 0
        await bench.pass_ms(2)
        assert isinstance(bench.outcome("retried"), BackendFailed)  # which has the dispatcher try another lane
        assert isinstance(bench.outcome("elsewhere"), Overloaded)
        assert bench.ended["here"] == []
        bench.runner.slots = 1
        bench.runner.on_change()
        await bench.pass_ms(10)
        assert isinstance(bench.outcome("here"), InferResponse)

    simulate(main)


def test_when_an_idle_session_dies_what_then_comes_and_waits_is_handed_over_in_time() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock)
        bench.runner.slots = 0
        bench.send("waits")
        await bench.pass_ms(1)
        assert bench.ended["waits"] == []
        bench.lane.observer = Observer(lambda request: True)
        bench.lane.hand_over(clock.now_ns())
        assert isinstance(bench.outcome("waits"), Overloaded)

    simulate(main)


def test_a_cold_lane_keeps_what_waits_for_its_start() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock)
        bench.lane.observer = Observer(lambda request: True)
        bench.runner.slots, bench.runner.cold = 0, True
        bench.send("waits")
        await bench.pass_ms(1)
        bench.lane.hand_over(clock.now_ns())
        bench.runner.on_change()
        assert bench.ended["waits"] == []

    simulate(main)


def test_a_retry_without_a_session_ends_at_its_deadline() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock)
        bench.runner.faults = ["lost"]
        bench.send("a", timeout_ms=250)
        await bench.pass_ms(0.5)
        bench.runner.slots = 0
        await bench.pass_ms(249)
        assert bench.ended["a"] == []
        await bench.pass_ms(2)
        assert isinstance(bench.outcome("a"), DeadlineExceeded)

    simulate(main)


def test_a_runner_without_hope_refuses_retries_and_what_is_left_of_split_requests() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock, fixed_ns=5 * MS)
        bench.runner.faults = ["lost"]
        bench.send("retried")
        await bench.pass_ms(1)
        bench.send("large", rows=10)
        bench.runner.slots = 0
        await bench.pass_ms(5)
        assert bench.lane.pending == 2
        bench.runner.available = False
        bench.runner.on_change()
        assert one_each(bench) == [BackendUnreachable, BackendUnreachable]
        assert bench.lane.pending == 0

    simulate(main)


# deadlines while the model runs


def test_a_deadline_that_passes_while_the_model_runs_is_told_then_and_the_answer_dropped() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock, fixed_ns=50 * MS)
        bench.send("late", timeout_ms=20)
        bench.send("later", timeout_ms=30)
        bench.send("in time", timeout_ms=60)
        bench.send("without")
        await bench.pass_ms(19.9)
        assert bench.ended["late"] == []
        await bench.pass_ms(0.2)
        assert isinstance(bench.outcome("late"), DeadlineExceeded)
        assert bench.ended["later"] == []
        await bench.pass_ms(10)
        assert isinstance(bench.outcome("later"), DeadlineExceeded)
        assert bench.runner.cancelled == []
        await bench.pass_ms(20)
        assert one_each(bench) == [DeadlineExceeded, DeadlineExceeded, InferResponse, InferResponse]
        assert bench.dropped() == 2

    simulate(main)


def test_the_first_deadline_counts_whichever_batch_it_came_with() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock, workers=2, fixed_ns=50 * MS)
        bench.send("second", timeout_ms=30)
        await bench.pass_ms(1)
        bench.send("first", timeout_ms=10)
        await bench.pass_ms(10.1)
        assert isinstance(bench.outcome("first"), DeadlineExceeded)
        await bench.pass_ms(20)
        assert isinstance(bench.outcome("second"), DeadlineExceeded)

    simulate(main)


def test_a_promise_that_is_broken_while_the_model_runs_is_answered_late() -> None:
    """The SLO is the gateway's own promise: a late answer is better than none. A deadline is what the client asked for."""

    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock, slo_ms=20, fixed_ns=50 * MS)
        bench.send("late")
        await bench.pass_ms(60)
        assert isinstance(bench.outcome("late"), InferResponse)

    simulate(main)


def test_a_retry_that_runs_past_the_deadline_is_told_at_its_time() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock, fixed_ns=20 * MS)
        bench.runner.faults = ["lost"]
        bench.send("a", timeout_ms=30)
        await bench.pass_ms(30.1)
        assert isinstance(bench.outcome("a"), DeadlineExceeded)
        await bench.pass_ms(50)
        assert len(bench.ended["a"]) == 1

    simulate(main)


# the end


def test_giving_up_answers_what_waits_as_not_run_and_what_runs_as_perhaps_run() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock, fixed_ns=50 * MS)
        bench.send("running")
        await bench.pass_ms(1)
        bench.send("waiting")
        bench.send("large", rows=10)
        bench.lane.give_up()
        assert one_each(bench) == [DeadlineExceeded, NotReady, NotReady]
        assert bench.runner.cancelled == bench.runner.batches
        await bench.lane.close()
        await bench.pass_ms(60)
        assert len(bench.runner.batches) == 1
        assert one_each(bench) == [DeadlineExceeded, NotReady, NotReady]

    simulate(main)


@pytest.mark.parametrize(("rows", "fault"), [(6, ""), (2, "lost")], ids=["a part", "a failed run"])
def test_giving_up_tells_what_waits_for_another_run_that_it_may_have_run(rows: int, fault: str) -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock)
        bench.runner.faults = [fault]
        bench.send("begun", rows=rows)
        await bench.pass_ms(0.5)
        bench.runner.slots = 0
        bench.send("waiting")
        await bench.pass_ms(1)
        assert not bench.lane.runs.running
        bench.lane.give_up()
        assert one_each(bench) == [DeadlineExceeded, NotReady]

    simulate(main)


def test_a_cancelled_request_of_a_failed_batch_is_not_run_again() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock)
        bench.runner.faults = ["failed"]
        gone, _ = bench.send("gone"), bench.send("stays")
        await bench.pass_ms(0.5)
        bench.lane.cancel(gone)
        await bench.pass_ms(5)
        assert one_each(bench) == [Cancelled, InferResponse]
        assert [batch.rows for batch in bench.runner.batches] == [2, 1]

    simulate(main)
