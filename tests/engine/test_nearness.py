"""Which batches run on the event loop: the decision by itself, the turns of the loop in simulated time, and a real pool."""

import asyncio
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.base import ModelSpec, Tensors
from gateway.batching.batch import Batch
from gateway.clock import LoopClock
from gateway.config import Backend, ModelSection, Synthetic, parse_config
from gateway.engine.loop_runs import TURN_NS, LoopRuns
from gateway.engine.nearness import SHORT_NS, Nearness
from gateway.engine.workers import WorkerPool
from gateway.ingress import Ingress
from gateway.types import InferRequest, InferResponse
from tests.engine.pools import PATIENCE_S, batch_of, run
from tests.simulation import SimulatedClock, run_simulated

SHORT, LONG = SHORT_NS // 2, 50 * SHORT_NS


def proven(rows: int = 1) -> Nearness:
    nearness = Nearness()
    for _ in range(4):
        nearness.ran_on_thread(None, rows, SHORT)
    assert nearness.near(None, rows)
    return nearness


def test_a_size_runs_on_threads_until_four_runs_in_a_row_were_short() -> None:
    nearness = Nearness()
    for cpu_ns in (LONG, SHORT, SHORT, SHORT, LONG, SHORT, SHORT, SHORT):
        nearness.ran_on_thread(None, 1, cpu_ns)
        assert not nearness.near(None, 1)
    nearness.ran_on_thread(None, 1, SHORT)
    assert nearness.near(None, 1)


def test_other_sizes_and_groups_have_to_prove_themselves() -> None:
    nearness = proven(rows=5)
    assert nearness.near(None, 7)  # up to the same power of two
    assert not nearness.near(None, 8)
    assert not nearness.near("longer", 5)


def test_one_run_that_takes_long_sends_its_size_back_to_threads() -> None:
    nearness = proven()
    nearness.ran_on_loop(None, 1, 6_000_000)
    assert not nearness.near(None, 1)
    for _ in range(63):
        nearness.ran_on_thread(None, 1, SHORT)
    assert not nearness.near(None, 1)
    nearness.ran_on_thread(None, 1, SHORT)  # the 64th
    assert nearness.near(None, 1)
    nearness.ran_on_loop(None, 1, 6_000_000)
    for _ in range(64):
        nearness.ran_on_thread(None, 1, SHORT)
    assert not nearness.near(None, 1)  # twice as many this time


def test_a_run_that_was_interrupted_now_and_then_is_forgiven() -> None:
    nearness = proven()
    for _ in range(100):
        nearness.ran_on_loop(None, 1, 3_000_000)
        for _ in range(30):
            nearness.ran_on_loop(None, 1, SHORT)
    assert nearness.near(None, 1)


def test_runs_that_all_take_somewhat_longer_go_back_as_well() -> None:
    nearness = proven()
    for _ in range(50):  # (300 - 200) µs owed each
        assert nearness.near(None, 1)
        nearness.ran_on_loop(None, 1, 3 * SHORT_NS)
    nearness.ran_on_loop(None, 1, 3 * SHORT_NS)
    assert not nearness.near(None, 1)


@given(st.lists(st.integers(0, 20_000_000), max_size=300))
def test_what_runs_on_the_loop_holds_it_no_longer_than_is_promised(runs_ns: list[int]) -> None:
    nearness = Nearness()
    held_ns = 0
    for took_ns in runs_ns:
        if nearness.near(None, 1):
            assert held_ns <= 5_000_000
            held_ns = max(0, held_ns + took_ns - 2 * SHORT_NS)
            nearness.ran_on_loop(None, 1, took_ns)
        else:
            held_ns = 0
            nearness.ran_on_thread(None, 1, took_ns)


def test_shapes_that_clients_choose_are_not_remembered_for_ever() -> None:
    nearness = Nearness()
    for length in range(1000):
        for _ in range(4):
            nearness.ran_on_thread(length, 1, SHORT)
    assert sum(nearness.near(length, 1) for length in range(1000)) == 256


def test_others_have_their_turn_after_each_millisecond_of_runs() -> None:
    async def main(clock: SimulatedClock) -> None:
        loop = asyncio.get_running_loop()
        runs = LoopRuns(loop, clock)
        seen: list[str] = []

        def work() -> None:
            seen.append("run")
            clock.advance_to(clock.now_ns() + TURN_NS // 2)

        def other() -> None:
            seen.append("other")
            if len(seen) < 12:
                loop.call_soon(other)

        for _ in range(5):
            runs.put(work)
        loop.call_soon(other)
        await asyncio.sleep(0.1)
        assert seen[:8] == ["run", "run", "other", "run", "run", "other", "run", "other"]

    run_simulated(main)


def test_what_a_run_starts_waits_for_the_next_turn() -> None:
    async def main(clock: SimulatedClock) -> None:
        loop = asyncio.get_running_loop()
        runs = LoopRuns(loop, clock)
        seen: list[str] = []

        def again() -> None:
            seen.append("run")
            if len(seen) < 5:
                runs.put(again)

        runs.put(again)
        loop.call_soon(seen.append, "other")
        await asyncio.sleep(0.1)
        assert seen[:2] == ["run", "other"]

    run_simulated(main)


def test_what_is_called_soon_comes_before_the_runs_and_starts_them_in_the_same_turn() -> None:
    async def main(clock: SimulatedClock) -> None:
        loop = asyncio.get_running_loop()
        runs = LoopRuns(loop, clock)
        seen: list[str] = []

        def look() -> None:
            seen.append("look")
            runs.put(lambda: seen.append("run"))
            if len(seen) < 3:
                runs.call_soon(look)

        runs.put(lambda: seen.append("first run"))
        runs.call_soon(look)
        runs.call_soon(lambda: seen.append("another look"))
        loop.call_soon(seen.append, "other")
        assert not seen
        await asyncio.sleep(0.1)
        assert seen == ["look", "another look", "first run", "run", "other", "look", "run"]

    run_simulated(main)


def test_what_raises_among_what_is_called_soon_costs_the_others_nothing() -> None:
    async def main(clock: SimulatedClock) -> None:
        loop = asyncio.get_running_loop()
        raised: list[object] = []
        loop.set_exception_handler(lambda _, context: raised.append(context["exception"]))
        runs = LoopRuns(loop, clock)
        seen: list[str] = []

        def fail() -> None:
            raise ValueError("of a lane")

        runs.call_soon(fail)
        runs.call_soon(lambda: seen.append("look"))
        runs.put(lambda: seen.append("run"))
        await asyncio.sleep(0.1)
        assert seen == ["look", "run"]
        assert len(raised) == 1

    run_simulated(main)


def test_a_run_that_raises_costs_the_others_nothing() -> None:
    async def main(clock: SimulatedClock) -> None:
        loop = asyncio.get_running_loop()
        raised: list[object] = []
        loop.set_exception_handler(lambda _, context: raised.append(context["exception"]))
        runs = LoopRuns(loop, clock)
        seen: list[int] = []
        runs.put(lambda: seen.append(1 // 0))
        runs.put(lambda: seen.append(2))
        await asyncio.sleep(0.1)
        assert seen == [2]
        assert [type(exc) for exc in raised] == [ZeroDivisionError]

    run_simulated(main)


def test_a_size_that_was_short_for_long_has_to_prove_itself_as_at_first() -> None:
    nearness = proven()
    for short, proving in ((0, 64), (100, 128), (5000, 64), (100, 128)):
        for _ in range(short):
            nearness.ran_on_loop(None, 1, SHORT)
        nearness.ran_on_loop(None, 1, 6_000_000)
        for _ in range(proving):
            assert not nearness.near(None, 1)
            nearness.ran_on_thread(None, 1, SHORT)
        assert nearness.near(None, 1)


def pool_for(loop_runs: LoopRuns | None = None, clock: LoopClock | None = None, **options: object) -> WorkerPool:
    loop = asyncio.get_running_loop()
    clock = clock or LoopClock(loop)
    backend = Synthetic.model_validate({"kind": "synthetic", "fixed_ms": 0, "row_ms": 0, **options})
    loop_runs = loop_runs or LoopRuns(loop, clock)
    return WorkerPool(backend, ModelSpec("", (), (), 64), name="m:1/synthetic", clock=clock, loop_runs=loop_runs)


class Where(Batch, kw_only=True, eq=False):
    """A batch that notes the thread which it is run on."""

    threads: list[threading.Thread]

    def concat(self, *, kept: bool = True) -> Tensors:
        self.threads.append(threading.current_thread())
        return super().concat(kept=kept)

    def parameters(self) -> Mapping[str, object]:
        return {}


def noting(kind: type[Where] = Where, rows: int = 1) -> Where:
    batch = batch_of(1.0, rows=rows)
    return kind(parts=batch.parts, rows=rows, padded_rows=rows, reason="full", closed_ns=batch.closed_ns, threads=[])


async def on_loop(pool: WorkerPool, rows: int = 1) -> bool:
    where = noting(rows=rows)
    execution = await run(pool, where)
    assert execution.error is None
    assert execution.outputs is not None
    assert execution.outputs["OUTPUT0"].shape == (rows, 16)
    return where.threads == [threading.current_thread()]


def test_short_batches_move_to_the_loop_and_others_stay_on_the_thread() -> None:
    async def main() -> None:
        pool = pool_for()
        await pool.open()
        assert not await on_loop(pool)
        for _ in range(200):
            if await on_loop(pool):
                break
        assert await on_loop(pool)
        assert pool.busy == 0
        await pool.close()

    asyncio.run(main())


def test_what_cannot_be_learned_of_a_run_does_not_keep_its_end_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def raises(nearness: Nearness, *about: object) -> None:
        raise MemoryError

    async def main() -> None:
        pool = pool_for()
        await pool.open()
        monkeypatch.setattr(Nearness, "ran_on_thread", raises)
        assert not await asyncio.wait_for(on_loop(pool), PATIENCE_S)
        await pool.close()

    asyncio.run(main())
    assert "could not be learned" in caplog.text


def test_nothing_runs_on_the_loop_where_that_is_forbidden_or_a_run_may_wait() -> None:
    async def main() -> None:
        for options in ({"on_loop": False}, {"fixed_ms": 0.01}, {"faults": {"hang": 103.0}}):
            pool = pool_for(**options)
            await pool.open()
            for _ in range(30):
                assert not await on_loop(pool)
            await pool.close()

    asyncio.run(main())


class LateClock(LoopClock):
    """Goes on by itself, and when it is told to."""

    late_ns = 0

    def now_ns(self) -> int:
        return LoopClock.now_ns() + self.late_ns


def test_what_a_run_waits_for_the_interpreter_beside_threads_is_not_put_down_to_it() -> None:
    clocks: list[LateClock] = []
    go_on = threading.Event()

    class Interrupted(Where, kw_only=True, eq=False):
        def concat(self, *, kept: bool = True) -> Tensors:
            clocks[0].late_ns += 6_000_000
            return super().concat(kept=kept)

    class Holding(Where, kw_only=True, eq=False):
        def concat(self, *, kept: bool = True) -> Tensors:
            go_on.wait()
            return super().concat(kept=kept)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        clocks.append(LateClock(loop))
        runs = LoopRuns(loop, clocks[0])
        pool, other = pool_for(runs, clocks[0]), pool_for(runs, clocks[0], on_loop=False)
        await pool.open()
        await other.open()
        while not await on_loop(pool):
            pass
        ended: asyncio.Future[object] = loop.create_future()
        other.start(noting(Holding), lambda _, execution: ended.set_result(execution))
        for _ in range(3):
            await run(pool, noting(Interrupted))
            assert await on_loop(pool)
        go_on.set()
        await ended
        await run(pool, noting(Interrupted))
        assert not await on_loop(pool)
        await pool.close()
        await other.close()

    asyncio.run(main())


def test_a_batch_that_was_given_up_before_its_turn_does_not_run() -> None:
    async def main() -> None:
        pool = pool_for()
        await pool.open()
        while not await on_loop(pool):
            pass
        batch = batch_of(1.0)
        ended: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        pool.start(batch, lambda _, execution: ended.set_result(execution.error))
        pool.abort()
        assert "the gateway ends" in str(await ended)
        await pool.close()

    asyncio.run(main())


@pytest.mark.parametrize("on_ray", [False, True])
def test_a_request_of_a_short_batch_is_answered_in_the_next_turn_of_the_loop(tmp_path: Path, on_ray: bool) -> None:
    def open_remote(model: ModelSection, backend: Backend, declared: ModelSpec) -> WorkerPool:
        return WorkerPool(backend, declared, name="in replicas", clock=LoopClock(asyncio.get_running_loop()))

    async def main() -> None:
        backend = {"kind": "synthetic", "fixed_ms": 0, "row_ms": 0}
        models = [
            {"name": "embedded", "backends": [backend]},
            {"name": "elsewhere", "backends": [{**backend, "placement": "replicas"}]},
        ]
        config = parse_config({"server": {"http_port": 0, "grpc_port": None}, "models": models}, source="test")
        ingress = Ingress(config, run_dir=tmp_path, open_remote=open_remote if on_ray else None)
        await ingress.start()
        assert min([await turns(ingress) for _ in range(50)]) == 1
        await ingress.drain()

    async def turns(ingress: Ingress) -> int:
        repository = ingress.repository
        answered: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        inputs = {"INPUT0": np.zeros((1, 16), np.float32)}
        request = InferRequest("embedded", "1", "", inputs, 1, time.monotonic_ns())
        repository.infer(repository.model("embedded"), request, answered.set_result)
        passed = 0
        while not answered.done():
            await asyncio.sleep(0)
            passed += 1
        assert isinstance(answered.result(), InferResponse)
        return passed

    asyncio.run(main())
