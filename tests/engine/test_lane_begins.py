"""Answers of a long batch wait until the next has what it needs of the interpreter, but not for long."""

import pytest

from gateway.errors import BackendUnreachable, Cancelled
from gateway.types import InferResponse
from tests.engine.test_lane import MS, Bench, simulate
from tests.simulation import SimulatedClock


async def two_batches(clock: SimulatedClock, *, begins_ns: int | None, fixed_ns: int = 10 * MS) -> Bench:
    """Two batches of two requests each, a and b, of which the first has just ended."""
    bench = Bench(clock, fixed_ns=fixed_ns)
    bench.runner.begins_ns = begins_ns
    bench.send("a1")
    bench.send("a2")
    await bench.pass_ms(0.5)
    bench.send("b1")
    bench.send("b2")
    await bench.pass_ms(fixed_ns / MS - 0.5)
    assert len(bench.runner.batches) == 2
    return bench


@pytest.mark.parametrize(("begins_ms", "answered_ms"), [(0.25, 0.25), (40.0, 1.0)])
def test_answers_wait_until_the_next_batch_has_begun_but_at_most_1_ms(begins_ms: float, answered_ms: float) -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = await two_batches(clock, begins_ns=round(begins_ms * MS))
        await bench.pass_ms(answered_ms - 0.125)
        assert bench.ended["a1"] == bench.ended["a2"] == []
        await bench.pass_ms(0.25)
        assert all(isinstance(bench.outcome(name), InferResponse) for name in ("a1", "a2"))
        await bench.pass_ms(60)
        assert all(isinstance(bench.outcome(name), InferResponse) for name in ("a1", "a2", "b1", "b2"))

    simulate(main)


@pytest.mark.parametrize(("begins_ns", "fixed_ns"), [(None, 10 * MS), (MS // 4, MS)])
def test_answers_do_not_wait_for_who_does_not_tell_or_behind_a_short_batch(begins_ns: int | None, fixed_ns: int) -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = await two_batches(clock, begins_ns=begins_ns, fixed_ns=fixed_ns)
        await bench.pass_ms(0.01)
        assert all(isinstance(bench.outcome(name), InferResponse) for name in ("a1", "a2"))

    simulate(main)


def test_who_leaves_while_the_answers_wait_gets_none() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = Bench(clock, fixed_ns=10 * MS)
        bench.runner.begins_ns = MS // 2
        leaving = bench.send("leaving")
        bench.send("staying")
        await bench.pass_ms(1)
        bench.send("next")
        await bench.pass_ms(9.25)
        bench.lane.cancel(leaving)
        await bench.pass_ms(1)
        assert isinstance(bench.outcome("leaving"), Cancelled)
        assert isinstance(bench.outcome("staying"), InferResponse)
        assert bench.dropped() == 1

    simulate(main)


def test_answers_that_wait_are_given_though_the_backend_is_lost_meanwhile() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = await two_batches(clock, begins_ns=MS // 2)
        bench.send("c")
        bench.runner.available = False
        bench.runner.on_change()
        await bench.pass_ms(1)
        assert all(isinstance(bench.outcome(name), InferResponse) for name in ("a1", "a2"))
        assert isinstance(bench.outcome("c"), BackendUnreachable)

    simulate(main)


def test_a_lane_closes_once_the_answers_that_wait_are_given() -> None:
    async def main(clock: SimulatedClock) -> None:
        bench = await two_batches(clock, begins_ns=MS // 2)
        await bench.lane.close()
        assert all(isinstance(bench.outcome(name), InferResponse) for name in ("a1", "a2", "b1", "b2"))

    simulate(main)
