"""No more than, not again, and two things at once: several parts, sessions, batches or deadlines of one lane."""

import asyncio
import logging
import math
from collections.abc import Callable

import numpy as np
import pytest

from gateway.batching.batch import Batch
from gateway.batching.fairness import SharedWorkers, Sharer
from gateway.batching.policy import Decision
from gateway.batching.queue import LengthGroup, Queue, State
from gateway.clock import Timer
from gateway.engine.place import OnAnswer
from gateway.engine.runner import Execution, OnBatchDone, OnBatchPart
from gateway.errors import BackendFailed, BackendUnreachable, Cancelled, DeadlineExceeded, InternalError, NotReady, Overloaded
from gateway.types import InferRequest, InferResponse
from tests.engine.simulated_runner import SimulatedRunner
from tests.engine.test_lane import MS, Bench, simulate
from tests.engine.test_shared_workers import SharingModel, pass_ms
from tests.simulation import SimulatedClock


class Observer:
    """Remembers what it is told and asked."""

    def __init__(self, takes: Callable[[InferRequest], bool] = lambda request: False) -> None:
        self.takes = takes
        self.asked: list[str] = []
        self.told: list[tuple[str, bool]] = []

    def executed(self, batch: Batch, execution: Execution, now_ns: int, failed: bool) -> None:
        self.told.append(("executed", failed))

    def cancelled(self, batch: Batch, now_ns: int) -> None:
        self.told.append(("cancelled", True))

    def takes_over(self, request: InferRequest, on_answer: OnAnswer, now_ns: int) -> bool:
        self.asked.append(request.id)
        return self.takes(request)


class CountingClock:
    """A simulated clock that knows its timers. raises: at the next `call_at`."""

    def __init__(self, clock: SimulatedClock) -> None:
        self._clock = clock
        self.set = 0
        self.pending: set[int] = set()
        self.raises: BaseException | None = None

    def now_ns(self) -> int:
        return self._clock.now_ns()

    def call_at(self, when_ns: int, callback: Callable[[], None]) -> Timer:
        if self.raises is not None:
            raised, self.raises = self.raises, None
            raise raised
        self.set += 1
        number = self.set
        self.pending.add(number)

        def fire() -> None:
            self.pending.discard(number)
            callback()

        timer = self._clock.call_at(when_ns, fire)
        pending = self.pending

        class Counted:
            def cancel(self) -> None:
                pending.discard(number)
                timer.cancel()

        return Counted()


def outcomes(bench: Bench) -> list[type]:
    """What became of each, in order of sending; each exactly once."""
    return [type(bench.outcome(name)) for name in bench.ended]


# parts


def test_parts_that_end_out_of_order_are_joined_in_order() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock, workers=2)
        bench.runner.faults = ["lost"]  # the first part, which is run again when the second is done
        request = bench.send("large", rows=8)
        await bench.pass_ms(6)
        assert [batch.parts[0].start for batch in bench.runner.batches] == [0, 4, 0]
        outcome = bench.outcome("large")
        assert isinstance(outcome, InferResponse)
        assert np.array_equal(outcome.outputs["Y"], request.inputs["X"])

    simulate(main)


def test_each_lost_run_is_counted_as_one_retry() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock, workers=2)
        bench.runner.faults = ["lost", "lost", "", "lost"]
        bench.send("large", rows=8)
        await bench.pass_ms(6)
        assert outcomes(bench) == [BackendFailed]
        assert bench.counted("gateway_retries_total") == 2

    simulate(main)


def test_what_is_left_of_a_request_that_has_failed_is_not_run() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock)
        bench.runner.faults = ["failed"]
        bench.send("large", rows=12)
        await bench.pass_ms(0.5)
        bench.send("next")
        await bench.pass_ms(6)
        assert outcomes(bench) == [BackendFailed, InferResponse]
        assert [batch.rows for batch in bench.runner.batches] == [4, 1]

    simulate(main)


# retries and blame


def test_of_a_batch_that_fails_with_its_session_alive_nobody_is_taken_over() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock)
        bench.lane.observer = observer = Observer(lambda request: True)
        bench.runner.faults = ["failed"]
        bench.send("a")
        bench.send("b")
        await bench.pass_ms(4)
        assert outcomes(bench) == [InferResponse] * 2
        assert observer.asked == []
        assert observer.told == [("executed", True), ("executed", False), ("executed", False)]

    simulate(main)


def test_of_a_batch_whose_session_is_lost_each_is_taken_over_or_run_again() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock)
        bench.lane.observer = observer = Observer(lambda request: request.id == "b")
        bench.runner.faults = ["lost"]
        for name in "abc":
            bench.send(name)
        await bench.pass_ms(0.5)
        bench.send("waits")
        await bench.pass_ms(6)
        assert outcomes(bench) == [InferResponse, BackendFailed, InferResponse, InferResponse]
        assert observer.asked == ["a", "b", "c"]  # what waits has a session still

    simulate(main)


def test_nothing_is_run_again_where_no_session_is_expected() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock)
        bench.runner.faults = ["failed"]
        bench.send("a")
        bench.send("b")
        await bench.pass_ms(0.5)
        bench.runner.available = False
        await bench.pass_ms(5)
        assert outcomes(bench) == [BackendFailed] * 2
        assert bench.counted("gateway_retries_total") == 0
        assert len(bench.runner.batches) == 1

    simulate(main)


def test_only_a_lost_session_gives_up_what_waits_and_only_if_it_was_the_last() -> None:
    async def main(clock: SimulatedClock) -> None:
        for fault, slots, taken in (("lost", 0, True), ("lost", 1, False), ("failed", 0, False), ("", 0, False)):
            bench = Bench(clock)
            bench.runner.faults = [fault]
            bench.send("runs")
            await bench.pass_ms(0.5)
            bench.send("waits")
            await bench.pass_ms(0.1)
            bench.runner.slots = slots
            bench.lane.observer = observer = Observer(lambda request: request.id == "waits")
            await bench.pass_ms(1)
            assert ("waits" in observer.asked) is taken
            if taken:
                assert isinstance(bench.outcome("waits"), Overloaded)

    simulate(main)


def test_a_killer_is_never_reported_as_safe_to_send_again() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock)
        bench.runner.faults = ["killed"]  # as "unreachable"
        bench.send("poison")
        await bench.pass_ms(5)
        outcome = bench.outcome("poison")
        assert type(outcome) is BackendFailed
        assert outcome.message == "told to: killed"

    simulate(main)


def test_requests_that_kill_together_are_each_given_one_run_alone() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock)
        bench.runner.faults = ["killed"]
        for name in "ab":
            bench.lane.submit(
                InferRequest("m", "1", name, {"X": np.full((1, 1), 7, np.float32)}, 1, clock.now_ns()),
                bench.ended.setdefault(name, []).append,
            )
        await bench.pass_ms(5)
        assert outcomes(bench) == [InferResponse] * 2
        again = bench.ended.setdefault("again", [])
        bench.lane.submit(InferRequest("m", "1", "again", {"X": np.full((1, 1), 7, np.float32)}, 1, 0), again.append)
        await bench.pass_ms(5)
        assert isinstance(bench.outcome("again"), InferResponse)

    simulate(main)


def test_who_routes_is_told_how_each_batch_ended() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock)
        bench.lane.observer = observer = Observer()
        bench.runner.faults = ["", "failed", ""]
        for name in ("good", "bad"):
            bench.send(name)
            await bench.pass_ms(2)
        gone = bench.send("gone")
        await bench.pass_ms(0.5)
        bench.lane.cancel(gone)
        await bench.pass_ms(2)
        assert observer.told == [("executed", False), ("executed", True), ("cancelled", True)]
        assert bench.counted("gateway_failed_executions_total") == 1

    simulate(main)


# giving up what waits


async def learn(bench: Bench) -> None:
    """Have the lane know what a batch takes."""
    for _ in range(20):
        bench.send(f"learn {len(bench.ended)}")
        await bench.pass_ms(30)


def test_what_will_be_late_is_handed_over_in_order_until_one_cannot_be_taken() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock, fixed_ns=20 * MS)
        await learn(bench)
        bench.lane.observer = observer = Observer(lambda request: request.id != "third")
        bench.send("runs")
        await bench.pass_ms(1)
        for name, timeout_ms in (("first", 10), ("second", 12), ("third", 14), ("fourth", 16), ("later", 40), ("never", None)):
            bench.send(name, timeout_ms=timeout_ms)
        bench.lane.hand_over(clock.now_ns())
        assert observer.asked == ["first", "second", "third"]
        assert [name for name in ("first", "second", "third", "fourth", "later", "never") if bench.ended[name]] == [
            "first",
            "second",
        ]
        assert isinstance(bench.outcome("first"), Overloaded)
        observer.takes = lambda request: True
        bench.lane.hand_over(clock.now_ns())
        assert observer.asked[3:] == ["third", "fourth"]

    simulate(main)


def test_nothing_is_handed_over_while_a_worker_is_free() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock, fixed_ns=20 * MS)
        await learn(bench)
        bench.lane.observer = observer = Observer(lambda request: True)
        bench.send("runs soon", timeout_ms=5)
        bench.lane.hand_over(clock.now_ns())
        assert observer.asked == []

    simulate(main)


@pytest.mark.parametrize("sessions", [0, 1])
def test_no_more_than_32_are_handed_over_at_once(sessions: int) -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock, fixed_ns=20 * MS)
        await learn(bench)
        bench.send("runs")
        await bench.pass_ms(1)
        bench.lane.observer = observer = Observer(lambda request: True)
        if not sessions:
            await bench.pass_ms(30)
            bench.runner.slots = 0
        for number in range(40):
            bench.send(str(number), timeout_ms=10)
        bench.lane.hand_over(clock.now_ns())
        assert observer.asked == [str(number) for number in range(32)]

    simulate(main)


def test_all_that_waits_can_be_given_up_at_once_and_each_is_asked_for() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock, fixed_ns=20 * MS)
        bench.send("runs")
        await bench.pass_ms(1)
        bench.lane.observer = observer = Observer(lambda request: int(request.id) % 2 == 1)
        for number in range(40):
            bench.send(str(number))
        bench.lane.hand_over_all(clock.now_ns())
        assert observer.asked == [str(number) for number in range(40)]
        assert bench.lane.pending == 1 + 20

    simulate(main)


def test_a_lane_that_nobody_routes_beside_keeps_what_waits() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock, fixed_ns=20 * MS)
        bench.send("runs")
        await bench.pass_ms(1)
        bench.send("waits")
        bench.lane.hand_over_all(clock.now_ns())
        await bench.pass_ms(50)
        assert outcomes(bench) == [InferResponse] * 2

    simulate(main)


# timers and ticks


def test_the_arrivals_of_one_tick_are_looked_at_once() -> None:
    async def main(clock: SimulatedClock) -> None:
        calls = 0

        def call_soon(callback: Callable[[], None]) -> object:
            nonlocal calls
            calls += 1
            return asyncio.get_running_loop().call_soon(callback)

        bench = Bench(clock, call_soon=call_soon)
        for tick in range(2):
            for number in range(3):
                bench.send(f"{tick} {number}")
            await bench.pass_ms(2)
        assert calls == 2
        assert outcomes(bench) == [InferResponse] * 6

    simulate(main)


def test_what_waits_takes_one_timer_however_much_comes() -> None:
    async def main(clock: SimulatedClock) -> None:
        counting = CountingClock(clock)
        bench = Bench(clock, lane_clock=counting, fixed_ns=100 * MS)
        bench.send("runs")
        await bench.pass_ms(1)
        deadline_ns = clock.now_ns() + 50 * MS
        for number in range(20):
            bench.send(str(number), timeout_ms=None)
            request = InferRequest("m", "1", "", {"X": np.zeros((1, 1), np.float32)}, 1, clock.now_ns())
            request.deadline_ns = deadline_ns
            bench.lane.submit(request, lambda outcome: None)
            await bench.pass_ms(1)
        assert (counting.set, len(counting.pending)) == (1, 1)
        bench.send("sooner", timeout_ms=10)
        await bench.pass_ms(1)
        assert (counting.set, len(counting.pending)) == (2, 1)
        await bench.pass_ms(9.1)
        assert isinstance(bench.outcome("sooner"), DeadlineExceeded)
        assert bench.lane.pending == 1 + 40
        await bench.pass_ms(21)
        assert bench.lane.pending == 1 + 20  # those of the first timer, which the second replaced

    simulate(main)


def test_what_waits_is_answered_at_each_of_several_deadlines() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock, fixed_ns=100 * MS)
        bench.send("runs")
        await bench.pass_ms(1)
        for timeout_ms in (10, 20, 30):
            bench.send(str(timeout_ms), timeout_ms=timeout_ms)
        for answered in range(1, 4):
            await bench.pass_ms(9.8)
            assert sum(bool(ended) for ended in bench.ended.values()) == answered - 1
            await bench.pass_ms(0.3)
            assert sum(bool(ended) for ended in bench.ended.values()) == answered

    simulate(main)


def test_running_batches_take_one_timer_for_their_first_deadline() -> None:
    async def main(clock: SimulatedClock) -> None:
        counting = CountingClock(clock)
        bench = Bench(clock, lane_clock=counting, workers=8, fixed_ns=100 * MS)
        bench.send("first", timeout_ms=50)
        await bench.pass_ms(1)
        running = counting.set
        for number, timeout_ms in enumerate((49, 60, 70, None)):  # of which one ends with the first
            bench.send(str(number), timeout_ms=timeout_ms)
            await bench.pass_ms(0.001)
        assert (counting.set, running) == (1, 1)
        bench.send("sooner", timeout_ms=20)
        await bench.pass_ms(1)
        assert (counting.set, len(counting.pending)) == (2, 1)
        for passed_ms, told in ((19, 1), (30, 3), (10, 4), (10, 5)):
            await bench.pass_ms(passed_ms)
            assert sum(bool(ended) for ended in bench.ended.values()) == told
        await bench.pass_ms(100)
        assert outcomes(bench).count(DeadlineExceeded) == 5
        assert counting.pending == set()

    simulate(main)


def test_who_is_too_late_is_told_how_long_was_waited_for() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock, fixed_ns=200_000 * MS)
        bench.send("late", timeout_ms=100_000).arrival_ns -= MS // 2
        await bench.pass_ms(100_000.1)
        outcome = bench.outcome("late")
        assert isinstance(outcome, DeadlineExceeded)
        assert outcome.message == "m:1/simulated: still running at the deadline, 100000.5 ms after arrival"

    simulate(main)


def test_no_timer_outlives_the_lane() -> None:
    async def main(clock: SimulatedClock) -> None:
        counting = CountingClock(clock)
        bench = Bench(clock, lane_clock=counting, fixed_ns=5 * MS)
        bench.send("runs", timeout_ms=5000)
        await bench.pass_ms(1)
        bench.send("waits", timeout_ms=5000)
        await bench.pass_ms(20)
        assert outcomes(bench) == [InferResponse] * 2
        assert len(counting.pending) == 2
        await bench.lane.close()
        assert counting.pending == set()

    simulate(main)


def test_a_clock_that_fails_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def main(clock: SimulatedClock) -> None:
        counting = CountingClock(clock)
        bench = Bench(clock, lane_clock=counting, fixed_ns=5 * MS)
        bench.send("runs")
        await bench.pass_ms(1)
        counting.raises = KeyboardInterrupt("injected")
        bench.send("waits", timeout_ms=100)
        await bench.pass_ms(20)
        assert outcomes(bench) == [InferResponse] * 2

    simulate(main)
    assert "m:1/simulated: what waits could not be looked at" in caplog.text


# what answering takes


def test_what_is_set_aside_for_answering_is_the_mean_and_two_deviations() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock, slo_ms=1000)
        takes_ms = 16

        def answer(outcome: object) -> None:
            clock.advance_to(clock.now_ns() + takes_ms * MS)

        async def reserved_ms(requests: int = 1) -> float:
            for _ in range(requests):
                request = InferRequest("m", "1", "", {"X": np.zeros((1, 1), np.float32)}, 1, clock.now_ns())
                bench.lane.submit(request, answer)
            reserved_ns = bench.lane.batcher.reserved_ns
            await bench.pass_ms(100)
            return reserved_ns / MS

        assert await reserved_ms() == 0
        assert await reserved_ms(3) == 3  # mean and deviation: a sixteenth of 16 ms each
        # Of the three only the first counts, which is 15 ms off the mean.
        mean, deviation = 1 + 15 / 16, 1 + (15 - 1) / 16
        takes_ms = 0
        assert await reserved_ms() == pytest.approx(mean + 2 * deviation, abs=1e-5)
        mean, deviation = mean - mean / 16, deviation + (mean - deviation) / 16
        takes_ms = 10_000  # of which a fifth of the SLO counts
        assert await reserved_ms() == pytest.approx(mean + 2 * deviation, abs=1e-5)
        mean, deviation = mean + (200 - mean) / 16, deviation + ((200 - mean) - deviation) / 16
        assert await reserved_ms() == pytest.approx(mean + 2 * deviation, abs=1e-5)

    simulate(main)


def test_requests_keep_their_order_when_more_is_set_aside() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock, slo_ms=1000, fixed_ns=20 * MS)

        def answer(outcome: object) -> None:
            clock.advance_to(clock.now_ns() + 16 * MS)
            bench.send("first")

        request = InferRequest("m", "1", "", {"X": np.zeros((1, 1), np.float32)}, 1, clock.now_ns())
        bench.lane.submit(request, answer)
        for name in "abcdefg":  # the first three go with it, and the others next
            bench.send(name)
        await bench.pass_ms(20 + 16 + 1)
        bench.send("second")
        assert bench.lane.batcher.reserved_ns > 0
        await bench.pass_ms(20)
        assert [part.request.id for part in bench.runner.batches[-1].parts] == ["first", "second"]

    simulate(main)


def test_nothing_is_set_aside_where_nothing_is_promised() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock)
        for name in "ab":
            bench.send(name)
            clock.advance_to(clock.now_ns() + MS)
            await bench.pass_ms(5)
            assert bench.lane.batcher.reserved_ns == 0

    simulate(main)


# what a lane says of itself


def test_a_lane_tells_what_waits_and_what_runs() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock, workers=2, fixed_ns=5 * MS)
        assert (bench.lane.available, bench.lane.pending, bench.lane.runs.wants_worker) == (True, 0, False)
        bench.send("runs")
        assert bench.lane.runs.wants_worker
        await bench.pass_ms(1)
        bench.send("runs too", rows=4)
        await bench.pass_ms(1)
        bench.send("waits", rows=3)
        bench.send("waits too")
        await bench.pass_ms(1)
        assert not bench.lane.runs.wants_worker  # no session is free
        assert (bench.lane.available, bench.lane.pending) == (True, 4)
        assert repr(bench.lane) == "<Lane m:1/simulated: 4 waiting, 2 batches running>"
        gauges = ("queue_rows", "queue_requests", "workers", "busy_workers")
        assert [bench.counted(f"gateway_{name}") for name in gauges] == [4, 2, 2, 2]
        bench.runner.slots = 3
        bench.runner.on_change()
        assert [bench.counted(f"gateway_{name}") for name in gauges] == [0, 0, 3, 3]
        bench.runner.available = False
        assert not bench.lane.available
        bench.runner.available = True
        await bench.pass_ms(30)
        closing = asyncio.ensure_future(bench.lane.close())
        await asyncio.sleep(0)
        assert not bench.lane.available
        await closing
        assert [bench.exposed(f"gateway_{name}") for name in gauges] == [[], [], [], []]

    simulate(main)


def test_what_was_learned_is_told_for_buckets_but_not_for_every_length_and_shape() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock)
        service = bench.lane.batcher.service
        learned = {None: 10, LengthGroup(None, 64): 20, (("X", (7,)),): 30, LengthGroup(None, 1_000_003): 40}
        for group in (*learned, LengthGroup(None, 128)):
            service.curve(group)  # of the last nothing is known
        for group, ms in learned.items():
            for rows in service.probe_rows:
                service.probe(group, rows, [ms * MS])
        found = bench.exposed("gateway_service_time_seconds")
        assert {(labels["bucket"], labels["rows"], value) for labels, value in found} == {
            (bucket, rows, value) for bucket, value in (("", 0.01), ("64", 0.02)) for rows in ("1", "4")
        }

    simulate(main)


def test_the_time_of_nine_in_ten_is_the_expected_one_by_the_spread() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock)
        curve = bench.lane.batcher.service.curve(None)
        for number in range(64):
            curve.observe(1, 1, (12 if number % 4 == 0 else 10) * MS)
        assert curve.spread > 1.05
        found = {
            labels["estimate"]: value
            for labels, value in bench.exposed("gateway_service_time_seconds")
            if labels["rows"] == "1"
        }
        assert found["expected"] == pytest.approx(curve.expected_ns(1) / 1e9)
        assert found["p90"] == pytest.approx(curve.expected_ns(1) / 1e9 * curve.spread)

    simulate(main)


def test_a_trace_tells_each_step_of_a_batch_in_milliseconds(caplog: pytest.LogCaptureFixture) -> None:
    class Late(SimulatedRunner):
        """What it starts begins 2.00025 s later, and its end is told 60.00025 s later."""

        def start(self, batch: Batch, on_done: OnBatchDone, on_part: OnBatchPart | None = None) -> None:
            def done(batch: Batch, execution: Execution) -> None:
                started_ns, finished_ns = execution.started_ns + 2_000_250_000, execution.finished_ns - 60_000_250_000
                times = Execution(started_ns, finished_ns, outputs=execution.outputs)
                on_done(batch, times)

            super().start(batch, done)

    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock, trace=True)
        bench.lane.runner = bench.lane.runs.runner = Late(clock, fixed_ns=90_000 * MS)
        bench.send("a")
        await bench.pass_ms(90_001)

    caplog.set_level(logging.INFO, "gateway.trace")
    simulate(main)
    (message,) = [record.getMessage() for record in caplog.records if record.name == "gateway.trace"]
    assert message.startswith("m:1/simulated closed=")
    assert message.endswith(" started_ms=2000.250 computed_ms=27999.500 returned_ms=60000.250 error=None")


def test_each_batch_is_counted_once_however_it_ends() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock)
        bench.runner.faults = ["failed"]
        bench.send("a", rows=2)
        bench.send("b")
        await bench.pass_ms(5)
        assert sum(value for _, value in bench.exposed("gateway_batches_total")) == 3
        assert (bench.counted("gateway_batch_rows_count"), bench.counted("gateway_batch_rows_sum")) == (3, 6)

    simulate(main)


def test_nothing_is_traced_unasked(caplog: pytest.LogCaptureFixture) -> None:
    async def main(clock: SimulatedClock) -> None:
        SharingModel(clock, None, "untraced", batch_ms=1).send()
        await pass_ms(5)

    caplog.set_level(logging.INFO, "gateway.trace")
    simulate(main)
    assert [record for record in caplog.records if record.name == "gateway.trace"] == []


def test_the_batcher_knows_how_many_workers_live() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock, workers=3, fixed_ns=5 * MS)
        bench.send("a")
        await bench.pass_ms(1)
        bench.send("b")
        await bench.pass_ms(1)
        assert bench.lane.batcher.workers == 3
        bench.runner.slots = 2
        bench.runner.on_change()
        assert bench.lane.batcher.workers == 2
        await bench.pass_ms(10)
        bench.runner.slots = 0
        bench.runner.on_change()
        assert bench.lane.batcher.workers == 1

    simulate(main)


def test_no_more_batches_are_started_than_asked_for_nor_than_sessions_are_free() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock, workers=3)
        for number in range(4):
            bench.send(str(number), rows=4)
        assert len(bench.lane.runs.start_batches(0)) == 0
        assert len(bench.lane.runs.start_batches(1)) == 1
        assert len(bench.lane.runs.start_batches(9)) == 2
        assert len(bench.lane.runs.start_batches(9)) == 0

    simulate(main)


def test_what_is_refused_says_why_and_when_to_come_back() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock)
        bench.runner.slots = 0
        bench.send("waits")
        bench.runner.available = False
        with pytest.raises(BackendUnreachable) as refused:
            bench.send("new")
        assert (refused.value.message, refused.value.retry_after_s) == ("backend m:1/simulated has no live session", 1.0)
        bench.runner.on_change()
        outcome = bench.outcome("waits")
        assert isinstance(outcome, BackendUnreachable)
        assert (outcome.message, outcome.retry_after_s) == ("backend m:1/simulated has no live session", 1.0)
        await bench.lane.close()
        with pytest.raises(NotReady) as unloaded:
            bench.send("newer")
        assert unloaded.value.message == "model 'm' is being unloaded"

    simulate(main)


# waking


def test_a_runner_is_woken_only_when_it_is_cold_and_something_waits() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock)
        bench.send("warm")
        await bench.pass_ms(3)
        assert bench.runner.woken == 0
        bench.runner.slots, bench.runner.cold = 0, True
        bench.runner.on_change()
        assert bench.runner.woken == 0
        bench.send("cold")
        await bench.pass_ms(1)
        assert bench.runner.woken == 1

    simulate(main)


def test_what_waits_stays_while_a_session_runs_or_is_free_or_comes_when_needed() -> None:
    async def main(clock: SimulatedClock) -> None:
        for slots, cold, running, stays in ((1, False, True, True), (0, True, False, True), (0, False, False, False)):
            bench = Bench(clock, fixed_ns=5 * MS)
            if running:
                bench.send("runs")
                await bench.pass_ms(1)
            bench.runner.slots, bench.runner.cold = slots, cold
            bench.send("waits")
            await bench.pass_ms(1)
            bench.lane.observer = observer = Observer(lambda request: True)
            bench.runner.on_change()
            assert (observer.asked == []) is stays

    simulate(main)


# what raises


class Unruly(SimulatedRunner):
    """Cannot be cancelled, and does not close well."""

    def cancel(self, batch: Batch) -> None:
        super().cancel(batch)
        raise KeyboardInterrupt("injected")

    async def close(self) -> None:
        raise OSError("does not close")


def test_a_run_that_cannot_be_cancelled_stops_neither_the_others_nor_the_end(caplog: pytest.LogCaptureFixture) -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock)
        bench.lane.runner = bench.lane.runs.runner = runner = Unruly(clock, workers=2, fixed_ns=5 * MS)
        gone = bench.send("gone", rows=4)
        bench.send("other", rows=4)
        await bench.pass_ms(1)
        bench.lane.cancel(gone)
        await bench.pass_ms(0)
        assert len(runner.cancelled) == 1
        bench.lane.give_up()
        assert len(runner.cancelled) == 3
        assert outcomes(bench) == [Cancelled, DeadlineExceeded]
        await bench.pass_ms(10)
        with pytest.raises(OSError, match="does not close"):
            await bench.lane.close()
        assert bench.exposed("gateway_workers") == []

    simulate(main)
    assert "m:1/simulated: a run could not be cancelled" in caplog.text


def test_outputs_that_are_no_arrays_fail_their_batch_and_no_other() -> None:
    class Odd(SimulatedRunner):
        def start(self, batch: Batch, on_done: OnBatchDone, on_part: OnBatchPart | None = None) -> None:
            def done(batch: Batch, execution: Execution) -> None:
                on_done(batch, Execution(execution.started_ns, execution.finished_ns, outputs={"Y": None}))  # type: ignore[dict-item]

            super().start(batch, done if batch.parts[0].request.id == "odd" else on_done)

    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock)
        bench.lane.runner = bench.lane.runs.runner = Odd(clock)
        for name in ("odd", "even"):
            bench.send(name)
            await bench.pass_ms(2)
        assert outcomes(bench) == [BackendFailed, InferResponse]
        assert str(bench.outcome("odd")).startswith("m:1/simulated: outputs do not fit the batch: AttributeError: ")
        assert bench.counted("gateway_failed_executions_total") == 1

    simulate(main)


def test_a_queue_that_cannot_be_searched_does_not_keep_an_answer_back(caplog: pytest.LogCaptureFixture) -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock)
        request = bench.send("a")
        request.shape_key = []  # type: ignore[assignment]  # which no queue can be found by
        bench.lane.cancel(request)
        assert isinstance(bench.outcome("a"), Cancelled)

    simulate(main)
    assert "m:1/simulated: a request could not be taken out of the queue" in caplog.text


def test_a_request_that_cannot_be_taken_is_not_there() -> None:
    async def main(clock: SimulatedClock) -> None:
        faults: list[BaseException] = [RuntimeError("injected")]

        def call_soon(callback: Callable[[], None]) -> object:
            if faults:
                raise faults.pop()
            return asyncio.get_running_loop().call_soon(callback)

        bench = Bench(clock, call_soon=call_soon)
        with pytest.raises(RuntimeError, match="injected"):
            bench.send("a")
        assert (bench.lane.pending, bench.lane.batcher.has_work, bench.ended["a"]) == (0, False, [])
        bench.send("b")
        await bench.pass_ms(5)
        assert isinstance(bench.outcome("b"), InferResponse)
        assert [batch.rows for batch in bench.runner.batches] == [1]

    simulate(main)


def test_what_cannot_be_started_runs_once_more_alone_and_says_what_failed() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock)
        bench.runner.faults = [ZeroDivisionError("injected"), "", ZeroDivisionError("injected")]
        bench.send("a")
        bench.send("b")
        await bench.pass_ms(5)
        assert outcomes(bench) == [InferResponse, InternalError]
        outcome = bench.outcome("b")
        assert isinstance(outcome, InternalError)
        assert outcome.message == "m:1/simulated: internal error while a batch was started"

    simulate(main)


def test_a_lane_leaves_those_it_shares_workers_with_even_if_its_runner_does_not_close_well() -> None:
    async def main(clock: SimulatedClock) -> None:
        shared = SharedWorkers(1)
        leaving = SharingModel(clock, shared, "leaving", batch_ms=10)
        staying = SharingModel(clock, shared, "staying", batch_ms=10)
        leaving.lane.runner = leaving.lane.runs.runner = Unruly(clock)
        with pytest.raises(OSError, match="does not close"):
            await leaving.lane.close()
        assert repr(shared) == "<SharedWorkers 0 of 1 busy, 1 lanes>"
        staying.send()
        await pass_ms(20)
        assert isinstance(staying.ended[0], InferResponse)

    simulate(main)


# shared workers


def test_a_policy_that_fails_does_not_keep_the_worker_from_another_model(caplog: pytest.LogCaptureFixture) -> None:
    def failing(queue: Queue, state: State, now_ns: int, free_slots: int) -> Decision:
        raise ZeroDivisionError("injected")

    async def main(clock: SimulatedClock) -> None:
        shared = SharedWorkers(1)
        busy, broken, waiting = (SharingModel(clock, shared, name, batch_ms=10) for name in ("busy", "broken", "waiting"))
        broken.lane.batcher.policy.decide = failing  # type: ignore[method-assign]  # the policy is the test's to choose
        busy.send()
        await pass_ms(1)
        broken.send()
        waiting.send()
        await pass_ms(9.5)
        assert [type(outcome) for outcome in broken.ended] == [InternalError]
        assert len(waiting.runner.batches) == 1  # in the tick in which the worker became free

    simulate(main)
    assert "could not be looked at" not in caplog.text


def test_a_forecast_knows_of_the_workers_that_others_have() -> None:
    async def main(clock: SimulatedClock) -> None:
        shared = SharedWorkers(2)
        few = {"policy": "adaptive", "slo_ms": 1000.0, "probed": True}
        asked = SharingModel(clock, shared, "asked", batch_ms=10, sessions=3, **few)  # type: ignore[arg-type]
        other = SharingModel(clock, shared, "other", batch_ms=40, sessions=3, **few)  # type: ignore[arg-type]

        def forecast() -> tuple[int, int]:
            found = asked.lane.forecast(asked.request(), clock.now_ns())
            return found.workers, math.ceil(found.wait_ns / MS)

        assert forecast() == (2, 0)  # of its three sessions
        other.send(rows=4)
        await pass_ms(1)
        assert forecast() == (1, 0)
        other.send(rows=4)
        await pass_ms(1)
        assert forecast() == (1, 38)  # one session is there, once another's batch has ended
        await pass_ms(100)
        asked.send(rows=4)
        other.send(rows=4)
        await pass_ms(1)
        assert forecast() == (1, 9)  # only the one that runs
        asked.runner.slots = 0
        await pass_ms(100)
        assert forecast()[0] == 0

    simulate(main)


def test_a_lane_shares_with_a_weight_of_one_unless_told_otherwise() -> None:
    class Joined(SharedWorkers):
        def join(self, member: Sharer, weight: float) -> None:
            weights.append(weight)
            super().join(member, weight)

    weights: list[float] = []

    async def main(clock: SimulatedClock) -> None:
        shared = Joined(1)
        Bench(clock, shared=shared)
        SharingModel(clock, shared, "heavy", batch_ms=1, weight=3)

    simulate(main)
    assert weights == [1.0, 3]


def test_without_sharing_a_forecast_counts_all_sessions() -> None:
    async def main(clock: SimulatedClock) -> None:
        model = SharingModel(clock, None, "alone", batch_ms=10, sessions=3, policy="adaptive", slo_ms=1000, probed=True)
        model.send(rows=4)
        await pass_ms(1)
        forecast = model.lane.forecast(model.request(), clock.now_ns())
        assert (forecast.workers, forecast.wait_ns) == (3, 0)

    simulate(main)
